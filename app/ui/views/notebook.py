"""Notebook: hypotheses, what tested them, what was seen, and the clock."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar, cast

import msgspec
from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Static

from ...casebook import notebook as books
from ...casebook.notebook import Hypothesis, Notebook
from ...text import one_line
from ..actions import bindings
from ..link import Answer
from ..screens.filling import FillScreen
from .base import View

_SIGNS = {"supported": ("✓", "bold green"), "refuted": ("✗", "red"), "undecided": ("?", "yellow")}
#: Questions that rules answer, which takes seconds.
_RULES = ("notebook_open", "notebook_test")
_VERDICTS = ("supported", "refuted", "undecided")


class NotebookView(View):
    """The clock above, hypotheses below; what was written down stays in the capsule's directory."""

    name_ = "notebook"
    channel = "table"  # a line is written down at once, whatever verdicts are being made meanwhile
    signs = "✓ supported  ✗ refuted  ? undecided"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("notebook")]
    DEFAULT_CSS = """
    NotebookView Static { text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._book: Notebook | None = None
        self._at = 0
        self._top = 0
        self._doing = ""  # what the rules are asked, until they answer

    @property
    def twin(self) -> str:
        """The command that prints the same."""
        return f"llmconsole incident show {self.path}"

    def compose(self) -> ComposeResult:
        """One page."""
        yield Static(" reading …", id="page", markup=False)

    def on_mount(self) -> None:
        """The clock goes by minutes."""
        self.set_interval(60.0, self._draw)

    def reload(self) -> None:
        """Ask for what stands there; others may have written too."""
        self.ask("notebook", channel="look")

    def answered(self, answer: Answer) -> None:
        """Draw it; what was written by us is at the cursor."""
        if answer.method in _RULES:
            self._doing = ""
        before = len(self._book.hypotheses) if self._book is not None else 0
        self._book = msgspec.convert(answer.result, Notebook)
        added = len(self._book.hypotheses) - before
        if answer.method == "notebook_write" and added:
            self._at = len(self._book.hypotheses) - 1
        self._draw()

    def failed(self, problem: str) -> None:
        """Say it and keep the page."""
        self._doing = ""
        self.notify(one_line(problem), severity="warning", markup=False)
        if self._book is None:
            lines = wrapped(problem, self.size.width - 2)
            self.query_one("#page", Static).update("\n".join(f" {each}" for each in lines))
        self._draw()

    def on_resize(self, event: events.Resize) -> None:
        """Lines are as long as the screen is wide."""
        self._draw()

    def _draw(self) -> None:
        if self._book is None or not self.size.width:
            return
        now = datetime.now(UTC)
        self._at = max(0, min(self._at, len(self._book.hypotheses) - 1))
        head = clock(self._book, now, self.size.width, self._doing)
        lines, first, last = page(self._book, self._at, self.size.width)
        room = max(1, self.size.height - len(head))
        if last >= self._top + room:
            self._top = last - room + 1
        self._top = max(0, min(self._top, first))
        shown = [*head, *lines[self._top : self._top + room]]
        self.query_one("#page", Static).update(Text("\n").join(shown))

    @property
    def _chosen(self) -> Hypothesis | None:
        known = self._book.hypotheses if self._book is not None else []
        return known[self._at] if known else None

    # -- actions

    def action_choose(self, by: int) -> None:
        """Another hypothesis."""
        self._at += by
        self._draw()

    def action_start(self) -> None:
        """Open the incident: the clock starts, and the rules suggest hypotheses."""
        if self._doing or (self._book is not None and self._book.opened):
            self.notify(self._doing or "the clock was started already", timeout=3, markup=False)
            return
        from ..app import Console

        kept = cast(Console, self.app).reports.of(self.path)
        report = msgspec.to_builtins(kept.report) if kept is not None and kept.report is not None else None
        self._doing = "starting …"
        self._draw()
        self.ask("notebook_open", channel="table" if report is not None else "verdict", report=report)

    def action_hypothesis(self) -> None:
        """Write a hypothesis down."""
        fields = (("claim", "claim", "what would explain it", ()), ("test", "test", "what would decide it", ()))
        self._fill("A hypothesis", fields, ("claim",), "hypothesis")

    def action_note(self) -> None:
        """Write a line down."""
        self._fill("A note", (("text", "note", "", ()),), ("text",), "note")

    def action_experiment(self) -> None:
        """Write down what a test of the chosen hypothesis showed."""
        if self._chosen is None:
            self.notify("there is no hypothesis yet: h writes one down, s has the rules suggest some", timeout=4)
            return
        fields = (
            ("changed", "changed", "the one thing that was changed", ()),
            ("observed", "observed", "what was seen", ()),
            ("verdict", "it is", "", _VERDICTS),
        )
        title = f"What a test of hypothesis {self._chosen.id} showed"
        self._fill(title, fields, ("observed", "verdict"), "experiment", self._chosen.id)

    def action_test(self) -> None:
        """Run the rule of the chosen hypothesis; without one, write down what a test showed."""
        if self._chosen is not None and self._chosen.rule:
            if self._doing:
                self.notify(self._doing, timeout=3, markup=False)
                return
            self._doing = f"running {one_line(self._chosen.rule)} …"
            self._draw()
            self.ask("notebook_test", channel="verdict", number=self._chosen.id)
        else:
            self.action_experiment()

    def _fill(self, title: str, fields: Any, required: tuple[str, ...], what: str, number: int = 0) -> None:
        def filled(words: dict[str, str] | None) -> None:
            if words is not None:
                self.ask("notebook_write", what=what, words=words, number=number, key=f"{datetime.now(UTC)}")

        self.app.push_screen(FillScreen(title, fields, required), filled)


def clock(book: Notebook, now: datetime, width: int, doing: str = "") -> list[Text]:
    """Status and time, what goes on, and after thirty minutes the way back."""
    line = Text(" ")
    seconds = book.seconds(now)
    if seconds is None:
        line.append("not opened", "bold")
        line.append("   s starts the clock and has the rules suggest hypotheses", "dim")
    else:
        word = "located" if book.located else "open"
        if book.status != word:
            line.append(f"{book.status}   ", "bold")
        line.append(word, "bold")
        went = "in" if book.located else "for"
        line.append(f" {went} {books.duration(seconds)}", "bold yellow" if book.late(now) else "")
        line.append(f"   target {books.duration(books.TARGET)}", "dim")
    if book.case:
        line.append(f"   case {one_line(book.case)}", "cyan")
    found = [line]
    if doing:
        found.append(Text(f" {doing}", "bold cyan"))
    if book.late(now):
        found += [Text(f" {each}", "yellow") for each in wrapped(books.WAY_BACK, width - 2)]
    return [*found, Text()]


def page(book: Notebook, at: int, width: int) -> tuple[list[Text], int, int]:
    """All hypotheses and notes as lines, and the first and last line of the chosen hypothesis."""
    lines: list[Text] = []
    first = last = 0
    for index, each in enumerate(book.hypotheses):
        sign, style = _SIGNS[each.verdict]
        begin = len(lines)
        head, *more = wrapped(each.claim, width - 8)
        line = Text(f" {'▸' if index == at else ' '} ")
        line.append(f"{sign} ", style)
        line.append(f"{each.id} {head}", "bold" if index == at else "")
        lines.append(line)
        lines += [Text(f"       {words}", "bold" if index == at else "") for words in more]
        test = "; ".join(part for part in (each.test, each.rule) if part)
        if test:
            lines += _indented("test", test, width, "dim")
        for tried in each.experiments:
            changed = f"changed {tried.changed}: " if tried.changed else ""
            lines += _indented(tried.t[11:16], f"{changed}{tried.observed} → {tried.verdict}", width, "")
        if index == at:
            first, last = begin, len(lines) - 1
    if book.notes:
        lines.append(Text())
    for note in book.notes:
        lines += _indented(note.t[11:16], note.text, width, "")
    return lines, first, last


def _indented(label: str, words: str, width: int, style: str) -> list[Text]:
    head, *more = wrapped(words, width - 14)
    return [
        Text(f"       {label:<6}{head}", style),
        *(Text(f"             {each}", style) for each in more),
    ]


def wrapped(words: str, width: int) -> list[str]:
    """Text in lines of at most ``width`` cells, broken between words where that can be."""
    lines: list[str] = [""]
    for word in one_line(words, 4000).split(" "):
        while cell_len(word) > width > 4:  # Chinese has no blanks
            room = width - cell_len(lines[-1]) - bool(lines[-1])
            cut = next((n for n in range(len(word), 0, -1) if cell_len(word[:n]) <= room), 0)
            lines[-1] = f"{lines[-1]} {word[:cut]}".strip()
            word = word[cut:]
            lines.append("")
        if lines[-1] and cell_len(lines[-1]) + 1 + cell_len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
