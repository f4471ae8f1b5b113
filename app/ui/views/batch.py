"""Batch: samples as the model saw them, a column a token, with what each was asked for and what it cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

import msgspec
from rich.console import Group
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Static

from ....analyzers.report import CapsuleReport
from ... import batch_table as table
from ...looks.sheets import BatchSheet
from ..actions import bindings
from ..link import Answer
from .base import View

if TYPE_CHECKING:
    from ..app import Console


class BatchView(View):
    """As many samples as fit, three at 80x24."""

    name_ = "batch"
    needs = "batches.input_ids"
    channel = "table"
    teach = "with rec.step(batch=batch): keeps the last batches, and the logits' log-sum-exp beside them"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("batch")]
    DEFAULT_CSS = """
    BatchView Static { height: auto; }
    BatchView #samples { height: 1fr; }
    BatchView #notes { color: $text-muted; }
    BatchView #legend { color: $text-muted; }
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._sheet: BatchSheet | None = None
        self._position: int | None = None
        self._top = self._left = 0
        self._fit = 16  # tokens on screen
        self._worst: int | None = None
        self._faults: tuple[str, ...] = ()

    def compose(self) -> ComposeResult:
        """Which batch, how it is aligned, the samples, what the signs mean."""
        yield Static(" reading …", id="which", markup=False)
        yield Static(id="notes", markup=False)
        yield Static(id="samples", markup=False)
        yield Static(id="legend", markup=False)

    @property
    def twin(self) -> str:
        """The command that prints the same."""
        step = self._sheet.step if self._sheet is not None and self._sheet.step is not None else ""
        return f"llmconsole show {self.path} --batch {step}"

    @property
    def signs(self) -> str:
        """What the signs mean."""
        return (
            "· not supervised  ! far above the batch's mean  with x: → scored on another token, + scored in addition, "
            "÷ counted in the denominator only"
        )

    def reload(self) -> None:
        """Ask for the batch at the cursor."""
        self._ask()

    def on_resize(self, event: events.Resize) -> None:
        """More room shows more samples and tokens."""
        if self._sheet is not None:
            self._ask()

    def _ask(self, by: int = 0) -> None:
        self.ask(
            "batch",
            step=self.step,
            position=self._position,
            by=by,
            top=self._top,
            left=self._left,
            samples=max(8, self.size.height // 4),
            tokens=max(200, self.size.width),
            worst=self._worst,
            fit=self._fit,
            faults=list(self._faults),
        )

    def answered(self, answer: Answer) -> None:
        """Draw a window of the batch."""
        sheet = self._sheet = msgspec.convert(answer.result, BatchSheet)
        if sheet.step is None:
            self.query_one("#which", Static).update(" no batch holds token ids")
            return
        self._position, self._top, self._left = sheet.position, sheet.top, sheet.left
        self._draw(sheet)
        if answer.params["by"]:
            self.step = float(sheet.step)
            self.post_message(self.CursorMoved(self.step))

    def _draw(self, sheet: BatchSheet) -> None:
        width = max(40, self.size.width)
        near = ""
        if self.step and sheet.step != round(self.step):
            near = f"  nearest to {self.step:,.0f}"
        self.query_one("#which", Static).update(Text(f" {table.where(sheet)}{near}", "bold"))
        notes, legend = table.notes(sheet), table.legend(sheet)
        self.query_one("#notes", Static).update(Group(*(Text(f" {line}") for line in notes)))
        self.query_one("#legend", Static).update(Text(f" {legend}"))
        taken = sum(-(-(len(line) + 1) // width) for line in [*notes, legend]) + 1
        room = max(1, self.size.height - taken)
        lines: list[Text] = []
        fits: list[int] = []
        for row in sheet.samples:
            drawn, fit = table.sample(sheet, row, width, bool(self._faults))
            if lines and len(lines) + len(drawn) > room:
                break
            lines += drawn
            fits.append(fit)
        self._fit = max(1, min(fits, default=1))
        self.query_one("#samples", Static).update(Group(*lines))

    def follow(self, step: float | None) -> None:
        """Show the captured batch nearest to the cursor."""
        if step == self.step and self._sheet is not None and self._sheet.step == step:
            return
        super().follow(step)
        self._position, self._worst = None, None
        self._ask()

    # -- actions

    def _go(self, top: int, left: int) -> None:
        rows = self._sheet.rows if self._sheet is not None else 1
        columns = self._sheet.tokens if self._sheet is not None else 1
        self._top, self._left = min(max(top, 0), rows - 1), max(0, min(left, columns - self._fit))
        self._worst = None
        self._ask()

    def action_sample(self, by: int) -> None:
        """Scroll through the samples."""
        self._go(self._top + by, self._left)

    def action_along(self, by: int) -> None:
        """Scroll along the tokens by what is on screen, less one for context."""
        self._go(self._top, self._left + by * max(1, self._fit - 1))

    def action_edge(self, end: int) -> None:
        """Go to the first or the last tokens."""
        columns = self._sheet.tokens if self._sheet is not None else 1
        self._go(self._top, columns - self._fit if end else 0)

    def action_worst(self) -> None:
        """Go to the worst token, then to the next worst."""
        self._worst = 0 if self._worst is None else self._worst + 1
        self._ask()

    def action_extra(self) -> None:
        """Lay beside the labels what the named fault scores; again: without it."""
        if self._faults:
            self._faults = ()
        else:
            kept = cast("Console", self.app).reports.of(self.path)
            self._faults = named_faults(kept.report if kept is not None else None)
            if not self._faults:
                words = "no finding names a fault of the loss" if kept is not None else "the report is not there yet"
                self.notify(words, timeout=3)
                return
        self._ask()

    def action_step(self, by: int) -> None:
        """Go to the next or previous captured batch."""
        self._worst = None
        self._ask(by=by)


def named_faults(report: CapsuleReport | None) -> tuple[str, ...]:
    """The faults that a report names for its loss: those of the first counterfactual that something fits."""
    for finding in report.findings if report is not None else ():
        table_of = finding.counterfactual
        if finding.stage == "objective" and table_of is not None:
            for candidate in table_of.candidates:
                if candidate.fits and candidate.faults:
                    return candidate.faults
    return ()
