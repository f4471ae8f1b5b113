"""The seed cases, shipped as data."""
