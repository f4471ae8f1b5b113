"""The log of resolved incidents: list it, search it, show one case.

`cases search WORDS` finds the cases that hold every word (substrings, any case, any language); `field:value` narrows
to a field (class:distributed, rule:numerics/fp16-overflow, cause:"log of zero"), quotes keep a phrase. The cases that
ship with llmconsole are read beside your own file and marked seed. `cases lint` says what is wrong with your file.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from .. import paths
from ..casebook import cards, search
from ..casebook.lint import Problem, lint
from ..casebook.log import load
from ..casebook.resolve import ResolveError, read
from ..casebook.show import case_block, is_gated
from ..casebook.store import Repository, StoreError
from ..output import FOUND, OK, CommandError, console, narrate, print_json
from ..text import one_line, visible
from ..worker import Worker, WorkerError

if TYPE_CHECKING:
    from rich.console import RenderableType


class CaseRow(msgspec.Struct, kw_only=True):
    """One case."""

    id: str
    title: str
    seed: bool
    fields: dict[str, str]


class Cases(msgspec.Struct, kw_only=True):
    """``llmconsole.cases/1``."""

    format: Literal["llmconsole.cases/1"] = "llmconsole.cases/1"
    file: str
    query: str
    cases: tuple[CaseRow, ...]


class CaseProblems(msgspec.Struct, kw_only=True):
    """``llmconsole.cases/1`` of ``cases lint``."""

    format: Literal["llmconsole.cases/1"] = "llmconsole.cases/1"
    action: Literal["lint"] = "lint"
    file: str
    problems: tuple[Problem, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--json", action="store_true", help="print as JSON (llmconsole.cases/1)")
    actions = parser.add_subparsers(dest="action", metavar="search|show|lint", title="actions", required=False)
    find = actions.add_parser("search", help="the cases that hold every word", allow_abbrev=False)
    find.add_argument("words", nargs="+", metavar="WORDS")
    one = actions.add_parser("show", help="one case as it stands in the file", allow_abbrev=False)
    one.add_argument("id", metavar="ID")
    check = actions.add_parser("lint", help="what is wrong with your case log", allow_abbrev=False)
    for each in (find, one, check):
        each.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print as JSON")


def run(args: argparse.Namespace) -> int:
    """List, search or show."""
    file = paths.case_file()
    if args.action == "lint":
        return _lint(file, as_json=args.json)
    try:
        known = load(file)
    except ResolveError as error:
        raise CommandError(error) from error
    query = ""
    if args.action == "search":
        query = " ".join(map(_quoted, args.words))
        known = tuple(search.search(known, query))
    elif args.action == "show":
        known = tuple(card for card in known if card.id == args.id) or _unknown(args.id, known)
    if args.json:
        rows = [
            CaseRow(
                id=card.id, title=card.title, seed=card.seed, fields={each.name: each.value for each in card.fields}
            )
            for card in known
        ]
        print_json(Cases(file=str(file), query=query, cases=tuple(rows)))
        return 0
    screen = console()
    if args.action == "show":
        for card in known:
            fields = [(each.name, each.value) for each in card.fields]
            screen.print(case_block(card.id, card.title, fields, seed=card.seed))
    elif known:
        for card in known:
            for line in _rows(card):
                screen.print(line)
    else:
        screen.print(f" No case holds {visible(query)}.", style="bright_black")
        if '"' in query:
            narrate("words quoted together are searched for side by side; without the quotes each may stand anywhere")
    return 0


def _lint(file: Path, *, as_json: bool) -> int:
    try:
        text = read(file)
        with Worker() as worker:
            rules = {rule["id"] for rule in worker.call("rules")["rules"]}
    except (ResolveError, WorkerError) as error:
        raise CommandError(error) from error
    if not file.exists():
        narrate(f"{file} is not there yet; the first resolved incident makes it")
    try:
        # Tests and gates are where the work is done, also where LLMCONSOLE_CASES names a log elsewhere.
        repository = Repository(Path.cwd() if paths.repository_root() else file.parent)
    except StoreError as error:
        repository = None
        narrate(f"tests and gates were not looked up: {error}")
    found = lint(text, file, rules, repository)
    if as_json:
        print_json(CaseProblems(file=str(file), problems=tuple(found)))
    else:
        for each in found:
            case = f"{each.case}: " if each.case else ""
            print(one_line(f"{file.name}:{each.line}: {case}{each.words}", 2000))
        if not found:
            number = len(cards.parse(text))
            print(f"{number:,} case{'' if number == 1 else 's'}, nothing wrong")
    return FOUND if found else OK


def _quoted(word: str) -> str:
    """One argument of the shell as one term: what it quoted together stays together."""
    if '"' in word or not any(char.isspace() for char in word):
        return word
    field, colon, rest = word.partition(":")
    return f'{field}:"{rest}"' if colon and not any(char.isspace() for char in field) else f'"{word}"'


def _unknown(id: str, known: tuple[cards.Card, ...]) -> tuple[cards.Card, ...]:
    import difflib

    near = difflib.get_close_matches(id, [card.id for card in known], n=1)
    advice = f"did you mean {near[0]}?" if near else f"llmconsole cases search {id}"
    raise CommandError(f"no case is called {id}; {advice}")


def _rows(card: cards.Card) -> list[RenderableType]:
    """A case in a list: its id and title, and below them what to suspect."""
    from rich.padding import Padding
    from rich.text import Text

    row = Text(" ")
    row.append(visible(card.id), "bold")
    row.append(f"  {visible(card.title)}")
    if card.seed:
        row.append("  seed", "bright_black")
    elif not is_gated(card.get("Gate")):
        row.append("  ○ not gated", "yellow")
    suspect = card.get("Root cause") or card.get("First suspect")
    below = Padding(Text(cards.single_line(suspect), "bright_black"), (0, 0, 0, 4))
    return [row, below] if suspect else [row]
