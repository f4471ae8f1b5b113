"""Pixel columns become text in which spikes, holes and marks can be seen."""

from __future__ import annotations

import numpy as np
import pytest
from llmconsole.app.columns import Columns, reduce_to_columns
from llmconsole.app.ui.raster import PIXELS, Axis, Cell, Charset, draw, fit_axis

CHARSETS: tuple[Charset, ...] = ("braille", "block", "ascii")


def columns(values: list[float], count: int, *, log: bool = False) -> Columns:
    return reduce_to_columns(np.arange(len(values)), np.array(values), count, log=log)


def text(rows: list[list[Cell]]) -> list[str]:
    return ["".join(cell.text for cell in row) for row in rows]


@pytest.mark.parametrize("charset", CHARSETS)
def test_a_one_sample_spike_reaches_the_top_row(charset: Charset) -> None:
    values = [0.0] * 10_000
    values[5_000] = 1.0
    rows = draw([columns(values, 40 * PIXELS[charset][0])], 40, 5, charset=charset)
    assert [x for x, cell in enumerate(rows[0]) if cell.series is not None] == [20]


@pytest.mark.parametrize("charset", CHARSETS)
def test_a_rising_line_has_no_hole(charset: Charset) -> None:
    rows = draw([columns([0.0, 1.0], 20 * PIXELS[charset][0])], 20, 6, charset=charset)
    drawn = [x for x in range(20) if any(row[x].series is not None for row in rows)]
    assert drawn == list(range(drawn[-1] + 1))


@pytest.mark.parametrize("charset", CHARSETS)
def test_the_line_is_not_joined_across_nan(charset: Charset) -> None:
    values = [1.0] * 10 + [float("nan")] * 10 + [1.0] * 10
    rows = draw([columns(values, 30 * PIXELS[charset][0])], 30, 3, charset=charset)
    assert all(cell.mark for cell in rows[0][10:20])
    assert text(rows)[1][10:20].strip() == ""
    assert text(rows)[1][:9].strip() != ""


def test_nan_and_both_infinities_have_signs_of_their_own() -> None:
    values = [float("nan"), float("inf"), float("-inf")]
    assert text(draw([columns(values, 3)], 3, 2, charset="ascii"))[0] == "N^v"
    assert text(draw([columns(values, 6)], 3, 2))[0] == "N▲▼"


def test_braille_dots_stand_where_the_standard_puts_them() -> None:
    # One point at the top left of a cell of 2 × 4 dots is dot 1: U+2801; at the bottom right dot 8: U+2880.
    axis = Axis(0.0, 3.0)
    left = Columns(0, 2, [3.0, None], [3.0, None], [3.0, None], [3.0, None], ["", ""], 1)
    right = Columns(0, 2, [None, 0.0], [None, 0.0], [None, 0.0], [None, 0.0], ["", ""], 1)
    assert text(draw([left], 1, 1, axes=[axis])) == ["⠁"]
    assert text(draw([right], 1, 1, axes=[axis])) == ["⢀"]


def test_a_log_axis_spaces_decades_evenly() -> None:
    axis = Axis(1.0, 10_000.0, log=True)
    assert [axis.pixel(10.0**power, 9) for power in range(5)] == [8, 6, 4, 2, 0]


def test_two_series_share_one_axis_and_keep_their_own_colour() -> None:
    low, high = columns([0.0] * 4, 4), columns([9.0] * 4, 4)
    rows = draw([low, high], 4, 3, charset="ascii")
    assert {cell.series for cell in rows[0]} == {1}
    assert {cell.series for cell in rows[2]} == {0}


def test_the_widest_floats_do_not_overflow_the_axis() -> None:
    rows = draw([columns([-1.7e308, 1.7e308], 2)], 2, 3, charset="ascii")
    assert text(rows)[0][1] == "*"
    assert text(rows)[2][0] == "*"


def test_a_series_without_a_finite_value_still_draws() -> None:
    rows = draw([columns([float("nan")] * 3, 3)], 3, 2, charset="ascii")
    assert text(rows)[0] == "NNN"
    assert fit_axis([columns([float("nan")], 1)]) == Axis(0.0, 1.0)
