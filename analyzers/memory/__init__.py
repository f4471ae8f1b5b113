"""Rules of device memory, of the stage runtime: where it went, and what would fit."""
