"""Checkpoints saved and loaded, in the words of the usual trainers."""

from __future__ import annotations

import re

from .log import Log, Stateless, count

FORMAT = ""
NEEDED = b""
SIGN = b""

_LOADED = re.compile(
    r"successfully loaded checkpoint\b|\b(?:[Ll]oading|[Ll]oaded|[Rr]esuming|[Rr]esumed)\b(?: \w+){0,3}? "
    r"(?:checkpoint|training from|model from|from step|from checkpoint)\b"
)
_SAVED = re.compile(
    r"successfully saved checkpoint\b|\b(?:[Ss]aving|[Ss]aved)\b(?: \w+){0,2}? checkpoint\b|\b[Cc]heckpoint saved\b"
)
_STEP = re.compile(r"(?:at|from|for) (?:iteration|step)\s+(\d+)|(?:checkpoint-|step[-_]?|iter_)(\d+)\b")
_PATH = re.compile(r"(?:\b(?:to|from)\b|checkpoint:) ['\"]?([\w.~-]*/[^\s'\",\[\]]{1,1000})")


class Lines(Stateless):
    """Reads them. A trainer announces and confirms; both are one event."""

    marks = (b"heckpoint", b"esuming", b"oading model from")

    def __init__(self, log: Log) -> None:
        self._log = log
        self._last: dict[tuple[str, int], int | None] = {}

    def take(self, line: str) -> bool:
        """Use one line."""
        kind = "checkpoint_loaded" if _LOADED.search(line) else "checkpoint_saved" if _SAVED.search(line) else ""
        if not kind:
            return False
        log = self._log
        found = _STEP.search(line)
        step = count(found[1] or found[2]) if found else None
        step = log.step if step is None else step
        path = _PATH.search(line)
        if self._last.get((kind, log.rank), -1) == step:
            return True
        self._last[kind, log.rank] = step
        log.event(kind, step=step, path=path[1].rstrip(".") if path else None, t=log.time(line))
        return True
