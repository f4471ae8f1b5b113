"""How a case looks, in the terminal and on the screen: the same rows, made from nothing but its fields."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..text import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

_MISLED = "misled by"
_PASSED = re.compile(r"^\S+\.json\W+passed(?:-with-exceptions)?\b")


def is_gated(gate: str) -> bool:
    """Whether the field ``Gate`` of a case tells of a record that passed, as the gate writes it."""
    return _PASSED.search(gate.casefold()) is not None


def case_block(
    id: str, title: str, fields: Sequence[tuple[str, str]], *, seed: bool, first: bool = False
) -> RenderableType:
    """A case, a row a field; `Misled by` stands out, since it saves the most time.

    Args:
        id: of the case.
        title: of the case.
        fields: names and values in file order.
        seed: it ships with the product.
        first: put `Misled by` above the other fields, for a small panel.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = Text(" ")
    head.append(visible(id), "bold cyan")
    head.append(f" · {visible(title)}", "bold")
    head.append("  seed\n" if seed else "\n", "bright_black")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    ordered = sorted(fields, key=lambda each: each[0].casefold() != _MISLED) if first else fields
    for name, value in ordered:
        misled = name.casefold() == _MISLED
        cell = Text(visible(value, keep="\n"), "yellow" if misled else "")
        table.add_row(Text(f"{'!' if misled else ' '}{visible(name)}", "bold yellow" if misled else "bold"), cell)
    if not seed and not is_gated(next((value for name, value in fields if name.casefold() == "gate"), "")):
        table.add_row(Text(" Gate", "bold"), Text("○ not gated: no record yet that the fix holds", "yellow"))
    return Group(head, table, Text())
