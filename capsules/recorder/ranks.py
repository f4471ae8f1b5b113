"""What one of several ranks did: its collectives, its account of time and samples, and how it ended.

Nothing here asks the other ranks for anything: no collective, no store that may wait. Of a hang they tell each other
by a file in the capsule's directory.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from torch import nn

from ..process import host
from ..storage import TEMPORARY
from ..writer import CapsuleWriter
from . import checksums
from .calls import frames_of
from .collectives import Collectives
from .operation import Operation
from .triggers import Trigger
from .watchdog import TICK, Watchdog
from .window import Window

log = logging.getLogger("llmconsole.recorder")

#: Accounts in the stream before it is cut to the last one; each window appends one, so that a kill loses none.
MOST_ACCOUNTS = 1000
#: Seconds for which a collective may be under way before it counts as a hang, where half its time-out is not less. A
#: rank may well write a checkpoint or evaluate for minutes while the others wait; torch gives up after 600 or 1,800 s.
HANG_AFTER = 300.0
#: Seconds without a heartbeat after which the watchdog renews it: a long step is no dead process.
HEARTBEAT_EVERY = 10.0
#: Looks at a good end, and seconds between two: Gloo's threads tell torch a moment after the call that it is over.
LOOKS_AT_END, BETWEEN_LOOKS = 10, 0.01
#: The file that says that a rank hangs, no evidence.
FLAG = f"{TEMPORARY}hang"

Attempt = Callable[[str, Callable[[], None]], None]


class Ranks:
    """The part of the recorder that a job of several processes has.

    Args:
        writer: of the capsule.
        attempt: runs a part of the recording and disables it where it raises.
        window: the window that is open, if one is.
        carry: what takes a trigger over into the heartbeat, or with None the last one back.
        model: whose replicas are compared.
        hang_after: seconds, see ``HANG_AFTER``; None for the default.
    """

    def __init__(
        self,
        writer: CapsuleWriter,
        attempt: Attempt,
        window: Callable[[], Window | None],
        carry: Callable[[Trigger | None], None],
        model: nn.Module,
        hang_after: float | None,
    ) -> None:
        self._writer = writer
        self._attempt = attempt
        self._window = window
        self._carry = carry
        self._model = model
        self._hang_after = hang_after = _seconds(hang_after)
        self._collectives = Collectives(writer, self._mark)
        self._host = host()
        self._accounts = 0
        self._steps = 0
        self._step = 0
        self._samples = 0
        self._inside = 0.0  # seconds in collectives up to the end of the last window
        self._means = Means()
        self._exit: dict[str, Any] | None = None
        self.remark: str | None = None  # on an end that is none of an error
        self._hung: Operation | None = None
        self._told = False  # of the hang of another rank
        self._flag = writer.path / FLAG
        self._beaten = time.monotonic()
        self._main = threading.main_thread().ident
        self._closed = False
        #: What to do after a signal was recorded that the job's own thread cannot deal with.
        self.unheard: Callable[[str], None] = lambda name: None
        tick = TICK if hang_after is None else min(TICK, max(hang_after / 4, 0.05))
        self._watchdog = Watchdog(self._look, self._signalled, tick)
        self._collectives.calls.install()

    def reductions(self) -> int:
        """Reductions that were called from Python so far."""
        return self._collectives.calls.reductions

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
        self._steps, self._step = self._steps + 1, window.step
        self._samples += sum(len(micro.row_digests) for micro in window.micros)
        if self._steps == 1:
            self._attempt("ranks", lambda: self._write_event("log", level="info", message=self._collectives.coverage()))
        else:  # the first one warms up
            self._means.add(values["step_time"] - communication, communication, values["data_time"])
        began = window.micros[0].began if window.micros else time.time()
        self._attempt("collectives", lambda: self._collectives.window(began, window.step))
        if self._hung is not None:
            self._attempt("ranks", self._recovered)
        self._attempt("ranks", self._account)
        # Also after 1, 2, 4, 8 … windows: a short run has few that are due. Never at the end, where a rank may have
        # made something else of its model to save it.
        if window.stepped and (window.due or self._steps & (self._steps - 1) == 0):
            self._attempt("checksums", lambda: self._checksums(window))

    def _checksums(self, window: Window) -> None:
        records = checksums.of_model(self._model, window.step)
        if window.micros:
            records += checksums.of_random(window.micros[0], window.step)
        self._writer.records("checksums", records)

    def _account(self) -> None:
        record: dict[str, Any] = {"t": time.time(), "host": self._host, "steps": self._steps, "step": self._step}
        record |= {"samples_seen": self._samples} if self._samples else {}
        record |= {name: numbers for name, numbers in self._collectives.numbers().items() if numbers}
        record |= self._means.milliseconds()
        record |= {"exit": self._exit} if self._exit is not None else {}
        self._accounts += 1
        if self._accounts % MOST_ACCOUNTS == 0:
            self._writer.rewrite("ranks", [record])
        else:
            self._writer.record("ranks", record)

    # -- from the watchdog's thread

    def _look(self) -> None:
        if self._closed:
            return
        if (mark := self._mark()) is not None:
            self._step = mark[1]
        if time.monotonic() - self._beaten > HEARTBEAT_EVERY:
            self._beaten = time.monotonic()
            self._writer.heartbeat()
        self._collectives.between()
        if self._hung is None and (late := self._collectives.late(self._hang_after or HANG_AFTER, self._hang_after)):
            self._hangs(*late)
        elif self._hung is None and self._flag.exists() != self._told:
            self._told = not self._told
            if self._told:
                self._write_state("another rank waits for ranks that did not come; this rank was here")

    def _hangs(self, operation: Operation, seconds: float) -> None:
        row = operation.row(None)
        words = f"{row.get('op')} number {operation.seq} of group {operation.name!r} is under way since {seconds:.0f} s"
        self._hung, self._told = operation, True
        self._exit = self._exit or {"kind": "hang", "t": time.time(), "message": words}
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self._flag, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        self._carry(Trigger("hang", self._step, self._writer.rank, str(row.get("op")), round(seconds, 1), words))
        self._write_state(f"hang: {words}")

    def _recovered(self) -> None:
        """It was slow, not stuck: what was said of a hang is taken back."""
        self._collectives.collect(wait=1.0)
        operation, self._hung = self._hung, None
        self._exit = None if self._exit is not None and self._exit["kind"] == "hang" else self._exit
        self._flag.unlink(missing_ok=True)
        self._told = False
        seconds = time.time() - operation.created if operation is not None else 0.0
        self._write_event("log", level="warning", message=f"the collective went on; begun {seconds:.0f} s ago")
        self._carry(None)

    def _signalled(self, name: str) -> None:
        if self._closed:
            return
        self.ends("signal", name)
        self._carry(Trigger("signal", self._step, self._writer.rank, name, message=f"received {name}"))
        self._write_state(f"received {name} while the job's own thread was not to be reached")
        self.unheard(name)

    def _write_state(self, words: str) -> None:
        """What this rank is at: operations under way, and the stack of the job's thread."""
        self._collectives.collect(everything=True, wait=2.0)
        frames = frames_of(sys._current_frames().get(self._main or 0))  # pyright: ignore[reportPrivateUsage]
        self._account()
        self._write_event("log", level="error", message=words)
        self._write_event("stack", message=words, thread="main", frames=frames)

    def _write_event(self, kind: str, **fields: Any) -> None:
        about = {"kind": kind, "step": self._step, "t": time.time(), "logger": "llmconsole.recorder"}
        self._writer.record("events", about | fields)

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

    def close(self) -> None:
        """Write what is left, the operations under way among it. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        said = {"message": self.remark} if self.remark else {}
        self._exit = self._exit or {"kind": "ok", "t": time.time(), **said}
        done: list[bool] = []
        self._attempt("collectives", lambda: done.append(self._collect_all()))
        if self._collectives.lost:
            self._attempt("ranks", lambda: self._write_event("log", level="info", message=self._collectives.coverage()))
        self._attempt("ranks", self._account)
        self.stop(collected=done == [True])

    def _collect_all(self) -> bool:
        done = self._collectives.collect(everything=True, wait=5.0)
        for _ in range(LOOKS_AT_END):
            if self._exit is None or self._exit["kind"] != "ok" or self._collectives.oldest() is None:
                break
            time.sleep(BETWEEN_LOOKS)
            done = self._collectives.collect(everything=True, wait=5.0)
        if self._hung is not None and not self._collectives.failed and self._collectives.oldest() is None:
            self._recovered()
            self._exit = self._exit or {"kind": "ok", "t": time.time()}
        return done

    def _mark(self) -> tuple[float, int] | None:
        window = self._window()
        return None if window is None or not window.micros else (window.micros[0].began, window.step)

    def stop(self, collected: bool = False) -> None:
        """Look at nothing any more."""
        self._closed = True
        self._collectives.close(collected)
        self._watchdog.stop()


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


def _seconds(given: Any) -> float | None:
    """What the job asked for, None for the default where that is no length of time."""
    if given is None:
        return None
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = 0.0
    if seconds > 0 and math.isfinite(seconds):
        return seconds
    log.warning("hang_after=%.60r is no number of seconds above 0; the default holds", given)
    return None
