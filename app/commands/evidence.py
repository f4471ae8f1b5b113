"""What stands behind the paths that people give: capsules, raw files by their content, and directories of either."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...capsules.layout import INCIDENT, MANIFEST, RANKS
from ..analysis import capsules_in, is_capsule
from ..output import CommandError, narrate
from ..worker import Worker, WorkerError

#: What only the reader of a whole capsule understands; the originals in its ``files`` are evidence of their own.
_PARTS = (MANIFEST, INCIDENT, RANKS)
_WHAT_TO_GIVE = "give the directory of a Recorder, or one in which logs, event files, dumps or traces lie directly"
#: Jobs that are named where a path holds several.
_NAMED = 3

Look = Callable[..., Any]


@dataclass(frozen=True)
class Evidence:
    """What stands behind a path: a capsule, or the raw files of one job; or why there is nothing to use.

    Attributes:
        path: the capsule or the raw file; of several files their directory.
        files: the raw files of the job; empty for a capsule.
        problem: one line, where the path cannot be used.
        remark: one line about what was left out, where something was.
    """

    path: Path
    files: tuple[str, ...] = ()
    problem: str = ""
    remark: str = ""


def sources(worker: Worker, paths: Sequence[str], *, separate: bool = False) -> Iterator[Evidence]:
    """Everything behind the given paths: capsules first, then the raw files, job by job.

    Args:
        worker: recognises raw files, by their content.
        paths: capsules, raw files, and directories of either.
        separate: each raw file is a job of its own.
    """
    raw: list[str] = []
    for given in paths:
        path = Path(given)
        try:
            if not given:  # a variable of the shell that is not set; Path makes the working directory of it
                yield Evidence(path, problem="an empty path was given; . is the working directory")
            elif is_capsule(path):
                yield Evidence(path)
            elif (whole := _capsule_around(path)) is not None:
                yield Evidence(path, problem=f"{path}: is a part of a capsule; give the whole one: {whole}")
            elif path.is_dir():
                found = capsules_in(path)
                yield from map(Evidence, found)
                yield from _in_directory(worker, path, raw, lonely=not found)
            elif path.exists():
                raw.append(given)
            else:
                yield Evidence(path, problem=f"{path}: no such file or directory")
        except (OSError, ValueError) as error:
            yield Evidence(path, problem=f"{path}: cannot be read ({_said(error)})")
    if raw:
        yield from _jobs(worker, raw, separate)


def one_job(worker: Worker, given: str) -> Evidence:
    """The one capsule, or the raw files of the one job, behind a path.

    Raises:
        CommandError: there is none, or several; the line names them.
    """
    found: list[Evidence] = []
    for each in sources(worker, [given]):
        if each.problem:
            raise CommandError(each.problem)
        if each.remark:
            narrate(each.remark)
        else:
            found.append(each)
    if len(found) == 1:
        return found[0]
    names = ", ".join(map(_called, found[:_NAMED])) + (", …" if len(found) > _NAMED else "")
    several = any(len(each.files) > 1 and not _named(each) for each in found)  # no path names one of those alone
    advice = f"; make a capsule of a job of several files: {import_command(given)}" if several else ""
    raise CommandError(f"{given}: holds {len(found)} jobs; name one of them ({names}){advice}")


def look_at(worker: Worker, evidence: Evidence) -> Look:
    """A function that asks the worker for one of the console's looks (its name and arguments) at some evidence."""
    files = list(evidence.files)
    path = files[0] if files else os.fspath(evidence.path)  # a look knows a job of raw files by its first one

    def look(method: str, **params: Any) -> Any:
        return worker.call(method, {"path": path, "jobs": {path: files}, **params})

    return look


def import_command(given: str | Path) -> str:
    """The command that makes a capsule of raw evidence, ready to be typed."""
    return f"llmconsole import {shlex.quote(os.fspath(given))} -o runs"


def _called(evidence: Evidence) -> str:
    if not evidence.files:
        return str(evidence.path)
    if _named(evidence):
        return str(evidence.path)
    more = len(evidence.files) - 1
    return evidence.files[0] + (f" and {more:,} more file{'' if more == 1 else 's'}" if more else "")


def _around(files: Sequence[str]) -> Path:
    """The directory that holds all files of a job."""
    places = {Path(file).parent for file in files}
    if len({place.is_absolute() for place in places}) > 1:
        places = {Path(os.path.abspath(place)) for place in places}
    return Path(os.path.commonpath(places))


def _named(evidence: Evidence) -> bool:
    """Whether the path names the files alone, since they lie in directories of their own below it."""
    return len({Path(file).parent for file in evidence.files}) > 1


def _in_directory(worker: Worker, directory: Path, raw: list[str], *, lonely: bool) -> Iterator[Evidence]:
    """Put the raw evidence of a directory into ``raw``; ``lonely``: there is no capsule in it."""
    try:
        found = worker.call("evidence_in", {"directory": os.fspath(directory)})
    except WorkerError as error:
        yield Evidence(directory, problem=str(error))
        return
    raw += [row["path"] for row in found["files"]]
    yield from (Evidence(directory, remark=remark) for remark in found["remarks"])
    if lonely and not found["files"]:
        place = f"there is some in {directory / found['below']}" if found["below"] else _WHAT_TO_GIVE
        what = (
            "no capsule in this directory (a capsule is a directory with a capsule.json), and no file of a known format"
        )
        yield Evidence(directory, problem=f"{directory}: {what}; {place}")
    elif found["files"] and (others := len(found["unknown"]) + found["left_out"]):
        names = ", ".join(found["unknown"][:3]) + (", …" if others > 3 else "")
        remark = f"{directory}: {others:,} file{'' if others == 1 else 's'} of no known format left out ({names})"
        yield Evidence(directory, remark=remark)


def _jobs(worker: Worker, raw: list[str], separate: bool) -> Iterator[Evidence]:
    try:
        found = worker.call("group", {"paths": raw, "separate": separate})
    except WorkerError as error:
        yield Evidence(Path(raw[0]), problem=str(error))
        return
    for problem in found["problems"]:
        yield Evidence(Path(raw[0]), problem=problem)
    for files in found["jobs"]:
        first = Path(files[0])
        yield Evidence(first if len(files) == 1 else _around(files), tuple(files))


def _said(error: OSError | ValueError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _capsule_around(path: Path) -> Path | None:
    """The capsule of which a path is a part that says nothing alone."""
    full = Path(os.path.abspath(path))
    for above in full.parents:
        if full.relative_to(above).parts[0] in _PARTS and is_capsule(above):
            return above if path.is_absolute() else Path(os.path.relpath(above))
    return None
