"""The environment as a capsule would record it: versions, devices, flags; by allow-list, so no secret is in it."""

from __future__ import annotations

import argparse
from typing import Any, Literal

import msgspec

from ..output import CommandError, console, print_json
from ..text import one_line
from ..worker import Worker, WorkerError


class Environment(msgspec.Struct, kw_only=True):
    """``llmconsole.env/1``."""

    format: Literal["llmconsole.env/1"] = "llmconsole.env/1"
    environment: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--json", action="store_true", help="print as JSON (llmconsole.env/1)")


def run(args: argparse.Namespace) -> int:
    """Print the environment."""
    # A CUDA context reserves address space far beyond any sensible limit.
    with Worker(memory_gib=0) as worker:
        try:
            found = Environment(environment=worker.call("environment", timeout=120))
        except WorkerError as error:
            raise CommandError(error) from error
    if args.json:
        print_json(found)
        return 0
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for name, value in found.environment.items():
        if isinstance(value, dict):
            table.add_row(Text(f" {one_line(name)}", "bold"))
            for key, each in value.items():
                table.add_row(Text(f"   {one_line(key)}"), Text(one_line(_words(each))))
        else:
            table.add_row(Text(f" {one_line(name)}", "bold"), Text(one_line(_words(value))))
    console().print(table)
    return 0


def _words(value: Any) -> str:
    if value is None:
        return "–"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
