"""The console: a Textual program over the same worker and the same reports as the command line."""
