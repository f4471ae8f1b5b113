"""Calls on disk before they are made: a call may end its process on the spot.

Gloo aborts the process that receives more than it expects, without a handler getting a turn. A few calls, each in a
place of its own in one file, are what is left of them then; a clean end removes the file.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from ..lines import encode_line
from ..storage import make_directory
from ..underway import PLACE, PLACES, RELATIVE


class Journal:
    """The file. It is written by ``pwrite``: a full disk is an error here, and not a signal as with mapped memory.

    Args:
        directory: of the rank.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / RELATIVE
        make_directory(path.parent)
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._calls = 0

    def begin(self, record: dict[str, Any]) -> int:
        """Write a call that is about to be made; returns its number."""
        self._calls += 1
        self.put(self._calls, record)
        return self._calls

    def put(self, number: int, record: dict[str, Any]) -> None:
        """Write a call again, with what has become of it."""
        if self._descriptor < 0 or number <= self._calls - PLACES:
            return
        record = record | {"call": number}
        while len(line := encode_line(record)) > PLACE:
            record = _shorter(record)
        try:
            os.pwrite(self._descriptor, line.ljust(PLACE, b"\n"), (number - 1) % PLACES * PLACE)
        except OSError:  # a full disk: what has been written stays
            self._leave()

    def close(self) -> None:
        """All that it held is in the stream."""
        self._leave()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()

    def _leave(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _shorter(record: dict[str, Any]) -> dict[str, Any]:
    """Without what takes most: the outer half of the frames, or a field (half of one would be another statement)."""
    name = max(record, key=lambda each: len(encode_line({each: record[each]})))
    rest = {each: value for each, value in record.items() if each != name}
    frames = record[name][: len(record[name]) // 2] if name == "frames" else ()
    return rest | ({"frames": frames} if frames else {})
