"""Rules of speed, of the stage runtime: what a step waits for."""

from . import bounds, idle

__all__ = ["bounds", "idle"]
