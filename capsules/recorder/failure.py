"""What an exception says of itself: its words, where it was raised, and whether a collective of C++ raised it."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from .calls import MOST_FRAMES, is_inside

#: Places in torch from which C++ calls collectives: backward, and the wrapper that evens out buffers before forward.
_INSIDE = ("torch/autograd/", "torch/nn/parallel/", "torch/distributed/")


def said_by(error: BaseException) -> str:
    """The words of an exception; whoever raised it may have made even those raise."""
    try:
        return str(error)
    except Exception as fault:
        return f"(its words cannot be had: {type(fault).__name__})"


def raised_at(error: BaseException) -> list[dict[str, Any]]:
    """Where it was raised, innermost frame first, without the recorder's own."""
    found: list[dict[str, Any]] = []
    at: TracebackType | None = error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        if not is_inside(code.co_filename):
            found.append({"name": code.co_name, "file": code.co_filename, "line": at.tb_lineno})
        at = at.tb_next
    return found[::-1][:MOST_FRAMES]


def by_collective(error: BaseException, frames: list[dict[str, Any]]) -> bool:
    """Whether it came out of C++ at a place that asks the other ranks for something."""
    file = str(frames[0]["file"]).replace("\\", "/") if frames else ""
    return isinstance(error, RuntimeError) and any(place in file for place in _INSIDE)
