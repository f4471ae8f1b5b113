"""The smallest script that still fails as the job did: two ranks over Gloo, and the one collective at fault.

CAPSULE is a capsule, a raw evidence file, or a directory that holds one job of either (the flight recorder's dumps of
all ranks, say). Where ranks made different calls, or one left a call out, the script is printed, or written to FILE.
It needs torch alone, no GPU and none of your code: `python FILE` starts both ranks and ends with status 1 where they
hang or fail, which a time-out of a few seconds decides. Exit status of this command: 0, or 2 where there is no such
finding.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..output import OK, CommandError, narrate, print_json
from ..text import one_line
from ..worker import Worker, WorkerError
from .evidence import one_job

_LATER = "shrinking by running your own code (--entry) comes in a later version"


class Shrink(msgspec.Struct, kw_only=True):
    """``llmconsole.shrink/1``; ``ranks`` are those of the job that ranks 0 and 1 of the script stand for."""

    format: Literal["llmconsole.shrink/1"] = "llmconsole.shrink/1"
    capsule: str
    rule: str
    kind: str
    ranks: tuple[int, int]
    site: str | None
    path: str | None
    script: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("capsule", metavar="CAPSULE", help="a capsule, or the raw files of one job")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the script there; it is printed otherwise")
    parser.add_argument("--force", action="store_true", help="replace FILE where it is there already")
    parser.add_argument("--json", action="store_true", help="print as JSON (llmconsole.shrink/1)")
    parser.add_argument("--entry", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Write or print the script."""
    if args.entry is not None:
        raise CommandError(f"{_LATER}; without it the ranks' calls are shrunk: llmconsole shrink CAPSULE")
    target = None if args.output is None else Path(args.output)
    if target is not None and os.path.lexists(target) and not args.force:
        raise CommandError(f"{target} is there already; --force replaces it")
    with Worker() as worker:
        evidence = one_job(worker, args.capsule)
        try:
            params = {"path": os.fspath(evidence.path), "files": list(evidence.files)}
            found = worker.call("two_ranks", params)
        except WorkerError as error:
            raise CommandError(error) from error
    if "script" not in found:
        raise CommandError(_why_not(args.capsule, found))
    if target is not None:
        _write(target, found["script"], replace=args.force)
    if args.json:
        print_json(
            Shrink(
                capsule=args.capsule,
                rule=found["rule"],
                kind=found["kind"],
                ranks=tuple(found["ranks"]),
                site=found["frame"],
                path=args.output,
                script=found["script"],
            )
        )
    elif target is None:
        print(found["script"], end="")
    else:
        print(one_line(target, 4000))
        narrate(f"python {target} starts both ranks; it ends with status 1 where they fail as the job did")
    return OK


def _why_not(path: str, found: dict[str, Any]) -> str:
    if found.get("rule"):
        return f"{path}: {found['rule']} was found, but no script can be made of it: {found['problem']}"
    first = f" (the first divergence is {found['first']})" if found.get("first") else ""
    return f"{path}: ranks that made different calls or left one out were not found{first}; {_LATER}"


def _write(target: Path, script: str, *, replace: bool) -> None:
    """Write the script whole or not at all."""
    temporary = None
    try:
        if not replace:
            with target.open("x", encoding="utf-8") as file:
                file.write(script)
            return
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=target.parent, delete=False) as file:
            temporary = file.name
            file.write(script)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except FileExistsError as error:
        raise CommandError(f"{target} is there already; --force replaces it") from error
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise CommandError(f"{target}: cannot be written ({error.strerror or error})") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
