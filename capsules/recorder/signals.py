"""Records before a signal ends the process, and then lets it do what it would have done."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Signals:
    """Handlers in front of the ones that were there.

    A signal that the job ignores stays ignored, and outside the main thread nothing can be installed. While the
    recorder itself is at work the signal waits for it to finish, so that no write is cut in two.
    """

    def __init__(self, record: Callable[[str, bool], None]) -> None:
        """``record`` takes the signal's name and whether it will end the process; it must not raise."""
        self._record = record
        self._previous: dict[int, Any] = {}
        self._waiting: list[int] = []
        self._busy = 0
        if threading.current_thread() is not threading.main_thread():
            return
        for number in WATCHED:
            previous = signal.getsignal(number)
            if previous is not None and previous is not signal.SIG_IGN:  # None: installed from C, cannot be chained
                self._previous[number] = previous
                signal.signal(number, self._handle)

    def close(self) -> None:
        """Put the earlier handlers back; where someone has installed one over ours, ours only passes on."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle and threading.current_thread() is threading.main_thread():
                signal.signal(number, previous)
        self._record = _ignore

    def deadly(self, name: str) -> None:
        """End the process by a signal that has come and whose handler gets no turn, as it would have ended without us.

        For any thread. Python runs handlers in the main thread only; while that one waits in C for another rank, our
        handler would keep the process alive that the default action ends at once. What the job handles itself stays.
        """
        number = signal.Signals[name]
        if self._busy or self._previous.get(number) is not signal.SIG_DFL:
            return
        ctypes.CDLL(None).signal(int(number), None)  # SIG_DFL; Python lets only the main thread say so
        os.kill(os.getpid(), number)

    def __enter__(self) -> None:
        self._busy += 1

    def __exit__(self, *error: object) -> None:
        self._busy -= 1
        while self._waiting and not self._busy:
            self._handle(self._waiting.pop(0), None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._busy:
            self._waiting.append(number)
            return
        previous = self._previous[number]
        self._record(signal.Signals(number).name, previous is signal.SIG_DFL)
        if callable(previous):
            previous(number, frame)
        elif previous is signal.SIG_DFL:
            # The default action can only be had by taking our handler away and sending the signal again.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _ignore(name: str, final: bool) -> None:
    """What a signal means to a recorder that is closed."""
