"""A list of one-line rows that stays fluent with thousands of them: only the rows on screen are rendered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, overload

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

Item = TypeVar("Item")


@dataclass(frozen=True)
class Row(Generic[Item]):
    """One line of the list: what it stands for, and its text (already safe to show)."""

    key: str
    text: Text
    item: Item


class Lazy(Sequence[Row[Item]]):
    """Rows that are made when they are drawn: thousands cost nothing until they are on screen.

    Args:
        keys: one a row.
        make: the row at an index.
    """

    def __init__(self, keys: Sequence[str], make: Callable[[int], Row[Item]]) -> None:
        self.keys, self._make = keys, make

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> Row[Item]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row[Item]]: ...
    def __getitem__(self, index: int | slice) -> Row[Item] | Sequence[Row[Item]]:
        if isinstance(index, slice):
            return [self._make(each) for each in range(*index.indices(len(self)))]
        return self._make(index)


def _place(rows: Sequence[Row[Any]], key: str) -> int | None:
    """Index of the row of this key, None where there is none."""
    keys = rows.keys if isinstance(rows, Lazy) else [row.key for row in rows]
    return keys.index(key) if key in keys else None


class Rows(ScrollView, Generic[Item], can_focus=True):
    """A cursor over rows. Setting rows keeps the cursor on the same key, so that a refresh never moves it."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"rows--cursor"}
    DEFAULT_CSS = """
    Rows { height: 1fr; overflow-x: hidden; }
    Rows > .rows--cursor { background: $panel; }
    Rows:focus > .rows--cursor {
        background: $block-cursor-background; color: $block-cursor-foreground; text-style: bold;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "edge(0)", show=False),
        Binding("end", "edge(1)", show=False),
    ]

    cursor: reactive[int] = reactive(0)

    class Moved(Message):
        """The cursor stands on another row (or none: the list is empty)."""

        def __init__(self, rows: Rows[Any], row: Row[Any] | None) -> None:
            super().__init__()
            self.rows, self.row = rows, row

        @property
        def control(self) -> Rows[Any]:
            """The list, for selectors."""
            return self.rows

    class Chosen(Message):
        """Enter was pressed, or the row under the cursor was clicked."""

        def __init__(self, rows: Rows[Any], row: Row[Any]) -> None:
            super().__init__()
            self.rows, self.row = rows, row

        @property
        def control(self) -> Rows[Any]:
            """The list, for selectors."""
            return self.rows

    def __init__(self, *, empty: str = "", id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._rows: Sequence[Row[Item]] = ()
        self._drawn: dict[int, Text] = {}
        self.empty = self._said = empty  # what an empty list says, and what was last drawn of it

    @property
    def selected(self) -> Row[Item] | None:
        """The row under the cursor."""
        return self._rows[self.cursor] if 0 <= self.cursor < len(self._rows) else None

    def __len__(self) -> int:
        return len(self._rows)

    def set_rows(self, rows: Sequence[Row[Item]]) -> None:
        """Show ``rows``; redraws only the lines that changed."""
        before, chosen = self._rows, self.selected
        self._rows = rows
        place = _place(rows, chosen.key) if chosen else None
        cursor = place if place is not None else max(0, min(self.cursor, len(rows) - 1))
        self.virtual_size = Size(max(1, self.size.width), len(rows))
        if len(before) != len(rows) or cursor != self.cursor or (not rows and self.empty != self._said):
            self._said = self.empty
            self.refresh()
        else:
            top = self.scroll_offset.y
            for y in range(top, min(len(rows), top + self.size.height)):
                # Compared with what was drawn: rows made lazily would tell today's text for both.
                if self._drawn.get(y) != rows[y].text:
                    self.refresh(Region(0, y - top, self.size.width, 1))
        moved = cursor != self.cursor
        self.set_reactive(Rows.cursor, cursor)
        if moved or (chosen.key if chosen else None) != (self.selected.key if self.selected else None):
            self.post_message(self.Moved(self, self.selected))

    def select(self, key: str) -> bool:
        """Put the cursor on the row of this key; False where there is none."""
        place = _place(self._rows, key)
        if place is not None:
            self.cursor = place
        return place is not None

    def reveal(self, index: int) -> None:
        """Put the cursor on a row with what is above and below it in view."""
        self.cursor = max(0, min(len(self._rows) - 1, index))
        self.scroll_to(y=max(0, self.cursor - self.size.height // 2), animate=False)

    def render_line(self, y: int) -> Strip:
        """One line of the list, padded to the width."""
        width, index = self.size.width, y + self.scroll_offset.y
        if not self._rows:
            words = self.empty.split("\n")
            line = words[y] if y < len(words) else ""
            return Strip([Segment(line, self.rich_style + Style(dim=True))]).adjust_cell_length(width, self.rich_style)
        if index >= len(self._rows):
            return Strip.blank(width, self.rich_style)
        style = self.rich_style
        if index == self.cursor:
            style += self.get_component_rich_style("rows--cursor", partial=not self.has_focus)
        text = self._drawn[index] = self._rows[index].text
        # On the cursor's strong ground colours and dimmed words could not be read; the signs say the same.
        plain = index == self.cursor and self.has_focus
        segments = [
            Segment(segment.text, style + segment.style if segment.style and not plain else style)
            for segment in text.render(self.app.console)
            if segment.text != "\n"
        ]
        return Strip(segments).adjust_cell_length(width, style)

    def watch_cursor(self, before: int, after: int) -> None:
        """Keep the cursor in view and redraw the two lines it touched."""
        top, height = self.scroll_offset.y, max(1, self.size.height)
        if after < top:
            self.scroll_to(y=after, animate=False)
        elif after >= top + height:
            self.scroll_to(y=after - height + 1, animate=False)
        for y in (before, after):
            self.refresh(Region(0, y - self.scroll_offset.y, self.size.width, 1))
        self.post_message(self.Moved(self, self.selected))

    def on_resize(self, event: events.Resize) -> None:
        """The list is as wide as its box."""
        self.virtual_size = Size(event.size.width, len(self._rows))

    def on_click(self, event: events.Click) -> None:
        """A click selects; a click on the selected row chooses it."""
        index = event.y + self.scroll_offset.y
        if index == self.cursor:
            self.action_choose()
        elif index < len(self._rows):
            self.cursor = index

    def action_move(self, by: int) -> None:
        """Move by rows."""
        self.cursor = max(0, min(len(self._rows) - 1, self.cursor + by))

    def action_page(self, by: int) -> None:
        """Move by pages."""
        self.action_move(by * max(1, self.size.height - 1))

    def action_edge(self, end: int) -> None:
        """Go to the first or the last row."""
        self.action_move(len(self._rows) if end else -len(self._rows))

    def action_choose(self) -> None:
        """Choose the row under the cursor."""
        if (row := self.selected) is not None:
            self.post_message(self.Chosen(self, row))
