"""Timelines: up to six series over the steps, with events, zoom, log axis and the shared cursor."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType

from ...looks.types import SeriesColumns, StepMark
from ..actions import bindings
from ..link import Answer
from ..widgets.timeline import Curve, EventMark, Timeline, Window
from .base import View

#: Series in the order in which an engineer wants them; others follow by name.
_FIRST = ("loss", "grad_norm", "learning_rate", "update_norm", "memory_allocated", "loss_scale", "step_time")
_PANELS = 6


class TimelinesView(View):
    """Six panels that share one window of steps and one cursor."""

    name_ = "timelines"
    needs = "scalars"
    teach = 'attach the recorder: rec = Recorder("runs", model=model, optimizer=optimizer)'
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("timelines")]

    def __init__(self, path: str, series: tuple[str, ...]) -> None:
        super().__init__(path)
        known = [name for name in _FIRST if name in series]
        self._names = [*known, *(name for name in sorted(series) if name not in known)]
        self._top = 0
        self._window = Window()
        self._log = False
        self._span = (0.0, 1.0)  # steps on screen
        self._whole = (0.0, 1.0)  # steps recorded
        self._marks: list[EventMark] = []

    @property
    def shown(self) -> list[str]:
        """Names of the series on screen."""
        return self._names[self._top : self._top + _PANELS]

    def compose(self) -> ComposeResult:
        """One panel a series."""
        panels = min(_PANELS, len(self._names))
        for index in range(panels):
            yield Timeline(self._names[index], steps=index == panels - 1, id=f"panel-{index}")

    def reload(self) -> None:
        """Marks and curves."""
        self.ask("marks")
        self._ask_curves()

    def _ask_curves(self) -> None:
        panels = list(self.query(Timeline))
        if panels:
            self.ask(
                "curves",
                names=self.shown,
                columns=max(8, panels[0].picture_columns),
                start=self._window.start,
                stop=self._window.stop,
                log=self._log,
                cursor=self.step,
            )

    @property
    def _cursor(self) -> float | None:
        """The shared cursor, where it stands among the recorded steps."""
        left, right = self._whole
        return self.step if self.step is not None and left <= self.step < right else None

    @on(Timeline.Wanted)
    def _wanted(self) -> None:
        self._ask_curves()

    def answered(self, answer: Answer) -> None:
        """Draw the curves or keep the marks for them."""
        if answer.method == "marks":
            found = msgspec.convert(answer.result, list[StepMark])
            self._marks = [EventMark(each.step, each.sign, each.words) for each in found]
            self._ask_curves()
            return
        by_name = {each.name: each for each in msgspec.convert(answer.result, list[SeriesColumns])}
        for panel, name in zip(self.query(Timeline), self.shown, strict=False):
            found = by_name.get(name)
            panel.log_axis = self._log
            if found is None:
                panel.show((), problem="not recorded")
                continue
            self._span = (found.columns.start, found.columns.stop)
            if self._window == Window():
                self._whole = self._span
            panel.set_reactive(Timeline.cursor, self._cursor)
            value = found.last if found.at is None or self._cursor is None else found.at
            panel.show([Curve(name, found.unit, found.columns, value)], self._marks)

    def follow(self, step: float | None) -> None:
        """Show the values at the cursor."""
        super().follow(step)
        self._ask_curves()

    # -- actions

    def action_cursor(self, by: int) -> None:
        """Move the cursor by one column of the picture, so that a key press is always seen."""
        start, stop = self._span
        panels = list(self.query(Timeline))
        width = panels[0].picture_columns // 2 if panels else 60
        stride = max(1.0, (stop - start) / max(1, width))
        step = (stop - 1 if self._cursor is None else self._cursor) + by * stride
        self.post_message(self.CursorMoved(float(round(min(max(step, start), stop - 1)))))

    def action_event(self, by: int) -> None:
        """Go to the next or previous event."""
        here = self._cursor if self._cursor is not None else (-1.0 if by > 0 else float("inf"))
        ahead = [each.step for each in self._marks if (each.step - here) * by > 0]
        if ahead:
            self.post_message(self.CursorMoved(min(ahead) if by > 0 else max(ahead)))

    def action_zoom(self, factor: float) -> None:
        """Zoom around the cursor, or the right edge."""
        start, stop = self._span
        left, right = self._whole
        width = min(max(4.0, (stop - start) * factor), right - left)
        centre = self._cursor if self._cursor is not None else stop
        begin = min(max(left, centre - width / 2), right - width)
        self._window = Window() if width == right - left else Window(begin, begin + width)
        self._ask_curves()

    def action_whole(self) -> None:
        """All steps again, without the cursor."""
        self._window = Window()
        self.post_message(self.CursorMoved(None))

    def action_log(self) -> None:
        """Switch the value axis between linear and logarithmic."""
        self._log = not self._log
        self._ask_curves()

    def action_scroll_series(self, by: int) -> None:
        """Show the next or previous series."""
        self._top = max(0, min(self._top + by, len(self._names) - _PANELS))
        for panel, name in zip(self.query(Timeline), self.shown, strict=False):
            panel.series = name
        self._ask_curves()
