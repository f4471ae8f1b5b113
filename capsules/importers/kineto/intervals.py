"""Arithmetic on intervals of time: unions, intersections and gaps, as sorted arrays that do not overlap."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
#: Shape [N, 2]: begin and end, ascending, disjoint.
Spans = NDArray[np.float64]

NONE: Final[Spans] = np.empty((0, 2))


def union(start: Any, length: Any) -> Spans:
    """Merge intervals given by start and length; what overlaps counts once.

    Args:
        start: N times, in any order.
        length: N durations, none negative.
    """
    begin = np.asarray(start, np.float64)
    if not begin.size:
        return NONE
    order = np.argsort(begin, kind="stable")
    begin = begin[order]
    reach = np.maximum.accumulate(begin + np.asarray(length, np.float64)[order])
    first = np.concatenate([[True], begin[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.column_stack([begin[first], reach[last]])


def both(left: Spans, right: Spans) -> Spans:
    """Where both cover."""
    if not len(left) or not len(right):
        return NONE
    # Every interval of the left with those of the right that end after it begins and begin before it ends.
    low = np.searchsorted(right[:, 1], left[:, 0], side="right")
    high = np.searchsorted(right[:, 0], left[:, 1], side="left")
    counts = np.maximum(high - low, 0)
    at = np.repeat(np.arange(len(left)), counts)
    other = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(low, counts)
    found = np.column_stack([np.maximum(left[at, 0], right[other, 0]), np.minimum(left[at, 1], right[other, 1])])
    return found[found[:, 1] > found[:, 0]]


def gaps(spans: Spans, begin: float, end: float) -> Spans:
    """What of ``begin`` to ``end`` is not covered."""
    inside = within(spans, begin, end)
    edges = np.concatenate([[begin], inside.ravel(), [end]]).reshape(-1, 2)
    return edges[edges[:, 1] > edges[:, 0]]


def within(spans: Spans, begin: float, end: float) -> Spans:
    """What lies between ``begin`` and ``end``, cut there."""
    low = int(np.searchsorted(spans[:, 1], begin, side="right"))
    high = int(np.searchsorted(spans[:, 0], end, side="left"))
    return np.clip(spans[low:high], begin, end) if high > low else NONE


def total(spans: Spans) -> float:
    """The time covered."""
    return float((spans[:, 1] - spans[:, 0]).sum())
