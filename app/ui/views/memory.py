"""Memory: what each phase of a step holds, stacked, and what the allocator held over the steps."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from ...ledger_table import ledger_text
from ...looks.types import LiveStacks, MemoryLedger, SeriesColumns
from ...stack_table import stacks_text
from ..actions import bindings
from ..link import Answer
from ..widgets.timeline import Curve, Timeline
from .base import View

_SERIES = ("memory_allocated", "memory_reserved", "memory_peak", "memory_device_used")


class MemoryView(View):
    """The ledger above, who held the peak under it, the allocator's timeline below."""

    name_ = "memory"
    needs = "records.memory|records.allocations|scalars.memory_allocated"
    channel = "table"
    teach = (
        'record the ledger: writer.record("memory", {"step": 3, "phase": "forward", "weights": bytes, "allocated": '
        "bytes, …}); the recorder writes the allocator's timeline by itself where there is a device"
    )
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("memory")]
    DEFAULT_CSS = """
    MemoryView VerticalScroll { height: 1fr; scrollbar-size-vertical: 1; }
    MemoryView #stacks { height: 1fr; text-wrap: nowrap; text-overflow: ellipsis; }
    MemoryView Timeline { height: 8; }
    MemoryView #ledger { text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._ledger: MemoryLedger | None = None
        self._stacks: LiveStacks | None = None
        self._stack = 0
        self._answered: set[str] = set()
        self._rank: int | None = None

    @property
    def twin(self) -> str:
        """The command that prints the same."""
        return f"llmconsole show {self.path} --memory"

    def compose(self) -> ComposeResult:
        """Ledger, stacks and timeline."""
        with VerticalScroll(can_focus=False):
            yield Static(" reading …", id="ledger", markup=False)
        yield Static("", id="stacks", markup=False)
        yield Timeline("allocator", problem="reading …", id="allocator")

    def reload(self) -> None:
        """All parts."""
        self.ask("stacks", rank=self._rank)
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
        """Draw the ledger, the stacks or the curves."""
        if answer.method == "curves":
            found = msgspec.convert(answer.result, list[SeriesColumns])
            timeline = self.query_one(Timeline)
            timeline.display = bool(found)
            if found:
                timeline.show([_curve(each) for each in found])
            return
        self._answered.add(answer.method)
        if answer.method == "stacks":
            self._stacks = msgspec.convert(answer.result, LiveStacks | None)
            self._draw()
            self.call_after_refresh(self._draw)  # only then is it known how many lines there is room for
            return
        self._ledger = msgspec.convert(answer.result, MemoryLedger | None)
        self._draw()
        moved = self._ledger is not None and answer.params.get("by", 0) and self._ledger.step is not None
        if moved and self._ledger is not None:
            self.post_message(self.CursorMoved(self._ledger.step))

    def _draw(self) -> None:
        ledger, stacks = self.query_one("#ledger", Static), self.query_one("#stacks", Static)
        width = max(40, self.size.width - 1)
        self.query_one(VerticalScroll).display = self._ledger is not None or self._stacks is None
        stacks.display = self._stacks is not None
        if self._ledger is not None:
            ledger.update(ledger_text(self._ledger, width))
        elif self._stacks is None and self._answered >= {"memory", "stacks"}:
            words = " No ledger of phases was captured, only the allocator's timeline. A ledger:\n"
            words += ' writer.record("memory", {"step": 3, "phase": "forward", "weights": bytes, "allocated": bytes})'
            ledger.update(words)
        if self._stacks is not None:
            stacks.update(stacks_text(self._stacks, width, max(4, stacks.size.height), self._stack))

    def action_step(self, by: int) -> None:
        """To the next or previous step with a ledger."""
        if self._ledger is not None:
            self.ask("memory", "move", rank=self._ledger.rank, step=self._ledger.step, by=by)

    def action_peak(self) -> None:
        """To the step at which most was allocated."""
        if self._ledger is not None and self._ledger.peak_step is not None:
            self.post_message(self.CursorMoved(self._ledger.peak_step))

    def action_stack(self, by: int) -> None:
        """To another stack; its frames are shown."""
        if self._stacks is not None:
            self._stack = max(0, min(self._stack + by, len(self._stacks.rows) - 1))
            self._draw()

    def action_rank(self) -> None:
        """The next rank that has a ledger, or stacks."""
        shown = self._ledger or self._stacks
        if shown is not None:
            self._rank = shown.ranks[(shown.ranks.index(shown.rank) + 1) % len(shown.ranks)]
            self._stack = 0
            self.reload()


def _curve(series: SeriesColumns) -> Curve:
    value = series.last if series.at is None else series.at
    return Curve(series.name.removeprefix("memory_"), series.unit, series.columns, value)
