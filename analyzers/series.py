"""Curves as rules read them: one value a step, resumes told apart, placeholders known, noise measured.

Logs repeat steps after a resume, skip steps, print few decimals and write 0 or −1 for what was never wired. What every
rule needs to know of that is decided here once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ..capsules import Capsule

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: 1 / Φ⁻¹(3/4): turns a median absolute deviation into the standard deviation of a normal distribution.
MAD_TO_SIGMA = 1.4826

#: What logs print for a number that nobody gave them.
PLACEHOLDERS = (0.0, -1.0)
#: Fewest equal values before a constant 0 or −1 is taken for a placeholder.
PLACEHOLDER_VALUES = 3
#: Steps that go back more often than this share of the rows come from several writers, not from resumes.
INTERLEAVED = 0.1
#: Points of a Theil–Sen estimate; a longer curve is first reduced to medians of equal blocks.
SLOPE_POINTS = 120
#: Most decimals that are looked for in printed values.
MOST_DECIMALS = 9

#: Windows reduced at a time: bounds the memory of a long series.
_BLOCK = 1 << 15


@dataclass(frozen=True)
class Curve:
    """A scalar over steps, one value a step in step order (the last one where a resumed run repeats a step)."""

    step: Ints
    value: Floats

    def finite(self) -> Curve:
        """Only the finite values."""
        return self.where(np.isfinite(self.value))

    def where(self, keep: Any) -> Curve:
        """The points for which ``keep`` (bool[N] or indices) holds."""
        return Curve(self.step[keep], self.value[keep])

    def at(self, step: int) -> float:
        """Value at a step, NaN where there is none."""
        index = int(np.searchsorted(self.step, step))
        return float(self.value[index]) if index < len(self.step) and self.step[index] == step else math.nan

    def between(self, first: int, last: int) -> Curve:
        """Values of steps first … last, both included."""
        return self.where(slice(*np.searchsorted(self.step, [first, last + 1]).tolist()))

    def before(self, step: int, points: int | None = None) -> Curve:
        """The ``points`` values before a step (all where None)."""
        end = int(np.searchsorted(self.step, step))
        return self.where(slice(0 if points is None else max(0, end - points), end))

    def after(self, step: int, points: int | None = None) -> Curve:
        """The ``points`` values after a step (all where None)."""
        start = int(np.searchsorted(self.step, step, side="right"))
        return self.where(slice(start, None if points is None else start + points))

    @property
    def interval(self) -> int:
        """Usual distance of two points, in steps; 1 where there are fewer than two."""
        return max(1, int(np.median(np.diff(self.step)))) if len(self.step) > 1 else 1

    def __len__(self) -> int:
        return len(self.step)


_CURVES: WeakKeyDictionary[Capsule, dict[tuple[str, int | None, str | None], Curve]] = WeakKeyDictionary()


def curve(capsule: Capsule, name: str, rank: int | None = None, side: str | None = None) -> Curve:
    """The scalar ``name`` as the run went on: after a resume the repeated steps replace the earlier ones.

    Args:
        capsule: where the series is.
        name: of the scalar; an empty curve where it was not recorded.
        rank: without it, the lowest rank that has the series.
        side: as in ``Capsule.scalars``.
    """
    known = _CURVES.setdefault(capsule, {})
    if (name, rank, side) not in known:
        series = capsule.scalars(name, rank=rank, side=side)
        step, value = np.asarray(series.step, np.int64), np.asarray(series.value, np.float64)
        last = np.append(step[1:] != step[:-1], True) if step.size else np.empty(0, bool)
        known[name, rank, side] = Curve(step[last], value[last])
    return known[name, rank, side]


def segments(capsule: Capsule, name: str, rank: int | None = None) -> tuple[Curve, ...]:
    """The stretches of a scalar between resumes, in the order in which they were written.

    A stretch ends where the steps go back. Several writers of one file make steps go back all the time: their rows are
    one stretch.
    """
    series = capsule.scalars(name, rank=rank)
    order = np.argsort(series.written, kind="stable")
    step = np.asarray(series.step, np.int64)[order]
    back = np.flatnonzero(np.diff(step) < 0) + 1
    if len(back) > max(2, INTERLEAVED * len(step)):
        return (curve(capsule, name, rank),)
    value = np.asarray(series.value, np.float64)[order]
    parts = zip(np.split(step, back), np.split(value, back), strict=True)
    return tuple(_last_of_each(steps, values) for steps, values in parts if steps.size)


def _last_of_each(step: Ints, value: Floats) -> Curve:
    keep = np.append(step[1:] != step[:-1], True)
    return Curve(step[keep], value[keep])


def resumes(capsule: Capsule, name: str = "loss", rank: int | None = None) -> tuple[int, ...]:
    """First steps after the resumes that a series or the events show, ascending."""
    found = {int(each.step[0]) for each in segments(capsule, name, rank)[1:]}
    for event in capsule.records("events"):
        step = event.get("step")
        if event.get("kind") == "checkpoint_loaded" and step is not None and int(step) > 0:
            found.add(int(step))
    return tuple(sorted(found))


def placeholder(found: Curve) -> float | None:
    """The constant 0 or −1 that stands in a curve for "not reported"; None where it holds anything else."""
    values = found.finite().value
    if values.size < PLACEHOLDER_VALUES or (values != values[0]).any() or values[0] not in PLACEHOLDERS:
        return None
    return float(values[0])


def reported(capsule: Capsule, name: str, rank: int | None = None) -> Curve:
    """The finite values of a scalar, none of them where they are nothing but a placeholder."""
    found = curve(capsule, name, rank).finite()
    return found.where(slice(0, 0)) if placeholder(found) is not None else found


def align(left: Curve, right: Curve) -> tuple[Ints, Floats, Floats]:
    """Steps that two curves share, and both values there."""
    step, at, there = np.intersect1d(left.step, right.step, assume_unique=True, return_indices=True)
    return step, left.value[at], right.value[there]


def carried(found: Curve, steps: Ints) -> Floats:
    """The latest value at or before each of ``steps``; NaN before the first."""
    if not len(found):
        return np.full(len(steps), np.nan)
    index = np.searchsorted(found.step, steps, side="right") - 1
    return np.where(index >= 0, found.value[np.maximum(index, 0)], np.nan)


def resolution(values: Floats) -> float:
    """Size of the last printed decimal: 10⁻ᵈ for the fewest decimals d that hold every value."""
    for decimals in range(MOST_DECIMALS + 1):
        if bool((np.abs(np.round(values, decimals) - values) <= 1e-12 * np.maximum(1.0, np.abs(values))).all()):
            return 10.0**-decimals
    return 10.0**-MOST_DECIMALS


def spread(values: Floats) -> tuple[float, float]:
    """Median and robust standard deviation."""
    if not values.size:
        return math.nan, math.nan
    median = float(np.median(values))
    return median, float(np.median(np.abs(values - median))) * MAD_TO_SIGMA


def noise(values: Floats) -> float:
    """Robust standard deviation of a curve around its own trend, from second differences (σ√6 each).

    A straight trend adds nothing to it, however steep. Never below what rounding to the printed decimals adds.
    """
    if values.size < 3:
        return math.nan
    scatter = float(np.median(np.abs(np.diff(values, 2)))) * MAD_TO_SIGMA / math.sqrt(6)
    return max(scatter, resolution(values) / math.sqrt(12))


@dataclass(frozen=True)
class Slope:
    """Change a step with its confidence interval."""

    value: float
    low: float
    high: float

    @property
    def holds_zero(self) -> bool:
        """Whether no change at all lies within the interval."""
        return self.low <= 0 <= self.high


def theil_sen(found: Curve, z: float = 1.96) -> Slope | None:
    """Median of the slopes between all pairs of points, and Sen's interval (1968) from the variance of Kendall's S.

    Args:
        found: finite values; None comes back for fewer than ten points.
        z: quantile of the normal distribution (1.96: 95 %).
    """
    if len(found) < 10:
        return None
    step, value = found.step.astype(np.float64), found.value
    if len(step) > SLOPE_POINTS:
        width = len(step) // SLOPE_POINTS
        used = len(step) // width * width
        step = step[-used:].reshape(-1, width).mean(axis=1)
        value = np.median(value[-used:].reshape(-1, width), axis=1)
    left, right = np.triu_indices(len(step), 1)
    slopes = np.sort((value[right] - value[left]) / (step[right] - step[left]))
    count = len(step)
    half = z * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, math.floor((len(slopes) - half) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + half) / 2))
    return Slope(float(np.median(slopes)), float(slopes[low]), float(slopes[high]))


def trailing(values: Floats, width: int, reduce: Callable[..., Any]) -> Floats:
    """``reduce`` over the ``width`` values before each one (fewer at the start; NaN for the first).

    Args:
        values: float64[N].
        width: length of the window, which ends before the value itself.
        reduce: a NumPy reduction that takes ``axis``.
    """
    found: Floats = np.full(len(values), np.nan)
    for index in range(1, min(width, len(values))):
        found[index] = reduce(values[:index], axis=-1)
    windows = np.lib.stride_tricks.sliding_window_view(values, width)[:-1] if len(values) > width else values[:0]
    for start in range(0, len(windows), _BLOCK):
        block = reduce(windows[start : start + _BLOCK], axis=-1)
        found[width + start : width + start + len(block)] = block
    return found


def deviation(values: Any, axis: int) -> Any:
    """Robust standard deviation along an axis, in the form that ``trailing`` takes."""
    return np.median(np.abs(values - np.median(values, axis=axis, keepdims=True)), axis=axis) * MAD_TO_SIGMA


def first_maximum(values: Floats, first: int) -> Floats:
    """Maximum of the values before each one, counting only the first ``first`` (NaN for the first value)."""
    if not values.size:
        return values
    highest = np.maximum.accumulate(values[:first])
    return np.concatenate([[np.nan], highest, np.full(max(0, len(values) - first - 1), highest[-1])])[: len(values)]


def periodic(steps: list[int], start: int, least: int) -> bool:
    """Whether excursions come once a fixed number of steps: the ticks of an epoch.

    Args:
        steps: where they are, ascending; fewer than two have no period.
        start: first step of the run: two excursions need it as the third mark.
        least: a period must be longer than this, or noise has one, too.
    """
    if len(steps) < 2:
        return False
    gaps = np.diff([start, *steps]) if len(steps) == 2 else np.diff(steps)
    period = float(np.median(gaps))
    # An epoch that is no multiple of the logging interval is met one point early or late.
    return period > least and bool((np.abs(gaps - period) <= max(1.0, 0.02 * period)).all())
