"""The notebook of an incident on the command line: open, look, write down hypotheses and what experiments showed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from .. import paths
from ..analysis import analyze_capsule, capsules_in, is_capsule
from ..casebook import notebook as books
from ..casebook.incident import IncidentError, notebook, open_incident, read_notebook
from ..casebook.notebook import Hypothesis, Notebook, Statistics
from ..output import OK, CommandError, console, narrate, print_json
from ..text import one_line, visible
from ..worker import Worker
from .evidence import import_command, sources

if TYPE_CHECKING:
    from rich.console import RenderableType

_SIGNS = {"supported": ("✓", "bold green"), "refuted": ("✗", "red"), "undecided": ("?", "yellow")}


class NotebookDocument(msgspec.Struct, kw_only=True):
    """``llmconsole.incident/1`` of the actions around the notebook; ``seconds`` is the clock, ``late`` its end."""

    format: Literal["llmconsole.incident/1"] = "llmconsole.incident/1"
    action: str
    capsule: str
    notebook: Notebook
    seconds: float | None
    late: bool


class StatisticsDocument(msgspec.Struct, kw_only=True):
    """``llmconsole.incident/1`` of ``incident statistics``."""

    format: Literal["llmconsole.incident/1"] = "llmconsole.incident/1"
    action: Literal["statistics"] = "statistics"
    directory: str
    file: str
    statistics: Statistics


def add_actions(actions: Any) -> None:
    """Declare the actions beside ``resolve``."""

    def action(name: str, words: str) -> argparse.ArgumentParser:
        parser = actions.add_parser(name, help=words, description=words, allow_abbrev=False)
        parser.add_argument("--json", action="store_true", help="print as JSON (llmconsole.incident/1)")
        return parser

    for name, words in (
        ("open", "start the clock, with the hypotheses that the rules suggest"),
        ("show", "the notebook: hypotheses, experiments, clock"),
        ("note", "write down a line"),
        ("hypothesis", "write down what would explain it, and what would test that"),
        ("experiment", "write down what a test of hypothesis N showed; without --observed its rule is run"),
    ):
        parser = action(name, words)
        parser.add_argument("capsule", metavar="CAPSULE", help="the capsule of the incident")
        if name == "note":
            parser.add_argument("text", metavar="TEXT")
        elif name == "hypothesis":
            parser.add_argument("claim", metavar="CLAIM")
            parser.add_argument("--test", default="", metavar="TEXT", help="the experiment that decides")
            parser.add_argument("--rule", default="", metavar="ID", help="the rule that decides")
        elif name == "experiment":
            parser.add_argument("number", metavar="N", type=int)
            parser.add_argument("--changed", default="", metavar="TEXT", help="the one thing that was changed")
            parser.add_argument("--observed", default="", metavar="TEXT")
            parser.add_argument("--verdict", choices=("supported", "refuted", "undecided"), default="undecided")
    parser = action("statistics", "cases by class, median time to locate, recurring rules")
    parser.add_argument("directory", nargs="?", metavar="DIR", help="where the capsules lie")


def run(args: argparse.Namespace, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> int:
    """Do one of the actions.

    Raises:
        IncidentError: the record cannot be read or written.
        WorkerError: the capsule is unusable.
    """
    if args.action == "statistics":
        return _statistics(args)
    capsule = Path(args.capsule)
    require_capsule(capsule)
    if args.action == "show":
        book = read_notebook(capsule)
    elif args.action == "open":
        book = _open(capsule, now())
    else:
        observed = _by_rule(capsule, args) if args.action == "experiment" and not args.observed else None
        with notebook(capsule) as book:
            _write_down(book, args, observed, now())
    _print(args, capsule, book, now())
    return OK


def require_capsule(path: Path) -> None:
    """An incident needs a capsule that stays.

    Raises:
        CommandError: the path is none; the line says how to come to one.
    """
    if is_capsule(path):
        return
    with Worker() as worker:
        found = [each for each in sources(worker, [str(path)]) if not each.remark]
    if problem := next((each.problem for each in found if each.problem), ""):
        raise CommandError(problem)
    made = ", ".join(str(each.path) for each in found[:3] if not each.files)
    advice = f"give one of those in it: {made}" if made else f"make one of it first: {import_command(path)}"
    raise CommandError(f"{path} is not a capsule; {advice}")


def _open(capsule: Path, now: datetime) -> Notebook:
    if read_notebook(capsule).opened:
        narrate(f"{capsule.name} is open already")
        return read_notebook(capsule)
    with Worker() as worker:
        report = analyze_capsule(worker, capsule)
        shown = worker.call("show", {"path": str(capsule)})
    manifest = shown["manifest"]
    trigger = str((manifest.get("trigger") or {}).get("kind") or "")
    return open_incident(capsule, report, str(manifest.get("phase") or ""), trigger, now)


def _by_rule(capsule: Path, args: argparse.Namespace) -> tuple[str, books.Verdict]:
    """Observation and verdict of a hypothesis that a rule tests."""
    found = read_notebook(capsule).hypothesis(args.number)
    if found is None:
        raise CommandError(f"{capsule.name} has no hypothesis {args.number}; llmconsole incident show lists them")
    if not found.rule:
        raise CommandError(f"hypothesis {args.number} has no rule that tests it; give --observed, --changed, --verdict")
    with Worker() as worker:
        return books.judge_by_rule(analyze_capsule(worker, capsule, rules=[found.rule]), found.rule)


def _write_down(
    book: Notebook, args: argparse.Namespace, observed: tuple[str, books.Verdict] | None, now: datetime
) -> None:
    if args.action == "note":
        book.notes.append(books.Note(text=_required(args.text, "the note"), t=books.said(now)))
    elif args.action == "hypothesis":
        books.add_hypothesis(book, _required(args.claim, "the claim"), args.test, args.rule, now)
    else:
        words, verdict = observed or (args.observed, args.verdict)
        if not books.add_experiment(book, args.number, args.changed, words, verdict, now):
            raise CommandError(f"there is no hypothesis {args.number}; llmconsole incident show lists them")


def _required(text: str, what: str) -> str:
    if not text.strip():
        raise CommandError(f"{what} is empty")
    return text


def _statistics(args: argparse.Namespace) -> int:
    from ..casebook.log import own
    from ..casebook.resolve import read

    directory, file = paths.capsule_directory(args.directory), paths.case_file()
    found: list[Notebook] = []
    try:
        for path in capsules_in(directory):
            if (path / "incident.json").exists():
                found.append(read_notebook(path))
    except OSError as error:
        raise CommandError(f"{directory} cannot be listed: {error.strerror}") from error
    numbers = books.count(found, own(read(file)))
    if args.json:
        print_json(StatisticsDocument(directory=str(directory), file=str(file), statistics=numbers))
        return OK
    screen = console()
    for row in _numbers(numbers):
        screen.print(row)
    return OK


def _numbers(found: Statistics) -> list[RenderableType]:
    from rich.text import Text

    def listed(words: dict[str, int]) -> str:
        return ", ".join(f"{visible(name)} {count:,}" for name, count in words.items()) or "none"

    median = "none yet" if found.median_seconds is None else books.duration(found.median_seconds)
    rows = [
        ("incidents", listed(found.incidents)),
        ("median time to locate", f"{median} over {found.located:,} located" if found.located else median),
        ("cases by class", listed(found.classes)),
        ("recurring rules", listed(found.rules)),
        ("without a gate", ", ".join(map(visible, found.ungated)) or "none"),
    ]
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in rows:
        table.add_row(Text(name, "bold"), Text(words))
    return [table]


def _print(args: argparse.Namespace, capsule: Path, book: Notebook, now: datetime) -> None:
    if args.json:
        document = NotebookDocument(
            action=args.action,
            capsule=str(capsule),
            notebook=book,
            seconds=book.seconds(now),
            late=book.late(now),
        )
        print_json(document)
        return
    screen = console()
    for row in rows(capsule.name, book, now):
        screen.print(row)


def rows(name: str, book: Notebook, now: datetime) -> list[RenderableType]:
    """The notebook for people."""
    from rich.padding import Padding
    from rich.text import Text

    head = Text(" ")
    head.append(one_line(name), "bold")
    head.append(f"  {book.status if book.opened or book.status != 'open' else 'not opened yet'}", "bold cyan")
    if book.status == "fixed":
        head.append("  ○ not gated", "yellow")
    if (seconds := book.seconds(now)) is not None:
        head.append(f"  {'located in' if book.located else 'open for'} {books.duration(seconds)}")
    found: list[RenderableType] = [head]
    if not book.opened:
        found.append(Text(" llmconsole incident open CAPSULE starts the clock and fills in hypotheses", "bright_black"))
    for each in book.hypotheses:
        found += _hypothesis(each)
    for note in book.notes:
        found.append(Text(f"   {note.t[11:16]}  {one_line(note.text, 2000)}"))
    if book.late(now):
        found.append(Padding(Text(f"{books.WAY_BACK}.", "bold yellow"), (1, 1, 0, 1)))
    return found


def _hypothesis(each: Hypothesis) -> list[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    sign, style = _SIGNS[each.verdict]
    line = Text(f" {sign} {each.id}  ", style)
    line.append(one_line(each.claim, 1000), "not bold default")
    found: list[RenderableType] = [line]
    if each.test or each.rule:
        words = one_line("; ".join(part for part in (each.test, each.rule) if part), 1000)
        found.append(Padding(Text(f"test     {words}", "bright_black"), (0, 0, 0, 6)))
    for tried in each.experiments:
        changed = f"changed {one_line(tried.changed, 500)}: " if tried.changed else ""
        words = f"{tried.t[11:16]}    {changed}{one_line(tried.observed, 1000)} → {tried.verdict}"
        found.append(Padding(Text(words), (0, 0, 0, 6)))
    return found


__all__ = ["IncidentError", "add_actions", "rows", "run"]
