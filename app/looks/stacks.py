"""Who held the memory at the instant that matters: the blocks that were live then, by the stack that asked for them."""

from __future__ import annotations

from typing import Any

from ...capsules import Capsule
from ..text import one_line
from .kept import kept
from .types import LiveStack, LiveStacks

#: Stacks on screen, and frames of each.
MOST, MOST_FRAMES = 200, 24

#: Places of the allocator itself and of the dispatch under it, which every stack begins with.
_BENEATH = ("torch::unwind", "torch::CapturedTraceback", "c10::", "CUDACachingAllocator", "??")


def stacks(path: str, rank: int | None = None) -> LiveStacks | None:
    """The live blocks of one rank by stack, or None where no snapshot of an allocator was captured.

    Args:
        path: the capsule.
        rank: default the one that held most.
    """
    found = kept(path, "stacks", _stacks)
    if not found:
        return None
    chosen = rank if rank in found else max(found, key=lambda each: found[each][0])
    total, blocks, rows = found[chosen]
    return LiveStacks(
        rank=chosen, ranks=tuple(sorted(found)), total=total, blocks=blocks, stacks=len(rows), rows=tuple(rows[:MOST])
    )


def _stacks(capsule: Capsule) -> dict[int, tuple[int, int, list[LiveStack]]]:
    found: dict[int, list[LiveStack]] = {}
    for record in capsule.records("allocations"):
        if record.get("action") == "live" and record.get("size"):
            found.setdefault(record["rank"], []).append(_stack(record))
    return {
        rank: (
            sum(each.size for each in rows),
            sum(each.count for each in rows),
            sorted(rows, key=lambda each: (-each.size, -each.count)),
        )
        for rank, rows in found.items()
    }


def _stack(record: dict[str, Any]) -> LiveStack:
    frames = [_frame(each) for each in (record.get("frames") or ())[: 4 * MOST_FRAMES]]
    told = [each for each in frames if not each.startswith(_BENEATH)] or frames
    return LiveStack(
        size=record["size"],
        count=record.get("count") or 1,
        category=one_line(str(record.get("category") or ""), 20),
        frames=tuple(told[:MOST_FRAMES]),
    )


def _frame(frame: dict[str, Any]) -> str:
    place = str(frame.get("file") or "")
    if frame.get("line"):
        place += f":{frame['line']}"
    return one_line(" ".join(each for each in (str(frame.get("name") or ""), place) if each), 300)
