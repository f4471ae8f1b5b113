"""Readable FP64 reference computations."""
