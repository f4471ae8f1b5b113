"""What goes wrong in any program: tracebacks, out of memory, collectives that time out, signals and the launcher.

Each becomes an event. Judging them is the rules' work; here the evidence is kept, with the numbers that a text states.
"""

from __future__ import annotations

import re
from typing import Any

from .collectives import Collectives, sizes
from .last_words import LastWords
from .launcher import Launcher
from .log import Log
from .out_of_memory import parsed, phase_of
from .tracebacks import LONGEST, Trace, error_of

FORMAT = ""
NEEDED = b""
SIGN = (
    rb"Traceback \(most recent call last\):|out of memory\b.{0,200}Tried to allocate"
    rb"|ut of memory while trying to allocate \d|OOM when allocating tensor with shape|[Oo]ut of memory: Kill"
    rb"|Watchdog caught collective operation timeout|detected by watchdog at work|[Tt]imeout at NCCL work|NCCL WARN"
    rb"|ProcessGroup(?:NCCL|Gloo)|failed to pass monitoredBarrier|oom-kill:constraint|oom[-_]kill event"
    rb"|is running (?:inconsistent )?collective: CollectiveFingerPrint|op\.preamble\.length <= op\.nbytes"
    rb"|death signal, shutting down workers|sigkill_handler\][^\n]{0,4000}exits with return code = -?\d"
    rb"|mpirun noticed that process rank \d|slurmstepd: error: [^\n]{0,200}CANCELLED"
    rb"|Fatal Python error: [A-Z]|terminate called after throwing an instance of '"
)

_TRACEBACK = "Traceback (most recent call last):"
#: A process as the kernel names it.
_PROCESS = re.compile(r"\bpid[=: ]{1,2}'?(\d{1,18})\b")
_NCCL_RANK = re.compile(r"\[Rank (\d+)\]|\bRank (\d+)\]")
_SIGNS = (
    "NCCL WARN",
    "Heartbeat monitor timed out",
    "Some NCCL operations have failed or timed out",
    "DUE TO: CANCELLED",
    "slurmstepd: error",
    "srun: error",
    "Segmentation fault",
    "Bus error",
    "received SIGTERM",
    "Sending process",
    "death signal, shutting down workers",
    "forcefully exiting via",
    "Signal 9 (SIGKILL)",
    "CUDA error:",
    "Xid (",
)
#: What C++ prints of an error that nobody catches, in two lines.
_THROWN = re.compile(r"terminate called after throwing an instance of '([\w:<>]{1,120})'")
_WHAT = re.compile(r"\s{0,8}what\(\):\s{0,8}(\S.*)")
#: What Python prints above the traceback of an error that it goes on without.
_IGNORED = ("Exception ignored in", "--- Logging error ---", "Error in atexit", "Exception in thread")
#: What launchers raise in a process of their own.
_LAUNCHERS = ("ChildFailedError", "SignalException", "CalledProcessError", "RendezvousConnectionError")
#: Events that wait for the end of a log.
_MOST_UNCLAIMED = 1000


class Lines:
    """Reads them. Tracebacks of several ranks may be interleaved where a prefix tells the ranks apart."""

    marks = (
        b"Traceback (most recent call last):",
        b"Exception i",
        b"--- Logging error",
        b"ut of memory",
        b"ut-of-memory",
        b"atchdog",
        b"CCL",
        b"ollective",
        b"onitoredBarrier",
        b"Timed out waiting",
        b"eartbeat monitor",
        b"rror",
        b"SIG",
        b"CANCELLED",
        b"OOM",
        b"oom",
        b"fault",
        b"Xid (",
        b"rank  ",
        b"local_rank:",
        b"exitcode",
        b"time  ",
        b"host  ",
        b"allocate",
        b"Killed process",
        b" low on memory",
        b"world_size=",  # an actor tells its rank
        b"terminate called",
        b"what():",
        b"op.preamble",
        b"death signal",
        b"forcefully exiting",
        b"exits with return code",
        b"exited on signal",
    )

    def __init__(self, log: Log) -> None:
        self._log = log
        self._traces: dict[int, Trace] = {}
        self._ignored: set[int] = set()
        self._seen: set[tuple[int, int, str, str]] = set()
        self._collectives = Collectives(log)
        self._launcher = Launcher(log)
        self._killed: list[dict[str, Any]] = []  # by the kernel, which knows processes and no ranks
        self._unclaimed: list[dict[str, Any]] = []  # events of lines that nothing says the rank of
        self._speakers: set[int] = set()
        self._thrown: dict[int, str] = {}
        self._words = LastWords(log)
        self._torn: list[tuple[int | None, dict[str, Any]]] = []  # errors of teardown, and whose they are
        self._errors = 0
        log.attempts.closing.append(self._complete)

    @property
    def open(self) -> bool:
        """Whether a traceback has begun, the stack of a collective, or what a process says at its end."""
        return bool(self._traces) or self._collectives.listing or self._words.open

    def take(self, line: str) -> bool:
        """Use one line."""
        at = line.find(_TRACEBACK)
        if at < 0 and any(sign in line for sign in _IGNORED):
            self._ignored.add(self._log.rank)
            return True
        if at >= 0:
            self._end(self._log.rank)
            launched = self._launcher.rank if "traceback :" in line[:at] else None
            in_summary, rank = launched is not None, self._log.rank if launched is None else launched
            indent = len(line) - len(line.lstrip()) if in_summary else at
            trace = self._traces[self._log.rank] = Trace(indent, rank, self._log.step, self._errors)
            trace.summary, trace.anonymous = in_summary, self._unsure and not in_summary
            trace.local = self._log.local
            trace.ignored = self._log.rank in self._ignored
            self._errors += 1
            self._ignored.discard(self._log.rank)
            return True
        trace = self._traces.get(self._log.rank)
        if trace is not None and self._traced(trace, line):
            return True
        if (memory := parsed(line)) is not None:
            self._oom(line, memory, None, "")
            if "NCCL WARN" not in line:
                return True
        if self._launcher.take(line) or self._uncaught(line) or self._torn_down(line):
            return True
        speaker, unclaimed = self._collectives.take(line), False
        if speaker is None and any(sign in line for sign in _SIGNS):
            named = _NCCL_RANK.search(line)
            speaker = int(named[1] or named[2]) if named and not self._log.told else self._log.rank
            unclaimed = self._unsure and named is None
        if speaker is None:
            return False
        if "CANCELLED" in line:
            self._log.attempts.launcher_ended()
        event: dict[str, Any] = {"step": self._log.step, "t": self._log.time(line), "level": _level(line)}
        event |= {"logger": _logger(line), "message": line.strip()[:LONGEST]}
        if unclaimed:
            process = _PROCESS.search(line)
            self._claim({"kind": "log", "pid": int(process[1]) if process else None, **event})
            return True
        self._speakers.add(speaker)
        self._log.attempts.event("log", speaker, **event)
        return True

    @property
    def _unsure(self) -> bool:
        """Whether it can only be known at the end which rank prints the line that is read now."""
        return self._log.anonymous or self._log.local is not None

    def close(self) -> None:
        """The log ends here: an error that waited for more lines is complete."""
        for rank in list(self._traces):
            self._end(rank)
        self._log.attempts.close()
        for entry in self._killed:
            rank = self._launcher.rank_of(entry.get("pid"))
            if rank is not None:
                self._launcher.ran_out(rank)
            told = None if rank is not None else False  # the kernel and a scheduler know no ranks
            self._log.attempts.event("oom", self._log.home if rank is None else rank, told=told, **entry)
        self._killed.clear()
        for rank, event in self._torn:
            if rank is None:
                self._claim(event)
            else:
                self._failed(rank, None, event)
        self._torn.clear()
        self._settle()
        self._launcher.close(self._collectives.timed_out)
        self._collectives.close()

    def _uncaught(self, line: str) -> bool:
        """An error of C++ that ended a rank; that of a watchdog's thread is the watchdog's own line."""
        if (thrown := _THROWN.search(line)) is not None:
            self._thrown[self._log.rank] = thrown[1]
            return True
        said = _WHAT.match(line)
        kind = self._thrown.pop(self._log.rank, None) if said is not None else None
        text = (said[1] if said is not None else line).strip()
        if "atchdog" in text or (kind is None and sizes(text) is None):
            return False
        event: dict[str, Any] = {"step": self._log.step, "type": kind or "gloo::EnforceNotMet", "order": self._errors}
        event["message"], self._errors = text[:LONGEST], self._errors + 1
        if self._unsure:
            self._claim({"kind": "exception", **event})
        else:
            self._failed(self._log.rank, None, event)
        return True

    def _torn_down(self, line: str) -> bool:
        """What a process says as it is torn down, over several lines; it is complete at the end of the log."""
        if self._words.open and self._words.goes_on(line):
            return True
        if (event := self._words.begins(line)) is None:
            return False
        named = _NCCL_RANK.search(line) if not self._log.told else None
        rank = int(named[1] or named[2]) if named else None if self._unsure else self._log.rank
        self._log.attempts.stopped(rank)
        event |= {"kind": "exception", "attempt": self._log.attempts.number, "order": self._errors}
        event["local"] = self._log.local if rank is None else None
        self._errors += 1
        if len(self._torn) < _MOST_UNCLAIMED and self._new(
            -1 if rank is None else rank, event["type"], event["message"]
        ):
            self._torn.append((rank, event))
        return True

    def _failed(self, rank: int, told: bool | None, event: dict[str, Any]) -> None:
        """Write an exception, and what it says of the sizes of two calls that met."""
        if told is None:
            self._speakers.add(rank)
        fields = {name: value for name, value in event.items() if name not in ("kind", "local")}
        self._log.attempts.event("exception", rank, told=told, **fields)
        if (met := sizes(str(event.get("message")))) is not None:
            said: dict[str, Any] = {"step": event.get("step"), "told": told, **met}
            self._log.attempts.event("collective_mismatch", rank, event.get("attempt"), **said)

    def _claim(self, event: dict[str, Any]) -> None:
        """Keep an event until the end of the log, when it is known whether several ranks print into it."""
        if len(self._unclaimed) >= _MOST_UNCLAIMED:
            self._log.run.note("more errors without the rank that printed them than are kept")
            return
        self._unclaimed.append({"attempt": self._log.attempts.number, "local": self._log.local, **event})

    def _settle(self) -> None:
        """Give what nothing says the rank of to the one rank that it can be of, or say that it is not told."""
        known = {*self._speakers, *self._launcher.ranks, *self._collectives.ranks}
        several = len(known) > 1 or self._log.run.several
        # A number that counts the processes of a machine is a rank where no rank is known that these are not.
        one_machine = not self._log.machines and known <= self._log.locals
        failed, aborted = self._launcher.failed, self._launcher.aborted
        for event in self._unclaimed:
            rank, home, local = self._launcher.rank_of(event.get("pid")), self._log.home, event.pop("local", None)
            rank = local if rank is None and one_machine else rank
            killed = event.get("type") == "OOM killer"
            launcher = str(event.get("type") or "").rpartition(".")[2] in _LAUNCHERS
            torn = str(event.get("type")).startswith(("Fatal Python", "NCCL error"))
            if rank is None and event["kind"] != "log" and not (killed or launcher or torn) and len(failed) == 1:
                rank = failed[0]
            if "::" in str(event.get("type")) and len(aborted) == 1:
                rank = aborted[0]
            if str(event.get("type")).startswith("Fatal Python") and rank is None and len(self._launcher.faulted) == 1:
                rank = self._launcher.faulted[0]
            unknown = several or killed or local is not None
            told = False if unknown and rank is None and not launcher else None
            if event["kind"] == "oom" and not killed and told is None:
                self._launcher.ran_out(home if rank is None else rank)
            if event["kind"] == "exception":
                self._failed(home if rank is None else rank, told, event)
            else:
                self._log.attempts.event(rank=home if rank is None else rank, told=told, **event)
        self._unclaimed.clear()

    def _traced(self, trace: Trace, line: str) -> bool:
        """A line while a traceback is open; False where it belongs to something else."""
        trace.lines += 1
        if trace.error is not None:
            if trace.goes_on(line):
                return True
            self._end(self._log.rank)
            return False
        if trace.lines > LONGEST:
            del self._traces[self._log.rank]
            return False
        if trace.inside(line):
            return True
        if (error := error_of(line)) is None:
            return False
        if (memory := parsed(line)) is not None:
            del self._traces[self._log.rank]
            return self._oom(line, memory, trace, error[0])
        if not (trace.ignored or trace.summary):
            self._stopped(trace, error[0])
        trace.ends(*error)
        return True

    def _stopped(self, trace: Trace, kind: str) -> None:
        """An attempt ends by an error, of a rank or of the launcher."""
        if kind.rpartition(".")[2] in _LAUNCHERS:
            self._log.attempts.launcher_ended()
            return
        self._log.attempts.stopped(None if trace.anonymous else trace.rank)
        if not trace.anonymous:
            trace.alive = self._log.attempts.alive(trace.rank)

    def _complete(self) -> None:
        """Another attempt begins: errors that waited for more lines are of the one before."""
        for rank in [rank for rank, trace in self._traces.items() if trace.error is not None]:
            self._end(rank)

    def _end(self, rank: int) -> None:
        trace = self._traces.pop(rank, None)
        if trace is None or trace.error is None:
            return
        if self._new(trace.rank, trace.error["type"], trace.error["message"]):
            if trace.ignored:
                message = f"{trace.error['type']}: {trace.error['message']}"[:LONGEST]
                fields: dict[str, Any] = {"level": "warning", "logger": "python", "message": message}
                self._log.incident("log", step=trace.step, rank=trace.rank, **fields)
                return
            frames = trace.frames[::-1]
            self._collectives.raised(trace.rank, trace.step, trace.text, frames)
            event: dict[str, Any] = {"step": trace.step, "frames": frames or None, "order": trace.order, **trace.error}
            event["alive"] = trace.alive
            if trace.anonymous:
                self._claim({"kind": "exception", "local": trace.local, **event})
            else:
                self._failed(trace.rank, None, event)

    def _oom(self, line: str, memory: dict[str, Any], trace: Trace | None, kind: str) -> bool:
        rank = self._log.rank if trace is None else trace.rank
        frames = trace.frames[::-1] if trace is not None else []
        entry: dict[str, Any] = {"message": line.strip()[:LONGEST], "phase": phase_of(frames), **memory}
        if "type" not in entry and (kind or "Error:" in line):
            entry["type"] = kind or line.split("Error:")[0].split()[-1] + "Error"
        if entry.get("pid") is not None:
            if self._new(rank, "oom", entry["message"]) and len(self._killed) < 1000:
                told = {"attempt": self._log.attempts.number, "step": self._log.step, "t": self._log.time(line)}
                self._killed.append({**entry, **told})
        elif self._new(rank, "oom", entry["message"]):
            self._log.attempts.stopped(None if self._unsure else rank)
            step = self._log.step if trace is None else trace.step
            event: dict[str, Any] = {"step": step, "t": self._log.time(line), "frames": frames or None, **entry}
            event["order"], self._errors = (self._errors if trace is None else trace.order), self._errors + 1
            if self._unsure if trace is None else trace.anonymous:
                self._claim({"kind": "oom", "local": self._log.local if trace is None else trace.local, **event})
                return True
            if entry.get("type") != "OOM killer":
                self._launcher.ran_out(rank)
            self._speakers.add(rank)
            self._log.attempts.event("oom", rank, **event)
        return True

    def _new(self, rank: int, kind: str, message: str) -> bool:
        """Whether an error was not printed before: launchers repeat what ranks have said already."""
        key = (self._log.attempts.number, rank, kind, message[:200])
        if key in self._seen:
            return False
        if len(self._seen) < 10_000:
            self._seen.add(key)
        return True


def _logger(line: str) -> str:
    return "nccl" if any(sign in line for sign in ("CCL", "atchdog", "Gloo", "collective", "Barrier")) else "system"


def _level(line: str) -> str:
    """Being stopped is a consequence; what a launcher says while it stops others is a warning."""
    said = ("Sending process", "received SIGTERM", "death signal", "forcefully exiting")
    return "warning" if any(sign in line for sign in said) else "error"
