"""Reduces a series to pixel columns: the worker sends these, so a screen never holds a million points.

A column keeps least and greatest value, so a spike of one sample stays visible at any width, and says whether a
value in it was not finite, so a curve is never joined across a hole.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Columns(msgspec.Struct, frozen=True):
    """One entry a pixel column. ``low``, ``high``, ``first`` and ``last`` are None where no value can be drawn.

    Attributes:
        start: step at the left edge of the first column.
        stop: step at the right edge of the last column (exclusive).
        low: least drawable value.
        high: greatest drawable value.
        first: drawable value of the earliest point, in file order.
        last: drawable value of the latest point, in file order.
        marks: letters of what could not be drawn: ``n`` NaN, ``p`` +Inf, ``m`` −Inf, ``z`` not positive on a log axis.
        points: how many points lie in the range altogether.
    """

    start: float
    stop: float
    low: list[float | None]
    high: list[float | None]
    first: list[float | None]
    last: list[float | None]
    marks: list[str]
    points: int


def reduce_to_columns(
    step: NDArray[np.int64],
    value: NDArray[np.float64],
    columns: int,
    *,
    start: float | None = None,
    stop: float | None = None,
    log: bool = False,
) -> Columns:
    """Least and greatest value of each of ``columns`` equal slices of the steps in [start, stop).

    Args:
        step: [N], in any order: a resumed run goes back, and both passes are drawn.
        value: [N], may hold NaN and Inf.
        columns: how many pixel columns, at least 1.
        start: left edge; the first step where it is None.
        stop: right edge, exclusive; one past the last step where it is None.
        log: values that are not positive cannot be drawn on this axis and become the mark ``z``.
    """
    import numpy as np  # the screen imports the type above, and must not pay for numpy

    if len(step) == 0:
        empty: list[float | None] = [None] * columns
        return Columns(start or 0.0, stop or 1.0, empty, empty, empty, empty, [""] * columns, 0)
    left = float(step.min()) if start is None else float(start)
    right = float(step.max()) + 1.0 if stop is None else float(stop)
    right = max(right, left + 1e-9)
    edges = left + (right - left) * np.arange(columns + 1) / columns
    inside = (step >= left) & (step < right)
    if not inside.all():
        step, value = step[inside], value[inside]
    if len(step) and np.any(step[1:] < step[:-1]):
        order = np.argsort(step, kind="stable")
        step, value = step[order], value[order]
    bounds = np.searchsorted(step, edges, side="left")
    cells = [_column(value[begin:end], log) for begin, end in itertools.pairwise(bounds)]
    low, high, first, last, marks = (list(each) for each in zip(*cells, strict=True))
    return Columns(left, right, low, high, first, last, marks, len(value))


def _column(
    values: NDArray[np.float64], log: bool
) -> tuple[float | None, float | None, float | None, float | None, str]:
    """Least, greatest, first and last drawable value of one slice, and the letters of its marks."""
    if not len(values):
        return None, None, None, None, ""
    low, high = float(values.min()), float(values.max())  # either carries a NaN: one pass tells that all is well
    if math.isfinite(low) and math.isfinite(high) and (low > 0 or not log):
        return low, high, float(values[0]), float(values[-1]), ""
    import numpy as np

    finite = np.isfinite(values)
    drawable = finite & (values > 0) if log else finite
    signs = (np.isnan(values), np.isposinf(values), np.isneginf(values), finite & ~drawable)
    marks = "".join(letter for letter, bad in zip("npmz", signs, strict=True) if bad.any())
    values = values[drawable]
    if not len(values):
        return None, None, None, None, marks
    return float(values.min()), float(values.max()), float(values[0]), float(values[-1]), marks
