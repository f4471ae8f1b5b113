"""Samples that a data loader leaves out, in the words of whoever wrote it: ``skipped sample: 12 < min_loss_tokens 32``.

A rank that leaves out more than others runs fewer steps: each line is an event, and the count goes to ``ranks``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .log import Log, count

FORMAT = ""
NEEDED = b"kipp"
SIGN = rb"\b[Ss]kipp(?:ed|ing) (?:sample|micro-?batch|batch)\b[^\n]{0,80}\d"

_THING = r"(?:micro-?batch|mini-?batch|batch|sample|example|sequence|row|document|instance|item|record|conversation)"
_LEFT_OUT = re.compile(
    r"\b(?:[Ss]kipp(?:ed|ing)|SKIPP(?:ED|ING)|[Dd]ropp(?:ed|ing)|[Dd]iscard(?:ed|ing)|[Ff]ilter(?:ed|ing) out)"
    rf"\s+(?:(\d{{1,12}})\s+)?(?:(?!first\b|next\b|last\b|already\b|to\b|optimizer\b|no\b)[a-z][\w-]{{0,20}}\s+)?{_THING}"
    r"(?:es|s)?\b(?!\s*(?:size|norm|dim|loss))"
)
#: A skip that belongs to a resume, or is announced and not done.
_NOT_ONE = re.compile(
    r"\b(?:first|resum|fast[- ]forward|will skip|no samples|drop_last|if |already trained)", re.IGNORECASE
)
#: A count of all so far, not another one: ``skipped samples: 3 |``.
_COUNTER = re.compile(r"(?<=s)\s*[:=]\s*\d+\s*(?:[,|]|$)")
_IGNORED = re.compile(r"This instance will be ignored in loss calculation")
_REASON = re.compile(r"(?:[:;—–-]|\(|\bbecause\b|\bdue to\b|\bsince\b|\bas\b)\s*(.{3,200})")
#: Who left it out, where the line says so further in. The rank within a group, or of a node, is none of the job's.
_BY_RANK = re.compile(
    r"(?:^|[^\w\s-]\s{0,3}|\b(?:on|by|from|of|for|at|global|info|warning|debug)[ _])rank[ _=:#-]{0,2}(\d{1,6})\b",
    re.IGNORECASE,
)
#: Events of one rank that are kept.
_MOST = 1000


@dataclass
class _LeftOut:
    """What one rank left out; ``told`` is false where nothing says which rank it was."""

    reason: str
    told: bool
    number: int = 0


class Lines:
    """Counts them a rank."""

    open = False
    marks = (b"kipp", b"KIPP", b"ropp", b"iscard", b"iltered out", b"iltering out", b"ignored in loss")

    def __init__(self, log: Log) -> None:
        self._log = log
        self._left_out: dict[tuple[int, bool], _LeftOut] = {}
        self._life = 0

    def take(self, line: str) -> bool:
        """Use one line."""
        found = _LEFT_OUT.search(line)
        if found is None and _IGNORED.search(line) is None:
            return False
        if found is not None and (_NOT_ONE.search(line) or _COUNTER.match(line, found.end())):
            return False
        number = count(found[1]) if found is not None and found[1] else 1
        reason = _REASON.search(line, found.end()) if found is not None else None
        words = reason[1].strip(" ).") if reason else line.strip()[:200]
        rank, told = self._who(line)
        self._begun()
        said = self._left_out.setdefault((rank, told), _LeftOut(words, told))
        if said.number < _MOST:
            fields: dict[str, Any] = {"level": "info", "logger": "data", "samples_skipped": number}
            fields |= {"told": None if told else False, "message": line.strip()[:500]}
            fields |= {"step": self._log.step, "t": self._log.time(line)}
            self._log.attempts.event("log", rank, of_life=True, **fields)
        said.number = min(said.number + (number or 0), 2**53)
        return True

    def close(self) -> None:
        """The log ends here: in that of one rank nobody else can have left anything out."""
        self._begun()
        for (rank, told), said in self._left_out.items():
            if told or not self._log.run.several:
                self._log.run.record("ranks", {"samples_skipped": said.number, "skip_reason": said.reason}, rank)

    def _who(self, line: str) -> tuple[int, bool]:
        """The rank that left it out, and whether anything says so."""
        if self._log.anonymous and (named := _BY_RANK.search(line)) is not None:
            return int(named[1]), True
        return self._log.rank, not self._log.anonymous

    def _begun(self) -> None:
        """Forget what processes left out that others followed."""
        if self._life != self._log.attempts.restarts:
            self._life = self._log.attempts.restarts
            self._left_out.clear()
