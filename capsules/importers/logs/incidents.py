"""What goes wrong in any program: tracebacks, CUDA out of memory, NCCL and its watchdog, signals and the launcher.

Each becomes an event. Judging them is the rules' work; here the evidence is kept, with the bytes that the text states.
"""

from __future__ import annotations

import re
from typing import Any

from .log import Log, count, size

FORMAT = ""
NEEDED = b""
SIGN = (
    rb"Traceback \(most recent call last\):|out of memory\. Tried to allocate"
    rb"|Watchdog caught collective operation timeout|NCCL WARN|ProcessGroupNCCL"
)

_TRACEBACK = "Traceback (most recent call last):"
_ERROR = re.compile(r"((?:[A-Za-z_]\w{0,80}\.){0,12}[A-Za-z_]\w{0,80})(?::\s?(.*))?$")
_ERROR_NAME = re.compile(r"(?:Error|Exception|Interrupt|Exit|Failure|Timeout|Warning|Abort|StopIteration)\w*$")
_OOM = re.compile(r"out of memory\. Tried to allocate ([\d.]+) ([KMGT]?i?B)")
_OOM_NEW = re.compile(
    r"GPU (\d+) has a total capac[it]+y of ([\d.]+) ([KMGT]?i?B) of which ([\d.]+) ([KMGT]?i?B) is free"
)
_OOM_NEW_OWN = re.compile(
    r"allocated memory ([\d.]+) ([KMGT]?i?B) is allocated by PyTorch.{0,200}?"
    r"and ([\d.]+) ([KMGT]?i?B) is reserved by PyTorch but unallocated"
)
_OOM_OTHERS = re.compile(r"Process (\d+) has ([\d.]+) ([KMGT]?i?B) memory in use")
_OOM_OLD = re.compile(
    r"\(GPU (\d+); ([\d.]+) ([KMGT]?i?B) total capacity; ([\d.]+) ([KMGT]?i?B) already allocated; "
    r"([\d.]+) ([KMGT]?i?B) free; ([\d.]+) ([KMGT]?i?B) (?:reserved in total by PyTorch|cached)"
)
_NCCL_RANK = re.compile(r"\[Rank (\d+)\]|\bRank (\d+)\]")
_SIGNS = (
    "Watchdog caught collective operation timeout",
    "failure detected by watchdog",
    "Timeout at NCCL work",
    "NCCL WARN",
    "Some NCCL operations have failed or timed out",
    "DUE TO: CANCELLED",
    "slurmstepd: error",
    "srun: error",
    "Segmentation fault",
    "Bus error",
    "Fatal Python error",
    "received SIGTERM",
    "Sending process",
    "Signal 9 (SIGKILL)",
    "Out of memory: Killed process",
    "CUDA error:",
    "Xid (",
)
_LAUNCHER = re.compile(r"^\s+(rank|exitcode|host|time)\s+: (.*)$")
_LAUNCHED_RANK = re.compile(r"(\d{1,9}) \(local_rank: \d{1,9}\)")
#: What Python prints above the traceback of an error that it goes on without.
_IGNORED = ("Exception ignored in", "--- Logging error ---", "Error in atexit", "Exception in thread")
#: Lines between a traceback's beginning and its error, of the same rank.
_LONGEST = 2000
#: Lines after an error that still belong to its message.
_MORE = 4


class _Trace:
    """A traceback that is being printed by one rank, at the step where the run stands when it begins."""

    def __init__(self, indent: int, rank: int, step: int | None) -> None:
        self.indent, self.rank, self.step, self.lines = indent, rank, step, 0
        self.error: dict[str, Any] | None = None
        self.ignored = False
        self.more = _MORE


class Lines:
    """Reads them. Tracebacks of several ranks may be interleaved where a prefix tells the ranks apart."""

    marks = (
        b"Traceback (most recent call last):",
        b"Exception i",
        b"--- Logging error",
        b"out of memory. Tried",
        b"atchdog",
        b"NCCL",
        b"rror",
        b"SIG",
        b"CANCELLED",
        b"Out of memory",
        b"fault",
        b"Xid (",
        b"local_rank:",
        b"exitcode",
    )

    def __init__(self, log: Log) -> None:
        self._log = log
        self._traces: dict[int, _Trace] = {}
        self._ignored: set[int] = set()
        self._seen: set[tuple[int, str, str]] = set()
        self._launched: int | None = None

    @property
    def open(self) -> bool:
        """Whether a traceback has begun."""
        return bool(self._traces)

    def take(self, line: str) -> bool:
        """Use one line."""
        at = line.find(_TRACEBACK)
        if at < 0 and any(sign in line for sign in _IGNORED):
            self._ignored.add(self._log.rank)
            return True
        if at >= 0:
            self._end(self._log.rank)
            in_summary = "traceback :" in line[:at] and self._launched is not None
            rank = self._launched if in_summary and self._launched is not None else self._log.rank
            indent = len(line) - len(line.lstrip()) if in_summary else at
            trace = self._traces[self._log.rank] = _Trace(indent, rank, self._log.step)
            trace.ignored = self._log.rank in self._ignored
            self._ignored.discard(self._log.rank)
            return True
        trace = self._traces.get(self._log.rank)
        if trace is not None and self._traced(trace, line):
            return True
        if (found := _OOM.search(line)) is not None:
            return self._oom(line, found, self._log.rank, "")
        if (found := _LAUNCHER.match(line)) is not None:
            return self._launcher(found[1], found[2])
        if any(sign in line for sign in _SIGNS):
            named = _NCCL_RANK.search(line)
            rank = count(named[1] or named[2]) if named else None
            self._log.event(
                "log",
                rank=rank,
                level=_level(line),
                logger=_logger(line),
                message=line.strip()[:_LONGEST],
                t=self._time(line),
            )
            return True
        return False

    def close(self) -> None:
        """The log ends here: an error that waited for more lines is complete."""
        for rank in list(self._traces):
            self._end(rank)

    def _traced(self, trace: _Trace, line: str) -> bool:
        """A line while a traceback is open; False where it belongs to something else."""
        trace.lines += 1
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if trace.error is not None:
            if text and trace.more and indent >= trace.indent and not _begins_anew(text):
                trace.more -= 1
                trace.error["message"] = f"{trace.error['message']} {text}"[:_LONGEST]
                return True
            self._end(self._log.rank)
            return False
        if trace.lines > _LONGEST:
            del self._traces[self._log.rank]
            return False
        if indent > trace.indent and (indent > trace.indent + 1 or line[:1] == "\t"):
            return True
        found = _ERROR.match(text)
        if found is None or not (found[2] is not None or _ERROR_NAME.search(found[1]) or "." in found[1]):
            return False
        if found[2] is not None and not (_ERROR_NAME.search(found[1]) or "." in found[1] or found[1][:1].isupper()):
            return False
        if (memory := _OOM.search(line)) is not None:
            del self._traces[self._log.rank]
            return self._oom(line, memory, trace.rank, found[1])
        trace.error = {"type": found[1], "message": (found[2] or "")[:_LONGEST]}
        return True

    def _end(self, rank: int) -> None:
        trace = self._traces.pop(rank, None)
        if trace is None or trace.error is None:
            return
        if self._new(trace.rank, trace.error["type"], trace.error["message"]):
            if trace.ignored:
                message = f"{trace.error['type']}: {trace.error['message']}"[:_LONGEST]
                fields = {"level": "warning", "logger": "python", "message": message}
                self._log.run.event("log", step=trace.step, rank=trace.rank, **fields)
                return
            self._log.run.event("exception", step=trace.step, rank=trace.rank, **trace.error)

    def _oom(self, line: str, found: re.Match[str], rank: int, kind: str) -> bool:
        entry: dict[str, Any] = {"requested": size(found[1], found[2]), "message": line.strip()[:_LONGEST]}
        if (new := _OOM_NEW.search(line)) is not None:
            entry |= {"capacity": size(new[2], new[3]), "free": size(new[4], new[5]), "device": count(new[1])}
            if (own := _OOM_NEW_OWN.search(line)) is not None:
                allocated, idle = size(own[1], own[2]), size(own[3], own[4])
                entry["allocated"] = allocated
                entry["reserved"] = allocated + idle if allocated is not None and idle is not None else None
            others = [{"pid": count(pid), "bytes": size(n, unit)} for pid, n, unit in _OOM_OTHERS.findall(line)]
            entry["other_processes"] = others or None
        elif (old := _OOM_OLD.search(line)) is not None:
            names = ("capacity", "allocated", "free", "reserved")
            entry |= {name: size(old[2 * at + 2], old[2 * at + 3]) for at, name in enumerate(names)}
            entry["device"] = count(old[1])
        if kind or "Error:" in line:
            entry["type"] = kind or line.split("Error:")[0].split()[-1] + "Error"
        if self._new(rank, "oom", entry["message"]):
            self._log.event("oom", rank=rank, t=self._time(line), **entry)
        return True

    def _launcher(self, field: str, text: str) -> bool:
        """The summary that torchrun prints of ranks that failed: which rank, and how it ended."""
        if field == "rank":
            found = _LAUNCHED_RANK.match(text)
            self._launched = count(found[1]) if found else None
            return found is not None
        if field == "exitcode" and self._launched is not None:
            message = f"exit code {text.strip()}"
            self._log.event("log", rank=self._launched, level="error", logger="torchrun", message=message[:200])
            return True
        return False

    def _new(self, rank: int, kind: str, message: str) -> bool:
        """Whether an error was not printed before: launchers repeat what ranks have said already."""
        key = (rank, kind, message[:200])
        if key in self._seen:
            return False
        if len(self._seen) < 10_000:
            self._seen.add(key)
        return True

    def _time(self, line: str) -> float | None:
        return self._log.time(line)


def _begins_anew(text: str) -> bool:
    """Whether a line is no continuation of a message: a log record, a rule of signs, a frame."""
    return text[:1] in "[{=*-+" or text.startswith(
        ("File ", "During handling", "The above exception", "W0", "E0", "I0")
    )


def _logger(line: str) -> str:
    return "nccl" if "NCCL" in line or "atchdog" in line else "system"


def _level(line: str) -> str:
    """Being stopped is a consequence; what a launcher says while it stops others is a warning."""
    return "warning" if "Sending process" in line or "received SIGTERM" in line else "error"
