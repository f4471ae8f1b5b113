"""Errors that a process prints as it is torn down, without a traceback: NCCL's, over a few lines, and Python's own.

``… watchdog thread terminated with exception: NCCL error: remote process exited …``, then ``ncclRemoteError: …`` and
``Last error:`` with a line of its own; ``Fatal Python error: Segmentation fault``, then threads with their frames.
"""

from __future__ import annotations

import re
from typing import Any

from .log import Log

_NCCL = re.compile(r"thread terminated with exception: (?:\[[^\]]{0,200}\] )?(NCCL error: .*)")
_NCCL_MORE = re.compile(r"\s{0,8}(?:nccl\w{1,40}: |Last error:|[\w.]{1,60}: )")
_PYTHON = re.compile(r"Fatal Python error: (.{1,300})")
_THREAD = re.compile(r"\s{0,8}(Current t|T)hread 0x[0-9a-f]{1,32} .{0,80}\(most recent call first\):")
_FRAME = re.compile(r'\s{0,8}File "([^"]{1,1000})", line (\d{1,9}) in (\S{1,200})')
#: Lines that belong to one error, and signs of its words that are kept.
_LINES, _WORDS = 40, 2000


class LastWords:
    """Reads them: ``take`` gives an exception event when it is complete."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._event: dict[str, Any] | None = None
        self._left = 0
        self._inside = False

    @property
    def open(self) -> bool:
        """Whether an error has begun whose lines go on."""
        return self._event is not None

    def begins(self, line: str) -> dict[str, Any] | None:
        """An event that has just begun with a line, to be filled by the next ones; None where none does."""
        nccl, python = _NCCL.search(line), _PYTHON.match(line.lstrip())
        if nccl is None and python is None:
            return None
        said = nccl or python
        kind = "NCCL error" if nccl is not None else "Fatal Python error"
        message = "" if said is None else said[1].removeprefix("NCCL error: ").strip()
        self._event = {"step": self._log.step, "t": self._log.time(line), "type": kind, "message": message[:_WORDS]}
        self._left, self._inside = _LINES, False
        return self._event

    def goes_on(self, line: str) -> bool:
        """Whether a line belongs to the error that has begun."""
        event, self._left = self._event, self._left - 1
        if event is None:
            return False
        if event["type"] == "NCCL error" and _NCCL_MORE.match(line) is not None:
            event["message"] = f"{event['message']} {line.strip()}"[:_WORDS]
        elif event["type"] != "NCCL error" and (thread := _THREAD.match(line)) is not None:
            self._inside = thread[1].startswith("Current") or "frames" not in event
        elif event["type"] != "NCCL error" and (frame := _FRAME.match(line)) is not None:
            if self._inside and len(event.setdefault("frames", [])) < 24:
                event["frames"].append({"name": frame[3], "file": frame[1], "line": int(frame[2])})
        elif line.strip():
            self._event = None
            return False
        self._event = event if self._left else None
        return True
