"""What a data loader yields, before any training: fields, samples, lengths, labels, masks, padding, duplicates.

LOADER is module:attribute, looked for in the working directory first: a DataLoader, any iterable, or a function that
makes one. It is your own code and it is run, in a process of its own with a time limit. Importing a module runs it: a
script that trains at import would train, so name a module that only makes the loader, or put the training under
`if __name__ == "__main__":`. The batches become a capsule, whose place is printed, and the data rules judge it. Exit
status: 0 nothing found, 1 findings of severity warning or above, 2 where the loader cannot be used or raises.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from typing import Literal

import msgspec

from ...analyzers.report import CapsuleReport, exit_status
from ..analysis import analyze_capsule
from ..looks.sheets import BatchSheet
from ..output import UNUSABLE, CommandError, console, narrate, print_json
from ..paths import capsule_directory
from ..probing import Yielded, new_capsule, probe
from ..worker import Worker, WorkerError

BATCHES, TIMEOUT_S = 64, 120.0
#: Samples and tokens of each that are laid out with labels and mask.
SAMPLES, TOKENS = 3, 400


class Probe(msgspec.Struct, kw_only=True):
    """``llmconsole.probe/1``."""

    format: Literal["llmconsole.probe/1"] = "llmconsole.probe/1"
    loader: str
    capsule: str
    yielded: Yielded
    batch: BatchSheet
    report: CapsuleReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("loader", metavar="LOADER", help="module:attribute")
    parser.add_argument("--validation", metavar="LOADER", help="the loader of the validation split")
    parser.add_argument("--tokenizer", metavar="NAME", help="module:attribute of the tokenizer (found in the loader)")
    parser.add_argument(
        "--batches", type=_count, default=BATCHES, metavar="N", help=f"batches taken of each ({BATCHES})"
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=TIMEOUT_S, metavar="S", help=f"seconds for all of them ({TIMEOUT_S:g})"
    )
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="directory of the capsule (LLMCONSOLE_DIR, else this one)"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON (llmconsole.probe/1)")


def run(args: argparse.Namespace) -> int:
    """Take batches, write the capsule, judge it, and print what was found."""
    capsule = new_capsule(capsule_directory(args.output), args.loader)
    request = {
        "loader": args.loader,
        "validation": args.validation,
        "tokenizer": args.tokenizer,
        "batches": args.batches,
        "directory": os.getcwd(),
        "capsule": str(capsule.absolute()),
        "command": ["llmconsole", "probe", args.loader],
    }
    try:
        yielded = probe(request, args.timeout)
    except BaseException:  # an interrupt, too: half a capsule is no evidence
        shutil.rmtree(capsule, ignore_errors=True)
        raise
    if not yielded.batches:
        shutil.rmtree(capsule, ignore_errors=True)
        reason = yielded.problem or (
            f"gave no batch within {args.timeout:g} s; --timeout raises the limit"
            if yielded.ended == "time"
            else "is empty: it yields no batch"
        )
        raise CommandError(f"{args.loader}: {reason}")
    with Worker() as worker:
        try:
            report = analyze_capsule(worker, capsule, stages=("data",))
            params = {"path": str(capsule), "position": 0, "samples": SAMPLES, "tokens": TOKENS}
            sheet = msgspec.convert(worker.call("batch", params), BatchSheet)
        except WorkerError as error:
            raise CommandError(error) from error
    found = Probe(loader=args.loader, capsule=str(capsule), yielded=yielded, batch=sheet, report=report)
    if args.json:
        print_json(found)
    else:
        _print(found)
    if yielded.ended == "error":
        narrate(f"{args.loader}: {yielded.problem}")
        return UNUSABLE
    return exit_status(report)


def _print(found: Probe) -> None:
    """The probe for people."""
    from .. import batch_table
    from .. import probe_table as table
    from ..render import print_report

    screen = console()
    ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
    for line in table.head(found.yielded, found.capsule):
        screen.print(line)
    screen.print()
    screen.print(table.fields(found.yielded))
    screen.print()
    for line in table.facts(found.yielded, ascii_only=ascii_only):
        screen.print(line)
    for line in table.samples(found.yielded):
        screen.print(line)
    if found.batch.step is not None and found.batch.samples:
        screen.print()
        for words in batch_table.notes(found.batch):
            screen.print(f" {words}")
        for row in found.batch.samples:
            for line in batch_table.sample(found.batch, row, screen.width)[0]:
                screen.print(line)
        screen.print(f" {batch_table.legend(found.batch)}", style="bright_black")
    for line in table.printed(found.yielded):
        screen.print(line)
    screen.print()
    complete = all(found.yielded.exhausted.values())
    print_report(found.report, screen, within="" if complete else table.extent(found.yielded))


def _count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not 1 <= number <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of batches from 1 to 100000")
    return number


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.1 <= number <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.1 to 86400")
    return number
