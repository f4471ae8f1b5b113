"""One row of the list, as the worker makes it and the screen shows it."""

from __future__ import annotations

import msgspec

#: What the status of raw evidence says.
RAW = "raw"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the list: a capsule, or the raw files of one job, whose ``status`` is ``RAW``.

    Attributes:
        path: the capsule, or the first of the raw files; all of them are ``files`` where they are several.
        trigger: what ended the recording; of raw files their format.
        changed: Unix seconds of the last write.
        problem: why it cannot be read, in one line.
    """

    path: str
    name: str
    id: str = ""
    title: str = ""
    status: str = ""
    phase: str = ""
    trigger: str = ""
    message: str = ""
    step: int | None = None
    changed: float = 0.0
    incident: str = ""
    problem: str = ""
    files: tuple[str, ...] = ()
