"""A few fields over a screen: enter goes on, and on the last one takes what was typed; escape drops it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

from ..widgets.form import Field, Form


class FillScreen(ModalScreen["dict[str, str] | None"]):
    """Dismissed with what stands in the fields, or with None.

    Args:
        title: one line.
        fields: name, label, hint and options of each.
        required: names of fields that must not be empty.
    """

    DEFAULT_CSS = """
    FillScreen { align: center middle; }
    FillScreen > Vertical {
        width: 90%; max-width: 100; height: auto; padding: 0 1; border: round $primary; background: $surface;
    }
    FillScreen .title { text-style: bold; padding: 0 1; }
    FillScreen .keys { color: $text-muted; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "drop", "drop", priority=True),
        Binding("enter", "next", "next", priority=True),
        Binding("down", "field(1)", "down", priority=True),
        Binding("up", "field(-1)", "up", priority=True),
    ]

    def __init__(
        self, title: str, fields: Sequence[tuple[str, str, str, Sequence[str]]], required: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self._title, self._fields, self._required = title, fields, required

    def compose(self) -> ComposeResult:
        """Title, fields, keys."""
        with Vertical():
            yield Static(self._title, classes="title", markup=False)
            yield Form([Field(name, label, hint, options) for name, label, hint, options in self._fields])
            yield Static("enter next, on the last field: write it down   esc drop it", classes="keys", markup=False)

    def on_mount(self) -> None:
        """The first field."""
        self.query_one(Form)[self._fields[0][0]].box.focus()

    def action_field(self, by: int) -> None:
        """Another field."""
        self.query_one(Form).move(by)

    def action_next(self) -> None:
        """The next field; past the last one take them all."""
        form = self.query_one(Form)
        if not form.move(1):
            # Behind the keys that the last field has not seen yet, as they were typed before this one.
            form[self._fields[-1][0]].box.call_later(self._take)

    def _take(self) -> None:
        form = self.query_one(Form)
        values = form.values
        missing = {name: "missing" for name in self._required if not values[name].strip()}
        form.complain(missing)
        if not missing:
            self.dismiss(values)

    def action_drop(self) -> None:
        """Nothing."""
        self.dismiss(None)
