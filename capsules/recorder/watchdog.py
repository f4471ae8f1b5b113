"""A thread that looks at a job of several ranks from aside, and writes while the job's own thread cannot.

A rank that waits for another inside a collective runs no Python: neither its loop nor its handlers of signals get a
turn before the launcher kills it. This thread sees the wait, the flag that another rank has put into the capsule, and
signals, whose numbers the interpreter writes into a pipe the moment they come.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable

log = logging.getLogger("llmconsole.recorder")

#: Seconds between two looks.
TICK = 1.0
#: Seconds that the job's own thread has to deal with a signal before this one writes in its place.
GRACE = 2.0
_ENDING = {int(signal.SIGTERM): "SIGTERM", int(signal.SIGINT): "SIGINT"}


class Watchdog:
    """The thread and the pipe that wakes it. It ends with the process, and is not there in forked children.

    Args:
        look: called every tick.
        signalled: called with the name of a signal that the job's own thread has not dealt with in time.
        tick: seconds between two looks.
    """

    def __init__(self, look: Callable[[], None], signalled: Callable[[str], None], tick: float = TICK) -> None:
        self._look = look
        self._signalled = signalled
        self._tick = tick
        self._stopped = False
        self._came: tuple[float, str] | None = None
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakes = _take_signals(self._writing)
        _all.add(self)
        self._thread = threading.Thread(target=self._run, name="llmconsole watchdog", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # as many threads as there may be
            self._stopped = True
            self.leave_signals()
            os.close(self._reading)
            os.close(self._writing)
            raise

    def stop(self) -> None:
        """Let the thread end; waits for nothing."""
        if not self._stopped:
            self._stopped = True
            self.leave_signals()
            with contextlib.suppress(OSError):
                os.write(self._writing, b"\0")

    def leave_signals(self) -> None:
        """Have signals wake nobody any more."""
        if self._wakes and threading.current_thread() is threading.main_thread():
            self._wakes = False
            current = signal.set_wakeup_fd(-1)
            if current not in (-1, self._writing):  # somebody has taken the place since
                signal.set_wakeup_fd(current, warn_on_full_buffer=False)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        try:
            while not self._stopped:
                if poll.poll(self._tick * 1000):
                    self._note(os.read(self._reading, 4096))
                if not self._stopped:
                    self._turn()
        except Exception as error:  # the job goes on without being watched
            log.warning("no longer watching for hangs: %s: %s", type(error).__name__, error)
        finally:
            while not self._stopped:  # the pipe must stay as long as signals are written into it
                time.sleep(self._tick)
            os.close(self._reading)
            os.close(self._writing)

    def _note(self, numbers: bytes) -> None:
        for number in numbers:
            if number in _ENDING:
                self._came = time.monotonic(), _ENDING[number]

    def _turn(self) -> None:
        if self._came is not None and time.monotonic() - self._came[0] >= GRACE:
            name, self._came = self._came[1], None
            self._signalled(name)
        self._look()


def _take_signals(descriptor: int) -> bool:
    """Have the interpreter write the numbers of signals there, unless somebody else has them (an event loop)."""
    if threading.current_thread() is not threading.main_thread():
        return False
    before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
    return before == -1


_all: weakref.WeakSet[Watchdog] = weakref.WeakSet()


def _in_child() -> None:
    """A signal to a forked child (a data loader's worker) is none to its parent, with whom it shares the pipe."""
    for each in list(_all):
        each.leave_signals()


os.register_at_fork(after_in_child=_in_child)
