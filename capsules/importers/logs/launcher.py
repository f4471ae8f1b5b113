"""What launchers say of ranks that failed: torchrun's summary of who ended how, and when; DeepSpeed and mpirun."""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable
from typing import Any

from .log import Log, count

#: Names are padded to ten signs, which a configuration's are not.
_FIELD = re.compile(r"^\s{1,20}(?=[a-z ]{10}: )(rank|exitcode|host|time) {2,6}: (.*)$")
_RANK = re.compile(r"(\d{1,9}) \(local_rank: \d{1,9}\)")
_PID = re.compile(r"\(pid: (\d{1,18})\)")
_EXIT = re.compile(r"(-?\d{1,6})\b(?:.*\((SIG[A-Z0-9]{1,12})\))?")
#: One line a process: DeepSpeed names the local rank in its arguments, mpirun the rank.
_DEEPSPEED = re.compile(
    r"sigkill_handler\].{0,4000}--local_rank=(\d{1,6})\b.{0,4000}exits with return code = (-?\d{1,6})"
)
_MPIRUN = re.compile(r"process rank (\d{1,6}) with PID \d{1,18} on node \S{1,200} exited on signal (\d{1,3})\b")
#: What a negative code, or one beyond 128, is: the signal that ended the process, though a summary may not name it.
_SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    11: "SIGSEGV",
    15: "SIGTERM",
}
_FAULTS = (-4, -6, -7, -8, -11, 132, 134, 135, 136, 139)
_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)[_ T](\d\d):(\d\d):(\d\d)")


class Launcher:
    """Reads it. A rank's exit is written at the end, when it is known whether it ran out of memory or waited.

    Attributes:
        rank: the rank that the summary speaks of now; None outside one.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self.rank: int | None = None
        self._before: dict[str, Any] = {}
        self._exits: dict[int, dict[str, Any]] = {}
        self._out_of_memory: set[int] = set()
        self._ranks: dict[int, int] = {}
        self._attempt = 0

    def ran_out(self, rank: int) -> None:
        """A rank ran out of memory."""
        self._begun()
        self._out_of_memory.add(rank)

    def rank_of(self, process: int | None) -> int | None:
        """The rank that a process was, where the summary names both."""
        return None if process is None else self._ranks.get(process)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that the summary of the last attempt speaks of."""
        self._begun()
        return tuple(self._exits)

    @property
    def failed(self) -> tuple[int, ...]:
        """The ranks that ended with a code of their own, as an exception does, and were not stopped by a signal."""
        return tuple(rank for rank, said in self._exits.items() if 0 < (said.get("code") or 0) < 128)

    @property
    def aborted(self) -> tuple[int, ...]:
        """The ranks that ended by SIGABRT, as an error of C++ does that nobody catches."""
        return tuple(rank for rank, said in self._exits.items() if said.get("code") in (-6, 134))

    @property
    def faulted(self) -> tuple[int, ...]:
        """The ranks that ended by a signal of their own fault: SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT."""
        return tuple(rank for rank, said in self._exits.items() if said.get("code") in _FAULTS)

    def take(self, line: str) -> bool:
        """Use one line of a summary."""
        found = _FIELD.match(line)
        if found is None:
            return self._of_one_line(line)
        self._begun()
        field, text = found[1], found[2].strip()
        if field == "rank":
            named = _RANK.match(text)
            rank = count(named[1]) if named else None
            self._log.attempts.launcher_ended(rank)
            self._begun()
            if rank is not None:
                self._exits.setdefault(rank, {}).update(self._before)
            self.rank, self._before = rank, {}
            return rank is not None
        if field in ("time", "host"):  # printed before the rank
            value = _seconds(text) if field == "time" else text[:200]
            self._before[field] = value
            return value is not None
        if self.rank is None:
            return False
        if field == "exitcode":
            ended = _EXIT.match(text)
            self._exits[self.rank].update(code=int(ended[1]) if ended else None, signal=ended[2] if ended else None)
            if (process := _PID.search(text)) is not None:
                self._ranks[int(process[1])] = self.rank
            message, time = f"exit code {text}"[:200], self._exits[self.rank].get("time")
            self._log.incident("log", rank=self.rank, level="error", logger="torchrun", message=message, t=time)
        return True

    def close(self, timed_out: Callable[[int], bool]) -> None:
        """The log ends here; ``timed_out`` says of a rank whether its watchdog gave up."""
        self._begun()
        for rank, said in self._exits.items():
            code = said.get("code")
            if code is None:
                continue
            kind = "ok" if code == 0 else "exception" if 0 < code < 128 else "signal"
            if rank in self._out_of_memory:
                kind = "oom"
            elif kind == "signal" and code not in (-9, -15, 137, 143) and timed_out(rank):
                kind = "hang"
            signal = said.get("signal") or _SIGNALS.get(-code if code < 0 else code - 128)
            message = f"exit code {code}" + (f" ({signal})" if signal else "")
            ended = {"kind": kind, "message": message, "t": said.get("time")}
            left = {name: value for name, value in ended.items() if value is not None}
            self._log.run.record("ranks", {"host": said.get("host"), "exit": left}, rank)

    def _of_one_line(self, line: str) -> bool:
        """One process and its exit; a local rank is none of the job's where several machines print."""
        if "exit" not in line:
            return False
        deepspeed, mpirun = _DEEPSPEED.search(line), _MPIRUN.search(line)
        if deepspeed is not None:
            rank, code = int(deepspeed[1]), int(deepspeed[2])
        elif mpirun is not None:
            rank, code = int(mpirun[1]), -int(mpirun[2])
        else:
            return False
        told = None if mpirun is not None or not self._log.machines else False
        self._begun()
        self._log.attempts.launcher_ended()
        signal, time = _SIGNALS.get(-code), self._log.time(line)
        if told is None:
            self._exits.setdefault(rank, {"code": code, "signal": signal, "time": time})
        message = f"exit code {code}" + (f" ({signal})" if signal else "")
        message += "" if told is None else f", local rank {rank} on {self._log.machine}"
        said: dict[str, Any] = {"level": "error", "logger": "launcher", "message": message, "t": time, "told": told}
        self._log.incident("log", rank=rank if told is None else self._log.home, **said)
        return True

    def _begun(self) -> None:
        """Forget the ends of the ranks in an attempt that another one followed."""
        if self._attempt != self._log.attempts.first:
            self._attempt = self._log.attempts.first
            self._exits.clear()
            self._out_of_memory.clear()
            self.rank = None


def _seconds(text: str) -> float | None:
    """Unix seconds of ``2026-11-30_07:25:26``; the launcher names no time zone: read as UTC, like a log's lines."""
    found = _TIME.match(text)
    if found is None:
        return None
    try:
        return float(calendar.timegm(tuple(int(each) for each in found.groups())))  # pyright: ignore[reportArgumentType]
    except (ValueError, OverflowError):
        return None
