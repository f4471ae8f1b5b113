"""Small questions over a screen: one line, one key for each answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import Static


class AskScreen(ModalScreen[str]):
    """Dismissed with the key that was pressed; an empty string means that nothing is to happen.

    Args:
        question: one line.
        answers: key (one character) and what it does; ``esc`` always means nothing.
    """

    DEFAULT_CSS = """
    AskScreen { align: center middle; }
    AskScreen Static {
        width: auto; max-width: 90%; height: auto; padding: 1 2; border: round $primary; background: $surface;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "nothing", "nothing")]

    def __init__(self, question: str, answers: Sequence[tuple[str, str]], otherwise: str = "nothing happens") -> None:
        super().__init__()
        self._question, self._answers, self._otherwise = question, answers, otherwise

    def compose(self) -> ComposeResult:
        """Question and answers in a box."""
        text = Text(f"{self._question}\n\n", "bold")
        for key, words in (*self._answers, ("esc", self._otherwise)):
            text.append(f"{key:>4}", "bold")
            text.append(f"  {words}\n", "not bold")
        text.right_crop(1)
        yield Static(text)

    def on_key(self, event: events.Key) -> None:
        """One key answers; no other key goes through to what lies below."""
        if event.character in [key for key, _ in self._answers]:
            event.stop()
            self.dismiss(event.character)
        elif event.key != "escape":
            event.stop()

    def action_nothing(self) -> None:
        """Leave everything as it is."""
        self.dismiss("")
