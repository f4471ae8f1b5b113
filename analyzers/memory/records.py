"""Memory evidence as the rules of this family read it: whole numbers of bytes or None, and what the manifest states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...capsules import Capsule

_MIB = 1 << 20


def number(value: Any) -> float | None:
    """A finite number, else None."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    # Comparing is safe for integers of any length, converting them is not.
    return float(value) if real and -1e300 < value < 1e300 else None


def whole(value: Any) -> int | None:
    """A count of bytes (or of anything), else None."""
    found = number(value)
    return int(found) if found is not None and 0 <= found < 1 << 62 else None


def positive(value: Any) -> int | None:
    """A count above zero, else None."""
    return whole(value) or None


def mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """The mappings of a list; nothing where it is no list."""
    for each in value if isinstance(value, list | tuple) else ():
        if isinstance(each, Mapping):
            yield each


def gib(size: float | None) -> str:
    """Bytes for people: GiB, MiB below half of one, and smaller units for what is smaller."""
    if size is None or not math.isfinite(size):
        return "an unknown number of bytes"
    if abs(size) < 1 << 10:
        return f"{size:,.0f} B"
    if abs(size) < 100 << 10:
        return f"{size / 2**10:,.2f} KiB"
    if abs(size) < 1 << 29:
        return f"{size / 2**20:,.2f} MiB"
    return f"{size / 2**30:,.2f} GiB"


def segment_for(size: int) -> int:
    """Bytes of the segment that the allocator asks the driver for, to hold a block of a size."""
    if size <= _MIB:
        return 2 * _MIB
    return 20 * _MIB if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB


def capacities(capsule: Capsule) -> dict[int, int]:
    """Memory of each rank's device, as the manifest states it."""
    placement = capsule.manifest.placement
    ranks: Any = placement.get("ranks") if isinstance(placement, dict) else None
    found: dict[int, int] = {}
    for at, each in enumerate(mappings(ranks)):
        size, rank = positive(each.get("memory")), whole(each.get("rank"))
        if size is not None:
            found[at if rank is None else rank] = size
    return found


def largest_free_blocks(capsule: Capsule) -> dict[Any, int]:
    """Largest unused block by (rank, step), and by rank where its segments at the end are on record."""
    found: dict[Any, int] = {}
    for record in capsule.records("memory"):
        size = whole(record.get("largest_free_block"))
        if size is not None:
            found[whole(record.get("rank")) or 0, whole(record.get("step"))] = size
    for segment in capsule.records("segments"):
        rank = whole(segment.get("rank")) or 0
        for block in mappings(segment.get("blocks")):
            if block.get("state") == "inactive":
                found[rank] = max(found.get(rank, 0), whole(block.get("size")) or 0)
    return found
