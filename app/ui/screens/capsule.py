"""An opened capsule: one view at a time on the keys 1 to 9, one step cursor for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, cast

import msgspec
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container
from textual.screen import Screen
from textual.widgets import Footer, Static

from ...entry import RAW, Entry
from ...looks.types import Contents
from ...text import one_line
from ..actions import bindings
from ..importing import needs_capsule
from ..link import Answer
from ..reports import case_query
from ..views.base import View
from ..views.batch import BatchView
from ..views.gate import GateView
from ..views.latency import LatencyView
from ..views.layers import LayersView
from ..views.memory import MemoryView
from ..views.notebook import NotebookView
from ..views.overview import OverviewView
from ..views.ranks import RanksView
from ..views.timelines import TimelinesView

if TYPE_CHECKING:
    from ..app import Console

Make = Callable[[str, Contents], View]

#: Views in the order of their keys: the word in the tab, the evidence it needs, how to make it.
VIEWS: tuple[tuple[type[View], Make], ...] = (
    (OverviewView, lambda path, _: OverviewView(path)),
    (TimelinesView, lambda path, has: TimelinesView(path, has.series)),
    (LayersView, lambda path, _: LayersView(path)),
    (BatchView, lambda path, _: BatchView(path)),
    (MemoryView, lambda path, _: MemoryView(path)),
    (RanksView, lambda path, _: RanksView(path)),
    (LatencyView, lambda path, _: LatencyView(path)),
    (NotebookView, lambda path, _: NotebookView(path)),
    (GateView, lambda path, _: GateView(path)),
)

#: Words for tabs where the whole ones have no room.
_SHORT = {"timelines": "curves", "notebook": "notes"}

#: Views that write something down beside the evidence.
_STAY = (NotebookView, GateView)

#: At the right of the first line, since the last may have no room for it.
_HELP = "  ? help "


class CapsuleScreen(Screen[None]):
    """Tabs, one view, footer."""

    CSS_PATH = "capsule.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("capsule")]
    scope = "capsule"

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.entry = entry
        self._contents: Contents | None = None
        self._open: View | None = None
        self._step: float | None = None  # the cursor that the views share
        self._wanted = 1  # the view asked for before it is known what the capsule holds

    @property
    def open_view(self) -> View | None:
        """The view on screen."""
        return self._open

    @property
    def number(self) -> int:
        """The key of the view on screen."""
        return self._wanted

    @property
    def scopes(self) -> tuple[str, ...]:
        """Scopes of the registry: the open view's, then ours."""
        return (*((self._open.name_,) if self._open is not None else ()), "capsule")

    @property
    def twin(self) -> str:
        """The command that prints the same."""
        return getattr(self._open, "twin", "") or f"llmconsole show {self.entry.path}"

    @property
    def signs(self) -> str:
        """What the signs of the open view mean."""
        return getattr(self._open, "signs", "")

    def compose(self) -> ComposeResult:
        """Where am I, which views, the view, the keys."""
        yield Static(id="where")
        yield Static(id="tabs")
        yield Container(id="views")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Ask what the capsule holds; the one looked at last opens as it was left."""
        state = cast("Console", self.app).state
        self._wanted = state.view if state.viewed == self.entry.path else 1
        self._head()
        self._look()
        self.set_interval(1.0, self._look)

    def on_resize(self) -> None:
        """The first lines are as wide as the screen."""
        self._head()
        if self._contents is not None:
            self._tabs(self._wanted)

    def _look(self) -> None:
        """Ask whether the capsule has grown."""
        known = self._contents.version if self._contents is not None else ""
        cast("Console", self.app).link.ask(self, "contents", {"path": self.entry.path, "known": known})

    @on(Answer)
    async def _answered(self, answer: Answer) -> None:
        if answer.problem:
            self._head(answer.problem)
        elif answer.method == "contents" and answer.result is not None:
            first = self._contents is None
            self._contents = msgspec.convert(answer.result, Contents)
            if first:
                await self.action_view(self._wanted)
            elif self._open is not None:
                self._open.reload()
                cast("Console", self.app).reports.refresh(
                    self.entry.path, self._contents.changed, self._contents.status
                )

    @on(View.CursorMoved)
    def _cursor(self, message: View.CursorMoved) -> None:
        self._step = message.step
        if self._open is not None:
            self._open.follow(message.step)

    def _head(self, problem: str = "") -> None:
        words = Text(f" {one_line(self.entry.title or self.entry.name)}", style="bold")
        words.append(f"  {one_line(self.entry.message)}", "not bold")
        if problem:
            words.append(f"  {one_line(problem)}", "bold yellow")
        room = self.app.size.width - len(_HELP)
        words.truncate(room, overflow="ellipsis", pad=True)
        words.append(_HELP, "not bold dim")
        self.query_one("#where", Static).update(words)

    def _tabs(self, number: int) -> None:
        named = [view for view, _ in VIEWS]
        there = [each for each in named if self._has(each)]
        # Where not all names have room, those of views without evidence go, then blanks, then all but the open one.
        for keep, margin in ((named, " "), (there, " "), (named, ""), (there, ""), ([], "")):
            line = Text(margin)
            for index, view in enumerate(named, start=1):
                name = view.name_ if margin else _SHORT.get(view.name_, view.name_)
                words = f" {index} {name}{margin}" if view in keep or index == number else f" {index}{margin}"
                line.append(words, "reverse" if index == number else "" if self._has(view) else "dim")
            if line.cell_len <= self.app.size.width:
                break
        self.query_one("#tabs", Static).update(line)

    def _has(self, view: type[View]) -> bool:
        if self._contents is None or (self.entry.status == RAW and view in _STAY):
            return False
        if view.needs == "scalars":
            return bool(self._contents.series)
        return not view.needs or any(self._contents.has.get(each, False) for each in view.needs.split("|"))

    async def action_view(self, number: int) -> None:
        """Open the view on this key; one that was not captured says what to capture."""
        if not 1 <= number <= len(VIEWS):
            return
        self._wanted = number
        state = cast("Console", self.app).state
        state.viewed, state.view = self.entry.path, number
        if self._contents is None:
            return
        kind, make = VIEWS[number - 1]
        area = self.query_one("#views", Container)
        await area.remove_children()
        self._tabs(number)
        if self._has(kind):
            self._open = make(self.entry.path, self._contents)
            self._open.step = self._step
            await area.mount(self._open)
            self._open.focus()
            self._open.reload()
        else:
            self._open = None
            stays = kind in _STAY
            words = needs_capsule(f"The {kind.name_}", self.entry) if stays else kind.missing(self._contents)
            await area.mount(Static(words, classes="teach", markup=False))

    @property
    def case_query(self) -> str:
        """What the case log is opened with: the rule of the finding that the view shows, else of the first."""
        query = getattr(self._open, "case_query", "")
        kept = cast("Console", self.app).reports.of(self.entry.path)
        return query or case_query(kept.report if kept is not None else None)

    def action_neighbour(self, by: int) -> None:
        """Open the next or previous capsule of the list on the same view."""
        console = cast("Console", self.app)
        found = console.home.neighbour(self.entry.path, by)
        if found is None:
            self.app.notify(f"this is the {'last' if by > 0 else 'first'} capsule of the list", timeout=3)
            return
        console.state.viewed, console.state.view = found.path, self._wanted
        self.app.switch_screen(CapsuleScreen(found))

    def action_resolve(self) -> None:
        """Make a case of this incident."""
        cast("Console", self.app).resolve(self.entry)

    def action_import(self) -> None:
        """Make a capsule of the raw file."""
        cast("Console", self.app).make_capsule(self.entry)

    def action_export(self) -> None:
        """Write the report to a file."""
        cast("Console", self.app).export(self.entry.path)

    def action_close(self) -> None:
        """Back to the list."""
        self.app.pop_screen()
