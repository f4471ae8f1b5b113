"""Whether there is a terminal that the console can be drawn on, and why not."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def is_one() -> bool:
    """Whether all three streams are a terminal."""
    return all(stream is not None and stream.isatty() for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__))


def obstacle() -> str:
    """Why the console cannot be drawn here, in a few words; empty where it can."""
    if not is_one():
        return "not a terminal"
    if cannot_position():
        return f"TERM is {os.environ.get('TERM') or 'not set'}: this terminal cannot position text"
    return ""


def cannot_position() -> bool:
    """Whether the terminal says that it knows no escape sequences."""
    return os.environ.get("TERM", "") in ("", "dumb", "unknown")


def speaks_unicode() -> bool:
    """Whether the locale that this process was started with says that the terminal shows UTF-8.

    ``os.environ`` does not tell: Python itself sets LC_CTYPE where it found the C locale (PEP 538).
    """
    given: dict[str, str] = {}
    try:
        for entry in Path("/proc/self/environ").read_bytes().split(b"\0"):
            name, _, value = entry.decode("utf-8", "replace").partition("=")
            given[name] = value
    except OSError:
        given = dict(os.environ)
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        if value := given.get(name):
            return "utf-8" in value.lower() or "utf8" in value.lower()
    return False
