"""What a capsule holds: manifest, inventory of the evidence, damage, and the eight things that a replay needs.

CAPSULE is a capsule, a raw evidence file, or a directory that holds one job of either.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ..output import CommandError, console, print_json
from ..text import one_line
from ..worker import Worker, WorkerError
from .evidence import look_at, one_job

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

#: Rows of a table printed for people; a configuration may hold a million.
_MOST_ROWS = 1000


class ReplayRow(msgspec.Struct, kw_only=True):
    """One of the eight things that a replay needs."""

    name: str
    present: bool
    missing: tuple[str, ...] = ()


class DamageRow(msgspec.Struct, kw_only=True):
    """One thing that is broken, and what of it could still be read."""

    what: str
    where: str
    lost: Any = None
    kept: Any = None


class Show(msgspec.Struct, kw_only=True):
    """``llmconsole.show/1``."""

    format: Literal["llmconsole.show/1"] = "llmconsole.show/1"
    id: str
    title: str
    path: str
    status: str
    ranks: tuple[int, ...]
    replayable: bool
    replay: tuple[ReplayRow, ...]
    damage: tuple[DamageRow, ...]
    inventory: dict[str, Any]
    manifest: dict[str, Any]


#: Parts of the inventory that have a field of their own in the document.
_SAID_ALREADY = frozenset({"id", "title", "path", "status", "ranks", "replay", "damage"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("capsule", metavar="CAPSULE", help="a capsule, a raw file, or a directory of one job")
    sheet = parser.add_mutually_exclusive_group()
    sheet.add_argument(
        "--layers",
        nargs="?",
        const="",
        type=_step("--layers"),
        metavar="STEP",
        help="statistics of the tensors of a step (the first bad one)",
    )
    sheet.add_argument(
        "--batch",
        nargs="?",
        const="",
        type=_step("--batch"),
        metavar="STEP",
        help="tokens, labels and losses of the batch nearest to a step",
    )
    sheet.add_argument("--memory", action="store_true", help="what each phase of a step holds on the device")
    sheet.add_argument(
        "--ranks", action="store_true", help="which rank did which collective, around the first difference"
    )
    sheet.add_argument("--latency", action="store_true", help="where the time of requests goes, and which are slow")
    parser.add_argument(
        "--kind",
        choices=("forward", "backward", "parameters", "updates"),
        default="forward",
        help="which tensors --layers prints (default: forward)",
    )
    parser.add_argument("--json", action="store_true", help="print as JSON (llmconsole.show/1)")


def run(args: argparse.Namespace) -> int:
    """Print what the capsule holds, or a part of it."""
    with Worker() as worker:
        try:
            evidence = one_job(worker, args.capsule)
            if args.layers is not None or args.batch is not None:
                from .sheets import print_batch, print_layers

                return (print_layers if args.batch is None else print_batch)(args, look_at(worker, evidence))
            if args.memory or args.ranks or args.latency:
                from .machine import print_latency, print_memory, print_ranks

                part = print_memory if args.memory else print_ranks if args.ranks else print_latency
                return part(args, look_at(worker, evidence))
            facts = worker.call("show", {"path": os.fspath(evidence.path), "files": list(evidence.files)})
        except WorkerError as error:
            raise CommandError(error) from error
    facts["replayable"] = all(item["present"] for item in facts["replay"])
    facts["inventory"] = {name: value for name, value in facts["inventory"].items() if name not in _SAID_ALREADY}
    shown = msgspec.convert(facts, Show)
    if args.json:
        print_json(shown)
        return 0
    screen = console()
    for part in _parts(shown):
        screen.print(part)
    return 0


def _step(option: str) -> Callable[[str], int | str]:
    """A reader of an option's step, which is easily given the path where the capsule stands last."""

    def step(given: str) -> int | str:
        try:
            return int(given) if given else ""
        except ValueError:
            usage = f"llmconsole show CAPSULE {option} [STEP]"
            raise argparse.ArgumentTypeError(
                f"{one_line(given, 200)!r} is no step (a whole number); write {usage}"
            ) from None

    return step


def _parts(shown: Show) -> list[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    head = Text(" ")
    head.append(one_line(shown.title or shown.id), "bold")
    head.append(f"   {one_line(shown.status)} · {one_line(shown.id)} · {_ranks(shown.ranks)}", "bright_black")
    parts: list[RenderableType] = [head, Text()]
    ready = sum(item.present for item in shown.replay)
    parts.append(Text(f" Replay: {ready} of {len(shown.replay)} present", "bold"))
    ticks = Table.grid(padding=(0, 2, 0, 0))
    for item in shown.replay:
        lacks = f"lacks {one_line(', '.join(item.missing))}".replace("|", " or ") if item.missing else ""
        sign = Text("   ✓" if item.present else "   ✗", "green" if item.present else "red")
        ticks.add_row(sign, Text(one_line(item.name)), Text(lacks, "bright_black"))
    parts.append(ticks)
    for row in shown.damage:
        line = Text(" ")
        line.append("✗ damaged", "bold red")
        line.append(f"  {one_line(row.where)}: {one_line(row.what)}")
        line.append(f"   lost {one_line(row.lost)}, kept {one_line(row.kept)}", "bright_black")
        parts.append(line)
    parts += [Text(), Text(" Evidence", "bold"), _tree(shown.inventory)]
    parts += [Text(), Text(" Manifest", "bold"), _tree(shown.manifest)]
    return parts


def _tree(mapping: dict[str, Any]) -> Table:
    """A nested mapping as two columns, dotted names left; long lists by their length."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(overflow="fold", max_width=44)
    table.add_column(overflow="fold", ratio=1)
    rows = _flat(mapping)
    for name, value in rows[:_MOST_ROWS]:
        table.add_row(Text(f"   {one_line(name, 80)}"), Text(one_line(value, 240)))
    if len(rows) > _MOST_ROWS:
        table.add_row(Text("   …"), Text(f"{len(rows) - _MOST_ROWS:,} more: llmconsole show --json", "bright_black"))
    return table


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [row for key, item in value.items() for row in _flat(item, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(value, list):
        if all(not isinstance(item, dict | list) for item in value):
            return [(prefix, ", ".join(map(str, value)))] if value else []
        if len(value) > 40:
            return [(prefix, f"{len(value):,} entries")]
        rows: list[tuple[str, str]] = []
        for item in value:
            name = str(item.get("name", "")) if isinstance(item, dict) else ""
            rest = {key: each for key, each in item.items() if key != "name"} if isinstance(item, dict) else item
            summary = ", ".join(f"{key} {each}" for key, each in _flat(rest))
            rows.append((f"{prefix}.{name}" if name else prefix, summary))
        return rows
    return [] if value is None else [(prefix, str(value))]


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
