"""Layers: the tensors of one step in execution order, their statistics, and how near each is to overflow."""

from __future__ import annotations

from typing import ClassVar, cast

import msgspec
from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Static

from ... import layer_table as table
from ...looks.sheets import Kind, LayerSheet
from ..actions import bindings
from ..link import Answer
from ..widgets.rows import Lazy, Row, Rows
from .base import View


class LayersView(View):
    """One sheet at a time; left and right go through the recorded steps with the cursor that all views share."""

    name_ = "layers"
    needs = "stats"
    channel = "table"
    teach = 'Recorder("runs", model=model, every=50) keeps norms each step and full statistics every 50 steps'
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("layers")]
    DEFAULT_CSS = """
    LayersView Static { height: auto; }
    LayersView #notes { color: $text-warning; }
    LayersView #exact { min-height: 2; max-height: 4; }
    LayersView #legend { color: $text-muted; height: 2; }
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._kind: Kind = "forward"
        self._rank: int | None = None
        self._micro: int | None = None
        self._sheet: LayerSheet | None = None
        self._bad: frozenset[int] = frozenset()

    def compose(self) -> ComposeResult:
        """Which step, the sheet, the chosen tensor exactly, what the signs mean."""
        yield Static(" reading …", id="step", markup=False)
        yield Static(id="notes", markup=False)
        yield Static(id="head", markup=False)
        yield Rows[int](empty=" nothing of this kind was recorded; f b p u show what was", id="sheet")
        yield Static(id="exact", markup=False)
        yield Static(Text("\n".join(f" {line}" for line in table.LEGEND)), id="legend")

    @property
    def twin(self) -> str:
        """The command that prints the same."""
        step = self._sheet.step if self._sheet is not None and self._sheet.step is not None else ""
        return f"llmconsole show {self.path} --layers {step} --kind {self._kind}"

    @property
    def signs(self) -> str:
        """What the columns mean."""
        return (
            "room: how many times absmax can double before it overflows (≤: from the rms, absmax was not recorded)  "
            "growth: rms against the recorded step before  bad: NaN or Inf elements"
        )

    @property
    def _rows(self) -> Rows[int]:
        return cast("Rows[int]", self.query_one("#sheet", Rows))

    def on_focus(self) -> None:
        """The sheet has the cursor."""
        self._rows.focus()

    def on_resize(self, event: events.Resize) -> None:
        """Columns depend on the width."""
        if self._sheet is not None:
            self._draw(self._sheet)

    def reload(self) -> None:
        """Ask for the sheet at the cursor."""
        self._ask()

    def _ask(self, by: int = 0, full: int = 0) -> None:
        here = self._sheet.step if self._sheet is not None else None
        step = here if (by or full) and here is not None else self.step
        self.ask("layers", kind=self._kind, step=step, by=by, full=full, rank=self._rank, micro=self._micro)

    def answered(self, answer: Answer) -> None:
        """Draw a sheet; where it has a bad tensor that is not in view yet, go there."""
        sheet = msgspec.convert(answer.result, LayerSheet)
        if sheet.kind != self._kind:
            return
        before, self._sheet, self._bad = self._sheet, sheet, frozenset(sheet.bad)
        if (answer.params["by"] or answer.params["full"]) and sheet.step is not None:
            self.step = float(sheet.step)
            self.post_message(self.CursorMoved(self.step))
        self._draw(sheet)
        moved = before is None or (before.kind, before.step, before.micro) != (sheet.kind, sheet.step, sheet.micro)
        if moved and sheet.bad and self._rows.cursor not in self._bad:
            self.call_after_refresh(self._rows.reveal, sheet.bad[0])  # the sheet has its height only then
        self._choose()

    def _draw(self, sheet: LayerSheet) -> None:
        width = max(40, self.size.width - 2)  # beside the scroll bar
        near = ""
        if self.step and sheet.step is not None and sheet.step != round(self.step):
            near = f"  nearest to {self.step:,.0f}"
        self.query_one("#step", Static).update(Text(f" {table.where(sheet)}{near}", "bold"))
        notes = self.query_one("#notes", Static)
        words = table.notes(sheet)
        notes.display = bool(words)
        notes.update(Text(f" {words}"))
        lines = table.LayerTable(sheet, width)
        self.query_one("#head", Static).update(lines.head())
        keys = [f"{name} {role}" for name, role in zip(sheet.name, sheet.role, strict=True)]
        self._rows.set_rows(Lazy(keys, lambda row: Row(keys[row], lines.line(row), row)))

    @on(Rows.Moved, "#sheet")
    def _moved(self, message: Rows.Moved) -> None:
        message.stop()
        self._choose()

    def _choose(self) -> None:
        """The chosen tensor with its exact values."""
        sheet, row = self._sheet, self._rows.cursor
        lines = Text()
        if sheet is not None and 0 <= row < len(sheet.name):
            name, values = table.exact(sheet, row)
            lines = Text(f" {name}\n {values}")
        self.query_one("#exact", Static).update(lines)

    def follow(self, step: float | None) -> None:
        """Show the recorded step nearest to the cursor."""
        if step == self.step and self._sheet is not None and self._sheet.step == step:
            return
        super().follow(step)
        self._ask()

    # -- actions

    def action_show(self, kind: Kind) -> None:
        """Another pass."""
        self._kind = kind
        self._ask()

    def action_step(self, by: int) -> None:
        """Go to the next or previous recorded step."""
        self._ask(by=by)

    def action_full(self, by: int) -> None:
        """Go to the next or previous step with full statistics."""
        self._ask(full=by)

    def action_bad(self) -> None:
        """Go to the first bad tensor of the capsule, on whichever sheet it is."""
        bad = self._sheet.first_bad if self._sheet is not None else None
        if bad is None:
            self.notify("no tensor on record holds NaN or Inf where none should be", timeout=3)
            return
        self._kind, self._rank, self._micro = bad.kind, bad.rank, bad.micro
        self._rows.cursor = 0
        self._sheet = None
        self.step = None
        self.post_message(self.CursorMoved(float(bad.step)))

    def action_micro(self) -> None:
        """Next micro-batch of the step."""
        sheet = self._sheet
        if sheet is not None and len(sheet.micros) > 1:
            self._micro = sheet.micros[(sheet.micros.index(sheet.micro) + 1) % len(sheet.micros)]
            self._ask()

    def action_rank(self) -> None:
        """Next rank."""
        sheet = self._sheet
        if sheet is not None and len(sheet.ranks) > 1:
            at = sheet.ranks.index(sheet.rank) if sheet.rank in sheet.ranks else -1
            self._rank = sheet.ranks[(at + 1) % len(sheet.ranks)]
            self._ask()
