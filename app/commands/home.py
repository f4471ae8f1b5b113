"""The capsules of a directory: what state each is in, what triggered it, and what to type next."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from .. import paths
from ..analysis import capsules_in, is_capsule
from ..output import UNUSABLE, CommandError, console, print_json
from ..text import one_line
from ..worker import Worker, WorkerError

if TYPE_CHECKING:
    from rich.table import Table


class CapsuleRow(msgspec.Struct, kw_only=True):
    """One capsule; ``problem`` says why it cannot be read, else it is empty."""

    id: str = ""
    title: str = ""
    path: str
    status: str = ""
    trigger: str = ""
    message: str = ""
    step: int | None = None
    changed: float = 0.0
    problem: str = ""


class Capsules(msgspec.Struct, kw_only=True):
    """``llmconsole.capsules/1``: the capsules of a directory; failing ones first, then live ones, then by time."""

    format: Literal["llmconsole.capsules/1"] = "llmconsole.capsules/1"
    directory: str
    capsules: tuple[CapsuleRow, ...]


#: Sign and style of a state: a trigger fired, it died, it is being written, its writer went silent, it ended well.
_STATES = {
    "problem": ("?", "yellow"),
    "triggered": ("✗", "bold red"),
    "crashed": ("✗", "red"),
    "stale": ("?", "yellow"),
    "recording": ("◐", "cyan"),
    "sealed": ("✓", "green"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("directory", nargs="?", metavar="DIR", help="default: LLMCONSOLE_DIR, else this directory")
    parser.add_argument("--json", action="store_true", help="print as JSON (llmconsole.capsules/1)")


def run(args: argparse.Namespace) -> int:
    """List the capsules."""
    directory = paths.capsule_directory(args.directory)
    try:
        found = [directory] if is_capsule(directory) else capsules_in(directory)
    except OSError as error:
        raise CommandError(f"{directory}: {error.strerror}; give a directory that holds capsules") from error
    rows: list[CapsuleRow] = []
    with Worker() as worker:
        for path in found:
            try:
                rows.append(msgspec.convert(worker.call("peek", {"path": str(path)}), CapsuleRow))
            except WorkerError as error:
                rows.append(CapsuleRow(path=str(path), problem=one_line(error)))
    order = list(_STATES)
    rows.sort(key=lambda row: (order.index(_state(row)), -row.changed))
    listing = Capsules(directory=str(directory), capsules=tuple(rows))
    if args.json:
        print_json(listing)
    else:
        _print(listing)
    return UNUSABLE if any(row.problem for row in rows) else 0


def _print(listing: Capsules) -> None:
    from rich.text import Text

    screen = console()
    count = len(listing.capsules)
    live = sum(row.status == "recording" for row in listing.capsules)
    head = Text(f" {one_line(listing.directory)}", "bold")
    head.append(f"  {count} capsule{'' if count == 1 else 's'}" + (f", {live} live" if live else ""), "not bold")
    screen.print(head)
    if not count:
        for line in (
            " Nothing recorded here yet. A capsule is what the recorder writes around a training loop:",
            "   from llmconsole.capsules import Recorder",
            '   rec = Recorder("runs", model=model, optimizer=optimizer)',
            " Or see a run break and be explained:  llmconsole demo",
        ):
            screen.print(Text(line, "bright_black"))
        return
    screen.print()
    screen.print(_table(listing))
    worst = listing.capsules[0]
    screen.print()
    screen.print(Text(" next  ", "bold") + Text(f"llmconsole analyze {one_line(worst.path)}"), soft_wrap=True)


def _table(listing: Capsules) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    table.add_column(" ")
    table.add_column("capsule", overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    table.add_column("what happened", ratio=1, overflow="fold")
    for row in listing.capsules:
        sign, style = _STATES[_state(row)]
        happened = row.problem or ": ".join(part for part in (row.trigger, row.message) if part)
        cells: list[Any] = [
            Text(f" {sign}", style),
            Text(one_line(row.title or row.path)),
            Text(one_line(row.status) or "unreadable"),
            Text(f"{row.step:,}" if row.step is not None else "–"),
            Text(_age(time.time() - row.changed) if row.changed else "–"),
            Text(one_line(happened, 160)),
        ]
        table.add_row(*cells)
    return table


def _state(row: CapsuleRow) -> str:
    if row.problem or row.status not in _STATES:
        return "problem"
    return "triggered" if row.trigger and row.status != "recording" else row.status


def _age(seconds: float) -> str:
    """An age in one unit: ``now``, ``12 min``, ``3 h``, ``9 d``."""
    if seconds < 60:
        return "now"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return "now"
