"""The demo: a small real training run with a fault in it."""
