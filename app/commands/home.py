"""The console on a directory of capsules; without a terminal, the list of them and what to type next."""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from .. import paths, terminal
from ..analysis import is_capsule
from ..entry import RAW, Entry
from ..listing import Listing
from ..output import UNUSABLE, CommandError, console, narrate, print_json
from ..text import one_line
from ..worker import Worker, WorkerError

if TYPE_CHECKING:
    from rich.table import Table


class Capsules(msgspec.Struct, kw_only=True):
    """``llmconsole.capsules/1``: the capsules of a directory; failing ones first, then live ones, then by time."""

    format: Literal["llmconsole.capsules/1"] = "llmconsole.capsules/1"
    directory: str
    capsules: tuple[Entry, ...]


#: Sign and style of a state: a trigger fired, it died, its writer went silent, raw evidence, being written, ended well.
_STATES = {
    "problem": ("?", "yellow"),
    "triggered": ("✗", "bold red"),
    "crashed": ("✗", "red"),
    "stale": ("?", "yellow"),
    RAW: ("·", "bright_black"),
    "recording": ("◐", "cyan"),
    "sealed": ("✓", "green"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("directory", nargs="?", metavar="DIR", help="default: LLMCONSOLE_DIR, else this directory")
    parser.add_argument("--list", action="store_true", help="print the list, also on a terminal")
    parser.add_argument("--json", action="store_true", help="print as JSON (llmconsole.capsules/1)")


def run(args: argparse.Namespace) -> int:
    """Open the console; without a terminal, or where asked for text, print the list."""
    directory = paths.capsule_directory(args.directory)
    # A capsule instead of a directory of them: the same, with that one chosen.
    only = directory if is_capsule(directory) else None
    directory = directory.resolve().parent if only else directory
    obstacle = "" if args.json or args.list else terminal.obstacle()
    if not (args.json or args.list or obstacle):
        gc.disable()  # until the first paint: a sixth of the way there would be spent looking for garbage
        from ..ui.app import run as run_console

        return run_console(directory, only)
    if obstacle and terminal.is_one():
        narrate(f"{obstacle}; here is the list instead of the console")
    return _list(directory, only, args.json)


def _list(directory: Path, only: Path | None, as_json: bool) -> int:
    with Worker() as worker:
        try:
            found = msgspec.convert(worker.call("listing", {"directory": str(directory)}), Listing)
        except WorkerError as error:
            raise CommandError(error) from error
    if found.problem and not found.entries:
        raise CommandError(found.problem)
    order = list(_STATES)
    chosen = [each for each in found.entries if only is None or each.name == only.resolve().name]
    rows = sorted(chosen, key=lambda row: (order.index(_state(row)), -row.changed))
    listing = Capsules(directory=str(directory), capsules=tuple(rows))
    if as_json:
        print_json(listing)
    else:
        _print(listing, found.below)
    if found.problem:
        narrate(found.problem)
    return UNUSABLE if any(row.problem for row in rows) else 0


def _print(listing: Capsules, below: Sequence[str]) -> None:
    from rich.text import Text

    screen = console()
    count = len(listing.capsules)
    live = sum(row.status == "recording" for row in listing.capsules)
    head = Text(f" {one_line(listing.directory)}", "bold")
    head.append(f"  {count} capsule{'' if count == 1 else 's'}" + (f", {live} live" if live else ""), "not bold")
    screen.print(head)
    if not count and below:
        screen.print(Text(" No capsule or log lies directly here. There are some in:", "bright_black"))
        for name in below:
            screen.print(Text(f"   {one_line(os.path.join(listing.directory, name))}"), soft_wrap=True)
        return
    if not count:
        for line in (
            " Nothing here yet. A capsule is what the recorder writes around a training loop:",
            "   from llmconsole.capsules import Recorder",
            '   rec = Recorder("runs", model=model, optimizer=optimizer)',
            " Or copy a log here (text, JSON, CSV, TensorBoard, wandb): it is known by its content.",
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
        words = (row.message,) if row.status == RAW else (row.trigger, row.message)
        happened = row.problem or ": ".join(part for part in words if part)
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


def _state(row: Entry) -> str:
    if row.problem or row.status not in _STATES:
        return "problem"
    return "triggered" if row.trigger and row.status not in ("recording", RAW) else row.status


def _age(seconds: float) -> str:
    """An age in one unit: ``now``, ``12 min``, ``3 h``, ``9 d``."""
    if seconds < 60:
        return "now"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return "now"
