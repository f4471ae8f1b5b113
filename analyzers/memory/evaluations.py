"""Memory over time as evaluation and training see it: which measurements were made inside a pass of evaluation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..series import Floats
from .records import number, whole

if TYPE_CHECKING:
    from ...capsules import Capsule

PHASES: Final = frozenset({"eval", "evaluation", "validation", "valid", "test", "val"})
_LEVELS: Final = ("allocated", "peak", "reserved")
_CURVES: Final = ("memory_allocated", "memory_reserved", "memory_device_used", "memory_peak")


@dataclass(frozen=True)
class Levels:
    """Bytes in the order of time on one rank: inside one pass of evaluation after the other, and in training."""

    rank: int
    step: int | None
    inside: tuple[Floats, ...]
    training: Floats


def levels(capsule: Capsule) -> tuple[Levels, ...]:
    """What is on record of each rank: the memory records by their phase, else the curves by time and by side."""
    found = list(_of_records(capsule))
    if not any(each.inside for each in found):
        found = list(_of_curves(capsule))
    return tuple(each for each in found if each.inside)


def intervals(capsule: Capsule, rank: int) -> list[tuple[float, float]]:
    """Unix seconds of the evaluation passes of a rank; one that never ended goes on."""
    found: list[tuple[float, float]] = []
    began: float | None = None
    for event in capsule.records("events"):
        if (whole(event.get("rank")) or 0) != rank or event.get("kind") not in ("eval_begin", "eval_end"):
            continue
        t = number(event.get("t"))
        if event["kind"] == "eval_begin":
            began = t if began is None else began
        elif began is not None and t is not None:
            found.append((began, t))
            began = None
    return [*found, (began, math.inf)] if began is not None else found


def _of_records(capsule: Capsule) -> Iterator[Levels]:
    inside: dict[int, list[tuple[int | None, float]]] = defaultdict(list)
    training: dict[int, list[float]] = defaultdict(list)
    for record in capsule.records("memory"):
        level = next((size for name in _LEVELS if (size := whole(record.get(name))) is not None), None)
        if level is None:
            continue
        rank = whole(record.get("rank")) or 0
        if str(record.get("phase") or "").lower() in PHASES:
            inside[rank].append((whole(record.get("step")), float(level)))
        else:
            training[rank].append(float(level))
    for rank, points in inside.items():
        yield Levels(
            rank,
            points[0][0],
            tuple(_passes(np.array([level for _, level in points]))),
            np.array(training[rank], np.float64),
        )


def _passes(values: Floats) -> Iterator[Floats]:
    """Cut where the level falls by more than half of what it had risen: what was collected is given back."""
    start, low, high = 0, values[0], values[0]
    for at, value in enumerate(values.tolist()):
        if high > low and value < high - 0.5 * (high - low):
            yield values[start:at]
            start, low, high = at, value, value
        low, high = min(low, value), max(high, value)
    yield values[start:]


def _of_curves(capsule: Capsule) -> Iterator[Levels]:
    for key in capsule.scalar_keys():
        if key.name not in _CURVES:
            continue
        series = capsule.scalars(key.name, rank=key.rank, side=key.side)
        values: Any = np.asarray(series.value, np.float64)
        good = np.isfinite(values)
        if key.side is not None and key.side.lower() in PHASES:
            other = capsule.scalars(key.name, rank=key.rank)
            inside = tuple(_passes(values[good])) if good.any() else ()
            yield Levels(key.rank, int(series.step[0]), inside, np.asarray(other.value, np.float64))
        elif key.side is None and series.time is not None:
            times: Any = np.asarray(series.time, np.float64)
            spans = intervals(capsule, key.rank)
            masks = [(times >= first) & (times <= last) & good for first, last in spans]
            within = np.any(masks, axis=0) if masks else np.zeros(len(values), bool)
            passes = tuple(values[mask] for mask in masks if mask.any())
            if passes:
                yield Levels(key.rank, int(series.step[within][0]), passes, values[good & ~within])
