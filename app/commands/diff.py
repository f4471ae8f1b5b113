"""The first place where two runs part: capsules, logs, or one of each.

LEFT and RIGHT are each a capsule, a raw file (a log, an event file, …), or a directory that holds one run. Curves are
compared step by step at the precision with which they were printed; where both runs were recorded, so are batches and
tensors in execution order. Exit status: 0 the same, 1 they diverge, 2 a path that cannot be used.
"""

from __future__ import annotations

import argparse
import os

import msgspec

from ...analyzers.diff.types import Difference
from ..output import FOUND, OK, CommandError, console, print_json
from ..worker import Worker, WorkerError
from .evidence import one_job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("left", metavar="LEFT", help="a capsule, a raw file, or a directory with one run in it")
    parser.add_argument("right", metavar="RIGHT", help="the run to compare it with")
    parser.add_argument("--json", action="store_true", help="print as JSON (llmconsole.diff/1)")


def run(args: argparse.Namespace) -> int:
    """Print the difference of two runs, and return the exit status."""
    with Worker() as worker:
        left, right = one_job(worker, args.left), one_job(worker, args.right)
        params = {
            "left": os.fspath(left.path),
            "right": os.fspath(right.path),
            "left_files": list(left.files),
            "right_files": list(right.files),
        }
        try:
            found = msgspec.convert(worker.call("difference", params), Difference)
        except WorkerError as error:
            raise CommandError(error) from error
    if args.json:
        print_json(found)
    else:
        from ..difference import rows

        screen = console()
        for row in rows(found, screen.width):
            screen.print(row)
    return OK if found.same else FOUND
