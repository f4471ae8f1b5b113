"""A form of one-line fields, moved through with the arrow keys; what is wrong with a field stands below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Key
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Static

from .line import Line


class Choice(Widget, can_focus=True):
    """One of a few words: left and right go through them, a letter jumps to the next that begins with it."""

    DEFAULT_CSS = """
    Choice { height: 1; width: 1fr; }
    Choice:focus { background: $primary 30%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right,space", "turn(1)", show=False),
        Binding("left", "turn(-1)", show=False),
    ]

    value: reactive[str] = reactive("")

    def __init__(self, options: Sequence[str], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.options = ("", *options)

    def render_line(self, y: int) -> Strip:
        """The word between arrows, and its place among the others."""
        place = self.options.index(self.value) if self.value in self.options else 0
        count = f"   {place} of {len(self.options) - 1}" if place else ""
        words = f"◂ {self.value or 'choose: left, right, or a letter'} ▸{count}"
        return Strip([Segment(words, self.rich_style)]).adjust_cell_length(self.size.width, self.rich_style)

    def action_turn(self, by: int) -> None:
        """Go round the words."""
        place = self.options.index(self.value) if self.value in self.options else 0
        self.value = self.options[(place + by) % len(self.options)]

    def on_key(self, event: Key) -> None:
        """A letter jumps."""
        if event.character and event.character.isalpha():
            event.stop()
            place = self.options.index(self.value) if self.value in self.options else 0
            order = [*self.options[place + 1 :], *self.options[: place + 1]]
            self.value = next((each for each in order if each.startswith(event.character)), self.value)


class Field(Vertical):
    """A label, the input beside it, and below it what is wrong.

    Args:
        name: of the field, by which the form knows it.
        label: what the user reads.
        hint: shown while it is empty.
        options: words to choose from; a text field where there are none.
    """

    DEFAULT_CSS = """
    Field { height: auto; }
    Field Horizontal { height: 1; }
    Field .label { width: 20; padding: 0 1; }
    Field Line { width: 1fr; height: 1; border: none; padding: 0 1; background: $boost; }
    Field Line:focus { background: $primary 30%; border: none; }
    Field .wrong { display: none; height: auto; padding: 0 1 0 20; color: $error; }
    Field.bad .wrong { display: block; }
    Field.bad .label { color: $error; text-style: bold; }
    """

    def __init__(self, name: str, label: str, hint: str = "", options: Sequence[str] = ()) -> None:
        super().__init__(id=f"field-{name}")
        self.field, self._label, self.hint, self._options = name, label, hint, options

    def compose(self) -> ComposeResult:
        """Label, input, note."""
        with Horizontal():
            yield Static(self._label, classes="label", markup=False)
            if self._options:
                yield Choice(self._options)
            else:
                box = Line(placeholder=self.hint, compact=True, select_on_focus=False)
                box.cursor_blink = False
                yield box
        yield Static(classes="wrong", markup=False)

    @property
    def box(self) -> Line | Choice:
        """The widget that holds the value."""
        return self.query_one(Choice) if self._options else self.query_one(Line)

    @property
    def value(self) -> str:
        """What stands in the field."""
        return self.box.value

    @value.setter
    def value(self, text: str) -> None:
        self.box.value = text
        self._show_beginning()

    def on_descendant_focus(self) -> None:
        """One goes on writing at the end."""
        if isinstance(self.box, Line):
            self.box.cursor_position = len(self.box.value)

    def on_descendant_blur(self) -> None:
        """A field that is left shows how its text begins."""
        self._show_beginning()

    def _show_beginning(self) -> None:
        if isinstance(self.box, Line) and not self.box.has_focus:
            self.box.cursor_position = 0

    def suggest(self, hint: str) -> None:
        """Show another hint while the field is empty."""
        if isinstance(self.box, Line):
            self.box.placeholder = hint or self.hint

    @on(Line.Changed)
    def _changed(self) -> None:
        if self.has_class("bad"):
            self.complain("")

    def complain(self, words: str) -> None:
        """Say what is wrong with the field, until it is changed."""
        self.set_class(bool(words), "bad")
        self.query_one(".label", Static).update(f"{'✗ ' if words else ''}{self._label}")
        self.query_one(".wrong", Static).update(words)


class Form(Vertical):
    """Fields below one another."""

    DEFAULT_CSS = """
    Form { height: auto; }
    """

    def __init__(self, fields: Sequence[Field], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._fields = tuple(fields)

    def compose(self) -> ComposeResult:
        """All fields."""
        yield from self._fields

    def __getitem__(self, name: str) -> Field:
        return next(each for each in self._fields if each.field == name)

    @property
    def values(self) -> dict[str, str]:
        """Field → what stands in it."""
        return {each.field: each.value for each in self._fields}

    def fill(self, values: dict[str, str]) -> None:
        """Put values into fields; others stay as they are."""
        for name, text in values.items():
            self[name].value = text

    def complain(self, problems: dict[str, str]) -> None:
        """Say what is wrong in place, and go to the first field that is."""
        for each in self._fields:
            each.complain(problems.get(each.field, ""))
        first = next((each for each in self._fields if each.field in problems), None)
        if first is not None:
            first.box.focus()

    def move(self, by: int) -> bool:
        """Go to the next or previous field at once, so that keys typed ahead arrive there; False past the last one."""
        here = self.screen.focused  # a widget itself learns only later that it has the focus
        place = next((index for index, each in enumerate(self._fields) if each.box is here), len(self._fields))
        if place + by >= len(self._fields):
            return False
        field = self._fields[max(0, place + by)]
        self.screen.set_focus(field.box)
        field.on_descendant_focus()
        return True
