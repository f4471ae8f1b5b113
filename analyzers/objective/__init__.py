"""Rules of the stage objective: is the number that was optimised the one that was meant?"""

from . import computation, fitting, hidden, level, supervision, vocabulary

__all__ = ["computation", "fitting", "hidden", "level", "supervision", "vocabulary"]
