"""Runs a data loader in a process of its own and returns what it yielded; whatever happens there, this side goes on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from .output import CommandError

#: Seconds after the time limit in which the loader's process may still say what it has.
GRACE_S = 5.0
#: Seconds that our own imports may take there, on a slow file system.
START_S = 300.0
_MOST_ANSWER = 64 << 20
_MOST_PRINTED = 1 << 16


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One field of the batches: ``shapes`` are the distinct ones, ``seen`` the batches that have it."""

    name: str
    kind: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    seen: int
    note: str = ""


class Lengths(msgspec.Struct, frozen=True, kw_only=True, rename={"start": "from", "stop": "to"}):
    """Lengths of the samples in tokens; ``histogram`` counts equal bins from ``start`` to ``stop``."""

    samples: int
    mean: float
    deviation: float
    min: int
    max: int
    p50: float
    p95: float
    p99: float
    histogram: tuple[int, ...]
    start: float
    stop: float


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """Images of one size, in pixels."""

    width: int
    height: int
    count: int


class Supervised(msgspec.Struct, frozen=True, kw_only=True):
    """Labels that ask for a token, ``of`` so many tokens that are no padding; rows without any."""

    tokens: int
    of: int
    rows: int
    rows_without: int


class Padding(msgspec.Struct, frozen=True, kw_only=True):
    """Positions that hold padding, ``of`` all."""

    positions: int
    of: int


class Duplicates(msgspec.Struct, frozen=True, kw_only=True):
    """Samples that came again within a split, the samples of each split, and distinct ones that are in both."""

    within_train: int
    train: int
    within_validation: int
    validation: int
    between: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample as text."""

    split: str
    name: str
    tokens: int
    text: str


class Yielded(msgspec.Struct, frozen=True, kw_only=True):
    """What the loader yielded.

    ``ended``: at the number asked for (limit), with the last batch of every loader (exhausted), at the time limit
    (time) or because a loader raised (error, and ``problem`` says what). ``exhausted``: of each split that was asked
    for, whether its last batch was taken; where it was not, what is said holds of ``batches`` alone.
    """

    batches: dict[str, int]
    ended: Literal["limit", "exhausted", "time", "error"]
    exhausted: dict[str, bool]
    seconds: float
    problem: str | None = None
    tokenizer: str | None = None
    fields: tuple[Field, ...] = ()
    lengths: Lengths | None = None
    images: tuple[Image, ...] = ()
    supervised: Supervised | None = None
    padding: Padding | None = None
    duplicates: Duplicates | None = None
    samples: tuple[Sample, ...] = ()
    notes: tuple[str, ...] = ()
    printed: tuple[str, ...] = ()


def new_capsule(directory: Path, loader: str) -> Path:
    """A free name for the capsule of a probe, in a directory that is created where it is absent.

    Raises:
        CommandError: the directory cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{directory}: cannot be made a directory ({error.strerror or error})") from error
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", loader).strip("-.")[:80] or "loader"
    for number in range(1, 100_000):
        path = directory / (f"probe-{name}.capsule" if number == 1 else f"probe-{name}-{number}.capsule")
        if not os.path.lexists(path):
            return path
    raise CommandError(f"{directory}: holds too many probes of {loader}; remove some")


def probe(request: dict[str, Any], timeout: float) -> Yielded:
    """Run the loader in a child of its own session and take its answer.

    Args:
        request: loader, validation, tokenizer, batches, directory, capsule, command.
        timeout: seconds for all batches.

    Raises:
        CommandError: there is no such loader, nothing can be taken from it, or its process died.
    """
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            # -P: the user's directory is put on the path by the child, after our own imports.
            [
                sys.executable,
                "-P",
                "-m",
                "llmconsole.capsules.probe.child",
                json.dumps({**request, "timeout": timeout}),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=printed,
            start_new_session=True,
            cwd=request["directory"],
        )
        try:
            answer = _answer(process, timeout + GRACE_S)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        lines = _printed(printed)
    if answer is None:
        took = f"gave no batch within {timeout:g} s and was stopped; --timeout raises the limit"
        took += ". Importing a module runs it: name one that only makes the loader"
        raise CommandError(f"{request['loader']}: {took}")
    try:
        content = json.loads(answer)
    except ValueError:
        last = f"; it last said: {lines[-1]}" if lines else ""
        raise CommandError(f"{request['loader']}: its process {_death(status)}{last}") from None
    if "refused" in content:
        raise CommandError(content["refused"])
    return msgspec.convert({**content, "printed": lines}, Yielded)


def _answer(process: subprocess.Popen[bytes], limit: float) -> bytes | None:
    """What the child writes until it ends; None where that takes longer than ``limit`` seconds from its first byte."""
    assert process.stdout is not None
    buffer = bytearray()
    deadline = time.monotonic() + START_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(buffer) < _MOST_ANSWER:
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                return None
            chunk = os.read(process.stdout.fileno(), 1 << 20)
            if not chunk:
                break
            if not buffer:
                deadline = time.monotonic() + limit
            buffer += chunk
            with contextlib.suppress(ValueError):  # workers of the loader may hold the pipe open
                json.loads(buffer)
                break
    return bytes(buffer)


def _printed(file: Any) -> list[str]:
    """The last lines that the loader printed."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _MOST_PRINTED))
    lines = file.read().decode("utf-8", "replace").splitlines()
    return [line[:300] for line in lines if line.strip()][-20:]


def _death(status: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name if -status in signal.valid_signals() else f"signal {-status}"
        return f"was ended by {name}" + (" (out of memory, most likely)" if name == "SIGKILL" else "")
    return f"left with status {status}"
