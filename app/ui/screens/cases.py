"""Cases: a search box, what it finds while one types, and the chosen case beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Input, Static

from ...casebook.show import case_block
from ...looks.types import CaseCard, CaseHistory, CaseLine, CaseList
from ...text import one_line
from ..actions import bindings
from ..link import Answer
from ..widgets.line import Line
from ..widgets.rows import Row, Rows

if TYPE_CHECKING:
    from ..app import Console

_PLACEHOLDER = "words, or class:kernel  rule:numerics/fp16-overflow  gate:passed"


class CasesScreen(Screen[None]):
    """The case log, from wherever one was.

    Args:
        start: directory from which the user's case log is found.
        query: what to search for at first; it is selected, so that typing replaces it.
    """

    CSS_PATH = "cases.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("cases")]
    scopes = ("cases",)
    signs = "● gated   ○ not gated: no record yet that the fix holds   · seed: ships with llmconsole   ! misled by"

    def __init__(self, start: Path, query: str = "") -> None:
        super().__init__()
        self.start, self.query_text = start, query
        self._list: CaseList | None = None
        self._card: CaseCard | None = None
        self._history: CaseHistory | None = None
        self._opened = False  # occurrences and commits are shown
        self._problem = ""

    @property
    def twin(self) -> str:
        """The command that prints the same."""
        return f"llmconsole cases search {self.query_text}" if self.query_text else "llmconsole cases"

    def compose(self) -> ComposeResult:
        """Where am I, the box, what it found, the card, the keys."""
        yield Static(id="where")
        yield Line(self.query_text, placeholder=_PLACEHOLDER, id="query", compact=True)
        with Horizontal(id="body"):
            yield Rows[CaseLine](empty=" reading the case log …", id="found")
            with VerticalScroll(id="card"):
                yield Static(id="fields", markup=False)
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Search at once; an empty box finds every case."""
        box = self.query_one("#query", Input)
        box.cursor_blink = False
        box.focus()
        self._head()
        self._ask()

    def on_resize(self, event: events.Resize) -> None:
        """A wide terminal gives titles more room."""
        self.set_class(event.size.width >= 110, "wide")
        self._fill()

    # -- data

    def _ask(self) -> None:
        self._link.ask(self, "case_list", {"query": self.query_text, "start": str(self.start)})

    @on(Input.Changed, "#query")
    def _typed(self, message: Input.Changed) -> None:
        self.query_text = message.value
        self._ask()

    @on(Answer)
    def _answered(self, answer: Answer) -> None:
        self._problem = answer.problem
        if answer.problem:
            self._head()
        elif answer.method == "case_list":
            # An answer to what was typed before is not shown: the next one is on its way.
            if answer.params["query"] == self.query_text:
                self._list = msgspec.convert(answer.result, CaseList)
                self._head()
                self._fill()
        elif answer.method == "case_card":
            self._card = msgspec.convert(answer.result, CaseCard | None)
            self._draw()
        elif answer.method == "case_history":
            self._history = msgspec.convert(answer.result, CaseHistory)
            self._draw()

    def _head(self) -> None:
        words = Text(" Cases", "bold")
        if self._list is not None:
            words.append(f"  {one_line(self._list.file)}", "not bold")
            words.append(f"  {self._list.found:,} of {self._list.total:,}", "not bold")
        if problem := self._problem or (self._list.problem if self._list else ""):
            words.append(f"  {one_line(problem)}", "bold yellow")
        self.query_one("#where", Static).update(words)

    # -- list and card

    @property
    def _link(self):
        return cast("Console", self.app).link

    @property
    def _rows(self) -> Rows[CaseLine]:
        return cast("Rows[CaseLine]", self.query_one("#found", Rows))

    def _fill(self) -> None:
        if self._list is None:
            return
        rows = self._rows
        rows.empty = " No case holds all of these.\n Fewer words find more;\n an empty box shows all."
        rows.set_rows([Row(f"{each.id}\t{each.seed}", _line(each), each) for each in self._list.rows])
        rows.border_title = "Found" if self._list.found <= len(self._list.rows) else f"The {len(self._list.rows)} best"
        if rows.selected is None:
            self._card = None
            self._draw()

    @on(Rows.Moved, "#found")
    def _moved(self, message: Rows.Moved) -> None:
        line = cast("CaseLine | None", message.row.item if message.row is not None else None)
        self._opened, self._history = False, None
        self.query_one("#card").scroll_home(animate=False)
        if line is not None:
            self._link.ask(self, "case_card", {"id": line.id, "start": str(self.start), "seed": line.seed})

    def _draw(self) -> None:
        box, card = self.query_one("#card"), self._card
        box.border_title = one_line(card.id).replace("[", r"\[") if card is not None else ""
        box.border_subtitle = "" if card is None else "enter the card" if self._opened else "enter occurrences, commits"
        if card is None:
            self.query_one("#fields", Static).update("")
            return
        parts: list[RenderableType] = []
        if self._opened:
            parts += _history(self._history)
        parts.append(case_block(card.id, card.title, card.fields, seed=card.seed, first=True))
        self.query_one("#fields", Static).update(Group(*parts))

    # -- actions

    def action_open(self) -> None:
        """Show occurrences, gate and commits above the card, or take them away again."""
        if self._card is None:
            return
        self._opened = not self._opened
        if self._opened and self._history is None:
            self._link.ask(self, "case_history", {"id": self._card.id, "start": str(self.start)})
        self.query_one("#card").scroll_home(animate=False)
        self._draw()

    @on(Input.Submitted, "#query")
    @on(Rows.Chosen, "#found")
    def _chosen(self) -> None:
        self.action_open()

    def action_search(self) -> None:
        """Back to the search box, its words selected."""
        box = self.query_one("#query", Input)
        box.focus()
        box.select_all()

    def action_move(self, by: int) -> None:
        """Move in the list while the cursor stays in the search box."""
        self._rows.action_move(by)

    def action_page(self, by: int) -> None:
        """Scroll the card."""
        card = self.query_one("#card", VerticalScroll)
        card.scroll_relative(y=by * max(1, card.size.height - 2), animate=False)

    def action_back(self) -> None:
        """From the occurrences to the card, from there to where one came from."""
        if self._opened:
            self.action_open()
        else:
            self.app.pop_screen()


def _line(case: CaseLine) -> Text:
    text = Text(no_wrap=True)
    sign, style = ("·", "dim") if case.seed else ("●", "green") if case.gated else ("○", "yellow")
    if case.alike:
        sign, style = "~", "dim"
    text.append(f"{sign} ", style)
    text.append(one_line(case.title))
    return text


def _history(history: CaseHistory | None) -> list[RenderableType]:
    if history is None:
        return [Text(" asking git …\n", "dim")]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for number, each in enumerate(history.occurrences or ("none noted yet",)):
        table.add_row(Text(" Occurred" if not number else "", "bold"), Text(one_line(each)))
    table.add_row(Text(" Gate", "bold"), Text(one_line(history.gate) or "none yet"))
    for number, each in enumerate(history.commits):
        row = Text(f"{one_line(each.id)[:12]} ", "cyan")
        row.append(f"{one_line(each.date)} ", "dim")
        row.append(one_line(each.subject))
        table.add_row(Text(" Commits" if not number else "", "bold"), row)
    if history.note:
        table.add_row(Text(" Commits", "bold"), Text(one_line(history.note), "dim"))
    return [table, Text()]
