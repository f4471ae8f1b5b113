"""Curves of memory over steps that rise evenly, as logs and records hold them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from ..series import Curve, align, curve, segments, theil_sen
from .evaluations import PHASES
from .lengths import length_curves, rank_correlation
from .records import whole
from .thresholds import (
    CURVE_BYTES,
    CURVE_EVEN,
    CURVE_FEW,
    CURVE_JUMP,
    CURVE_POINTS,
    CURVE_RESET,
    CURVE_RISE,
    CURVE_STEEP,
    FOLLOWS_LENGTHS,
)

if TYPE_CHECKING:
    from ...capsules import Capsule

#: The side of curves that go over events of a trace, not over steps.
ALLOCATOR: Final = "allocator"
_RESERVES: Final = ("memory_reserved", "memory_device_used")


@dataclass(frozen=True)
class Rise:
    """A stretch of a curve that rises evenly: where, by how much a step, from and to which level."""

    rank: int
    first: int
    last: int
    slope: float
    low: float
    high: float
    resets: tuple[int, ...]


def long_curves(capsule: Capsule) -> bool:
    """Whether allocated memory is on record over steps, long enough to be judged."""
    return any(len(points) >= CURVE_POINTS for _, points in _allocated(capsule))


def rising(capsule: Capsule) -> list[Rise]:
    """The curves of allocated memory that rise evenly over steps, by rank."""
    found = [_even_rise(capsule, points.finite(), rank) for rank, points in _allocated(capsule)]
    return sorted(filter(None, found), key=lambda each: (each.rank, each.first))


def rising_reserve(capsule: Capsule) -> Rise | None:
    """The first curve of reserved memory, or of the device's use, that rises evenly where nothing better is on record.

    What the allocator reserves grows with what is in use, and with what it cannot use again.
    """
    if any(True for _ in _allocated(capsule)):
        return None
    for name in _RESERVES:
        for key in capsule.scalar_keys():
            if key.name == name and key.side != ALLOCATOR:
                found = _even_rise(capsule, curve(capsule, name, key.rank, key.side).finite(), key.rank)
                if found is not None:
                    return found
    return None


def _allocated(capsule: Capsule) -> Iterator[tuple[int, Curve]]:
    """Curves of allocated memory by rank: the scalars, each stretch between resumes, else the records of one phase."""
    ranks: set[int] = set()
    for key in capsule.scalar_keys():
        if key.name != "memory_allocated" or key.side == ALLOCATOR:
            continue
        ranks.add(key.rank)
        if key.side is None:
            yield from ((key.rank, part) for part in segments(capsule, key.name, key.rank))
        else:
            yield key.rank, curve(capsule, key.name, key.rank, key.side)
    recorded: dict[tuple[int, str], dict[int, int]] = defaultdict(dict)
    for record in capsule.records("memory"):
        step, size, rank = whole(record.get("step")), whole(record.get("allocated")), whole(record.get("rank")) or 0
        phase = str(record.get("phase") or "").lower()
        if step is not None and size is not None and rank not in ranks and phase not in PHASES:
            recorded[rank, phase][step] = size
    for (rank, _), levels in recorded.items():
        steps = sorted(levels)
        yield rank, Curve(np.array(steps, np.int64), np.array([levels[step] for step in steps], np.float64))


def _even_rise(capsule: Capsule, whole: Curve, rank: int) -> Rise | None:
    """The longest stretch between two falls, where it rises evenly; None where none does.

    A few points will do where each is higher than the one before, by much in all.
    """
    whole = whole.where(slice(max(2, len(whole) // 20), None))
    if len(whole) < CURVE_FEW:
        return None
    cuts = _falls(whole)
    edges = [0, *cuts, len(whole)]
    start, end = max(pairwise(edges), key=lambda each: each[1] - each[0])
    part = whole.where(slice(start, end))
    if len(part) < CURVE_FEW:
        return None
    slope = theil_sen(part)
    span = float(part.step[-1] - part.step[0])
    if slope is None or slope.low <= 0:
        return None
    rise, level = slope.value * span, float(np.median(part.value))
    if rise < max(CURVE_BYTES, CURVE_RISE * level):
        return None
    if len(part) < CURVE_POINTS and (rise < CURVE_STEEP * level or not (np.diff(part.value) > 0).all()):
        return None
    quarters = np.array([np.median(each) for each in np.array_split(part.value, 4)])
    if np.diff(quarters).min() < CURVE_EVEN * rise / 4 or np.diff(part.value).max() > CURVE_JUMP * rise:
        return None
    if _follows_lengths(capsule, part, rank):
        return None
    resets = tuple(int(whole.step[each]) for each in cuts)
    low, high = float(part.value.min()), float(part.value.max())
    return Rise(rank, int(part.step[0]), int(part.step[-1]), slope.value, low, high, resets)


def _falls(curve: Curve) -> list[int]:
    """Indices at which a curve gives back most of what it had gained since the last such place."""
    found: list[int] = []
    lowest = highest = float(curve.value[0])
    least = max(CURVE_BYTES, CURVE_RISE * highest)
    for at, value in enumerate(curve.value.tolist()):
        gained = highest - lowest
        if gained >= least and highest - value > CURVE_RESET * gained:
            found.append(at)
            lowest = highest = value
        lowest, highest = min(lowest, value), max(highest, value)
    return found


def _follows_lengths(capsule: Capsule, part: Curve, rank: int) -> bool:
    for lengths in length_curves(capsule, rank):
        _, memory, length = align(part, lengths)
        if len(memory) >= 10 and rank_correlation(memory, length) >= FOLLOWS_LENGTHS:
            return True
    return False
