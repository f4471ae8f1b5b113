"""What would be committed, exactly: file, diff, message; and one key that commits it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, cast

import msgspec
from rich.console import Group
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static

from ...looks.types import ResolveDone, ResolvePlan
from ...text import one_line, visible
from ..actions import bindings
from ..link import Answer

if TYPE_CHECKING:
    from ..app import Console

_STYLES = {"+": "green", "-": "red", "@": "cyan"}


class ReviewScreen(Screen[bool]):
    """Dismissed with True when the commit was made.

    Args:
        path: the capsule.
        repository: directory in the repository of fix and test.
        statement: what the form said.
        plan: what the worker made of it.
    """

    CSS_PATH = "resolve.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("review")]
    scopes = ("review",)

    def __init__(self, path: str, repository: str, statement: dict[str, str], plan: ResolvePlan) -> None:
        super().__init__()
        self._path, self._repository, self._statement, self._plan = path, repository, statement, plan
        self._committing = False
        self._commit = ""

    @property
    def case_query(self) -> str:
        """What the case log is opened with from here."""
        return self._statement["case"]

    @property
    def unsaved(self) -> str:
        """Why one should not leave now, or nothing."""
        return "the commit is being made" if self._committing else ""

    def compose(self) -> ComposeResult:
        """Where am I, what would be committed, the question, the keys."""
        yield Static(id="where")
        with VerticalScroll(id="shown"):
            yield Static(Group(*_shown(self._plan)), id="diff", markup=False)
        yield Static(id="ask", markup=False)
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """The arrow keys scroll the diff."""
        words = Text(" Review  ", "bold")
        words.append(f"case {one_line(self._statement['case'])}", "not bold")
        words.append("  new" if self._plan.new_case else "  one more occurrence", "not bold")
        self.query_one("#where", Static).update(words)
        self.query_one("#shown").focus()
        self._ask()

    def _ask(self, problem: str = "") -> None:
        text = Text()
        if problem:
            text.append(f"✗ {one_line(problem, 800)}\n", "bold red")
        text.append("Commit this, and only this?  ")
        text.append("y", "bold")
        text.append(" commits   ")
        text.append("esc", "bold")
        text.append(" goes back to the form")
        self.query_one("#ask", Static).update(text)

    @on(Answer)
    def _answered(self, answer: Answer) -> None:
        self._committing = False
        if answer.problem:
            self._ask(answer.problem)
            return
        done = msgspec.convert(answer.result, ResolveDone)
        if not done.commit:
            self._ask(done.problem)
            return
        self._commit = done.commit
        self.refresh_bindings()
        text = Text(f"✓ Committed {one_line(done.commit)}\n", "bold green")
        if done.warning:
            text.append(f"but {one_line(done.warning, 600)}\n", "bold yellow")
        text.append(f"Case {one_line(done.case)} is in the log: c finds it. Not gated yet.  esc back", "not bold")
        self.query_one("#ask", Static).update(text)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """What was committed is not committed again, and the footer does not offer it."""
        return not (action == "commit" and self._commit)

    def action_commit(self) -> None:
        """Commit what is shown, once."""
        if self._committing or self._commit:
            return
        self._committing = True
        self.query_one("#ask", Static).update("Committing … hooks of the repository may take their time")
        params = {
            "path": self._path,
            "repository": self._repository,
            "statement": self._statement,
            "shown": msgspec.to_builtins(self._plan),
        }
        cast("Console", self.app).link.ask(self, "resolve_commit", params, channel="verdict")

    def action_back(self) -> None:
        """Back to the form, or after the commit to where the form was opened."""
        if self._committing:
            self.notify("the commit is being made; one moment", markup=False)
        else:
            self.dismiss(bool(self._commit))


def _shown(plan: ResolvePlan) -> Iterator[Text]:
    yield Text(f"file     {visible(plan.file)}", "bold")
    if plan.uncommitted:
        yield Text("the file has changes that were not committed; they become part of this commit", "bold yellow")
    for line in visible(plan.diff, keep="\n\t").rstrip("\n").split("\n"):
        yield Text(line, "bold" if line.startswith(("+++", "---")) else _STYLES.get(line[:1], ""))
    yield Text()
    yield Text("message", "bold")
    for line in visible(plan.message, keep="\n").rstrip("\n").split("\n"):
        yield Text(f"    {line}" if line else "")
