"""A series reduced to pixel columns loses no extreme, no hole and no point."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from llmconsole.app.columns import reduce_to_columns

VALUES = st.lists(
    st.tuples(st.integers(-50, 500), st.floats(allow_nan=True, allow_infinity=True, width=32)), min_size=1, max_size=80
)


def test_a_spike_of_one_sample_in_a_million_is_the_maximum_of_its_column() -> None:
    value = np.zeros(1_000_000)
    value[612_345] = 7.0
    columns = reduce_to_columns(np.arange(1_000_000), value, 120)
    assert columns.high.index(7.0) == 612_345 * 120 // 1_000_000
    assert columns.high.count(7.0) == 1


@given(VALUES, st.integers(1, 40))
def test_extremes_and_marks_agree_with_a_plain_loop(points: list[tuple[int, float]], width: int) -> None:
    step = np.array([s for s, _ in points])
    value = np.array([v for _, v in points])
    columns = reduce_to_columns(step, value, width)
    start, stop = float(step.min()), float(step.max()) + 1
    edges = start + (stop - start) * np.arange(width + 1) / width
    for index in range(width):
        here = [v for s, v in sorted(points, key=lambda p: p[0]) if edges[index] <= s < edges[index + 1]]
        finite = [v for v in here if np.isfinite(v)]
        assert columns.low[index] == (min(finite) if finite else None)
        assert columns.high[index] == (max(finite) if finite else None)
        assert columns.first[index] == (finite[0] if finite else None)
        assert columns.last[index] == (finite[-1] if finite else None)
        assert ("n" in columns.marks[index]) == any(np.isnan(v) for v in here)
        assert ("p" in columns.marks[index]) == any(v == np.inf for v in here)
        assert ("m" in columns.marks[index]) == any(v == -np.inf for v in here)
    assert columns.points == len(points)


def test_a_log_axis_marks_what_it_cannot_draw() -> None:
    columns = reduce_to_columns(np.arange(4), np.array([1.0, 0.0, -3.0, 100.0]), 4, log=True)
    assert columns.marks == ["", "z", "z", ""]
    assert columns.low == [1.0, None, None, 100.0]


def test_a_resumed_run_that_goes_back_is_drawn_with_both_passes() -> None:
    columns = reduce_to_columns(np.array([0, 1, 2, 1, 2]), np.array([5.0, 4.0, 9.0, 3.0, 2.0]), 3)
    assert (columns.low, columns.high) == ([5.0, 3.0, 2.0], [5.0, 4.0, 9.0])


def test_a_window_holds_only_its_own_points() -> None:
    columns = reduce_to_columns(np.arange(100), np.arange(100.0), 10, start=40, stop=60)
    assert (columns.low[0], columns.high[-1], columns.points) == (40.0, 59.0, 20)


def test_an_empty_series_is_empty_columns() -> None:
    columns = reduce_to_columns(np.array([], dtype=np.int64), np.array([]), 3)
    assert (columns.low, columns.points) == ([None] * 3, 0)
