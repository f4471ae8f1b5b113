"""The difference of two runs as lines for people."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .render import figure
from .text import keep_tail, one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..analyzers.diff.types import Difference, SeriesDifference, Side

_DIM = "bright_black"
_SIGNS = {"none": ("✓", "green"), "rounding": ("~", "yellow"), "data-noise": ("~", "yellow")}
_UNDECIDED = ("?", "yellow")
_PARTED = ("✗", "bold red")
_MOST_SERIES, _MOST_TENSORS, _MOST_SETTINGS = 16, 8, 12


def rows(found: Difference, width: int) -> Iterator[RenderableType]:
    """The whole of it: verdict, steps around the divergence, series, batches, tensors, settings, notes."""
    yield _side("left", found.left, width)
    yield _side("right", found.right, width)
    yield Text()
    yield from _verdict(found)
    if found.around:
        yield Text()
        yield _indented(_around(found))
    yield from _section("Series", _series(found))
    yield from _section("Batches", _batches(found))
    yield from _section("Tensors, in execution order", _tensors(found))
    yield from _section("Settings that differ, nearest first", _settings(found))
    if found.notes or found.verdict.next:
        yield Text()
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(ratio=1)
        for name, lines in (("Next", found.verdict.next), ("Note", found.notes)):
            for number, line in enumerate(lines):
                table.add_row(name if not number else "", Text(one_line(line, 400), "" if name == "Next" else _DIM))
        yield _indented(table)


def _side(name: str, side: Side, width: int) -> Text:
    line = Text(f" {name:5}  ")
    title, path = one_line(side.title, 60), one_line(side.path)
    line.append(title, "bold")
    if side.first_step is not None and side.last_step is not None:
        line.append(f"  steps {side.first_step:,} to {side.last_step:,}", _DIM)
    room = width - len(line) - 3
    if room > 12 and path != title:
        line.append(f"  {keep_tail(path, room)}", _DIM)
    return line


def _verdict(found: Difference) -> Iterator[RenderableType]:
    first, verdict = found.first_divergence, found.verdict
    sign, style = _SIGNS.get(verdict.kind, _UNDECIDED if verdict.kind in ("undetermined", "start") else _PARTED)
    head = Text(" ")
    if first is None:
        head.append(f"{sign} {verdict.summary}", style)
        yield head
        return
    head.append(f"{sign} First divergence", style)
    head.append(f"  step {first.step:,} · {one_line(first.name, 60)}", "bold")
    head.append(f"   {first.stage} · {verdict.kind}", _DIM)
    yield head
    yield _indented(Text(one_line(verdict.summary, 1000)))


def _around(found: Difference) -> Table:
    """The steps before and after, with the difference in per cent."""
    table = _table()
    for name in ("step", "left", "right", "difference"):
        table.add_column(name, justify="right")
    for row in found.around:
        scale = max(abs(row.left), abs(row.right))
        apart = (row.right - row.left) / scale if scale and math.isfinite(row.left - row.right) else math.nan
        words = "=" if not row.differs else f"{100 * apart:+.2g} %" if math.isfinite(apart) else "≠"
        style = "bold" if row.differs else ""
        table.add_row(f"{row.step:,}", *(Text(_number(each), style) for each in (row.left, row.right)), words)
    return table


def _series(found: Difference) -> Table | None:
    table = _table()
    table.add_column("name", overflow="fold")
    for name in ("shared", "first", "left", "right"):
        table.add_column(name, justify="right")
    table.add_column("", overflow="fold", ratio=1)
    shown = sorted(found.series, key=_by_step)
    for each in shown[:_MOST_SERIES]:
        cells = [f"{each.shared:,}", "–", "", ""]
        if each.step is not None:
            cells[1:] = [f"{each.step:,}", _number(each.left), _number(each.right)]
        words = "equal" if each.step is None else each.manner
        table.add_row(Text(one_line(each.name, 40)), *cells, Text(words, _DIM))
    if len(shown) > _MOST_SERIES:
        table.add_row(Text(f"and {len(shown) - _MOST_SERIES} more", _DIM))
    return table if shown else None


def _by_step(each: SeriesDifference) -> tuple[bool, int]:
    return each.step is None, each.step or 0


def _batches(found: Difference) -> Table | None:
    table = _table()
    for name in ("step", "micro"):
        table.add_column(name, justify="right")
    for name in ("what", "left", "right"):
        table.add_column(name, overflow="fold")
    table.add_column("", overflow="fold", ratio=1)
    for each in found.batches:
        place = "" if each.at is None else f"at {list(each.at)}, {each.differing:,} of {each.elements:,} elements"
        cells = (one_line(each.what), figure(each.left), figure(each.right))
        table.add_row(f"{each.step:,}", str(each.micro), *map(Text, cells), Text(place, _DIM))
    return table if found.batches else None


def _tensors(found: Difference) -> Table | None:
    table = _table()
    for name in ("step", "order"):
        table.add_column(name, justify="right")
    table.add_column("tensor", overflow="fold")
    for name in ("left rms", "right rms", "apart", "allowed"):
        table.add_column(name, justify="right")
    for each in found.tensors[:_MOST_TENSORS]:
        name = Text(keep_tail(one_line(each.name), 32))
        name.append(f" {each.role}", _DIM)
        if each.note:
            name.append(f" {one_line(each.note)}", "yellow")
        numbers = (_number(each.left), _number(each.right), f"{each.relative:.2g}", f"{each.tolerance:.1g}")
        table.add_row(f"{each.step:,}", str(each.order), name, *numbers)
    if len(found.tensors) > _MOST_TENSORS:
        table.add_row("", "", Text(f"and {len(found.tensors) - _MOST_TENSORS} more of this step", _DIM))
    return table if found.tensors else None


def _settings(found: Difference) -> Table | None:
    table = _table()
    for name in ("setting", "left", "right"):
        table.add_column(name, overflow="fold")
    for each in found.settings[:_MOST_SETTINGS]:
        cells = (one_line(each.name, 60), _setting(each.left), _setting(each.right))
        table.add_row(*map(Text, cells))
    if len(found.settings) > _MOST_SETTINGS:
        table.add_row(Text(f"and {len(found.settings) - _MOST_SETTINGS} more: --json", _DIM))
    return table if found.settings else None


def _setting(value: Any) -> str:
    return "–" if value is None else one_line(value, 60)


def _number(value: float | None) -> str:
    """All the digits that were printed: rounding would hide what is compared."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return figure(value)
    return f"{value:,.0f}" if value.is_integer() and 1e4 <= abs(value) < 1e15 else f"{value:.9g}"


def _section(heading: str, table: Table | None) -> Iterator[RenderableType]:
    if table is not None:
        yield Text()
        yield Text(f" {heading}", "bold")
        yield _indented(table)


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=_DIM, show_edge=False)


def _indented(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, 3))
