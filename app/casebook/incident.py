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
