"""A list over a screen: typing narrows it, enter takes a line, escape takes none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from ...text import one_line
from ..widgets.rows import Lazy, Row, Rows


class ChooseScreen(ModalScreen[str]):
    """Dismissed with the key of the line that was taken, or with an empty string.

    Args:
        question: one line.
        choices: key and words of each line.
    """

    DEFAULT_CSS = """
    ChooseScreen { align: center middle; }
    ChooseScreen Vertical {
        width: 60; max-width: 90%; height: 70%; padding: 0 1; border: round $primary; background: $surface;
    }
    ChooseScreen Static { height: auto; text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "nothing", "nothing"),
        Binding("down", "move(1)", "next", priority=True),
        Binding("up", "move(-1)", "previous", priority=True),
    ]

    def __init__(self, question: str, choices: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._question, self._choices = question, choices

    def compose(self) -> ComposeResult:
        """Question, what narrows, lines."""
        with Vertical():
            yield Static(self._question, markup=False)
            yield Input(placeholder="type to narrow", compact=True)
            yield Rows[str](empty=" nothing holds these words")

    def on_mount(self) -> None:
        """All lines."""
        self.query_one(Input).focus()
        self._fill("")

    def _fill(self, words: str) -> None:
        wanted = words.casefold().split()
        shown = [each for each in self._choices if all(word in each[1].casefold() for word in wanted)]
        made = Lazy([key for key, _ in shown], lambda at: Row(shown[at][0], Text(one_line(shown[at][1])), shown[at][0]))
        self.query_one(Rows).set_rows(made)

    @on(Input.Changed)
    def _narrowed(self, message: Input.Changed) -> None:
        self._fill(message.value)

    @on(Input.Submitted)
    @on(Rows.Chosen)
    def _taken(self) -> None:
        row = self.query_one(Rows).selected
        self.dismiss("" if row is None else row.key)

    def action_move(self, by: int) -> None:
        """Another line, while one types."""
        self.query_one(Rows).action_move(by)

    def action_nothing(self) -> None:
        """Take none."""
        self.dismiss("")
