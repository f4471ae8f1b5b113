"""Prove a fix and keep the proof: red before, green after, and five more questions, recorded in git.

`gate init CASE` writes gates/CASE.toml with what card and git know; fill in the rest, or skip an item with a reason.
`gate run CASE` runs it in temporary work trees of the broken and the fixed revision and, where it passed, commits card,
file and record together. `gate show CASE` prints the last run, `gate verify CASE` checks that the record still holds.
Exit status: 0 passed (with exceptions too), 1 not passed, 2 cannot be run.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from ..casebook.gate.gate import Gate, GateError, PlanError, ResolveError, StoreError
from ..casebook.gate.items import Result
from ..casebook.gate.plan import QUESTIONS
from ..casebook.gate.record import Facts, RecordError, junit, verify
from ..casebook.incident import IncidentError
from ..output import FOUND, OK, CommandError, console, narrate, print_json
from ..text import one_line, visible
from ..worker import Worker, WorkerError

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Sign and style of a verdict; the words repeat it.
SIGNS = {"passed": ("✓", "green"), "failed": ("✗", "bold red"), "error": ("!", "magenta"), "skipped": ("–", "yellow")}


class GateReport(msgspec.Struct, kw_only=True):
    """``llmconsole.gate/1``."""

    format: Literal["llmconsole.gate/1"] = "llmconsole.gate/1"
    action: str
    case: str
    outcome: str
    file: str
    items: tuple[Result, ...] = ()
    facts: Facts | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    actions = parser.add_subparsers(dest="action", metavar="init|run|show|verify", title="actions", required=True)
    words = {
        "init": "write gates/CASE.toml with what is known",
        "run": "run the six items; commit card, file and record where it passed",
        "show": "the last run, passed or not",
        "verify": "check that the committed record still holds",
    }
    for name, line in words.items():
        action = actions.add_parser(name, help=line, description=line, allow_abbrev=False)
        action.add_argument("case", metavar="CASE", help="id of the case")
        action.add_argument("--repo", metavar="DIR", help="the repository (default: the working directory's)")
        action.add_argument("--json", action="store_true", help="print as JSON (llmconsole.gate/1)")
        if name == "init":
            action.add_argument("--capsule", metavar="CAPSULE", help="the capsule of the incident")
        if name == "run":
            action.add_argument("--junit", metavar="FILE", help="also write the items as JUnit XML to a new file")
            action.add_argument("--verbose", action="store_true", help="also print what the commands print")


def run(args: argparse.Namespace) -> int:
    """Do one of the four."""
    try:
        gate = Gate(args.case, Path(args.repo) if args.repo else Path.cwd())
        return {"init": _init, "run": _run, "show": _show, "verify": _verify}[args.action](gate, args)
    except (GateError, PlanError, RecordError, ResolveError, StoreError, IncidentError, WorkerError) as error:
        raise CommandError(error) from error


def _init(gate: Gate, args: argparse.Namespace) -> int:
    file = gate.init(Path(args.capsule) if args.capsule else None)
    if args.json:
        print_json(GateReport(action="init", case=gate.case, outcome="", file=str(file)))
    else:
        print(f"wrote {one_line(file)}")
        narrate(f"fill it in, then: llmconsole gate run {gate.case}")
    return OK


def _run(gate: Gate, args: argparse.Namespace) -> int:
    target = _new_file(args.junit)
    begun: list[str] = []

    def progress(item: str, line: str | Result) -> None:
        if isinstance(line, Result):
            narrate(f"{item} {line.verdict}: {line.words}")
        elif not begun or begun[-1] != item:
            begun.append(item)
            narrate(f"{len(begun)} of 6: {item} ({QUESTIONS[item]})")
        elif line and args.verbose:
            narrate(f"   {line}")

    with Worker() as worker:
        facts = gate.run(worker, progress)
    if gate.warning:
        narrate(f"warning: {gate.warning}")
    _print(gate, args, facts)
    if target is not None:
        try:
            with open(target, "xb") as stream:
                stream.write(junit(facts))
        except OSError as error:
            raise CommandError(f"{target} cannot be written: {error.strerror}") from error
        narrate(f"wrote {target}")
    return FOUND if facts.outcome == "failed" else OK


def _show(gate: Gate, args: argparse.Namespace) -> int:
    facts = gate.last()
    if facts is None:
        facts = verify(gate.repository, gate.case)  # made elsewhere, and fetched
    _print(gate, args, facts)
    return FOUND if facts.outcome == "failed" else OK


def _verify(gate: Gate, args: argparse.Namespace) -> int:
    with Worker() as worker:
        facts = verify(gate.repository, gate.case, lambda path: worker.call("describe", {"path": str(path)})["sha256"])
    if args.json:
        _print(gate, args, facts)
    else:
        print(f"{gate.case}: the record holds: {facts.outcome} on {facts.started[:10]}, fix {facts.fixed[:12]}")
    return OK


def _print(gate: Gate, args: argparse.Namespace, facts: Facts) -> None:
    if args.json:
        document = GateReport(
            action=args.action,
            case=gate.case,
            outcome=facts.outcome,
            file=str(gate.record_file),
            items=tuple(facts.results),
            facts=facts,
        )
        print_json(document)
        return
    screen = console()
    for row in rows(facts):
        screen.print(row)


def rows(facts: Facts) -> list[RenderableType]:
    """A run for people: the outcome, then each item with its verdict and why."""
    from rich.padding import Padding
    from rich.text import Text

    head = Text(" ")
    head.append(f"gate {visible(facts.case)}", "bold")
    head.append(f"  {facts.outcome}", "bold red" if facts.outcome == "failed" else "bold green")
    head.append(f"  {facts.started[:10]}  broken {facts.broken[:12]}  fixed {facts.fixed[:12]}", "bright_black")
    found: list[RenderableType] = [head]
    for each in facts.results:
        sign, style = SIGNS[each.verdict]
        row = Text(" ")
        row.append(f"{sign} {each.item:<12}", style)
        row.append(f" {each.verdict}", style)
        found += [row, Padding(Text(one_line(each.words, 1000)), (0, 0, 0, 4))]
    last = next((each.runs[-1] for each in facts.results if each.verdict in ("failed", "error") and each.runs), None)
    if last is not None and last.output.strip():
        lines = visible(last.output, keep="\n").strip().split("\n")[-12:]
        found.append(Padding(Text("\n".join(lines), "bright_black"), (1, 0, 0, 4)))
    return found


def _new_file(name: str | None) -> Path | None:
    if name is None:
        return None
    path = Path(name)
    if path.exists():
        raise CommandError(f"{path} is there already and is not replaced; name another file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise CommandError(f"{path.parent} is no directory that can be written to")
    return path
