"""Measurements whose figures the README quotes: ratios taken side by side in one run."""
