"""Every check of llmconsole; with an id, its documentation."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Literal

import msgspec

from ..output import CommandError, console, narrate, print_json
from ..text import visible
from ..worker import Worker, WorkerError

if TYPE_CHECKING:
    from rich.console import RenderableType


class RuleRow(msgspec.Struct, kw_only=True):
    """One rule: its declaration, and its documentation where one rule was asked for."""

    id: str
    stage: str
    kind: str
    severity: str
    title: str
    needs: tuple[str, ...]
    explained_by: tuple[str, ...]
    cases: tuple[str, ...]
    documentation: str


class Rules(msgspec.Struct, kw_only=True):
    """``llmconsole.rules/1``."""

    format: Literal["llmconsole.rules/1"] = "llmconsole.rules/1"
    rules: tuple[RuleRow, ...]
    warnings: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("id", nargs="?", metavar="ID", help="the rule whose documentation to print")
    parser.add_argument("--json", action="store_true", help="print as JSON (llmconsole.rules/1)")


def run(args: argparse.Namespace) -> int:
    """List the rules, or document one."""
    with Worker() as worker:
        try:
            known = msgspec.convert(worker.call("rules"), Rules)
        except WorkerError as error:
            raise CommandError(error) from error
    for warning in known.warnings:
        narrate(warning)
    if args.id is not None:
        known.rules = tuple(rule for rule in known.rules if rule.id == args.id) or _unknown(args.id, known)
    if args.json:
        print_json(known)
    elif args.id is not None:
        screen = console(min(console().width, 110))
        for line in documentation(known.rules[0]):
            screen.print(line)
    else:
        _list(known.rules)
    return 0


def _unknown(id: str, known: Rules) -> tuple[RuleRow, ...]:
    import difflib

    near = difflib.get_close_matches(id, [rule.id for rule in known.rules], n=1)
    advice = f"did you mean {near[0]}?" if near else "llmconsole rules lists them"
    raise CommandError(f"no rule is called {id}; {advice}")


def _list(rules: tuple[RuleRow, ...]) -> None:
    from rich.table import Table
    from rich.text import Text

    screen = console()
    stage = ""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bright_black")
    table.add_column(ratio=1)
    for rule in rules:
        if rule.stage != stage:
            table.add_row(Text(f" {rule.stage}", "bold"))
            stage = rule.stage
        weight = rule.kind if rule.kind == "hygiene" else rule.severity
        table.add_row(Text(f"   {visible(rule.id)}"), Text(weight), Text(visible(rule.title)))
    screen.print(table)
    screen.print(Text("\n llmconsole rules ID documents one of them", "bright_black"))


def documentation(rule: RuleRow) -> list[RenderableType]:
    """The documentation as lines to print, headings in bold; below it what the rule declares."""
    from rich.padding import Padding
    from rich.text import Text

    head = Text(f" {visible(rule.id)}", "bold")
    head.append(f"   {rule.stage} · {rule.kind} · {rule.severity}", "not bold bright_black")
    lines: list[RenderableType] = [head]
    for line in _paragraphs(visible(rule.documentation, keep="\n")):
        if _is_heading(line):
            lines += [Text(), Text(f" {line.rstrip(':')}", "bold")]
        else:
            lines.append(Padding(Text(line), (0, 0, 0, 3)))
    lines.append(Text())
    for name, values in (("Needs", rule.needs), ("Explained by", rule.explained_by), ("Cases", rule.cases)):
        if values:
            lines.append(Text(f" {name}: ", "bold") + Text(visible(", ".join(values)), "not bold"))
    return lines


def _paragraphs(text: str) -> list[str]:
    """Headings, and paragraphs made one line each; lists and tables keep their lines."""
    found: list[str] = []
    flowing = False  # whether the next line continues the last paragraph
    for raw in text.split("\n"):
        line = raw.strip()
        if not line:
            flowing = False
        elif _is_heading(line) or line.startswith(("-", "*", "|")):
            found.append(line)
            flowing = not _is_heading(line)
        elif flowing:
            found[-1] += f" {line}"
        else:
            found.append(line)
            flowing = True
    return found


def _is_heading(line: str) -> bool:
    from ...analyzers.registry import HEADINGS

    return line.strip().rstrip(":") in HEADINGS
