"""Home: which capsules there are, which one needs me, and what broke in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import msgspec
from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer, Input, Static

from ...entry import RAW, Entry
from ...listing import Listing
from ...looks.types import SeriesColumns
from ...text import one_line
from ..actions import bindings
from ..link import Answer
from ..reports import case_query
from ..widgets.rows import Lazy, Row, Rows
from ..widgets.timeline import Curve, Timeline
from ..widgets.verdict import Advice, Verdict
from .entries import by_need, empty, head, heading, line, state_of

if TYPE_CHECKING:
    from ..app import Console

#: Series of the small timelines: the scalar, its label.
_SMALL = (("loss", "loss"), ("grad_norm", "grad norm"), ("learning_rate", "lr"), ("memory_allocated", "memory"))

#: Seconds of reading after which the list shows what it has so far.
_BUDGET = 0.25

#: Capsules that get a verdict before anyone looks at them.
_AHEAD = 30


class Curves(Vertical):
    """The small timelines; another height may have room for axes, or none."""

    class Resized(Message):
        """The curves are to be asked for again."""

    def on_resize(self) -> None:
        """Tell the screen."""
        self.post_message(self.Resized())


class HomeScreen(Screen[None]):
    """The list on the left, the chosen capsule on the right."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings("home")]
    scope = "home"
    scopes = ("home",)
    signs = (
        "? undetermined  ✗ divergence  ↳ follows from one  ! unreadable  ◐ live  · not looked at yet  ✓ quiet  "
        "● resolved  – not captured"
    )

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self._listing: Listing | None = None
        self._shown: list[Entry] = []  # the rows, in their order
        self._problem = ""
        self._filter = ""
        self._paused = False
        self._restored = False
        self._shown_head = Text()
        self._on_top = ""  # the row that the cursor was put on, as nobody has chosen one
        self._expected = ("", "")  # a capsule about to be listed, and the raw file it was made of

    @property
    def twin(self) -> str:
        """The command that prints the same."""
        entry = self._selected
        return f"llmconsole analyze {entry.path}" if entry is not None else f"llmconsole {self.directory}"

    @property
    def console_app(self) -> Console:
        """The app, by its own type."""
        return cast("Console", self.app)

    def compose(self) -> ComposeResult:
        """Header, list, the chosen capsule, footer."""
        yield Static(id="where")
        with Horizontal(id="body"):
            with Vertical(id="list"):
                yield Input(placeholder="words", id="filter", compact=True)
                yield Rows[Entry](empty=" reading …", id="capsules")
            with Vertical(id="chosen"):
                with Vertical(id="verdict", classes="box"):
                    yield Verdict(id="first")
                with Curves(id="curves", classes="box"):
                    for name, label in _SMALL:
                        yield Timeline(label, steps=False, id=f"small-{name}")
                with Vertical(id="advice", classes="box"):
                    yield Advice(id="next")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Name the panels; the list arrives from the worker after the first paint."""
        self.query_one("#list").border_title = "Capsules"
        if words := self.console_app.state.filter:
            box = self.query_one("#filter", Input)
            box.value, box.display = words, True
        for name in ("#verdict", "#curves", "#advice"):  # until there is something to show
            self.query_one(name).display = False
        self.query_one("#capsules").focus()
        self._head()
        self.console_app.reports.arrived.subscribe(self, self._analysed)
        self.call_after_refresh(self._poll)
        self.set_interval(1.0, self._poll)

    def on_resize(self, event: events.Resize) -> None:
        """A wide terminal gives the list more room."""
        self.set_class(event.size.width >= 110, "wide")
        self.set_class(event.size.width >= 160, "wider")
        self._fill()
        self._head()

    # -- data

    def _poll(self) -> None:
        if not self._paused:
            known = self._listing.version if self._listing is not None else ""
            params = {"directory": str(self.directory), "known": known, "budget": _BUDGET}
            self.console_app.link.ask(self, "listing", params)

    @on(Timeline.Wanted)
    @on(Curves.Resized)
    def _resized(self) -> None:
        """Another size needs other columns."""
        if self._selected is not None:
            self._ask_curves(self._selected)

    @on(Answer)
    def _answered(self, answer: Answer) -> None:
        if answer.method == "listing":
            self._listed(answer)
        elif answer.method == "curves":
            self._drawn(answer)

    def _listed(self, answer: Answer) -> None:
        self._problem = answer.problem
        if answer.result is not None:
            before = self._selected
            self._listing = msgspec.convert(answer.result, Listing)
            self._fill()
            now = self._selected
            if before is not None and now is not None and before.path == now.path and before != now:
                self._show_report(now)  # it has grown, or was replaced
                self._ask_curves(now)
            if not self._restored:
                self._restored = True
                chosen = self.console_app.state.capsule
                if not self._rows.select(chosen) and self._shown:
                    self._on_top = self._shown[0].path
            self.console_app.link.jobs = {each.path: each.files for each in self._listing.entries if each.files}
            self._arrived()
            self._look_ahead()
            if self._listing.unread:
                self._poll()
        elif (still := self._selected) is not None and still.status == RAW:
            self.console_app.reports.refresh(still.path, still.changed, still.status)
        self._head()

    def expect(self, capsule: str, raw: str) -> None:
        """Select a capsule as soon as it is listed, and show it where the raw file it was made of is open."""
        self._expected = (capsule, raw)
        self._poll()

    def _arrived(self) -> None:
        capsule, raw = self._expected
        entry = self._entry(capsule) if capsule else None
        if entry is None:
            return
        self._expected = ("", "")
        if not self._rows.select(capsule):
            self.query_one("#filter", Input).value = ""  # hidden by it
            self._fill()
            self._rows.select(capsule)
        self.console_app.replace(raw, entry)

    def _look_ahead(self) -> None:
        """Verdicts for the newest capsules, so that the list says which one needs me; not for thousands of old ones."""
        entries = self._listing.entries if self._listing is not None else ()
        newest = sorted((each for each in entries if not each.problem), key=lambda each: -each.changed)[:_AHEAD]
        self.console_app.reports.look_ahead(each for each in newest if each.status not in ("", "recording"))

    def _analysed(self, path: str) -> None:
        self._fill()
        self._stay_on_top()
        self._look_ahead()
        if self._selected is not None and self._selected.path == path:
            self._show_report(self._selected)

    def _stay_on_top(self) -> None:
        """While the first verdicts come and nobody has chosen a row, the cursor is on the one that needs it most."""
        if self._on_top and self._shown and self._selected is not None and self._selected.path == self._on_top:
            self._on_top = self._shown[0].path
            self._rows.select(self._on_top)

    def on_key(self) -> None:
        """From the first key on the cursor stays where it is."""
        self._on_top = ""

    def _drawn(self, answer: Answer) -> None:
        if self._selected is None or answer.params["path"] != self._selected.path:
            return
        found = {each.name: each for each in msgspec.convert(answer.result or [], list[SeriesColumns])}
        self.query_one("#curves").display = bool(found)
        room = self.query_one("#curves").size.height
        self.query_one("#curves").set_class(room >= 4 * max(1, len(found)), "axes")
        lowest = next((name for name, _ in reversed(_SMALL) if name in found), "")
        for name, label in _SMALL:
            timeline = self.query_one(f"#small-{name}", Timeline)
            series = found.get(name)
            timeline.display, timeline.steps = series is not None, name == lowest
            if series is not None:
                timeline.show([Curve(label, series.unit, series.columns, series.last)])

    # -- list

    def _entry(self, path: str) -> Entry | None:
        entries = self._listing.entries if self._listing is not None else ()
        return next((each for each in entries if each.path == path), None)

    @property
    def _rows(self) -> Rows[Entry]:
        return cast("Rows[Entry]", self.query_one("#capsules", Rows))

    @property
    def _selected(self) -> Entry | None:
        row = self._rows.selected
        return row.item if row is not None else None

    def _fill(self) -> None:
        if self._listing is None:
            return
        reports = self.console_app.reports
        self._shown = shown = by_need(self._listing.entries, self._filter, reports)
        rows = self._rows
        width = max(20, rows.size.width)
        rows.empty = empty(self._listing, width)
        hidden = f" {len(shown):,} of {len(self._listing.entries):,}" if self._filter.strip() else ""
        self.query_one("#list").border_title = f"Capsules{hidden}"
        rows.set_rows(
            Lazy(
                [each.path for each in shown],
                lambda at: Row(shown[at].path, line(shown[at], state_of(shown[at], reports), width), shown[at]),
            )
        )

    def _head(self) -> None:
        words = head(self.directory, self._listing, self._problem, self._paused, self.app.size.width)
        if words != self._shown_head:  # an unchanged line would still be sent to the terminal
            self._shown_head = words
            self.query_one("#where", Static).update(words)

    # -- the chosen capsule

    @on(Rows.Moved, "#capsules")
    def _moved(self, message: Rows.Moved) -> None:
        entry = cast("Entry | None", message.row.item if message.row is not None else None)
        self.query_one("#verdict").display = entry is not None
        if entry is None or entry.problem:
            self.query_one("#curves").display = False
        if entry is None:
            self.query_one("#advice").display = False
            self.query_one(Verdict).show(None, "")
            return
        if self._restored:
            self.console_app.state.capsule = entry.path
        self._show_report(entry)
        self._ask_curves(entry)

    def _show_report(self, entry: Entry) -> None:
        box = self.query_one("#verdict")
        box.border_title = heading(entry, max(20, box.size.width - 4)).replace("[", r"\[")
        kept = self.console_app.reports.of(entry.path)
        verdict, advice = self.query_one(Verdict), self.query_one(Advice)
        if entry.problem:
            verdict.show(None, one_line(entry.problem))
            advice.show(None)
        elif kept is not None and kept.report is not None:
            verdict.show(kept.report)
            advice.show(kept.report)
        else:
            verdict.show(None, one_line(kept.problem) if kept is not None else "analysing …")
            advice.show(None)
        self.query_one("#advice").display = advice.says
        if not entry.problem:
            self.console_app.reports.refresh(entry.path, entry.changed, entry.status)

    def _ask_curves(self, entry: Entry) -> None:
        if entry.problem:
            return
        columns = max(8, self.query_one(f"#small-{_SMALL[0][0]}", Timeline).picture_columns)
        params = {"path": entry.path, "names": [name for name, _ in _SMALL], "columns": columns}
        self.console_app.link.ask(self, "curves", params)

    # -- actions

    @property
    def case_query(self) -> str:
        """What the case log is opened with from here: the rule of the chosen capsule's first divergence."""
        kept = self.console_app.reports.of(self._selected.path) if self._selected is not None else None
        return case_query(kept.report if kept is not None else None)

    def neighbour(self, path: str, by: int) -> Entry | None:
        """The readable capsule next to the one at ``path``, ``by`` 1 below or -1 above it; the cursor follows."""
        readable = [each for each in self._shown if not each.problem]
        here = next((at for at, each in enumerate(readable) if each.path == path), None)
        if here is None or not 0 <= here + by < len(readable):
            return None
        self._rows.select(readable[here + by].path)
        return readable[here + by]

    def others(self, path: str) -> list[tuple[str, str, str]]:
        """Path, name and trigger of every readable capsule but the one at ``path``, in the order of the list."""
        entries = self._listing.entries if self._listing is not None else ()
        shown = by_need((each for each in entries if not each.problem), "", self.console_app.reports)
        return [(each.path, each.title or each.name, each.trigger) for each in shown if each.path != path]

    def action_resolve(self) -> None:
        """Make a case of the capsule under the cursor."""
        if self._selected is not None and not self._selected.problem:
            self.console_app.resolve(self._selected)

    def action_import(self) -> None:
        """Make a capsule of the raw file under the cursor."""
        if self._selected is not None:
            self.console_app.make_capsule(self._selected)

    def action_export(self) -> None:
        """Write the report of the capsule under the cursor to a file."""
        if self._selected is not None and not self._selected.problem:
            self.console_app.export(self._selected.path)

    def action_open(self) -> None:
        """Open the capsule under the cursor."""
        if self._selected is not None and not self._selected.problem:
            from .capsule import CapsuleScreen  # with all its views, which home does not need for its first paint

            self.app.push_screen(CapsuleScreen(self._selected))

    @on(Rows.Chosen, "#capsules")
    def _chosen(self) -> None:
        self.action_open()

    def action_filter(self) -> None:
        """Open the filter."""
        box = self.query_one("#filter", Input)
        box.display = True
        box.focus()

    @on(Input.Changed, "#filter")
    def _filtered(self, message: Input.Changed) -> None:
        self._filter = self.console_app.state.filter = message.value
        self._fill()

    @on(Input.Submitted, "#filter")
    def _filter_done(self) -> None:
        self.query_one("#filter").display = bool(self._filter)
        self.query_one("#capsules").focus()

    def action_pause(self) -> None:
        """Hold the view; the data go on."""
        self._paused = not self._paused
        self._head()

    def key_escape(self) -> None:
        """Leave the filter."""
        box = self.query_one("#filter", Input)
        box.value = ""
        box.display = False
        self.query_one("#capsules").focus()
