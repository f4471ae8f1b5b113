"""Timelines: up to six series over the steps, with events, zoom, log axis and the shared cursor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, cast

import msgspec
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType

from ...looks.types import SeriesColumns, StepMark
from ...text import one_line
from ..actions import bindings
from ..link import Answer
from ..screens.choosing import ChooseScreen
from ..widgets.timeline import Curve, EventMark, Timeline, Window
from .base import View

if TYPE_CHECKING:
    from ..app import Console

#: Series in the order in which an engineer wants them; others follow by name.
_FIRST = ("loss", "grad_norm", "learning_rate", "update_norm", "memory_allocated", "loss_scale", "step_time")
_PANELS = 6


class TimelinesView(View):
    """Six panels that share one window of steps and one cursor; any of them holds several series, and another run."""

    name_ = "timelines"
    needs = "scalars"
    teach = 'attach the recorder: rec = Recorder("runs", model=model, optimizer=optimizer)'
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("timelines")]

    def __init__(self, path: str, series: tuple[str, ...]) -> None:
        super().__init__(path)
        known = [name for name in _FIRST if name in series]
        self._names = [*known, *(name for name in sorted(series) if name not in known)]
        self._added: dict[str, list[str]] = {}  # by the series of a panel: what was added to it
        self._beside: tuple[str, str] | None = None  # path and name of the run laid over
        self._top = 0
        self._chosen = 0  # the panel that keys act on, counted from the top of the screen
        self._full = False
        self._window = Window()
        self._log = False
        self._span = (0.0, 1.0)  # steps on screen
        self._whole = (0.0, 1.0)  # steps recorded
        self._marks: list[EventMark] = []

    @property
    def shown(self) -> list[str]:
        """Names of the series on screen, one a panel."""
        return self._names[self._top : self._top + _PANELS]

    def compose(self) -> ComposeResult:
        """One panel a series."""
        for index in range(min(_PANELS, len(self._names))):
            yield Timeline(self._names[index], problem="reading …", id=f"panel-{index}")

    def on_mount(self) -> None:
        """The lowest panel has the axis of steps."""
        self._arrange()

    def reload(self) -> None:
        """Marks and curves."""
        self.ask("marks")
        self._ask_curves()

    def _arrange(self) -> None:
        """Which panels are on screen, and which one the keys act on."""
        panels = list(self.query(Timeline))
        for index, panel in enumerate(panels):
            panel.display = index == self._chosen or not self._full
            panel.steps = self._full or index == len(panels) - 1
            panel.marked = index == self._chosen and len(panels) > 1
            panel.refresh()

    def _ask_curves(self) -> None:
        panels = [each for each in self.query(Timeline) if each.display]
        if panels:
            self.ask(
                "curves",
                names=list(dict.fromkeys(each for name in self.shown for each in (name, *self._added.get(name, ())))),
                columns=max(8, panels[0].picture_columns),
                start=self._window.start,
                stop=self._window.stop,
                log=self._log,
                cursor=self.step,
                beside=self._beside[0] if self._beside else "",
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
        by_name: dict[str, list[SeriesColumns]] = {}
        for each in msgspec.convert(answer.result, list[SeriesColumns]):
            by_name.setdefault(each.name, []).append(each)
        for panel, name in zip(self.query(Timeline), self.shown, strict=False):
            panel.log_axis = self._log
            drawn = [each for one in (name, *self._added.get(name, ())) for each in by_name.get(one, ())]
            if not drawn:
                panel.show((), problem="not recorded")
                continue
            self._span = (drawn[0].columns.start, drawn[0].columns.stop)
            if self._window == Window():
                self._whole = self._span
            panel.set_reactive(Timeline.cursor, self._cursor)
            panel.show([self._curve(each) for each in drawn], self._marks)

    def failed(self, problem: str) -> None:
        """A run laid over that cannot be read any more is taken away; this one stays."""
        if self._beside is None:
            super().failed(problem)
            return
        self._beside = None
        self.app.notify(one_line(problem), severity="warning", markup=False)
        self._ask_curves()

    def _curve(self, found: SeriesColumns) -> Curve:
        value = found.last if found.at is None or self._cursor is None else found.at
        source = one_line(self._beside[1], 24) if found.beside and self._beside else ""
        return Curve(one_line(found.name), found.unit, found.columns, value, source, found.unit or found.name)

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

    def action_choose(self, by: int) -> None:
        """The next panel is the one that keys act on."""
        self._chosen = (self._chosen + by) % max(1, min(_PANELS, len(self._names)))
        self._arrange()

    def action_full(self) -> None:
        """One panel in full, or all of them."""
        self._full = not self._full
        self._arrange()

    def action_add(self) -> None:
        """Draw another series in the chosen panel, or take it out of there."""
        panel = self.shown[self._chosen] if self.shown else ""
        inside = self._added.setdefault(panel, [])
        choices = [(each, f"{each}  (take out)" if each in inside else each) for each in self._names if each != panel]

        def chosen(name: str | None) -> None:
            if name:
                (inside.remove if name in inside else inside.append)(name)
                self._ask_curves()

        self._choose(f"Which series to draw with {one_line(panel)}?", choices, "there is no other series", chosen)

    def action_overlay(self) -> None:
        """Lay another run over this one, or take it away."""
        if self._beside is not None:
            self._beside = None
            self._ask_curves()
            return
        others = cast("Console", self.app).home.others(self.path)
        names = {path: name for path, name, _ in others}

        def chosen(path: str | None) -> None:
            if path:
                self._beside = (path, names[path])
                self._ask_curves()

        choices = [(path, f"{name}  {words}".strip()) for path, name, words in others]
        self._choose("Which run to lay over this one?", choices, "there is no other run in this directory", chosen)

    def _choose(
        self, question: str, choices: list[tuple[str, str]], none: str, chosen: Callable[[str | None], None]
    ) -> None:
        if choices:
            self.app.push_screen(ChooseScreen(question, choices), chosen)
        else:
            self.app.notify(none, timeout=3)
