"""Work on an incident: its clock and notebook; at the end its case in debug-cases.md, shown first, then committed.

`incident open CAPSULE` starts the clock and writes down the hypotheses that the rules suggest; `hypothesis`,
`experiment` and `note` go on from there, `show` prints it all, `statistics` counts. `incident resolve CAPSULE` asks for
root cause, trigger, fix commit, regression test and prevention, and refuses, naming everything that is
missing, rather than writing half a case. A case that the log has gains an occurrence; a new one a section.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Literal

import msgspec

from ..casebook.incident import IncidentError
from ..casebook.resolve import Plan, ResolveError, Statement, commit, describe, plan
from ..casebook.store import StoreError
from ..output import CommandError, narrate, print_json
from ..text import visible
from ..worker import Worker, WorkerError
from . import notebook


class Resolved(msgspec.Struct, kw_only=True):
    """``llmconsole.incident/1``: what was committed, and where."""

    format: Literal["llmconsole.incident/1"] = "llmconsole.incident/1"
    action: Literal["resolve"] = "resolve"
    status: Literal["fixed"]
    case: str
    new_case: bool
    capsule: str
    capsule_sha256: str
    file: str
    diff: str
    message: str
    commit: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    notebook.add_actions(actions)
    resolve = actions.add_parser(
        "resolve",
        help="write the case and commit it",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    resolve.add_argument("capsule", metavar="CAPSULE", help="the capsule of the incident")
    # None is declared required: what is missing is named all at once, with what the log knows already.
    options = {
        "--case": ("ID", "id of the case: lower-case words joined by dashes"),
        "--title": ("TEXT", "the case in one line"),
        "--class": (
            "CLASS",
            "not-converging, overfitting, evaluation, resources, distributed, kernel, serving, application",
        ),
        "--root-cause": ("TEXT", "one sentence"),
        "--trigger": ("TEXT", "what set it off"),
        "--fix-commit": ("REV", "the commit that fixes it"),
        "--regression-test": ("NODE", "tests/test_x.py::test_y, committed with the fix or since"),
        "--prevention": ("TEXT", "what keeps it from coming back"),
        "--symptom": ("TEXT", "as first seen; default: the capsule's first divergence"),
        "--keywords": ("WORDS", "words to find it by"),
    }
    for name, (metavar, words) in options.items():
        dest = "case_class" if name == "--class" else name[2:].replace("-", "_")
        resolve.add_argument(name, dest=dest, default="", metavar=metavar, help=words)
    resolve.add_argument(
        "--repo", metavar="DIR", help="the repository of fix and test (default: the working directory's)"
    )
    resolve.add_argument("--yes", action="store_true", help="do not ask")
    resolve.add_argument("--json", action="store_true", help="print as JSON (llmconsole.incident/1); needs --yes")


def run(args: argparse.Namespace) -> int:
    """Keep the notebook; or plan, show, ask, commit."""
    if args.action != "resolve":
        try:
            return notebook.run(args)
        except (WorkerError, ResolveError, IncidentError) as error:
            raise CommandError(error) from error
    statement = Statement(**{name: getattr(args, name) for name in Statement.__dataclass_fields__})
    if args.json and not args.yes:
        raise CommandError("--json does not ask, so it needs --yes")
    notebook.require_capsule(Path(args.capsule))
    try:
        with Worker() as worker:
            incident = describe(worker, Path(args.capsule))
        planned = plan(statement, incident, repo=Path(args.repo) if args.repo else None)
        if not args.json:
            show_plan(planned)
        if not args.yes and not _confirmed():
            narrate("nothing was written")
            return 0
        sha = commit(planned)
    except (WorkerError, ResolveError, StoreError, IncidentError) as error:
        raise CommandError(error) from error
    if args.json:
        print_json(resolved(planned, sha))
    else:
        print(f"committed {sha}")
    return 0


def resolved(planned: Plan, sha: str) -> Resolved:
    """The document of a resolved incident."""
    return Resolved(
        status="fixed",
        case=planned.statement.case,
        new_case=planned.new_case,
        capsule=planned.incident.id,
        capsule_sha256=planned.incident.sha256,
        file=str(planned.file),
        diff=planned.diff,
        message=planned.message,
        commit=sha,
    )


def show_plan(planned: Plan) -> None:
    """Print the file, its whole diff against HEAD and the commit message, before anything is written."""
    from rich.text import Text

    from ..output import console

    screen = console()
    styles = {"+": "green", "-": "red", "@": "cyan"}
    screen.print(Text(f"file     {visible(planned.file)}", "bold"), soft_wrap=True)
    if planned.uncommitted:
        narrate(f"{planned.file.name} has changes that were not committed; they become part of this commit")
    for line in visible(planned.diff, keep="\n\t").rstrip("\n").split("\n"):
        style = "bold" if line.startswith(("+++", "---")) else styles.get(line[:1], "")
        screen.print(Text(line, style), soft_wrap=True)
    screen.print()
    screen.print(Text("message", "bold"))
    for line in visible(planned.message, keep="\n").rstrip("\n").split("\n"):
        screen.print(Text(f"    {line}" if line else ""), soft_wrap=True)
    screen.print()


def _confirmed() -> bool:
    if not sys.stdin.isatty():
        raise CommandError("standard input is no terminal, so nobody can be asked; --yes commits what was shown")
    print("Commit this? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
