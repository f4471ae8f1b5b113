"""Memory: what each phase of a step holds, stacked, and what the allocator held over the steps."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from ...looks.types import MemoryLedger, MemoryPhase, SeriesColumns
from ...numbers import size
from ...text import one_line
from ..actions import bindings
from ..link import Answer
from ..widgets.timeline import Curve, Timeline
from .base import View

#: Part → the letter that fills its piece of the bar, and its colour, which repeats the letter.
_PARTS = {
    "weights": ("W", "blue"),
    "gradients": ("G", "green"),
    "optimizer": ("O", "cyan"),
    "activations": ("A", "yellow"),
    "communication": ("C", "magenta"),
    "transient": ("T", "bright_blue"),
    "kv_cache": ("K", "bright_green"),
}
_UNACCOUNTED = ("?", "bold red")
_FRAGMENTED = ("F", "bright_black")
_SERIES = ("memory_allocated", "memory_reserved", "memory_peak", "memory_device_used")


class MemoryView(View):
    """The ledger above, the allocator's timeline below."""

    name_ = "memory"
    needs = "records.memory|scalars.memory_allocated"
    channel = "table"
    teach = (
        'record the ledger: writer.record("memory", {"step": 3, "phase": "forward", "weights": bytes, "allocated": '
        "bytes, …}); the recorder writes the allocator's timeline by itself where there is a device"
    )
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("memory")]
    DEFAULT_CSS = """
    MemoryView VerticalScroll { height: 1fr; scrollbar-size-vertical: 1; }
    MemoryView Timeline { height: 8; }
    MemoryView #ledger { text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._ledger: MemoryLedger | None = None
        self._rank: int | None = None

    @property
    def twin(self) -> str:
        """The command that prints the same."""
        return f"llmconsole show {self.path} --memory"

    def compose(self) -> ComposeResult:
        """Ledger and timeline."""
        with VerticalScroll(can_focus=False):
            yield Static(" reading …", id="ledger", markup=False)
        yield Timeline("allocator", id="allocator")

    def reload(self) -> None:
        """Both parts."""
        self.ask("memory", rank=self._rank, step=None if self.step is None else round(self.step))
        self._ask_curves()

    def follow(self, step: float | None) -> None:
        """The ledger of the step nearest the cursor."""
        super().follow(step)
        self.query_one(Timeline).cursor = step
        self.reload()

    def on_resize(self, event: events.Resize) -> None:
        """Bars are as wide as the screen."""
        self._draw()

    @on(Timeline.Wanted)
    def _ask_curves(self) -> None:
        columns = max(8, self.query_one(Timeline).picture_columns)
        self.ask("curves", names=_SERIES, columns=columns, cursor=self.step, rank=self._rank)

    def answered(self, answer: Answer) -> None:
        """Draw the ledger, or the curves."""
        if answer.method == "curves":
            found = msgspec.convert(answer.result, list[SeriesColumns])
            timeline = self.query_one(Timeline)
            timeline.display = bool(found)
            if found:
                timeline.show([_curve(each) for each in found])
            return
        self._ledger = msgspec.convert(answer.result, MemoryLedger | None)
        self._draw()
        moved = self._ledger is not None and answer.params.get("by", 0) and self._ledger.step is not None
        if moved and self._ledger is not None:
            self.post_message(self.CursorMoved(self._ledger.step))

    def _draw(self) -> None:
        if self._ledger is None:
            words = " No ledger of phases was captured, only the allocator's timeline. A ledger:\n"
            words += ' writer.record("memory", {"step": 3, "phase": "forward", "weights": bytes, "allocated": bytes})'
            self.query_one("#ledger", Static).update(words)
        else:
            self.query_one("#ledger", Static).update(ledger_text(self._ledger, max(40, self.size.width - 1)))

    def action_step(self, by: int) -> None:
        """To the next or previous step with a ledger."""
        if self._ledger is not None:
            self.ask("memory", "move", rank=self._ledger.rank, step=self._ledger.step, by=by)

    def action_peak(self) -> None:
        """To the step at which most was allocated."""
        if self._ledger is not None and self._ledger.peak_step is not None:
            self.post_message(self.CursorMoved(self._ledger.peak_step))

    def action_rank(self) -> None:
        """The next rank that has a ledger."""
        if self._ledger is not None:
            ranks = self._ledger.ranks
            self._rank = ranks[(ranks.index(self._ledger.rank) + 1) % len(ranks)]
            self.reload()


def _curve(series: SeriesColumns) -> Curve:
    value = series.last if series.at is None else series.at
    return Curve(series.name.removeprefix("memory_"), series.unit, series.columns, value)


def ledger_text(ledger: MemoryLedger, width: int) -> Text:
    """The phases as stacked bars on one scale, ``width`` cells wide."""
    text = Text(no_wrap=True)
    step = "no step" if ledger.step is None else f"step {ledger.step:,}"
    peak = " (the peak)" if ledger.step == ledger.peak_step else ""
    ranks = f"rank {ledger.rank}" + (f" of {len(ledger.ranks)}" if len(ledger.ranks) > 1 else "")
    text.append(f" {step}{peak} · ledger {ledger.place + 1:,} of {ledger.count:,} · {ranks}\n\n", "bold")
    scale = max((_extent(each) for each in ledger.phases), default=0) or 1
    for each in ledger.phases:
        text.append(f" {one_line(each.phase)[:12]:<13}")
        for letter, style, cells in _pieces(each, scale, width - 15):
            text.append(letter * cells, style)
        text.append(f"\n  {_words(each)}\n", "bright_black")
    shown = {name for each in ledger.phases for name in each.parts}
    signs = [(*sign, name) for name, sign in _PARTS.items() if name in shown]
    signs += [(*_UNACCOUNTED, "unknown"), (*_FRAGMENTED, "free"), ("|", "bold", "capacity")]
    line = 0
    for letter, style, words in signs:
        if line + len(words) + 4 > width:
            line = 0
        text.append("\n " if line == 0 else "  ")
        text.append(letter, style)
        text.append(f" {words}")
        line += len(words) + 4
    return text


def _extent(phase: MemoryPhase) -> int:
    parts = sum(phase.parts.values())
    return max(parts, *(each or 0 for each in (phase.allocated, phase.reserved, phase.peak, phase.capacity)))


def _pieces(phase: MemoryPhase, scale: int, width: int) -> list[tuple[str, str, int]]:
    """(letter, style, cells) from left to right. Edges are rounded, not lengths, so that sums stay true."""
    pieces: list[tuple[str, str, int]] = []
    total, edge = 0, 0

    def add(letter: str, style: str, count: int) -> None:
        nonlocal total, edge
        total += count
        here = min(width, round(total / scale * width))
        pieces.append((letter, style, here - edge))
        edge = here

    for name, count in phase.parts.items():
        add(*_PARTS.get(name, ("·", "")), count)
    if phase.unaccounted is not None and phase.unaccounted > 0:
        add(*_UNACCOUNTED, phase.unaccounted)
    held = phase.reserved if phase.reserved is not None else total + (phase.fragmentation or 0)
    if held > total:
        add(*_FRAGMENTED, held - total)
    if phase.capacity is not None and (at := round(phase.capacity / scale * width) - 1) >= edge:
        pieces += [(" ", "", at - edge), ("|", "bold", 1)]
    return [each for each in pieces if each[2] > 0]


def _words(phase: MemoryPhase) -> str:
    """The measured numbers, and where ledger and measurement part."""
    held = phase.allocated if phase.allocated is not None else sum(phase.parts.values())
    words = [f"{size(held)}{'' if phase.allocated is not None else ' by the ledger'}"]
    if phase.capacity is not None:
        capacity = size(phase.capacity)
        words[0] = f"{words[0].removesuffix(capacity[-4:])} of {capacity}"
    if phase.unaccounted:
        sign = "?" if phase.unaccounted > 0 else "ledger over by"
        words.append(f"{sign} {size(abs(phase.unaccounted))}")
    words += [
        f"{name} {size(value)}"
        for name, value in (
            ("reserved", phase.reserved),
            ("peak", phase.peak),
            ("free in one", phase.largest_free_block),
        )
        if value is not None
    ]
    return " · ".join(words)
