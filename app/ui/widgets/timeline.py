"""The timeline widget: several series in one picture, event marks, and a step cursor that other views share.

The widget asks for exactly as many pixel columns as it can draw (``Timeline.Wanted``); whoever owns the worker
answers by calling ``show``. It never sees the series itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from ... import terminal
from ...numbers import amount
from ..raster import PIXELS, Axis, Cell, Charset, draw, fit_axis

if TYPE_CHECKING:  # numpy stays in the worker
    from ...columns import Columns

_LABEL = 10  # cells for the names left of the picture
_VALUE = 9
_CHOSEN = "▸ "


@dataclass(frozen=True)
class Curve:
    """One series of the picture; ``last`` is its newest value as recorded, drawable or not.

    ``source`` names the run it comes from where that is another one. Curves of one ``scale`` share an axis.
    """

    name: str
    unit: str
    columns: Columns
    last: float | None = None
    source: str = ""
    scale: str = ""


@dataclass(frozen=True)
class EventMark:
    """Something that happened at a step: ``sign`` is one character, ``words`` what it means."""

    step: float
    sign: str
    words: str


@dataclass(frozen=True)
class Window:
    """The steps on screen; None means as far as the data goes."""

    start: float | None = None
    stop: float | None = None


class Timeline(Widget):
    """Curves over steps. One cell high it is a sparkline with name and value; higher it has axes and marks."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "timeline--label",
        "timeline--mark",
        "timeline--event",
        "timeline--cursor",
        "timeline--curve-0",
        "timeline--curve-1",
        "timeline--curve-2",
        "timeline--curve-3",
    }
    DEFAULT_CSS = """
    Timeline { height: 1; }
    Timeline > .timeline--label { color: $text-muted; }
    Timeline > .timeline--mark { color: $text-error; text-style: bold; }
    Timeline > .timeline--event { color: $text-warning; }
    Timeline > .timeline--cursor { background: $panel; }
    Timeline > .timeline--curve-0 { color: $text-primary; }
    Timeline > .timeline--curve-1 { color: $text-secondary; }
    Timeline > .timeline--curve-2 { color: $text-accent; }
    Timeline > .timeline--curve-3 { color: $text-success; }
    """

    cursor: reactive[float | None] = reactive(None)

    class Wanted(Message):
        """The widget can draw this many pixel columns of its window."""

        def __init__(self, timeline: Timeline, columns: int) -> None:
            super().__init__()
            self.timeline, self.columns = timeline, columns

        @property
        def control(self) -> Timeline:
            """The widget, for selectors."""
            return self.timeline

    def __init__(
        self,
        name: str,
        *,
        charset: Charset | None = None,
        steps: bool = True,
        problem: str = "",
        id: str | None = None,
    ) -> None:
        super().__init__(id=id)
        self.series = name
        self.charset: Charset = charset or ("braille" if terminal.speaks_unicode() else "ascii")
        self.steps = steps  # whether the lowest line is the axis of steps
        self.window = Window()
        self.log_axis = False
        self.problem = problem  # what stands in the place of curves: before the first answer, that it is on its way
        self.marked = False  # whether it is the one that keys act on
        self._curves: Sequence[Curve] = ()
        self._marks: Sequence[EventMark] = ()
        self._axis = Axis(0.0, 1.0)
        self._cells: list[list[Cell]] = []

    def show(self, curves: Sequence[Curve], marks: Sequence[EventMark] = (), *, problem: str = "") -> None:
        """Draw these curves; only cells that changed are sent to the terminal."""
        before = self._cells
        self._curves, self._marks, self.problem = curves, marks, problem
        columns = [curve.columns for curve in curves]
        scales = {
            curve.scale: fit_axis([each.columns for each in curves if each.scale == curve.scale], log=self.log_axis)
            for curve in curves
        }
        axes = [scales[curve.scale] for curve in curves]
        self._axis = axes[0] if axes else Axis(0.0, 1.0)  # the one whose numbers stand on the left
        width, height = self._picture
        self._cells = draw(columns, width, height, axes=axes, charset=self.charset) if curves else []
        if self.size.height <= 1 or len(before) != len(self._cells):
            self.refresh()
            return
        self.refresh(Region(0, 0, self.size.width, 1))
        for y, (old, new) in enumerate(zip(before, self._cells, strict=True)):
            changed = [x for x, (a, b) in enumerate(zip(old, new, strict=False)) if a != b]
            if changed or len(old) != len(new):
                left = changed[0] if len(old) == len(new) else 0
                right = changed[-1] if len(old) == len(new) else width - 1
                self.refresh(Region(_LABEL + left, y + 1, right - left + 1, 1))
        if self.steps:
            self.refresh(Region(0, self.size.height - 1, self.size.width, 1))

    @property
    def picture_columns(self) -> int:
        """Pixel columns that the picture can draw."""
        return self._picture[0] * PIXELS[self.charset][0]

    @property
    def _picture(self) -> tuple[int, int]:
        """Cells of the picture itself, wide × high."""
        if self.size.height <= 1:
            return max(1, self.size.width - _LABEL - _VALUE), 1
        return max(1, self.size.width - _LABEL), max(1, self.size.height - 1 - self.steps)

    def on_resize(self, event: events.Resize) -> None:
        """Another size needs another number of columns."""
        self.post_message(self.Wanted(self, self.picture_columns))

    def render_line(self, y: int) -> Strip:
        """Title, picture rows, then the axis of steps; or all in one line where there is no more."""
        base = self.rich_style
        label = self.get_component_rich_style("timeline--label")
        width = self.size.width
        if self.problem or not self._curves:
            words = f"{self.series:<{_LABEL}}{self.problem or 'not recorded'}" if y == 0 else ""
            return Strip([Segment(words, label)]).adjust_cell_length(width, base)
        if self.size.height <= 1:
            last = self._curves[0].last
            head = f"{self.series[: _LABEL - 1]:<{_LABEL}}"
            value = f"{amount(last, self._curves[0].unit):>{_VALUE - 1}} " if last is not None else " " * _VALUE
            segments = [Segment(head, label), Segment(value, base), *self._cells_of(0)]
            return Strip(segments).adjust_cell_length(width, base)
        if y == 0:
            return Strip(self._title(label)).adjust_cell_length(width, base)
        height = len(self._cells)
        if y <= height:
            edge = {1: self._axis.high, height: self._axis.low}.get(y)
            tick = f"{amount(edge, self._curves[0].unit):>{_LABEL - 1}} " if edge is not None else " " * _LABEL
            return Strip([Segment(tick, label), *self._cells_of(y - 1)]).adjust_cell_length(width, base)
        return Strip(self._steps(label)).adjust_cell_length(width, base)

    def _title(self, label: Style) -> list[Segment]:
        segments: list[Segment] = [Segment(_CHOSEN if terminal.speaks_unicode() else "> ")] if self.marked else []
        first = self._curves[0]
        for index, curve in enumerate(self._curves):
            value = f" {amount(curve.last, curve.unit)}" if curve.last is not None else ""
            unit = f" {curve.unit}" if curve.unit and curve.unit != "bytes" else ""
            name = curve.source if curve.source and curve.name == first.name else f"{curve.name} {curve.source}".strip()
            own = " (own scale)" if curve.scale != first.scale else ""
            segments.append(Segment(f"{name}{value}{unit}{own}  ", self._colour(index)))
        if self.log_axis:
            segments.append(Segment("log  ", label))
        if self.cursor is not None:
            words = [mark.words for mark in self._marks if mark.step == self.cursor]
            segments.append(Segment(f"step {self.cursor:,.0f}  {'; '.join(words)}", label))
        return segments

    def _cells_of(self, row: int) -> list[Segment]:
        mark = self.get_component_rich_style("timeline--mark")
        cursor_style = self.get_component_rich_style("timeline--cursor", partial=True)
        at = self._column_of(self.cursor) if self.cursor is not None else None
        colours = [self._colour(index) for index in range(max(1, len(self._curves)))]
        segments: list[Segment] = []
        # One change of colour a stretch, not one a cell.
        for (marked, series, here), cells in groupby(
            enumerate(self._cells[row]), lambda each: (each[1].mark, each[1].series or 0, each[0] == at)
        ):
            style = mark if marked else colours[series]
            segments.append(Segment("".join(cell.text for _, cell in cells), style + cursor_style if here else style))
        return segments

    def _steps(self, label: Style) -> list[Segment]:
        """The axis of steps with the signs of events on it."""
        columns = self._curves[0].columns
        width = self._picture[0]
        left, right = f"{columns.start:,.0f}", f"{columns.stop - 1:,.0f}"
        axis = [Segment(each, label) for each in (left + right.rjust(max(0, width - len(left))))[:width]]
        event = self.get_component_rich_style("timeline--event")
        for each in self._marks:
            at = self._column_of(each.step)
            if at is not None:
                axis[at] = Segment(each.sign, event)
        return [Segment(f"{'step':>{_LABEL - 1}} ", label), *Segment.simplify(axis)]

    def _column_of(self, step: float) -> int | None:
        columns = self._curves[0].columns
        at = int((step - columns.start) / (columns.stop - columns.start) * self._picture[0])
        return at if 0 <= at < self._picture[0] else None

    def _colour(self, index: int) -> Style:
        return self.get_component_rich_style(f"timeline--curve-{index % 4}")

    def watch_cursor(self) -> None:
        """The cursor is one column; the title says its step."""
        if self.size.height > 1:
            self.refresh()

    def zoom(self, factor: float) -> Window:
        """The window around the cursor (or the right edge) made ``factor`` times as wide."""
        if not self._curves:
            return self.window
        columns = self._curves[0].columns
        centre = self.cursor if self.cursor is not None else columns.stop
        half = (columns.stop - columns.start) * factor / 2
        return replace(self.window, start=max(0.0, centre - half), stop=centre + half)
