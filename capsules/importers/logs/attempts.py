"""Attempts of a job in one log: what ended one after which training went on is past, and the last one decides.

Errors reach a log at once, and standard output in blocks: steps that are printed behind an error may be older than it.
A job went on where the steps go back, where more of them follow than a block holds, or where the launcher had ended.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ..run import Run

#: Lines of steps that one block of standard output holds at most: 8 KiB of 55 bytes each.
_IN_A_BLOCK = 150
#: Times that steps go back in one attempt from which on it is several ranks that print the same steps in turn.
_INTERLEAVED = 2
#: Steps after the launcher's last word that are no stray line.
_STEADY = 2
#: Events that wait for what comes after them.
_MOST_HELD = 4096


class Attempts:
    """Holds back the events of how a job ended, until the log ends or training went on.

    Attributes:
        number: of the attempt that is read now, from 0 on.
        restarts: how often the job surely began anew; it may also have lived on, with an error that it dealt with.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.number = self.restarts = 0
        self._held: deque[tuple[int, int | None, str, int, dict[str, Any]]] = deque()
        self._stopped = self._launcher_ended = False
        self._last = self._newest = -1
        self._after = self._backs = 0

    def event(self, kind: str, rank: int, attempt: int | None = None, *, of_life: bool = False, **fields: Any) -> None:
        """An event of the attempt that is read now, or of ``attempt``; ``past`` is added where training went on.

        One ``of_life`` of the processes is past only where these began anew.
        """
        life = self.restarts if of_life else None
        self._held.append((self.number if attempt is None else attempt, life, kind, rank, fields))
        if len(self._held) > _MOST_HELD:
            self._write(*self._held.popleft())

    def stopped(self, launcher: bool = False) -> None:
        """Something was printed by which an attempt ends; ``launcher``: by the process that outlives all others."""
        self._stopped, self._after, self._newest = True, 0, self._last
        self._launcher_ended = self._launcher_ended or launcher

    def reached(self, step: int) -> None:
        """A step was reported."""
        back = step < self._last - 1
        if not (back or self._stopped):
            self._last = step
            return
        if self._stopped:
            self._after += step > self._newest
            self._newest = max(self._newest, step)
            steady = self._after >= (_STEADY if self._launcher_ended else _IN_A_BLOCK)
            anew = self._launcher_ended or (back and self._backs < _INTERLEAVED)
            if steady or (back and anew):
                self.begin(anew=anew)
                back = False
        self._backs += back
        self._last = step

    def begin(self, *, anew: bool = True) -> None:
        """Another attempt has begun: all that was printed of how the ones before ended is past."""
        self.number += 1
        self.restarts += anew
        self._stopped, self._launcher_ended, self._backs = False, False, 0

    def close(self) -> None:
        """The log ends here."""
        while self._held:
            self._write(*self._held.popleft())

    def _write(self, attempt: int, life: int | None, kind: str, rank: int, fields: dict[str, Any]) -> None:
        past = attempt < self.number if life is None else life < self.restarts
        self._run.event(kind, rank=rank, past=True if past else None, **fields)
