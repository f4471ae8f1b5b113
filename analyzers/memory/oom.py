"""Out-of-memory failures as the rules of this family read them: one list, and one classification of each.

A failure is said once, by the rule that ``Verdict.rule`` names; the other rules of the family stay quiet about it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal
from weakref import WeakKeyDictionary

from .names import collecting
from .processes import Other, sorted_out
from .records import capacities, gib, largest_free_blocks, number, positive, segment_for, whole
from .thresholds import (
    DRIVER_KEEPS,
    LITTLE_SLACK,
    MOSTLY_OUTSIDE,
    NO_SLACK,
    OTHERS_BYTES,
    OTHERS_SHARE,
    OUTSIDE_BYTES,
    OUTSIDE_SHARE,
    PRINTED,
    PRIVATE_SHARE,
)

if TYPE_CHECKING:
    from ...capsules import Capsule

Kind = Literal["capacity", "fragmentation", "other process", "undecided"]

#: Words of an exception by which a device says that it is full; numbers may be absent.
DEVICE_WORDS: Final = re.compile(
    r"out of memory\. Tried to allocate|(?:CUDA|HIP|XPU|cuda|hip|Cuda) (?:error|failure)(?: \d+)?:? '?out of memory"
    r"|backend out of memory|cudaErrorMemoryAllocation|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY"
    r"|RESOURCE_EXHAUSTED: Out of memory|UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"
    r"|(?:CUBLAS|CUDNN|CUSPARSE|CUSOLVER|HIPBLAS)_STATUS_ALLOC_FAILED",
)
#: Words by which the host, not a device, says so.
HOST_WORDS: Final = re.compile(
    r"DefaultCPUAllocator|Killed process \d+|oom[-_]?kill|cgroup out of memory|exceeded job memory limit"
    r"|std::bad_alloc|Cannot allocate memory|Unable to allocate .{1,40} for an array|OOMKilled",
    re.IGNORECASE,
)
#: The limit of ``set_per_process_memory_fraction``, as torch names it.
_ALLOWED: Final = re.compile(r"\b(\d{1,9}(?:\.\d{1,4})?) ([MGT])iB allowed;")
_UNITS: Final = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
#: Failures that are read of one capsule.
_MOST: Final = 4096


@dataclass(frozen=True)
class Failure:
    """One out-of-memory failure of a device; sizes in bytes, None where nothing says them.

    ``own`` is everything this process has on the device, ``outside`` the part of it that PyTorch's allocator did not
    hand out, ``allowed`` a limit that the job set itself. ``segment`` is what the driver was asked for, where that is
    more than what the job asked for. ``caught``: the rank reported a later step, so it went on. ``collects``: the line
    at which an evaluation joins the outputs of its batches, where that is what failed.
    """

    step: int | None
    rank: int | None
    t: float | None
    device: int | None
    phase: str | None
    type: str | None
    message: str
    requested: int | None
    segment: int | None
    free: int | None
    allocated: int | None
    reserved: int | None
    private: int | None
    capacity: int | None
    own: int | None
    outside: int | None
    allowed: int | None
    others: tuple[Other, ...]
    largest_free: int | None
    caught: bool
    collects: str | None = None

    @property
    def idle(self) -> int | None:
        """What the allocator holds and nobody uses."""
        if self.reserved is None or self.allocated is None or self.reserved < self.allocated:
            return None
        return self.reserved - self.allocated

    @property
    def limited(self) -> bool:
        """Whether a limit that the job set itself ended it, not the size of the device."""
        return self.allowed is not None and self.room is not None and (self.free is None or self.room < self.free)

    @property
    def room(self) -> int | None:
        """What the driver would still have given, the job's own limit counted."""
        if self.allowed is None or self.reserved is None:
            return self.free
        limit = max(0, self.allowed - self.reserved)
        return limit if self.free is None else min(self.free, limit)

    @property
    def held_by_others(self) -> int | None:
        """What other processes hold: the device less what is free and this process's own, else what is listed."""
        listed = sum(each.bytes for each in self.others)
        if self.own is not None and self.capacity is not None and self.free is not None:
            return max(listed, self.capacity - self.free - self.own, 0)
        return listed if self.others else None

    @property
    def not_accounted(self) -> int | None:
        """What neither is free nor held by the allocator nor by a listed process: contexts, libraries, processes."""
        if self.capacity is None or self.free is None or self.reserved is None:
            return None
        return max(0, self.capacity - self.free - self.reserved - (self.held_by_others or 0))


@dataclass(frozen=True)
class Verdict:
    """What a failure is. ``undecided`` names the candidates in ``between``, the likeliest first.

    ``rule`` is the one that says it; ``because`` the sentence with the numbers.
    """

    kind: Kind
    between: tuple[str, ...]
    because: str

    @property
    def rule(self) -> str:
        """Id of the rule that speaks of this failure."""
        word = self.between[0] if self.kind == "undecided" and self.between else self.kind
        return {"fragmentation": "memory/fragmentation", "other process": "memory/other-process"}.get(
            word, "memory/capacity"
        )


_FAILURES: WeakKeyDictionary[Capsule, tuple[Failure, ...]] = WeakKeyDictionary()


def failures(capsule: Capsule) -> tuple[Failure, ...]:
    """The out-of-memory failures of devices in a capsule, in the order of step, time and rank.

    Events of kind ``oom`` count, and exceptions whose words say the same. What the host's memory lacked is not among
    them (``host_failures``).
    """
    if capsule not in _FAILURES:
        found = [each for _, each in zip(range(_MOST), _failures(capsule), strict=False)]
        _FAILURES[capsule] = tuple(
            sorted(found, key=lambda each: (_late(each.step), _late(each.t), each.rank or 0, each.caught))
        )
    return _FAILURES[capsule]


def is_device_failure(event: Mapping[str, Any]) -> bool:
    """Whether an event is an out-of-memory failure of a device."""
    kind = event.get("kind")
    if kind not in ("oom", "exception") or is_host_failure(event):
        return False
    return kind == "oom" or DEVICE_WORDS.search(f"{event.get('type')}: {event.get('message')}"[:_MOST]) is not None


def is_host_failure(event: Mapping[str, Any]) -> bool:
    """Whether an event says that the host's memory ran out: a failed allocation, or a process that was killed."""
    if event.get("kind") not in ("oom", "exception", "log"):
        return False
    if event.get("where") == "host":
        return True
    if str(event.get("type") or "").rpartition(".")[2] == "MemoryError":
        return True
    words = str(event.get("message") or "")[:_MOST]
    return HOST_WORDS.search(words) is not None and DEVICE_WORDS.search(words) is None


def classify(failure: Failure) -> Verdict:
    """Name what a failure is, by arithmetic on its own numbers.

    Nothing helps where the request and what is in use together exceed the device: capacity. The unused part of the
    allocator's memory is what its search for a block left over, since it gave whole unused segments back before it
    failed: enough of it for the request, and no small share of the device, is fragmentation. Memory of others, without
    which the request had fitted, is another process. Printed sizes are rounded; what lies within that is undecided.
    """
    requested, free, idle = failure.requested, failure.room, failure.idle
    if requested is None:
        return Verdict("undecided", ("capacity", "fragmentation", "other process"), "no sizes are stated")
    if (full := _cannot_fit(failure, requested)) is not None:
        return full
    if free is None:
        return Verdict(
            "undecided",
            ("capacity", "fragmentation", "other process"),
            f"{gib(requested)} were asked for; what was free on the device is not stated",
        )
    if failure.free is not None and free < failure.free and requested > free:
        because = (
            f"the job's own limit of {gib(failure.allowed)} is reached, {gib(failure.free)} are free on the device"
        )
        return Verdict("capacity", (), because)
    wanted = max(requested, failure.segment or 0)
    segment = f" ({gib(wanted)} of the device, a whole segment)" if wanted > 1.1 * requested else ""
    if wanted <= free and free > DRIVER_KEEPS:
        because = (
            f"{gib(requested)} were asked for{segment}, {gib(free)} are free on the device: memory was freed since, "
            "or a limit other than the device's size was reached"
        )
        return Verdict("undecided", ("a limit", "other process"), because)
    size = failure.capacity or failure.reserved or requested
    asked = f"{gib(requested)} were asked for{segment}, {gib(free)} are free on the device"
    split = (
        idle is not None and idle >= requested and (failure.largest_free is None or failure.largest_free < requested)
    )
    outside = _outside(failure, size)
    if outside is not None and outside[0] >= wanted - free and (not split or outside[0] > (idle or 0)):
        held, words, sure, between = outside
        if sure:
            return Verdict("other process", (), f"{asked}, and {gib(held)} {words}: without them it had fitted")
        return Verdict("undecided", between, f"{asked}, and {gib(held)} {words}")
    if idle is None:
        return Verdict("undecided", ("capacity", "fragmentation"), f"{asked}; what the allocator holds is not stated")
    asked += f" and {gib(idle)} are held unused by the allocator"
    little = idle <= LITTLE_SLACK * size
    if split:
        if failure.capacity is not None and free + idle <= NO_SLACK * size:
            return Verdict(
                "capacity", (), f"{asked}: {(free + idle) / size:.1%} of the device, as any full device leaves"
            )
        if little and failure.largest_free is None:
            because = f"{asked}: enough by the sum, and only {idle / size:.1%} of the device, as any full device leaves"
            return Verdict("undecided", ("capacity", "fragmentation"), because)
        if failure.private is not None and failure.private >= PRIVATE_SHARE * idle:
            held = f"{gib(failure.private)} are in use in private pools (CUDA graphs), whose unused part none else gets"
            return Verdict("undecided", ("fragmentation", "unused memory of private pools"), f"{asked}; {held}")
        return Verdict("fragmentation", (), f"{asked}: enough by the sum, and no one block is large enough")
    if requested > free + idle + PRINTED or little:
        too_little = (
            "both together are too little" if requested > free + idle else "no more than any full device leaves"
        )
        if outside is not None and requested <= free + idle + outside[0]:
            return Verdict("undecided", ("capacity", "other process"), f"{asked}, and {gib(outside[0])} {outside[1]}")
        if failure.capacity is None:
            because = f"{asked}: {too_little}; how large the device is, and who else is on it, is not stated"
            return Verdict("undecided", ("capacity", "other process"), because)
        return Verdict("capacity", (), f"{asked}: {too_little}")
    return Verdict("undecided", ("capacity", "fragmentation"), f"{asked}: together they would do, neither does alone")


def told_by(capsule: Capsule, rule: str) -> list[tuple[Failure, Verdict]]:
    """The failures that one rule has to speak of: those that ended a rank, else those after which it went on."""
    mine = [(each, verdict) for each in failures(capsule) if (verdict := classify(each)).rule == rule]
    return [each for each in mine if not each[0].caught] or mine


def host_failures(capsule: Capsule) -> tuple[Mapping[str, Any], ...]:
    """Events that say the host's memory ran out, in the order of the capsule."""
    return tuple(each for _, each in zip(range(_MOST), _host(capsule), strict=False))


def _cannot_fit(failure: Failure, requested: int) -> Verdict | None:
    """Capacity where the device would be too small for this process alone, without a byte unused."""
    if failure.capacity is None:
        return None
    used = failure.allocated or 0
    limit = failure.capacity if failure.allowed is None else min(failure.capacity, failure.allowed)
    if requested + used <= limit + PRINTED:
        return None
    in_use = f" and {gib(used)} are in use" if failure.allocated is not None else ""
    return Verdict("capacity", (), f"{gib(requested)} were asked for{in_use}, of {gib(limit)} in all: no order helps")


def _outside(failure: Failure, size: int) -> tuple[int, str, bool, tuple[str, ...]] | None:
    """(bytes, words, whether it is certain, candidates) of memory outside the allocator where it is much."""
    others = failure.held_by_others
    if others is not None and others >= max(OTHERS_BYTES, OTHERS_SHARE * size):
        return others, "are held by other processes", True, ()
    own = failure.outside
    if own is None and failure.own is not None and failure.reserved is not None:
        own = max(0, failure.own - failure.reserved)
    least = max(OUTSIDE_BYTES, OUTSIDE_SHARE * size)
    if own is not None:
        if own >= least:
            words = "are held by this process outside of PyTorch's allocator (libraries, communication, contexts)"
            return own, words, False, ("capacity", "memory outside of PyTorch")
        return None
    left = failure.not_accounted
    if left is None or left < least:
        return None
    if left >= MOSTLY_OUTSIDE * size:
        return left, "are held outside of this process's allocator", True, ()
    words = "are held outside of the allocator, by other processes or by libraries of this one"
    return left, words, False, ("other process", "capacity", "memory outside of PyTorch")


def _is_line(event: Mapping[str, Any]) -> bool:
    return (
        event.get("kind") == "log"
        and event.get("level") == "error"
        and event.get("logger") != "nccl"
        and DEVICE_WORDS.search(str(event.get("message") or "")[:_MOST]) is not None
    )


def _host(capsule: Capsule) -> Iterator[Mapping[str, Any]]:
    for event in capsule.records("events"):
        if is_host_failure(event) and (event.get("kind") != "log" or event.get("logger") != "nccl"):
            yield event


def _failures(capsule: Capsule) -> Iterator[Failure]:
    from ...capsules.importers.logs.out_of_memory import parsed

    sizes = capacities(capsule)
    ends = _ends(capsule)
    blocks = largest_free_blocks(capsule)
    events = list(capsule.records("events"))
    errors = [each for each in events if is_device_failure(each)]
    # A line of a log alone counts where nothing better tells of a failure.
    for event in errors or (each for each in events if _is_line(each)):
        step, rank = whole(event.get("step")), whole(event.get("rank"))
        # Several ranks print into one log, and nothing says which did; NCCL's lines name a device and no rank.
        if event.get("told") is False or (
            event.get("phase") == "communication" and event.get("device") not in (None, rank)
        ):
            rank = None
        message = str(event.get("message") or "")
        # A recording has the words and what the device said afterwards; a log has been read already.
        said = (parsed(message[:_MOST]) or {}) | {name: value for name, value in event.items() if value is not None}
        allowed = _ALLOWED.search(message[:_MOST])
        requested, reserved = positive(said.get("requested")), whole(said.get("reserved"))
        capacity, free = positive(said.get("capacity")) or sizes.get(rank or 0), whole(said.get("free"))
        own, others = sorted_out(said, reserved, capacity, free)
        yield Failure(
            step=step,
            rank=rank,
            t=number(event.get("t")),
            device=whole(said.get("device")),
            phase=str(event["phase"]) if event.get("phase") else None,
            type=str(event["type"]) if event.get("type") else None,
            message=message,
            requested=requested,
            # An event of a trace names the block, an error's text the segment that the driver refused.
            segment=segment_for(requested) if requested is not None and "event" in said else None,
            free=free,
            allocated=whole(said.get("allocated")),
            reserved=reserved,
            private=positive(said.get("private_pools")),
            capacity=capacity,
            own=own,
            outside=whole(said.get("other_allocations")),
            allowed=round(float(allowed[1]) * _UNITS[allowed[2]]) if allowed else None,
            others=others,
            largest_free=_first(event.get("largest_free_block"), blocks.get((rank or 0, step)), blocks.get(rank or 0)),
            collects=collecting(event.get("frames")),
            caught=_went_on(step, number(event.get("t")), ends.get(rank or 0) or ends.get(None)),
        )


def _ends(capsule: Capsule) -> dict[int | None, tuple[int, float]]:
    """The last step that each rank reported, and when (NaN where unknown); under None that of any rank."""
    found: dict[int | None, tuple[int, float]] = {}
    for key in capsule.scalar_keys():
        if key.name not in ("loss", "grad_norm", "step_time") or key.side is not None:
            continue
        series = capsule.scalars(key.name, rank=key.rank)
        if not len(series.step):
            continue
        when = float(series.time[-1]) if series.time is not None else math.nan
        end = (int(series.step[-1]), when)
        for rank in (key.rank, None):
            found[rank] = max(found.get(rank, end), end)
    return found


def _went_on(step: int | None, t: float | None, end: tuple[int, float] | None) -> bool:
    if end is None:
        return False
    if step is not None:
        return end[0] > step
    return t is not None and end[1] > t


def _first(*values: Any) -> int | None:
    return next((found for value in values if (found := whole(value)) is not None), None)


def _late(value: float | None) -> float:
    return math.inf if value is None else float(value)
