"""Rules of the stage objective: is the number that was optimised the one that was meant?"""

from . import computation, drift, fitting, hidden, level, slices, supervision, vocabulary

__all__ = ["computation", "drift", "fitting", "hidden", "level", "slices", "supervision", "vocabulary"]
