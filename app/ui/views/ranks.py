"""Ranks: who did which collective and how far it got, and where the time of each rank went."""

from __future__ import annotations

from itertools import groupby
from typing import ClassVar

import msgspec
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Static

from ...looks.types import Contents, RankRow, RanksGrid
from ...numbers import duration
from ...text import one_line
from ..actions import bindings
from ..link import Answer
from .base import View

_STYLES = {"·": "bright_black", "○": "yellow", "✗": "bold red", " ": "on grey23", "-": "bright_black"}
_TIMES = (("C", "green"), ("M", "cyan"), ("D", "yellow"))
_LEGEND = " · done ○ waiting ✗ differs - not kept, or not asked; blank missing"
_BARS = "  C compute M comms D data"
#: The tag of how a rank ended, and the words that explain it.
_ENDS = {
    "exception": ("err", "an exception"),
    "signal": ("sig", "a signal"),
    "oom": ("oom", "out of memory"),
    "hang": ("hang", "stood still"),
}

#: What a job of one process is told.
ONE_PROCESS = "This job ran in one process: there are no ranks to compare."

#: Lines beside the rows of the grid: where, two of detail, the cursor's sign, two of legend.
_FRAME = 6
_LABEL = 11
_BAR = 20


class RanksView(View):
    """The grid with the cursor in the middle; each rank's times stand at the end of its row."""

    name_ = "ranks"
    needs = "records.collectives|records.ranks"
    channel = "table"
    teach = (
        "A Recorder on every rank keeps the calls. Without it run with TORCH_FR_BUFFER_SIZE=2000 "
        "(TORCH_NCCL_TRACE_BUFFER_SIZE before torch 2.9) and TORCH_NCCL_DUMP_ON_TIMEOUT=1, and import the dumps of all "
        "ranks: llmconsole import DUMPS -o DIR"
    )
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("ranks")]
    DEFAULT_CSS = """
    RanksView Static { text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._grid: RanksGrid | None = None
        self._group: str | None = None
        self._at: int | None = None
        self._row: int | None = None

    @classmethod
    def missing(cls, contents: Contents) -> str:
        """One process calls nobody: there is nothing to collect."""
        return ONE_PROCESS if contents.world_size == 1 else super().missing(contents)

    @property
    def twin(self) -> str:
        """The command that prints the same."""
        return f"llmconsole show {self.path} --ranks"

    def compose(self) -> ComposeResult:
        """One picture."""
        yield Static(" reading …", id="grid", markup=False)

    def on_resize(self, event: events.Resize) -> None:
        """Another size is another window."""
        self.reload()

    def reload(self) -> None:
        """The window around the cursor."""
        if self.size.height:
            columns = max(8, self.size.width - _LABEL - _BAR - 10)
            rows = max(1, self.size.height - _FRAME)
            self.ask("ranks", columns=columns, rows=rows, group=self._group, at=self._at, row=self._row)

    def answered(self, answer: Answer) -> None:
        """Draw the window; the cursor is where the worker put it."""
        self._grid = msgspec.convert(answer.result, RanksGrid)
        self._group, self._at, self._row = self._grid.group or None, self._grid.at, self._grid.row
        self.query_one("#grid", Static).update(grid_text(self._grid, self.size.width))

    def action_along(self, by: int) -> None:
        """Along the collectives."""
        self._at = (self._at or 0) + by
        self._at = max(0, min(self._at, self._grid.columns - 1)) if self._grid is not None else None
        self.reload()

    def action_page(self, by: int) -> None:
        """Along the collectives by a screen."""
        self.action_along(by * max(8, self.size.width - _LABEL - _BAR - 10))

    def action_rank(self, by: int) -> None:
        """To another rank."""
        self._row = (self._row or 0) + by
        self._row = max(0, min(self._row, self._grid.count - 1)) if self._grid is not None else None
        self.reload()

    def action_first(self) -> None:
        """To the first collective in which ranks differ."""
        self._at = self._row = None
        self.reload()

    def action_group(self) -> None:
        """The next process group, at its first difference."""
        if self._grid is not None and len(self._grid.groups) > 1:
            groups = self._grid.groups
            self._group = groups[(groups.index(self._grid.group) + 1) % len(groups)]
            self.action_first()


def grid_text(grid: RanksGrid, width: int) -> Text:
    """The window as text: head, detail, a row a rank, legend."""
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f" {_head(grid)}\n", "bold")
    for line in grid.detail:
        text.append(f" {one_line(line, 400)}\n")
    cursor = grid.at - grid.left
    shown = max((len(each.cells) for each in grid.rows), default=0)
    text.append(" " * (_LABEL + cursor) + "▾\n" if shown else "\n", "bold")
    timed = grid.longest_ms > 0
    for index, row in enumerate(grid.rows):
        here = grid.top + index == grid.row
        tag = _ENDS.get(row.exit, (one_line(row.exit)[:4], ""))[0]
        text.append(f"{'▸' if here else ' '}{row.rank:>4} {tag:<5}", "bold" if here else "")
        for piece, reverse in (
            (row.cells[:cursor], ""),
            (row.cells[cursor : cursor + 1], " reverse"),
            (row.cells[cursor + 1 :], ""),
        ):
            for sign, run in groupby(piece):  # a style a run: one a cell makes a wide screen crawl
                text.append("".join(run), f"{_STYLES.get(sign, '')}{reverse}")
        if timed:
            room = _BAR if shown else max(_BAR, width - _LABEL - 12)
            text.append(" " * (shown - len(row.cells) + 1))
            _bar(text, row, grid.longest_ms, room)
        text.append("\n")
    text.append((_LEGEND if shown else "") + (_BARS if timed else ""), "bright_black")
    ends = {each.exit for each in grid.rows}
    if explained := ", ".join(f"{tag} {words}" for kind, (tag, words) in _ENDS.items() if kind in ends):
        text.append(f"\n how a rank ended: {explained}", "bright_black")
    return text


def _head(grid: RanksGrid) -> str:
    if not grid.columns:
        return f"{_ranks(grid.count)} · {grid.note}"
    place = next((index for index, each in enumerate(grid.groups, start=1) if each == grid.group), 1)
    words = one_line(grid.group, 40) + (f" {place} of {len(grid.groups)}" if len(grid.groups) > 1 else "")
    words += f" · {grid.columns:,} calls · "
    none = "no difference among collectives" if grid.note else "no difference"
    words += none if grid.first is None else f"first difference at {grid.first + 1:,}"
    words += f" · {_ranks(grid.count)}"
    return f"{words} · {one_line(grid.note)}" if grid.note else words


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"


def _bar(text: Text, row: RankRow, longest: float, room: int) -> None:
    """Compute, communication and data of a rank, on the scale of the slowest rank."""
    total, edge = 0.0, 0
    for (letter, style), value in zip(_TIMES, (row.compute_ms, row.communication_ms, row.data_ms), strict=True):
        total += value if value is not None and value > 0 else 0.0
        here = min(room, round(total / longest * room))
        text.append(letter * (here - edge), style)
        edge = here
    text.append(" " * (room - edge))
    text.append(f" {duration(total / 1000):>8}" if total else "")
