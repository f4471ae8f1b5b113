"""``?``: what the keys do on this screen, and which command prints the same. Made from the registry of actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.keys import format_key
from textual.screen import ModalScreen
from textual.widgets import Static

from ..actions import ACTIONS


class HelpScreen(ModalScreen[None]):
    """A table of keys by scope, the innermost first.

    Args:
        scopes: scopes in which actions work right now.
        twin: the command that prints what is on screen.
        keymap: keys that the user changed, by action id.
        signs: words on the signs of the screen.
    """

    CSS_PATH = "help.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q", "dismiss", "close")]

    def __init__(self, scopes: Sequence[str], twin: str, keymap: dict[str, str], signs: str = "") -> None:
        super().__init__()
        self._scopes, self._twin, self._keymap, self._signs = scopes, twin, keymap, signs

    def compose(self) -> ComposeResult:
        """The table in a scrolling box."""
        with VerticalScroll(id="help"):
            yield Static(self._table())

    def on_mount(self) -> None:
        """Name the box."""
        box = self.query_one("#help")
        box.border_title, box.border_subtitle = "Keys", "esc closes"
        box.focus()

    def _table(self) -> Table:
        table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), expand=True)
        table.add_column(no_wrap=True, style="bold")
        table.add_column(ratio=1)
        for scope in self._scopes:
            rows = [each for each in ACTIONS if each.scope == scope]
            if rows:
                table.add_row("", Text("everywhere" if scope == "app" else scope, "dim underline"))
            for each in rows:
                table.add_row(Text(key_names(self._keymap.get(each.id, each.keys))), Text(each.description))
        if self._signs:
            table.add_row("", "")
            table.add_row("signs", Text(self._signs))
        if self._twin:
            table.add_row("", "")
            table.add_row("text", Text(f"the same as text: {self._twin}"))
        table.add_row(
            "keys", Text("keys.toml in the configuration directory changes them (llmconsole doctor says where)")
        )
        return table


def key_names(keys: str) -> str:
    """Keys as printed on the key caps: ``question_mark`` is ``?``."""
    return " ".join(format_key(key.strip()) for key in keys.split(","))
