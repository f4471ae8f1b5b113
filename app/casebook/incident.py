"""``incident.json`` beside a capsule's manifest: the state of an incident. It is no evidence and not in the digest."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Generator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from ...analyzers.report import CapsuleReport
from .notebook import Notebook, begin

FORMAT = "llmconsole.incident-record/1"
_NAME = "incident.json"
_LIMIT = 16 << 20


class IncidentError(Exception):
    """``incident.json`` cannot be read or written; one line."""


def read_incident(capsule: Path) -> dict[str, Any]:
    """The record as it stands, with fields that we do not know; empty where there is none.

    Raises:
        IncidentError: it is no regular file, too large, or no JSON object.
    """
    from ...capsules.errors import EvidenceError
    from ...capsules.jsonio import decode_object
    from ...capsules.storage import read_inside

    try:
        # The capsule may come from a stranger: a link is not followed, a pipe not waited for.
        return decode_object(read_inside(capsule, _NAME, _LIMIT))
    except FileNotFoundError:
        return {}
    except EvidenceError as error:
        raise IncidentError(f"{capsule / _NAME} cannot be used: {error.what}; move it away") from error


def update_incident(capsule: Path, changes: dict[str, Any]) -> None:
    """Set fields of the record, keep the others, and replace the file in one step.

    Raises:
        IncidentError: it cannot be read or written.
    """
    with _held(capsule):
        _write(capsule, {**read_incident(capsule), **changes})


def read_notebook(capsule: Path) -> Notebook:
    """The notebook of an incident; an empty one where it was never opened.

    Raises:
        IncidentError: the record cannot be read, or a field of it has another type.
    """
    return _notebook(capsule, read_incident(capsule))


@contextlib.contextmanager
def notebook(capsule: Path) -> Generator[Notebook]:
    """The notebook to be changed, written when the block ends; two people at once change it one after the other.

    Raises:
        IncidentError: it cannot be read or written.
    """
    with _held(capsule):
        record = read_incident(capsule)
        book = _notebook(capsule, record)
        yield book
        _write(capsule, {**record, **msgspec.to_builtins(book)})


def open_incident(capsule: Path, report: CapsuleReport, phase: str, trigger: str, now: datetime) -> Notebook:
    """Start the clock, with the hypotheses that the report suggests; one that is open already stays as it is.

    Raises:
        IncidentError: it cannot be read or written.
    """
    with notebook(capsule) as book:
        if not book.opened:
            made = begin(report, phase, trigger, now)
            book.opened, book.hypotheses = made.opened, [*book.hypotheses, *made.hypotheses]
            for number, each in enumerate(book.hypotheses, start=1):
                each.id = number
    return book


def _notebook(capsule: Path, record: dict[str, Any]) -> Notebook:
    known = {name: record[name] for name in Notebook.__struct_fields__ if record.get(name) is not None}
    try:
        return msgspec.convert(known, Notebook)
    except msgspec.ValidationError as error:
        raise IncidentError(f"{capsule / _NAME} cannot be used: {error}; move it away") from error


@contextlib.contextmanager
def _held(capsule: Path) -> Generator[None]:
    """The capsule's directory, held against other writers of its incident; nothing is added to it for that."""
    try:
        descriptor = os.open(capsule, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise IncidentError(f"{capsule} cannot be opened: {error.strerror}") from error
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(capsule: Path, record: dict[str, Any]) -> None:
    from ...capsules.jsonio import encode

    try:
        descriptor, temporary = tempfile.mkstemp(dir=capsule, prefix=f".{_NAME}.", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(encode({"format": FORMAT, **record}) + b"\n")
            os.replace(temporary, capsule / _NAME)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise IncidentError(f"{capsule / _NAME} cannot be written: {error.strerror}") from error
