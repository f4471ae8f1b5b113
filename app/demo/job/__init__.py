"""The training job of the demo: plain files, copied into a repository of their own and run there."""
