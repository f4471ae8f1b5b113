"""What libraries of collectives say when one of them does not end: NCCL's watchdog, Gloo, and the fingerprints of DDP.

A watchdog speaks in several lines, in words that changed with every release of torch. Each line stays as a log event;
together they become one ``collective_timeout`` a rank and collective. What a rank says of itself while another one
times out becomes a ``collective_status``, a fingerprint that differs a ``collective_mismatch``, and the list that DDP
prints of parameters without a gradient ``unused_parameters``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ...dtypes import torch_name
from .log import Log, count

Frame = dict[str, Any]

#: What torch's flight recorder calls an operation, by the name that C++ prints.
_OPS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "_allgather_base": "_all_gather_base",
    "allgather_coalesced": "all_gather_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "_allreduce_sparse": "_all_reduce_sparse",
    "recvanysource": "recv",
}
#: Who speaks: ``[Rank 1]``, ``[PG 0 Rank 1]``, ``[PG 2 (mesh_tp) Rank 1]``, ``[PG ID 0 PG GUID 0(default_pg) Rank 1]``.
_SPEAKER = re.compile(
    r"\[(?:PG (?:ID (?P<id>\d+) PG GUID )?(?P<group>[^\s()\[\]]{1,120}) ?(?:\((?P<desc>[^()\[\]]{0,120})\))? )?"
    r"Rank (?P<rank>\d{1,9})\]"
)
_WORK = re.compile(
    r"Work(?:NCCL|XCCL|HCCL|MCCL|RCCL)\(([^()]*(?:\(ms\))?[^()]*)\)(?:\s+ran for (\d{1,15}) milliseconds)?"
)
_FIELD = re.compile(r"(SeqNum|OpType|NumelIn|NumelOut|Timeout\(ms\))=([\w-]{1,60})")
_SHAPE = re.compile(r"TensorShape=\[([\d, ]{0,400})\]")
#: The work that failed, of all generations, with what the group had reached.
_FAILED = re.compile(r"(?:[Tt]imeout at NCCL work|detected by watchdog at work(?: sequence id)?): (\d{1,18})")
_ENQUEUED = re.compile(r"[Ll]ast enqueued (?:\w{1,10} )?work: (-?\d{1,18})")
_STARTED = re.compile(r"last started (?:\w{1,10} )?work: (-?\d{1,18})")
_COMPLETED = re.compile(r"last completed (?:\w{1,10} )?work: (-?\d{1,18})")
_SIGNAL_FROM = re.compile(r"due to a collective (?:timeout|exception)? ?from\s+rank (\d{1,9})")
#: An error in the words of torch's C++ logger: ``[E ProcessGroupNCCL.cpp:1316]``, ``[F1206 18:44:12.7 ProcessGroup…``.
_SEVERE = re.compile(r"\[[EF](?:\d{3,4} [\d:.]{8,20})? ProcessGroup\w*\.")
#: A text that explains what a watchdog says, in quotation marks: help, documentation, advice.
_QUOTED = re.compile(
    r"(?:^|[\s(])['\"`‘“][^'\"`]{0,200}(?:Watchdog caught|detected by watchdog|Received a dump signal)"
)
_STACK = re.compile(r"Stack trace of the (?:failed|timed[- ]out) collective(?! not found)")
_STACK_FRAME = re.compile(r"\s{0,8}#\d{1,3} (\S{1,200}) from (.{1,1000}):(\d{1,9})\s*$")
_BARRIER = re.compile(r"\bRanks? ([\d, ]{1,4000}) failed to pass monitoredBarrier in (\d{1,15}) ?ms")
_GLOO = re.compile(r"Timed out waiting (\d{1,15}) ?ms for (\w{1,20}) operation to complete")
#: Gloo met a message that is larger than what its rank waits for; around this the words vary with the release.
_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. {1,2}(\d{1,18}) vs (\d{1,18})")
_PRINT = re.compile(r"Rank (\d{1,9}) is running (?:inconsistent )?collective:\s{0,4}")
_PRINT_FIELDS = {
    "op": re.compile(r"OpType=(\w{1,60})|^([A-Z_]{3,60})\b"),
    "seq": re.compile(r"SequenceNumber=(\d{1,18})"),
    "dtype": re.compile(r"TensorDtypes=([A-Za-z]\w{0,30})"),
}
_UNUSED = re.compile(r"Parameters? (indices )?which did not receive grad for rank \d+: ([^\n]{1,12000})")
#: Function of torch that a person calls, as the innermost frame that is no wrapper shows it.
_CALLED_IN = ("distributed_c10d.py", "functional_collectives.py")
_PASSED_ON = frozenset(("wrapper", "inner", "wait", "_wrapped_call_impl", "_call_impl"))
#: Timeouts of one log that are kept.
_MOST = 10_000
#: Seconds by which what a line says of times may be off.
_SLACK_S = 2.0


class Collectives:
    """Gathers them while a log is read."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._open: dict[tuple[int, int, Any], dict[str, Any]] = {}  # by attempt, rank and call
        self._said: set[tuple[int, int, str]] = set()
        self._stack: list[Frame] | None = None

    def take(self, line: str) -> int | None:
        """Use a line that stands for itself; the rank that speaks, or None where the line is none of these."""
        if self._stack is not None and (frame := _STACK_FRAME.match(line)) is not None:
            if len(self._stack) < 24:
                self._stack.append({"name": frame[1], "file": frame[2], "line": int(frame[3])})
            return self._log.rank
        self._stack = None
        if _QUOTED.search(line) is not None:
            return None
        if _PRINT.search(line) is not None or _BARRIER.search(line) is not None or _GLOO.search(line) is not None:
            rank = self._speaker(line)[0]
            return rank if self._typed(rank, self._log.step, line, ()) else None
        rank, group = self._speaker(line)
        if "Work" in line and _WORK.search(line) is not None:
            self._work(rank, line)
        elif (failed := _FAILED.search(line)) is not None:
            self._reached(rank, group, count(failed[1]), line)
        elif "Received a dump signal" in line or "Received a timeout signal" in line:
            self._status(rank, group, line)
        elif _STACK.search(line) is not None:
            self._stack = self._newest(rank).setdefault("frames", [])
        elif _SEVERE.search(line) is None:
            return None
        return rank

    def raised(self, rank: int, step: int | None, text: str, frames: Sequence[Frame]) -> None:
        """What an exception says of collectives, in its whole text; ``frames`` are its stack, innermost first."""
        self._typed(rank, step, text, frames)

    def close(self) -> None:
        """The log ends here: what was said of each timeout is complete."""
        for fields in self._open.values():
            _fill(fields, op=_called(fields.get("frames") or ()))
            self._log.attempts.event("collective_timeout", **fields)
        self._open.clear()

    @property
    def listing(self) -> bool:
        """Whether the stack of a collective is being listed, line by line."""
        return self._stack is not None

    @property
    def ranks(self) -> set[int]:
        """The ranks that spoke of a collective."""
        return {rank for _, rank, _ in (*self._open, *self._said)}

    def timed_out(self, rank: int) -> bool:
        """Whether the watchdog of a rank gave up on a collective, in the last attempt."""
        return any(each[0] >= self._log.attempts.first and each[1] == rank for each in self._open)

    def _speaker(self, line: str) -> tuple[int, str | None]:
        """Who speaks, and the job-wide name of the group; a number in the text is the rank within that group."""
        found = None
        for found in _SPEAKER.finditer(line):
            if found["group"]:
                break
        if found is None:
            return self._log.rank, None
        named = count(found["rank"])
        return (self._log.rank if self._log.told or named is None else named), found["group"]

    def _entry(self, rank: int, key: Any, line: str) -> dict[str, Any]:
        attempts, t = self._log.attempts, self._log.time(line)
        attempts.stopped(rank)
        place = (attempts.number, rank, key)
        if place not in self._open and len(self._open) >= _MOST:
            self._log.run.note(f"more than {_MOST:,} timeouts of collectives; the first are kept")
            return {}
        entry = self._open.setdefault(place, {"attempt": place[0], "rank": rank, "step": self._log.step, "t": None})
        entry["t"] = t if entry["t"] is None else entry["t"]
        return entry

    def _newest(self, rank: int) -> dict[str, Any]:
        for key in reversed(self._open):
            if key[:2] == (self._log.attempts.number, rank):
                return self._open[key]
        return {}

    def _work(self, rank: int, line: str) -> None:
        """``Watchdog caught collective operation timeout: WorkNCCL(SeqNum=…, OpType=…, …) ran for …``."""
        found = _WORK.search(line)
        if found is None:
            return
        said = dict(_FIELD.findall(found[1]))
        seq, timeout, ran = count(said.get("SeqNum", "")), count(said.get("Timeout(ms)", "")), count(found[2] or "")
        if ran is not None and self._lived_on(rank, self._log.time(line), ran / 1e3):
            self._log.attempts.begin()
        entry = self._entry(rank, seq if seq is not None else f"{said.get('OpType')}", line)
        shape = _SHAPE.search(found[1])
        _fill(
            entry,
            seq=seq,
            op=op_name(said["OpType"]) if "OpType" in said else None,
            numel_in=count(said.get("NumelIn", "")),
            numel_out=count(said.get("NumelOut", "")),
            shapes=[_numbers(shape[1])] if shape else None,
            timeout_s=timeout / 1e3 if timeout is not None else None,
            ran_s=ran / 1e3 if ran is not None else None,
        )

    def _lived_on(self, rank: int, t: float | None, ran_s: float) -> bool:
        """Whether a call began after the watchdog of its rank had given up on another: a watchdog ends its process."""
        given_up = self._newest(rank).get("t")
        return given_up is not None and t is not None and t - ran_s > given_up + _SLACK_S

    def _reached(self, rank: int, group: str | None, seq: int | None, line: str) -> None:
        """``failure detected by watchdog at work sequence id: … PG status: last enqueued work: …``."""
        key: Any = seq
        if self._open.get((self._log.attempts.number, rank, key), {}).get("group", group) != group:
            key = (group, seq)  # another group of this rank that stands at the same number
        _fill(self._entry(rank, key, line), seq=seq, group=group, **_numbers_of_group(line))

    def _status(self, rank: int, group: str | None, line: str) -> None:
        """A rank that was told of a timeout elsewhere, and says what it had reached itself."""
        reached = _numbers_of_group(line)
        if not reached or not self._new(rank, f"status {group} {reached}"):
            return
        other = _SIGNAL_FROM.search(line)
        fields = {"group": group, "other_rank": count(other[1]) if other else None, "t": self._log.time(line)}
        self._log.incident("collective_status", rank=rank, **fields, **reached)

    def _typed(self, rank: int, step: int | None, text: str, frames: Sequence[Frame]) -> bool:
        """What a text says, in a line or in an exception: one event each, however often it is repeated."""
        if (barrier := _BARRIER.search(text)) is not None:
            entry = self._entry(rank, "monitored_barrier", text)
            called = _called(frames)
            _fill(entry, timeout_s=int(barrier[2]) / 1e3, missing=sorted(set(_numbers(barrier[1]))))
            entry["op"] = called or entry.get("op") or "monitored_barrier"
            _fill(entry, other_rank=entry["missing"][0] if len(entry["missing"]) == 1 else None)
            _fill(entry, frames=list(frames) or None)
        elif (waited := _GLOO.search(text)) is not None:
            entry = self._entry(rank, "gloo", text)
            _fill(entry, timeout_s=int(waited[1]) / 1e3, op=_called(frames), waited_for=waited[2])
            _fill(entry, frames=list(frames) or None)
        elif (prints := _prints(text)) is not None:
            named, fields = prints
            if self._new(rank if self._log.told or frames else named, f"print {sorted(fields.items(), key=str)}"):
                place = rank if self._log.told or frames else named
                fields["frames"] = list(frames) or None
                self._log.incident("collective_mismatch", step=step, rank=place, **fields)
        elif unused := _UNUSED.findall(text):
            names = next((names for indices, names in unused if not indices), "")
            listed = _listed(names) if names else [f"parameter {each}" for each in unused[0][1].split()][:500]
            if self._new(rank, f"unused {listed}"):
                self._log.incident("unused_parameters", step=step, rank=rank, missing=listed, message=text[:500])
        else:
            return False
        return True

    def _new(self, rank: int, said: str) -> bool:
        place = (self._log.attempts.number, rank, said)
        if place in self._said:
            return False
        if len(self._said) < _MOST:
            self._said.add(place)
        return True


def sizes(text: str) -> dict[str, int] | None:
    """Bytes that Gloo received for a call and that the call awaited, where a text says that they do not fit."""
    found = _SIZES.search(text)
    return None if found is None else {"received": int(found[1]), "awaited": int(found[2])}


def op_name(printed: str) -> str:
    """The bare name under which the flight recorder knows an operation: ``ALLREDUCE`` is all_reduce."""
    name = printed.lower()
    return _OPS.get(name, name)


def _fill(entry: dict[str, Any], **fields: Any) -> None:
    """Add what is known and was not said before."""
    for name, value in fields.items():
        if value is not None and entry.get(name) is None:
            entry[name] = value


def _numbers(text: str) -> list[int]:
    return [value for each in re.findall(r"\d{1,18}", text)[:4096] if (value := count(each)) is not None]


def _numbers_of_group(line: str) -> dict[str, int]:
    """What a group had reached on the rank that speaks."""
    patterns = {"last_enqueued": _ENQUEUED, "last_started": _STARTED, "last_completed": _COMPLETED}
    return {name: int(found[1]) for name, pattern in patterns.items() if (found := pattern.search(line)) is not None}


def _prints(text: str) -> tuple[int, dict[str, Any]] | None:
    """The rank that a fingerprint names first, and in what it differs from the other; None where there is none."""
    found = list(_PRINT.finditer(text))[:2]
    if not found:
        return None
    ends = [found[1].start() if len(found) > 1 else len(text), text.find("Collectives differ", found[-1].end())]
    fields = _print(text[found[0].end() : ends[0]], "")
    if len(found) > 1:
        fields["other_rank"] = int(found[1][1])
        fields |= _print(text[found[1].end() : ends[1] if ends[1] > 0 else len(text)], "other_")
    return int(found[0][1]), {name: value for name, value in fields.items() if value is not None}


def _print(text: str, before: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, pattern in _PRINT_FIELDS.items():
        if (found := pattern.search(text)) is not None:
            value = next(each for each in found.groups() if each is not None)
            fields[before + name] = (
                count(value) if name == "seq" else op_name(value) if name == "op" else torch_name(value)
            )
    if (shape := _SHAPE.search(text)) is not None:
        fields[f"{before}shapes"] = [_numbers(shape[1])]
    return fields


def _called(frames: Sequence[Frame]) -> str | None:
    """The collective that was called, by its function in torch."""
    for each in frames:
        if str(each.get("file", "")).endswith(_CALLED_IN) and each.get("name") not in _PASSED_ON:
            return str(each["name"])
    return None


def _listed(text: str) -> list[str]:
    """Names of parameters in a sentence's rest, which another sentence may follow on the same line."""
    names = [each.strip() for each in text.split(",")]
    return [each.split()[0][:300] for each in names if each and each.split()][:500]
