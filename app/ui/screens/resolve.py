"""Resolving an incident: a form that knows what report, case log and repository say, then what would be committed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import msgspec
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import Screen
from textual.widgets import Button, Footer, Input, Static

from ...casebook.cards import CLASSES
from ...entry import Entry
from ...looks.types import CaseCard, ResolveDraft, ResolvePlan
from ...text import one_line
from ..actions import bindings
from ..link import Answer
from ..widgets.form import Field, Form
from .asking import AskScreen
from .review import ReviewScreen

if TYPE_CHECKING:
    from ..app import Console

#: Field, label and hint; all but the last are what the command takes as options.
_FIELDS = (
    ("case", "case id", "lower-case words joined by dashes"),
    ("title", "title", "the case in one line"),
    ("case_class", "class", ""),
    ("root_cause", "root cause", "one sentence"),
    ("trigger", "trigger", "what set it off"),
    ("fix_commit", "fix commit", "the commit that fixes it"),
    ("regression_test", "regression test", "tests/test_x.py::test_y, committed with the fix or since"),
    ("prevention", "prevention", "what keeps it from coming back"),
    ("symptom", "symptom", "as first seen, with numbers"),
    ("keywords", "keywords", "words to find it by"),
    ("repository", "repository", "where fix and test are"),
)

#: Field of a card → field of the form that may stay empty where the card has it.
_ON_CARD = {
    "class": "case_class",
    "root cause": "root_cause",
    "trigger": "trigger",
    "prevention": "prevention",
    "regression test": "regression_test",
}


class ResolveScreen(Screen[None]):
    """The form. Nothing is written here; ``f2`` shows what would be.

    Args:
        entry: the capsule.
        start: directory in the repository of fix and test, until the user says otherwise.
    """

    CSS_PATH = "resolve.tcss"
    # The keys that change the field come before the fields themselves, or keys typed ahead would miss the new one.
    BINDINGS: ClassVar[list[BindingType]] = [
        replace(each, priority=each.action.startswith(("field", "next"))) for each in bindings("resolve")
    ]
    scopes = ("resolve",)
    signs = "✗ what is missing or wrong, with words below the field"

    def __init__(self, entry: Entry, start: Path) -> None:
        super().__init__()
        self.entry, self.start = entry, start
        self._given: dict[str, str] = {}  # what the form was filled with
        self._asked = False

    @property
    def twin(self) -> str:
        """The command that does the same."""
        return f"llmconsole incident resolve {self.entry.path} --case … --title … (--help lists the fields)"

    @property
    def case_query(self) -> str:
        """What the case log is opened with from here."""
        return self._form["case"].value

    @property
    def unsaved(self) -> str:
        """Why one should not just leave, or nothing."""
        changed = [name for name, text in self._form.values.items() if text != self._given.get(name, "")]
        return "what you typed into the form would be lost" if changed else ""

    def compose(self) -> ComposeResult:
        """Where am I, a note, the fields, the button, the keys."""
        yield Static(id="where")
        yield Static(" reading capsule, case log and repository …", id="note", markup=False)
        with Vertical(id="scroll"):
            yield Form(
                [Field(name, label, hint, CLASSES if name == "case_class" else ()) for name, label, hint in _FIELDS]
            )
            yield Button("Review file, diff and message", id="review", compact=True, variant="primary")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Ask what is known already."""
        words = Text(" Resolve  ", "bold")
        words.append(one_line(self.entry.title or self.entry.name), "not bold")
        self.query_one("#where", Static).update(words)
        self._given = {"repository": str(self.start)}
        self._form.fill(self._given)
        self._form["case"].box.focus()
        kept = self._main.reports.of(self.entry.path)
        report = msgspec.to_builtins(kept.report) if kept is not None and kept.report is not None else None
        params = {"path": self.entry.path, "repository": str(self.start), "report": report}
        self._main.link.ask(self, "resolve_draft", params, channel="verdict")

    @property
    def _main(self) -> Console:
        return cast("Console", self.app)

    @property
    def _form(self) -> Form:
        return self.query_one(Form)

    # -- answers

    @on(Answer)
    def _answered(self, answer: Answer) -> None:
        if answer.method == "resolve_plan":
            self._asked = False
        if answer.problem:
            self._say(answer.problem, bad=True)
        elif answer.method == "resolve_draft":
            self._drafted(msgspec.convert(answer.result, ResolveDraft))
        elif answer.method == "case_card":
            if answer.params["id"] == self._form["case"].value:
                self._known(msgspec.convert(answer.result, CaseCard | None))
        elif answer.method == "resolve_plan":
            self._planned(msgspec.convert(answer.result, ResolvePlan), answer.params["statement"])

    def _drafted(self, draft: ResolveDraft) -> None:
        """Fill what is known; what was typed meanwhile stays."""
        values = {**draft.values, "repository": draft.repository}
        untouched = {name for name, text in self._form.values.items() if text == self._given.get(name, "")}
        values = {name: text for name, text in values.items() if name in untouched}
        self._given |= values
        self._form.fill(values)
        self._form["fix_commit"].suggest(draft.head)
        words = "Filled from report, case log and HEAD; change what is wrong. ↑ ↓ move, f2 reviews."
        self._say(one_line(draft.note, 300) or words)

    def _known(self, card: CaseCard | None) -> None:
        """A case that the user's log has keeps what its card says."""
        own = card is not None and not card.seed
        on_card = {_ON_CARD.get(name.casefold(), ""): text for name, text in (card.fields if card and own else ())}
        if card is not None and own:
            on_card["title"] = card.title
        for name, _, hint in _FIELDS:
            text = one_line(on_card.get(name, ""), 120)
            self._form[name].suggest(f"on the card: {text}" if text else hint)
        if own:
            self._say("The log has this case: it gains an occurrence, and what its card has may stay empty.")

    def _planned(self, plan: ResolvePlan, statement: dict[str, str]) -> None:
        self._form.complain(plan.problems)
        count = len(plan.problems)
        if count:
            words = plan.problems.get("", "")
            inside = count - bool(words)
            marked = f"{inside} field{'' if inside == 1 else 's'} marked ✗ below" if inside else ""
            self._say("Not ready: " + "; ".join(each for each in (one_line(words, 600), marked) if each), bad=True)
            return
        self._say("Shown; nothing was written.")
        repository = self._form["repository"].value
        self.app.push_screen(ReviewScreen(self.entry.path, repository, statement, plan), self._reviewed)

    def _reviewed(self, committed: bool | None) -> None:
        if committed:
            self.dismiss()

    def _say(self, words: str, *, bad: bool = False) -> None:
        note = self.query_one("#note", Static)
        note.set_class(bad, "bad")
        note.update(one_line(words, 800))

    # -- actions

    @on(Input.Changed)
    def _typed(self, message: Input.Changed) -> None:
        form = self._form
        if message.input is form["case"].box and message.value:
            params = {"id": message.value, "start": form["repository"].value or str(self.start)}
            self._main.link.ask(self, "case_card", params)

    def action_field(self, by: int) -> None:
        """Move between fields; below the last one is the button."""
        if not self._form.move(by):
            self.set_focus(self.query_one("#review"))

    def action_next(self) -> None:
        """The next field; on the button what the button says."""
        if self.focused is self.query_one("#review"):
            self.action_review()
        else:
            self.action_field(1)

    @on(Button.Pressed, "#review")
    def _pressed(self) -> None:
        self.action_review()

    def action_review(self) -> None:
        """Have the worker plan the commit, once all that was typed has arrived in its field."""
        if not self._asked:
            self._asked = True
            self.call_after_refresh(self._ask_plan)

    def _ask_plan(self) -> None:
        statement = self._form.values
        repository = statement.pop("repository") or str(self.start)
        self._say("Working out file, diff and message …")
        params = {"path": self.entry.path, "repository": repository, "statement": statement}
        self._main.link.ask(self, "resolve_plan", params, channel="verdict")

    def action_back(self) -> None:
        """Leave the form; asks first where something typed would be lost."""
        if not self.unsaved:
            self.dismiss()
            return
        question = AskScreen(f"Leave? {self.unsaved.capitalize()}.", [("y", "leave, and lose it")], "stay in the form")
        self.app.push_screen(question, self._left)

    def _left(self, key: str | None) -> None:
        if key == "y":
            self.dismiss()
