"""A layer sheet as lines of text, for the console's view and for ``show --layers`` alike.

The shade of a cell is a sign, so it reads without colour; the colour only repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from .looks.sheets import LayerSheet
from .numbers import compact
from .text import keep_ends, one_line

#: Level → sign and style.
SHADES: dict[int, tuple[str, str]] = {
    4: ("█", "bold red"),
    3: ("▓", "red"),
    2: ("▒", "yellow"),
    1: ("░", "cyan"),
    0: ("·", "bright_black"),
    -1: ("v", "magenta"),
    -2: ("0", "magenta"),
    -3: (" ", ""),
}
BAD = ("✗", "bold reverse red")
LEGEND = (
    "below the largest number of its type by less than █ 2× ▓ 8× ▒ 64× ░ 1,024×",
    "· far   v below smallest normal   0 all zero   ✗ NaN, Inf   room: powers of 2",
)
WORDS = {
    "forward": "forward pass",
    "backward": "backward pass",
    "parameters": "parameters",
    "updates": "updates and moments",
}
_SHORT = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64",
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2",
}  # fmt: skip
_USUAL = ("activation", "gradient", "parameter", "update")  # roles that go without saying on their sheet


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    cell: Callable[[LayerSheet, int], str]


def _short(value: float) -> str:
    """Three significant digits in at most seven cells, eight with a sign."""
    if math.isnan(value):
        return ""
    size = abs(value)
    if math.isinf(value) or size == 0 or 1e-3 <= size < 1e5:
        return f"{value:,.0f}" if 1000 <= size < 1e5 else f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _room(sheet: LayerSheet, row: int) -> str:
    if math.isnan(sheet.room[row]) or math.isinf(sheet.room[row]):
        return ""
    return f"{'≤' if math.isnan(sheet.absmax[row]) else ''}{sheet.room[row]:.1f}"


def _growth(sheet: LayerSheet, row: int) -> str:
    now, before = sheet.rms[row], sheet.rms_before[row]
    if not (math.isfinite(now) and math.isfinite(before)) or before <= 0:
        return ""
    return f"×{now / before:.2f}" if now < 100 * before else f"×{_short(now / before)}"


def _nonfinite(sheet: LayerSheet, row: int) -> str:
    counts = (("NaN", sheet.nan[row]), ("Inf", sheet.posinf[row]), ("-Inf", sheet.neginf[row]))
    for word, count in counts:
        if count > 0:
            share = 100 * count / max(1, sheet.numel[row])
            return f"{count} {word}" if count < 1000 else f"{share:.0f}% {word}" if share >= 1 else f"<1% {word}"
    return "norm" if sheet.nan[row] < 0 and not math.isfinite(sheet.rms[row]) else ""


def _share(values: list[float], row: int) -> str:
    value = values[row]
    return "" if math.isnan(value) or value == 0 else f"{100 * value:.0f}%" if value >= 0.005 else "<1%"


_COLUMNS = (
    _Column("absmax", 7, lambda sheet, row: _short(sheet.absmax[row])),
    _Column("room", 6, _room),
    _Column("rms", 7, lambda sheet, row: _short(sheet.rms[row])),
    _Column("growth", 6, _growth),
    _Column("bad", 8, _nonfinite),
    _Column("zeros", 5, lambda sheet, row: _share(sheet.zeros, row)),
)
_WIDE = (
    _Column("min", 9, lambda sheet, row: _short(sheet.min[row])),
    _Column("max", 9, lambda sheet, row: _short(sheet.max[row])),
    _Column("mean", 9, lambda sheet, row: _short(sheet.mean[row])),
    _Column("subn.", 5, lambda sheet, row: _share(sheet.subnormals, row)),
)
_FIXED = 2 + 5 + 3  # mark, dtype, shade


def _columns(width: int) -> tuple[tuple[_Column, ...], int]:
    """The columns that fit, and the cells left for the name."""
    shown = _COLUMNS + _WIDE if width >= 116 else _COLUMNS
    return shown, max(12, width - _FIXED - sum(each.width + 1 for each in shown))


def _common(names: list[str]) -> int:
    """Characters up to and with the last dot that all names begin with."""
    if len(names) < 2:
        return 0
    first, last = min(names), max(names)
    same = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:same].rfind(".") + 1


class LayerTable:
    """A sheet in lines of ``width`` cells."""

    def __init__(self, sheet: LayerSheet, width: int) -> None:
        self._sheet, self._bad = sheet, frozenset(sheet.bad)
        self._columns, self._room = _columns(width)
        # What all names begin with tells nothing: model.layers. and the like.
        self._common = _common(sheet.name)

    def head(self) -> Text:
        """Titles of the columns."""
        titles = "".join(f" {each.title:>{each.width}}" for each in self._columns)
        return Text(f"  {'tensor':<{self._room}} type   {titles}", "bright_black", no_wrap=True)

    def line(self, row: int) -> Text:
        """One tensor; a long name keeps both its ends, without what all names begin with."""
        sheet, bad = self._sheet, row in self._bad
        sign, style = BAD if bad else SHADES[sheet.level[row]]
        role, dtype = sheet.role[row], one_line(sheet.dtype[row])
        name = one_line(sheet.name[row]) + ("" if role in _USUAL else f" ({role})")
        if cell_len(name) > self._room and self._common:
            name = "…" + keep_ends(name[self._common :], self._room - 1)
        name = keep_ends(name, self._room)
        text = Text("✗ " if bad else "  ", "bold red", no_wrap=True)
        text.append(name + " " * (self._room - cell_len(name)), "bold" if bad else "not bold default")
        text.append(f" {_SHORT.get(dtype, dtype)[:4]:<4}", "not bold bright_black")
        text.append(" ")
        text.append(sign * 2, style)
        for each in self._columns:
            loud = bad and each.title == "bad"
            text.append(f" {each.cell(sheet, row):>{each.width}}", "bold red" if loud else "not bold default")
        return text


def where(sheet: LayerSheet) -> str:
    """Which step this is, in words."""
    if sheet.step is None:
        return f"{WORDS[sheet.kind]}: nothing recorded"
    words = f"{WORDS[sheet.kind]}  step {sheet.step:,} ({sheet.position + 1:,} of {sheet.steps:,} recorded)"
    if len(sheet.ranks) > 1:
        words += f"  rank {sheet.rank} of {len(sheet.ranks)}"
    if len(sheet.micros) > 1:
        words += f"  micro-batch {sheet.micros.index(sheet.micro) + 1} of {len(sheet.micros)}"
    if sheet.total > len(sheet.name):
        words += f"  first {len(sheet.name):,} of {sheet.total:,} tensors"
    return words


def notes(sheet: LayerSheet) -> str:
    """The first bad tensor, and where full statistics are when this step has only norms."""
    words: list[str] = []
    if sheet.first_bad is not None:
        bad = sheet.first_bad
        words.append(f"first bad: {keep_ends(one_line(bad.name), 40)}, {WORDS[bad.kind]}, step {bad.step:,}")
    if sheet.step is not None and not sheet.full:
        near = [f"{each:,}" for each in (sheet.full_before, sheet.full_after) if each is not None]
        words.append("norms only" + (f"; full statistics at step {' and '.join(near)}" if near else ""))
    return "   ".join(words)


def exact(sheet: LayerSheet, row: int) -> tuple[str, str]:
    """One tensor with its whole name, shape, and exact values."""
    name = f"{one_line(sheet.name[row])}  {sheet.role[row]}  {one_line(sheet.dtype[row])}  [{sheet.shape[row]}]"
    values = [("absmax", sheet.absmax), ("rms", sheet.rms), ("min", sheet.min), ("max", sheet.max)]
    values += [("mean", sheet.mean), ("std", sheet.std)]
    words = [f"{title} {values[row]:.7g}" for title, values in values if not math.isnan(values[row])]
    counts = (("NaN", sheet.nan), ("+Inf", sheet.posinf), ("-Inf", sheet.neginf))
    words += [f"{values[row]:,} {title}" for title, values in counts if values[row] > 0]
    if sheet.numel[row] > 0:
        words.append(f"of {compact(float(sheet.numel[row]))}")
    return name, "  ".join(words)
