"""Whether there is a terminal that the console can be drawn on, and why not."""

from __future__ import annotations

import os
import sys


def is_one() -> bool:
    """Whether all three streams are a terminal."""
    return all(stream is not None and stream.isatty() for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__))


def obstacle() -> str:
    """Why the console cannot be drawn here, in a few words; empty where it can."""
    if not is_one():
        return "not a terminal"
    kind = os.environ.get("TERM", "")
    if kind in ("", "dumb", "unknown"):
        return f"TERM is {kind or 'not set'}: this terminal cannot position text"
    return ""
