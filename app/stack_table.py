"""The stacks that held the memory at its peak as lines of text, for the screen and for ``show --memory``."""

from __future__ import annotations

from rich.text import Text

from .looks.types import LiveStack, LiveStacks
from .numbers import size
from .text import keep_tail, one_line

_BAR = 8
_DIM = "bright_black"
#: Frames of libraries say what was called; a person looks for the line of their own that called it.
_LIBRARIES = ("/torch/", "site-packages", "dist-packages", "/python3", ".so", "[clone", "<frozen")


def stacks_text(found: LiveStacks, width: int, rows: int, chosen: int) -> Text:
    """Head, a row a stack with the chosen one in view, and the frames of the chosen one.

    Args:
        found: the stacks.
        width: cells of a line.
        rows: lines altogether, at least 4.
        chosen: place of the stack whose frames are shown.
    """
    text = Text(no_wrap=True, overflow="ellipsis")
    rank = f"rank {found.rank}" + (f" of {len(found.ranks)}" if len(found.ranks) > 1 else "")
    head = f" live at the peak: {size(found.total)} in {found.blocks:,} blocks of {found.stacks:,} stacks · {rank}"
    text.append(f"{head}\n", "bold")
    if not found.rows:
        return text
    chosen = min(max(0, chosen), len(found.rows) - 1)
    frames = found.rows[chosen].frames
    below = min(len(frames), max(2, rows // 2)) if frames else 0
    room = max(1, rows - 1 - below)
    top = max(0, min(chosen - room // 2, len(found.rows) - room))
    for index, row in enumerate(found.rows[top : top + room], start=top):
        _line(text, row, found.total, index == chosen, width)
    for frame in frames[:below]:
        text.append(f"     {one_line(frame, max(20, width - 6))}\n", _DIM)
    return text


def own_frame(row: LiveStack) -> str:
    """The innermost frame outside of libraries, else the innermost one."""
    own = (each for each in row.frames if not any(sign in each for sign in _LIBRARIES))
    return next(own, row.frames[0] if row.frames else "no stack was recorded")


def _line(text: Text, row: LiveStack, total: int, here: bool, width: int) -> None:
    share = row.size / total if total else 0.0
    text.append("▸" if here else " ", "bold")
    text.append("█" * round(share * _BAR) + "·" * (_BAR - round(share * _BAR)), "yellow")
    head = f" {share:>4.0%} {size(row.size):>9} {f'×{row.count:,}':>8}  {row.category:<13}"
    text.append(head, "bold" if here else "")
    text.append(f"{_short(own_frame(row), max(12, width - len(head) - _BAR - 2))}\n")


def _short(frame: str, room: int) -> str:
    """A frame in so many cells: directories go before the line number does."""
    if len(frame) > room:
        name, _, place = frame.partition(" ")
        frame = f"{name} {place.rpartition('/')[2]}"
    return keep_tail(one_line(frame, 300), room)
