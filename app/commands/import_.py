"""Make a capsule of raw evidence: a log, a trainer state, an event file, …, known by its content.

Files of one job that lie in one directory become one capsule, with the originals in it. Standard output names each
capsule. Exit status: 0, or 2 where any path cannot be used (the others are still imported).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..output import OK, UNUSABLE, CommandError, narrate, print_json
from ..text import one_line
from ..worker import Worker, WorkerError
from .evidence import sources


class ImportedFile(msgspec.Struct, kw_only=True):
    """One raw file: where it lay, what it is, and what a reader should know of it."""

    path: str
    format: str
    bytes: int
    notes: tuple[str, ...] = ()


class ImportedCapsule(msgspec.Struct, kw_only=True):
    """One capsule that was made."""

    path: str
    files: tuple[ImportedFile, ...]
    points: int
    records: int


class Imports(msgspec.Struct, kw_only=True):
    """``llmconsole.import/1``."""

    format: Literal["llmconsole.import/1"] = "llmconsole.import/1"
    capsules: tuple[ImportedCapsule, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a raw file, or a directory of them")
    parser.add_argument(
        "-o", "--output", required=True, metavar="DIR", help="directory for the capsules; made where it is not there"
    )
    parser.add_argument(
        "--separate", action="store_true", help="a capsule for each file, also where they are of one job"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON (llmconsole.import/1)")


def run(args: argparse.Namespace) -> int:
    """Import every path and say where its capsule is."""
    target = Path(args.output)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{target}: cannot be made a directory ({error.strerror or error})") from error
    made: list[ImportedCapsule] = []
    usable = True
    with Worker() as worker:
        for source in sources(worker, args.paths, separate=args.separate):
            if source.problem or source.remark:
                narrate(source.problem or source.remark)
                usable = usable and not source.problem
            elif not source.files:
                narrate(f"{source.path}: is a capsule already")
            else:
                try:
                    found = worker.call("import_job", {"files": list(source.files), "target": str(target)})
                except WorkerError as error:
                    narrate(error)
                    usable = False
                    continue
                for problem in found["problems"]:
                    narrate(problem)
                    usable = False
                made.append(_capsule(found))
                if not args.json:
                    print(one_line(found["capsule"], 4000))
    if args.json:
        print_json(Imports(capsules=tuple(made)))
    return OK if usable else UNUSABLE


def _capsule(found: dict[str, Any]) -> ImportedCapsule:
    imported = found["imported"]
    return ImportedCapsule(
        path=found["capsule"],
        files=tuple(msgspec.convert(each, ImportedFile) for each in imported.get("files", [])),
        points=imported.get("points", 0),
        records=imported.get("records", 0),
    )
