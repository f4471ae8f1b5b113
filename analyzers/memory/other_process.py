"""The device holds memory that this process did not allocate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import rule
from ..series import curve
from .capacity import failure_evidence, failure_words
from .oom import Failure, Verdict, failures, told_by
from .processes import Other
from .records import capacities, gib, mappings, whole
from .thresholds import BEYOND_BYTES, BEYOND_SHARE, MOSTLY_OUTSIDE, OUTSIDE_BYTES

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Points of the device's use without which its level is not known.
_FEWEST = 5


@rule(
    "memory/other-process",
    stage="runtime",
    severity="warning",
    needs=("records.events|scalars.memory_device_used",),
    cases=("out-of-memory-after-hours",),
)
def other_process(capsule: Capsule) -> Iterator[Finding]:
    """The device holds memory that this process did not allocate.

    What it checks:
        What other processes hold, as an out-of-memory error lists it or as what is left of the device shows; and what
        nvidia-smi says that the device uses, beside what the allocator has reserved.
    Why it matters:
        A job that was killed and left a worker behind, a notebook, or a neighbour's job: no setting of this job cures
        it, and each restart fails alike.
    How it decides:
        Failures: without what others hold the request had fitted (likely), and it is more than contexts and libraries
        take; undetermined where it may be this process's own libraries. Without a failure: the device uses 4 GiB and
        a tenth of its size more than this process ever reserved, throughout the later half of what was measured
        (likely where it is more than half of the device, or a monitor lists processes that hold half of it).
    Looks like it but is not:
        The context of CUDA and the buffers of NCCL and cuBLAS, several hundred MiB up to about 2 GiB; ranks of the
        same job that share the device on purpose; memory that the allocator reserved and does not use.
    What to try next:
        nvidia-smi on the node, with the process ids; ps for workers of an earlier run.
    Fix:
        End what is left over of an earlier run, or ask for a device of one's own.
    """
    told = told_by(capsule, "memory/other-process")
    if told:
        yield _at_a_failure(told)
    elif not failures(capsule):
        yield from _beside_the_allocator(capsule)


def _at_a_failure(told: Sequence[tuple[Failure, Verdict]]) -> Finding:
    failure, verdict = told[0]
    open_ = verdict.kind == "undecided"
    pids = ", ".join(str(each.pid) for each in failure.others[:8] if each.pid is not None)
    return Finding(
        severity="info" if failure.caught else None,
        confidence="undetermined" if open_ else "likely",
        title="Out of memory: others are on the device" if not open_ else "Out of memory: others may be on the device",
        summary=failure_words(told) + (f" Process ids: {pids}." if pids else ""),
        where=Where(step=failure.step, rank=failure.rank),
        evidence=failure_evidence(told),
        cause=None if open_ else "another process holds the memory that this one lacks",
        next=("nvidia-smi on the node: whose are the process ids that it lists?",),
        fix=("end what is left over of an earlier run, or ask for a device of one's own",),
    )


def _beside_the_allocator(capsule: Capsule) -> Iterator[Finding]:
    sizes = capacities(capsule)
    for key in capsule.scalar_keys():
        if key.name != "memory_device_used":
            continue
        used = curve(capsule, key.name, key.rank, key.side).finite()
        reserved = curve(capsule, "memory_reserved", key.rank).finite()
        if len(used) < _FEWEST or not len(reserved):
            continue
        # Both are measured at other times: what was ever reserved, beside what is used throughout.
        level = float(np.min(used.value[len(used) // 2 :]))
        own = float(reserved.value.max())
        least = max(BEYOND_BYTES, BEYOND_SHARE * sizes.get(key.rank, 0))
        if level - own >= least:
            yield _beyond(capsule, key.rank, level, own, least, sizes.get(key.rank))
            return  # who else is there is the same question on each device of a node


def _beyond(capsule: Capsule, rank: int, level: float, own: float, least: float, size: int | None) -> Finding:
    beyond = level - own
    others = _listed(capsule, rank, own)
    mostly = beyond >= MOSTLY_OUTSIDE * (size or level)
    sure = mostly or sum(each.bytes for each in others) >= MOSTLY_OUTSIDE * beyond
    pids = ", ".join(f"{each.pid} ({gib(each.bytes)})" for each in others[:8])
    return Finding(
        confidence="likely" if sure else "undetermined",
        title="Others are on the device" if sure else "The device holds more than this process reserved",
        summary=(
            f"The device uses {gib(level)} or more throughout, and this process never reserved more than {gib(own)}: "
            f"{gib(beyond)} belong to somebody else" + ("." if sure else ", or to libraries of this process.")
        )
        + (f" Other processes: {pids}." if pids else ""),
        where=Where(rank=rank),
        evidence=(
            Evidence(name="memory_device_used", value=level, unit="B", note="lowest of the later half"),
            Evidence(name="memory_reserved", value=own, unit="B", note="highest"),
            Evidence(
                name="beyond it",
                value=beyond,
                expected=f"< {least:,.0f}",
                unit="B",
                note=f"contexts and libraries take up to about {gib(OUTSIDE_BYTES)}",
            ),
            *(
                Evidence(name="other process", value=each.bytes, unit="B", note=f"pid {each.pid}")
                for each in others[:8]
            ),
        ),
        cause="another process holds memory of the device" if sure else None,
        next=("nvidia-smi on the node, with the process ids",),
        fix=("end what is left over of an earlier run, or ask for a device of one's own",),
    )


def _listed(capsule: Capsule, rank: int, own: float) -> list[Other]:
    """The processes that a monitor listed last on a device, but the one that may be this job's: largest first."""
    found: list[Other] = []
    for event in capsule.records("events", rank=rank):
        if event.get("kind") == "other_processes":
            each = [(whole(one.get("pid")), whole(one.get("bytes"))) for one in mappings(event.get("other_processes"))]
            found = [Other(pid, size) for pid, size in each if size]
    mine = min((each for each in found if each.bytes >= own), key=lambda each: each.bytes - own, default=None)
    return sorted((each for each in found if each is not mine), key=lambda each: -each.bytes)
