"""Rules of the stage objective: is the number that was optimised the one that was meant?"""

from . import computation, level

__all__ = ["computation", "level"]
