"""Attaches to a PyTorch loop and keeps the evidence."""
