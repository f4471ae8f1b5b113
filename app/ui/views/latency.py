"""Latency: which component the time goes to, and which requests are the slow ones."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Static

from ...looks.types import Latency, LatencyComponent
from ...numbers import duration
from ...text import one_line
from ..actions import bindings
from ..link import Answer
from .base import View

_MEASURES = {"ttft": "time to first token", "e2e": "whole request"}
_NAME = 14
_NUMBERS = 7 + 3 * 9


class LatencyView(View):
    """The waterfall above, the slices below."""

    name_ = "latency"
    needs = "records.requests"
    channel = "table"
    teach = (
        "No log or bench result is read for requests yet. Write them from the server with CapsuleWriter: "
        'writer.record("requests", {"id": …, "queue": seconds, "prefill": seconds, "ttft": seconds, "worker": …})'
    )
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("latency")]
    DEFAULT_CSS = """
    LatencyView Static { text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._latency: Latency | None = None
        self._measure = "ttft"
        self._top = 0

    @property
    def twin(self) -> str:
        """The command that prints the same."""
        return f"llmconsole show {self.path} --latency"

    def compose(self) -> ComposeResult:
        """One picture."""
        yield Static(" reading …", id="waterfall", markup=False)

    def reload(self) -> None:
        """Ask for the measure on screen."""
        self.ask("latency", measure=self._measure)

    def answered(self, answer: Answer) -> None:
        """Draw it."""
        self._latency = msgspec.convert(answer.result, Latency | None)
        self._draw()

    def on_resize(self, event: events.Resize) -> None:
        """Bars are as wide as the screen."""
        self._draw()

    def _draw(self) -> None:
        if self._latency is None:
            words = f" No request says its {_MEASURES[self._measure]}. t shows the other measure."
            self.query_one("#waterfall", Static).update(words)
        elif self.size.width:
            self.query_one("#waterfall", Static).update(
                waterfall(self._latency, self.size.width, self.size.height, self._top)
            )

    def action_scroll(self, by: int) -> None:
        """Through the slices."""
        if self._latency is not None:
            self._top = max(0, min(self._top + by, len(self._latency.slices) - 1))
            self._draw()

    def action_measure(self) -> None:
        """The other measure."""
        self._measure = "e2e" if self._measure == "ttft" else "ttft"
        self._top = 0
        self.reload()


def waterfall(latency: Latency, width: int, height: int, top: int = 0) -> Text:
    """Components as bars, each beginning where the medians before it end; below them the slices from ``top`` on."""
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f" {_MEASURES[latency.measure]} of {latency.requests:,} requests", "bold")
    text.append(f"  {one_line(latency.note, 300)}\n\n", "bright_black")
    text.append(f" {'component':<{_NAME}}{'n':>7}{'p50':>9}{'p95':>9}{'p99':>9}\n", "bright_black")
    bar = max(10, width - _NAME - _NUMBERS - 4)
    scale = _scale(latency)
    start = 0.0
    for each in (*latency.components, latency.total):
        whole = each is latency.total
        _component(text, each, 0.0 if whole else start, scale, bar, bold=whole)
        start += max(0.0, each.p50 or 0.0)
    text.append(f" {'':<{_NAME}}{'':{_NUMBERS}}  █ to p50  ▒ to p95  ░ to p99\n\n", "bright_black")
    used = len(latency.components) + 6
    if latency.slow is not None:
        text.append(f" Slices, by the slow requests (above p95, {duration(latency.slow)}) that they hold\n", "bold")
        head = f" {'slice':<22}{'n':>8}  {'slow':>6} {'95 % interval':>16}{'elsewhere':>10}{'of slow':>9}\n"
        text.append(head, "bright_black")
        room = max(1, height - used - 3)
        for each in latency.slices[top : top + room]:
            name = one_line(each.name, 60)
            name = name if len(name) <= 21 else f"{name[:10]}…{name[-10:]}"
            interval = f"[{each.low:.1%}, {each.high:.1%}]"
            line = f" {name:<22}{each.requests:>8,}  {each.share:>6.1%} {interval:>16}"
            line += f"{each.elsewhere:>10.1%}{each.held:>9.1%}{'  !' if each.apart else ''}"
            text.append(f"{line}\n", "bold" if each.apart else "")
        if not latency.slices:
            text.append(" no field has two values with enough requests each\n", "bright_black")
    return text


def _scale(latency: Latency) -> float:
    """Seconds at the right edge."""
    start, most = 0.0, _longest(latency.total)
    for each in latency.components:
        most = max(most, start + _longest(each))
        start += max(0.0, each.p50 or 0.0)
    return most or 1.0


def _longest(component: LatencyComponent) -> float:
    return max((each for each in (component.p50, component.p95, component.p99) if each is not None), default=0.0)


def _component(text: Text, component: LatencyComponent, start: float, scale: float, width: int, *, bold: bool) -> None:
    style = "bold" if bold else ""
    text.append(f" {component.name[: _NAME - 1]:<{_NAME}}{component.requests:>7,}", style)
    for value in (component.p50, component.p95, component.p99):
        text.append(f"{'–' if value is None else duration(value):>9}", style)
    edge = min(width, round(start / scale * width))
    text.append("  " + " " * edge)
    for sign, value in (("█", component.p50), ("▒", component.p95), ("░", component.p99)):
        if value is not None and value > 0:
            here = max(edge, min(width, round((start + value) / scale * width)))
            text.append(sign * (here - edge), style)
            edge = here
    text.append("\n")
