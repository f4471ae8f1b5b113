"""Widgets that hold no knowledge of capsules or workers: they draw what a snapshot says."""
