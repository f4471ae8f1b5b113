"""Draws pixel columns as text: braille, half blocks or ASCII, several series in one picture. Pure, no Textual.

The picture is a grid of cells; a cell knows its character and which series drew it last, so that a widget only has
to choose colours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # numpy stays in the worker
    from ..columns import Columns

Charset = Literal["braille", "block", "ascii"]

#: Pixels of one cell, wide × high.
PIXELS: dict[Charset, tuple[int, int]] = {"braille": (2, 4), "block": (1, 2), "ascii": (1, 1)}

#: Bit of the braille pattern for the pixel (x, y) of a cell, y counted from the top (Unicode block U+2800).
_BRAILLE_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_HALF_BLOCKS = (" ", "▀", "▄", "█")

#: What a column shows where a value could not be drawn, most telling first.
_MARKS = (("n", "N", "N"), ("p", "▲", "^"), ("m", "▼", "v"), ("z", "0", "0"))


class Cell(NamedTuple):
    """One character of the picture; ``series`` is the index of the series that drew it, None for empty cells."""

    text: str
    series: int | None
    mark: bool = False


@dataclass(frozen=True)
class Axis:
    """The vertical scale: ``low`` at the bottom, ``high`` at the top, both in the series' unit."""

    low: float
    high: float
    log: bool = False

    def pixel(self, value: float, height: int) -> int:
        """Row of a value, 0 at the top of ``height`` pixel rows."""
        return self.pixels(height)(value)

    def pixels(self, height: int) -> Callable[[float], int]:
        """The row of each value, 0 at the top of ``height`` pixel rows; made once for many values."""
        low, high, scale, bottom = self._scale(self.low), self._scale(self.high), self._scale, height - 1
        if high <= low:
            return lambda value: height // 2

        def pixel(value: float) -> int:
            row = round((1.0 - (scale(value) - low) / (high - low)) * bottom)
            return 0 if row < 0 else bottom if row > bottom else row

        return pixel

    def _scale(self, value: float) -> float:
        if not self.log:
            # Halved so that the distance of the two largest floats is still finite.
            return value / 2
        return math.log10(max(value, 5e-324))


def fit_axis(series: Sequence[Columns], *, log: bool = False) -> Axis:
    """The smallest axis that holds every drawable value; a flat series lies in the middle."""
    lows = [value for each in series for value in each.low if value is not None]
    highs = [value for each in series for value in each.high if value is not None]
    if not lows:
        return Axis(0.0 if not log else 1.0, 1.0 if not log else 10.0, log)
    return Axis(min(lows), max(highs), log)


def draw(
    series: Sequence[Columns],
    width: int,
    height: int,
    *,
    axes: Sequence[Axis] | None = None,
    charset: Charset = "braille",
) -> list[list[Cell]]:
    """Draw every series into ``height`` rows of ``width`` cells.

    Each of ``series`` holds ``width`` × pixels-per-cell columns and has its own of ``axes`` (one for all where None). A
    series is joined between neighbouring points but never across a value that is not finite; such a column carries a
    mark in the topmost row.
    """
    axes = axes or [fit_axis(series)] * len(series)
    wide, high = PIXELS[charset]
    masks = [[0] * width for _ in range(height)]
    owner: list[list[int | None]] = [[None] * width for _ in range(height)]
    for index, columns in enumerate(series):
        for x, top, bottom in _spans(columns, axes[index], height * high):
            column = x // wide
            if column >= width:
                continue
            for row in range(top // high, bottom // high + 1):
                begin, end = max(top - row * high, 0), min(bottom - row * high, high - 1)
                masks[row][column] |= _stroke(charset, x % wide, begin, end)
                owner[row][column] = index
    rows = [
        [_cell(charset, mask, series) for mask, series in zip(*both, strict=True)]
        for both in zip(masks, owner, strict=True)
    ]
    for index, columns in enumerate(series):
        for x, letters in enumerate(columns.marks):
            if letters and x // wide < width:
                rows[0][x // wide] = Cell(_mark(letters, charset), index, mark=True)
    return rows


def _spans(columns: Columns, axis: Axis, height: int) -> list[tuple[int, int, int]]:
    """(column, top, bottom) in pixels: each column's own range, stretched to meet the one before it."""
    spans: list[tuple[int, int, int]] = []
    pixel = axis.pixels(height)
    previous: tuple[int, int] | None = None  # column and pixel row where the line stands
    for x, (low, high, first, last) in enumerate(
        zip(columns.low, columns.high, columns.first, columns.last, strict=True)
    ):
        if columns.marks[x]:
            previous = None
        if low is None or high is None or first is None or last is None:
            continue
        top, bottom, start = pixel(high), pixel(low), pixel(first)
        if previous is not None:
            spans += _line(previous, (x, start))
        spans.append((x, top, bottom))
        previous = None if columns.marks[x] else (x, pixel(last))
    return spans


def _line(begin: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int, int]]:
    """Vertical strokes that join two points in different columns, without a hole and without a double stroke."""
    (x0, y0), (x1, y1) = begin, end
    strokes: list[tuple[int, int, int]] = []
    y = y0
    for x in range(x0 + 1, x1 + 1):
        target = round(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
        # One pixel beyond the last stroke is enough for the eye to join them.
        near = y if target == y else y + (1 if target > y else -1)
        strokes.append((x, min(near, target), max(near, target)))
        y = target
    return strokes


@cache
def _stroke(charset: Charset, x: int, top: int, bottom: int) -> int:
    """Mask of a vertical stroke in one cell, its ends included."""
    return sum(_BRAILLE_BITS[x][y] if charset == "braille" else 1 << y for y in range(top, bottom + 1))


@cache
def _cell(charset: Charset, mask: int, series: int | None) -> Cell:
    return Cell(_character(charset, mask), series)


def _character(charset: Charset, mask: int) -> str:
    if charset == "braille":
        return chr(0x2800 + mask) if mask else " "
    return _HALF_BLOCKS[mask] if charset == "block" else ("*" if mask else " ")


def _mark(letters: str, charset: Charset) -> str:
    for letter, sign, plain in _MARKS:
        if letter in letters:
            return plain if charset == "ascii" else sign
    return "?"
