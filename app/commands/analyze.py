"""Name the first place where a run left the expected path.

PATH is a capsule, a raw evidence file (a log, trainer_state.json, an event file, …, known by its content), or a
directory of either. Raw files of one job that lie in one directory are one report.

Exit status: 0 nothing found, 1 findings of severity warning or above, 2 where any path cannot be used (the others
are still reported).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...analyzers.finding import STAGES
from ...analyzers.report import CapsuleReport, Report, exit_status
from ..analysis import analyze_capsule, capsules_in, is_capsule, unfinished_report
from ..output import UNUSABLE, CommandError, console, narrate, print_json
from ..worker import Worker, WorkerError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a capsule, a raw file, or a directory of either")
    parser.add_argument(
        "--separate", action="store_true", help="a report for each raw file, also where they are of one job"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON (llmconsole.report/1)")
    parser.add_argument("--export", metavar="FILE", help="also write the report to a new file: .txt, .svg or .html")
    parser.add_argument("--rule", action="append", default=[], metavar="ID", help="run this rule only; may be repeated")
    parser.add_argument(
        "--stage", choices=STAGES, metavar="S", help=f"run the rules of one stage only: {', '.join(STAGES)}"
    )


def run(args: argparse.Namespace) -> int:
    """Analyse every path, print one report, and return the exit status."""
    export = _new_file(args.export)
    reports: list[CapsuleReport] = []
    usable = True
    with Worker() as worker:
        _check_rules(worker, args.rule)
        for source in sources(worker, args.paths, separate=args.separate):
            if source.problem:
                narrate(source.problem)
                usable = False
                continue
            if source.remark:
                narrate(source.remark)
                continue
            try:
                stages = (args.stage,) if args.stage else ()
                reports.append(analyze_capsule(worker, source.path, rules=args.rule, stages=stages, files=source.files))
            except WorkerError as error:
                narrate(f"{source.path}: {error}" if str(source.path) not in str(error) else error)
                usable = False
                if error.kind != "refused":
                    reports.append(unfinished_report(source.path, str(error)))
    report = Report(reports=tuple(reports))
    if export is not None and reports:
        _write(report, export)
    if args.json:
        print_json(report)
    elif reports:
        from ..render import print_report

        print_report(report, console())
    return exit_status(report) if usable else UNUSABLE


def _new_file(name: str | None) -> Path | None:
    """The file to export to, refused before the analysis where it could not be written after it."""
    if name is None:
        return None
    from ..export import ExportError, format_of

    path = Path(name)
    try:
        format_of(path)
    except ExportError as error:
        raise CommandError(error) from error
    if os.path.lexists(path):
        raise CommandError(f"{path} is there already and is not replaced; name another file")
    return path


def _write(report: Report, path: Path) -> None:
    from ..export import ExportError, write

    try:
        write(report, path)
    except ExportError as error:
        raise CommandError(error) from error
    narrate(f"wrote {path}")


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


def _in_directory(worker: Worker, directory: Path, raw: list[str], *, lonely: bool) -> Iterator[Evidence]:
    """Put the raw evidence of a directory into ``raw``; ``lonely``: there is no capsule in it."""
    try:
        found = worker.call("evidence_in", {"directory": os.fspath(directory)})
    except WorkerError as error:
        yield Evidence(directory, problem=str(error))
        return
    raw += [row["path"] for row in found["files"]]
    if lonely and not found["files"]:
        place = f"; there is some in {directory / found['below']}" if found["below"] else ""
        what = (
            "no capsule in this directory (a capsule is a directory with a capsule.json), and no file of a known format"
        )
        yield Evidence(directory, problem=f"{directory}: {what}{place}")
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
        yield Evidence(first if len(files) == 1 else first.parent, tuple(files))


def _said(error: OSError | ValueError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _check_rules(worker: Worker, ids: list[str]) -> None:
    """Refuse a rule that does not exist: its silence would look like health."""
    if not ids:
        return
    import difflib

    known = [rule["id"] for rule in worker.call("rules")["rules"]]
    for each in ids:
        if each not in known:
            near = difflib.get_close_matches(each, known, n=1)
            advice = f"did you mean {near[0]}?" if near else "llmconsole rules lists them"
            raise CommandError(f"no rule is called {each}; {advice}")
