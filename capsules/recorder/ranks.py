"""What one of several ranks did: its collectives, its account of time and samples, and how it ended.

Nothing here asks the other ranks for anything: no collective, no store that may wait.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from ..process import host
from ..writer import CapsuleWriter
from .collectives import Collectives
from .window import Window

#: Accounts in the stream before it is cut to the last one; each window appends one, so that a kill loses none.
MOST_ACCOUNTS = 1000

Attempt = Callable[[str, Callable[[], None]], None]


class Ranks:
    """The part of the recorder that a job of several processes has.

    Args:
        writer: of the capsule.
        attempt: runs a part of the recording and disables it where it raises.
    """

    def __init__(self, writer: CapsuleWriter, attempt: Attempt) -> None:
        self._writer = writer
        self._attempt = attempt
        self._collectives = Collectives(writer)
        self._host = host()
        self._accounts = 0
        self._steps = 0
        self._samples = 0
        self._inside = 0.0  # seconds in collectives up to the end of the last window
        self._means = Means()
        self._exit: dict[str, Any] | None = None
        self._closed = False
        self._collectives.calls.install()

    # -- windows

    def window(self, window: Window, values: dict[str, float]) -> None:
        """A window has ended: its scalars get ``communication_time``, and what the rank did is written.

        Args:
            window: that was read.
            values: its scalars, ``step_time`` and ``data_time`` among them.
        """
        inside = self._collectives.calls.seconds
        communication = inside - self._inside + window.reduction_wait
        self._inside = inside
        values["communication_time"] = communication
        self._steps += 1
        self._samples += sum(len(micro.row_digests) for micro in window.micros)
        if self._steps > 1:  # the first one warms up
            self._means.add(values["step_time"] - communication, communication, values["data_time"])
        began = window.micros[0].began if window.micros else time.time()
        self._attempt("collectives", lambda: self._collectives.window(began, window.step))
        self._attempt("ranks", lambda: self._account(window.step))

    def _account(self, step: int | None) -> None:
        record: dict[str, Any] = {"t": time.time(), "host": self._host, "steps": self._steps}
        record |= {"step": step} if step is not None else {}
        record |= {"samples_seen": self._samples} if self._samples else {}
        record |= {name: numbers for name, numbers in self._collectives.numbers().items() if numbers}
        record |= self._means.milliseconds()
        record |= {"exit": self._exit} if self._exit is not None else {}
        self._accounts += 1
        if self._accounts % MOST_ACCOUNTS == 0:
            self._writer.rewrite("ranks", [record])
        else:
            self._writer.record("ranks", record)

    # -- the end

    def ends(self, kind: str, message: str | None, since: float | None = None) -> None:
        """Something ends this rank, or may: the account says so from now on; the first reason stays.

        Args:
            kind: oom, exception or signal.
            message: in words.
            since: Unix seconds at which the backward began out of which the error came, where it did.
        """
        if self._exit is None:
            self._exit = {"kind": kind, "t": time.time()} | ({"message": message} if message else {})
        if since is not None:
            self._attempt("collectives", lambda: self._collectives.failed_since(since))

    def goes_on(self) -> None:
        """The loop has caught what was to end it."""
        self._exit = None

    def close(self, step: int) -> None:
        """Write what is left, the operations under way among it. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._exit = self._exit or _uncaught() or {"kind": "ok", "t": time.time()}
        self._attempt("collectives", self._collect_all)
        self._attempt("ranks", lambda: self._account(step))
        self.stop()

    def _collect_all(self) -> None:
        self._collectives.collect(everything=True, wait=5.0)

    def stop(self) -> None:
        """Look at nothing any more."""
        self._closed = True
        self._collectives.calls.close()


class Means:
    """Seconds of computing, communicating and waiting for data, and their means."""

    def __init__(self) -> None:
        self._sums = [0.0, 0.0, 0.0]
        self._windows = 0

    def add(self, compute: float, communication: float, data: float) -> None:
        """One window more."""
        self._windows += 1
        for at, value in enumerate((compute, communication, data)):
            self._sums[at] += max(value, 0.0)

    def milliseconds(self) -> dict[str, float]:
        """The means by their names in a record; nothing before there is one."""
        names = ("compute_ms", "communication_ms", "data_ms")
        if not self._windows:
            return {}
        return {name: 1e3 * total / self._windows for name, total in zip(names, self._sums, strict=True)}


def _uncaught() -> dict[str, Any] | None:
    """The exception that ends the interpreter, where one does: it was printed before anything at exit runs."""
    error = getattr(sys, "last_value", None)
    if not isinstance(error, Exception):
        return None
    from .finish import said_by

    return {"kind": "exception", "message": f"{type(error).__name__}: {said_by(error)}"[:2000], "t": time.time()}
