"""Attempts of a job in one log: what ended one after which training went on is past, and the last one decides.

Errors reach a log at once, and standard output in blocks: steps that are printed behind an error may be older than it.
A job went on where the steps go back, where more of them follow than a block holds, or where the launcher had ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from ..run import Run

#: Lines of steps that one block of standard output holds at most: 8 KiB of 55 bytes each.
_IN_A_BLOCK = 150
#: Times that steps go back in one attempt from which on it is several ranks that print the same steps in turn.
_INTERLEAVED = 2
#: Steps after the launcher's last word that are no stray line.
_STEADY = 2
#: Stands for the last step of a rank that has reported none.
_NO_STEP = -1
#: Events that wait for what comes after them.
_MOST_HELD = 4096


class Attempts:
    """Holds back the events of how a job ended, until the log ends or training went on.

    After the summary of a launcher a new stretch of the log begins. It is another attempt as soon as a rank that the
    summary has ended says a word of its end: a launcher of another machine may print its own while ranks still wait.

    Attributes:
        number: of the stretch that is read now, from 0 on.
        first: of the stretch with which the attempt began that is read now.
        restarts: how often the job surely began anew; it may also have lived on, with an error that it dealt with.
        closing: called before another stretch begins: what waits for more lines belongs to the one before.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.number = self.first = self.restarts = 0
        self.closing: list[Callable[[], None]] = []
        self._held: deque[tuple[int, int | None, str, int, dict[str, Any]]] = deque()
        self._stopped = self._launcher_ended = self._apart = False
        self._last = self._newest = -1
        self._after = self._backs = 0
        self._ended: set[int] = set()  # the ranks of a launcher's summary
        self._steps: dict[int | None, int] = {}  # of this attempt, the last step by the rank that printed it
        self._reported: dict[int | None, int] = {}  # the same, of all attempts; None where no line says who

    def event(
        self,
        kind: str,
        rank: int,
        attempt: int | None = None,
        *,
        of_life: bool = False,
        alive: int | None = None,
        **fields: Any,
    ) -> None:
        """An event of the stretch that is read now, or of ``attempt``.

        Where there are several attempts, ``past`` says whether another one followed its own. One ``of_life`` of the
        processes is past only where these began anew. An error is ``uncaught`` where its rank has reported no step
        since ``alive`` was its sign of life.
        """
        life = self.restarts if of_life else None
        fields["uncaught"] = alive
        self._held.append((self.number if attempt is None else attempt, life, kind, rank, fields))
        if len(self._held) > _MOST_HELD:
            self._write(*self._held.popleft())

    def alive(self, rank: int) -> int | None:
        """A sign of life of a rank that says who it is; None where later lines could not tell whether it lives on."""
        return self._reported.get(rank, _NO_STEP if self._reported.keys() <= {None} else None)

    def stopped(self, rank: int | None) -> None:
        """Something was printed by which an attempt ends: by ``rank`` where that is told."""
        if self._ended:
            if not self._apart:
                self._close_stretch()
                self._apart = True
            if rank in self._ended:
                self._another(self.number)
        self._stopped, self._after, self._newest = True, 0, self._last

    def launcher_ended(self, rank: int | None = None) -> None:
        """The process that outlives all others says that it ends, or that a rank did."""
        if rank is not None:
            if self._apart and rank in self._ended:
                self._another(self.number)
            self._ended.add(rank)
        self._stopped, self._after, self._newest, self._launcher_ended = True, 0, self._last, True

    def reached(self, step: int, who: int | None) -> None:
        """A step was reported, by the rank ``who`` where the line tells: each goes back against its own steps only."""
        self._reported[who] = step
        back = step < self._steps.get(who, step) - 1
        if not (back or self._stopped):
            self._steps[who] = self._last = step
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
        self._steps[who] = self._last = step

    def begin(self, *, anew: bool = True) -> None:
        """Another attempt has begun: all that was printed of how the ones before ended is past."""
        self._close_stretch()
        self._another(self.number, anew=anew)
        self._stopped = False
        self._steps.clear()

    def close(self) -> None:
        """The log ends here."""
        while self._held:
            self._write(*self._held.popleft())

    def _close_stretch(self) -> None:
        for each in self.closing:
            each()
        self.number += 1

    def _another(self, first: int, *, anew: bool = True) -> None:
        """Another attempt began with a stretch."""
        self.first = first
        self.restarts += anew
        self._launcher_ended, self._apart, self._backs = False, False, 0
        self._ended.clear()

    def _write(self, attempt: int, life: int | None, kind: str, rank: int, fields: dict[str, Any]) -> None:
        past = attempt < self.first if life is None else life < self.restarts
        alive = fields["uncaught"]
        fields["uncaught"] = True if alive is not None and alive == self._reported.get(rank, _NO_STEP) else None
        self._run.event(kind, rank=rank, past=past if self.first else None, **fields)
