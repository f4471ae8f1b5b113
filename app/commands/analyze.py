"""Name the first place where a run left the expected path.

PATH is a capsule, a raw evidence file (a log, trainer_state.json, an event file, …, known by its content), or a
directory of either. Raw files of one job that lie in one directory are one report.

Exit status: 0 nothing found, 1 findings of severity warning or above, 2 where any path cannot be used (the others
are still reported), or is cut so that nothing could be judged.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ...analyzers.stages import STAGES
from ..output import UNUSABLE, CommandError, console, narrate, print_json
from ..worker import Worker, WorkerError

if TYPE_CHECKING:
    from ...analyzers.report import Report


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
    with Worker() as worker:
        worker.start()  # it loads what it needs while this side does
        return _answered(worker, args, export)


def _answered(worker: Worker, args: argparse.Namespace, export: Path | None) -> int:
    from ...analyzers.report import IMPORT, CapsuleReport, Report, exit_status, judged
    from ..analysis import analyze_capsule, unfinished_report
    from .evidence import sources

    reports: list[CapsuleReport] = []
    usable = True
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
    usable = usable and all(judged(each) or all(error.rule != IMPORT for error in each.errors) for each in reports)
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
