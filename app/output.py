"""Standard output carries data, standard error narrates; both only ever get text that is safe to show."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from . import terminal
from .text import one_line, safe_json

if TYPE_CHECKING:
    from rich.console import Console

OK, FOUND, UNUSABLE = 0, 1, 2
_NARROWEST = 20


class CommandError(Exception):
    """A command cannot do what it was asked: one line that says what, where, and what to do. Exit status 2."""


def narrate(message: object) -> None:
    """Say one line on standard error."""
    print(f"llmconsole: {one_line(message, 2000)}", file=sys.stderr)


def print_json(document: Any) -> None:
    """Print a typed document as indented JSON: non-finite numbers as strings, nothing a terminal would act on."""
    import msgspec

    from ..capsules.jsonio import encode

    indented = msgspec.json.format(encode(document), indent=2)
    ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
    print(safe_json(indented.decode("utf-8", "surrogatepass"), ascii_only=ascii_only))


def console(width: int | None = None) -> Console:
    """The rich console for standard output: no markup, no emoji codes, no highlighting of look-alikes."""
    from rich.console import Console

    class Writer(Console):
        def on_broken_pipe(self) -> None:
            """Let the command line end as it does for other output; rich would leave with 1, which means findings."""
            raise BrokenPipeError

    plain = False if terminal.cannot_position() else None
    screen = Writer(markup=False, emoji=False, highlight=False, soft_wrap=False, width=width, force_terminal=plain)
    screen.width = max(screen.width, _NARROWEST)  # COLUMNS=0 would print nothing at all
    return screen
