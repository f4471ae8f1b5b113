"""Copies text out of the console: to the terminal's clipboard by OSC 52, and to a file where that does not reach."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console as Printer
from rich.console import RenderableType

from .. import paths

if TYPE_CHECKING:
    from textual.app import App

#: Characters in a line of copied text.
WIDTH = 100


def as_text(parts: Iterable[RenderableType], width: int = WIDTH) -> str:
    """What is on screen as plain lines, without colour and without blanks at their ends."""
    out = io.StringIO()
    printer = Printer(file=out, width=width, color_system=None, markup=False, emoji=False, highlight=False)
    for part in parts:
        printer.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def copy(app: App[Any], text: str) -> None:
    """Copy a text and say where it went. A disk that cannot be written to leaves the clipboard."""
    app.copy_to_clipboard(text)
    try:
        where = f"clipboard and {_keep(text)}"
    except OSError as error:
        where = f"clipboard only ({error.strerror or error})"
    app.notify(f"copied to {where}", timeout=4, markup=False)


def _keep(text: str) -> Path:
    folder = paths.state_directory()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "copied.txt"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as stream:
        stream.write(text)
    return path
