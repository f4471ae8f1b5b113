"""``incident.json`` beside a capsule's manifest: the state of an incident. It is no evidence and not in the digest."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

FORMAT = "llmconsole.incident-record/1"
_NAME = "incident.json"
_LIMIT = 16 << 20


class IncidentError(Exception):
    """``incident.json`` cannot be read or written; one line."""


def read_incident(capsule: Path) -> dict[str, Any]:
    """The record as it stands, with fields that we do not know; empty where there is none.

    Raises:
        IncidentError: it is a link, too large, or no JSON object.
    """
    from ...capsules.errors import EvidenceError
    from ...capsules.jsonio import decode

    path = capsule / _NAME
    try:
        # The capsule may come from a stranger: a link out of it is not followed.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise IncidentError(f"{path} cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as stream:
        content = stream.read(_LIMIT + 1)
    if len(content) > _LIMIT:
        raise IncidentError(f"{path} is larger than {_LIMIT >> 20} MiB; move it away")
    try:
        record = decode(content, _NAME)
    except EvidenceError as error:
        raise IncidentError(f"{path} is not JSON ({error}); move it away") from error
    if not isinstance(record, dict):
        raise IncidentError(f"{path} is not a JSON object; move it away")
    return record


def update_incident(capsule: Path, changes: dict[str, Any]) -> None:
    """Set fields of the record, keep the others, and replace the file in one step.

    Raises:
        IncidentError: it cannot be read or written.
    """
    from ...capsules.jsonio import encode

    record = {"format": FORMAT, **read_incident(capsule), **changes}
    try:
        descriptor, temporary = tempfile.mkstemp(dir=capsule, prefix=f".{_NAME}.", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(encode(record) + b"\n")
            os.replace(temporary, capsule / _NAME)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise IncidentError(f"{capsule / _NAME} cannot be written: {error.strerror}") from error
