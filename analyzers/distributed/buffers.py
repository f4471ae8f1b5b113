"""Buffers of asynchronous collectives that are read or written before the collective is done."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..finding import Evidence, Finding, Where
from ..registry import NotCaptured, rule
from . import thresholds as T

if TYPE_CHECKING:
    from ...capsules import Capsule

Record = dict[str, Any]

#: Calls that leave nothing to be read.
_NOTHING_TO_READ = ("barrier", "monitored_barrier")
#: Places whose own code waits by events or later: torch, and libraries that schedule communication.
_LIBRARIES = re.compile(
    r"(?:^|/)(?:torch|deepspeed|megatron|fairscale|accelerate|lightning|pytorch_lightning|transformer_engine|apex"
    r"|colossalai|bagua|horovod)/"
)


@rule(
    "distributed/unwaited-buffer",
    stage="distributed",
    needs=(
        "records.collectives.waited|records.collectives.buffer_reused_before_wait|records.collectives.stream_synced",
    ),
    cases=(),
)
def unwaited_buffer(capsule: Capsule) -> Iterator[Finding]:
    """The buffer of an asynchronous collective was used before the collective was done.

    What it checks:
        For each call with async_op: whether its handle was waited for, whether its buffer was written or read before
        that, and, on a stream of its own, whether an event orders the two streams.

    Why it matters:
        The call returns at once. Until it is done the buffer holds the old values, the new ones, or some of each: the
        result depends on timing, is right in a debugger and wrong at scale, and no error is raised.

    How it decides:
        Confirmed: the buffer was used before the wait. Likely: work on another stream without an event, and a handle
        that nobody waited for although the rank went on to later steps or calls; whether the values were used too early
        then depends on the timing. One finding a call site, with the number of calls.

    Looks like it but is not:
        Calls that still ran when the recording ended; a barrier that is fired and forgotten; calls of DDP, FSDP and
        other libraries, which wait by events of their own; coalesced calls, of which one handle stands for all.

    What to try next:
        handle.wait() directly after the call: if the numbers become repeatable, this was it. On CUDA also
        torch.cuda.synchronize().

    Fix:
        Keep the handle and wait before the buffer is touched; a second buffer for what goes on meanwhile; on a stream
        of its own wait_stream or an event, and record_stream for the tensor.
    """
    rows = [record for record in capsule.records("collectives") if _asynchronous(record)]
    if not any(
        record.get(name) is not None
        for record in rows
        for name in ("waited", "buffer_reused_before_wait", "stream_synced")
    ) and any(record.get("async_op") is None for record in capsule.records("collectives")):
        raise NotCaptured("asynchronous calls with what became of their handles")
    ends = _ends(capsule)
    sites: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in rows:
        fault = _fault(record, ends)
        if fault is not None:
            sites[fault, str(record.get("op") or ""), _site(record)].append(record)
    order = {"reused": 0, "stream": 1, "unwaited": 2}
    for (fault, op, site), calls in sorted(sites.items(), key=lambda each: (order[each[0][0]], each[0])):
        yield _finding(fault, op, site, calls, len(rows))


def _asynchronous(record: Record) -> bool:
    return record.get("async_op") is True or (
        record.get("async_op") is None and record.get("buffer_reused_before_wait") is True
    )


def _ends(capsule: Capsule) -> Mapping[int, tuple[int, int]]:
    """Rank → the last step and the last place in its order that it came to."""
    found: dict[int, tuple[int, int]] = {}
    for at, record in enumerate(capsule.records("collectives")):
        step, order = found.get(record["rank"], (-1, -1))
        own, place = record.get("step"), record.get("order")
        found[record["rank"]] = (
            max(step, own if isinstance(own, int) else -1),
            max(order, place if isinstance(place, int) else at),
        )
    for key in capsule.scalar_keys():
        if key.name in ("loss", "step_time", "tokens") and key.rank in found:
            steps = capsule.scalars(key.name, rank=key.rank).step
            if len(steps):
                found[key.rank] = (max(found[key.rank][0], int(steps[-1])), found[key.rank][1])
    return found


def _fault(record: Record, ends: Mapping[int, tuple[int, int]]) -> str | None:
    """What is wrong with a call: its buffer was reused, its stream not ordered, its handle not waited for."""
    if record.get("buffer_reused_before_wait") is True:
        return "reused"
    if record.get("op") in _NOTHING_TO_READ or _of_library(record):
        return None
    if record.get("stream_synced") is False:
        return "stream"
    if record.get("waited") is not False or record.get("stream_synced") is True:
        return None
    if record.get("buffer_reused_before_wait") is None and record.get("op") in ("send", "isend"):
        return None  # what was sent is read by the other side
    last_step, last_order = ends[record["rank"]]
    step, order = record.get("step"), record.get("order")
    if isinstance(step, int) and last_step >= 0:
        return "unwaited" if step < last_step else None
    return "unwaited" if isinstance(order, int) and last_order - order >= T.CALLS_LATER else None


def _of_library(record: Record) -> bool:
    """Whether a library made the call; of the frames the innermost that is not torch's own entry point decides."""
    for frame in record.get("frames") or ():
        file = (frame.get("file") or "").replace("\\", "/")
        if "torch/distributed/" in file and file.endswith(("distributed_c10d.py", "c10d_logger.py")):
            continue
        return bool(_LIBRARIES.search(file))
    return False


def _site(record: Record) -> str:
    """The line of the job that made the call."""
    for frame in record.get("frames") or ():
        file = (frame.get("file") or "").replace("\\", "/")
        if file and not _LIBRARIES.search(file):
            return f"{file}:{frame.get('line')} in {frame.get('name')}"
    return ""


def _finding(fault: str, op: str, site: str, calls: list[Record], asynchronous: int) -> Finding:
    first = min(calls, key=lambda each: (each.get("step") or 0, each.get("order") or 0, each["rank"]))
    ranks = sorted({each["rank"] for each in calls})
    step, seq = first.get("step"), first.get("seq")
    at = f" at {site}" if site else ""
    which = f"{op or 'a call'}{f' {seq}' if seq is not None else ''} of group {first.get('group') or '0'}"
    words = {
        "reused": "its buffer was used before it was waited for",
        "stream": "nothing orders its stream with the one that uses the buffer",
        "unwaited": "nobody waited for it, and the rank went on",
    }[fault]
    title = {
        "reused": "A buffer was used before its collective was done",
        "stream": "A collective's stream is not ordered with its readers",
        "unwaited": "An asynchronous collective is never waited for",
    }[fault]
    field = {"reused": "buffer_reused_before_wait", "stream": "stream_synced", "unwaited": "waited"}[fault]
    return Finding(
        severity="critical" if fault == "reused" else "warning",
        confidence={"reused": "confirmed", "stream": "likely", "unwaited": "likely"}[fault],  # type: ignore[arg-type]
        title=title,
        summary=(
            f"Rank {first['rank']}, {which}{f', step {step}' if step is not None else ''}{at}: {words} "
            f"({len(calls)} such call{'s' * (len(calls) != 1)} on {len(ranks)} rank{'s' * (len(ranks) != 1)})."
        ),
        where=Where(
            step=step if isinstance(step, int) else None,
            rank=first["rank"],
            order=first["order"] if isinstance(first.get("order"), int) else None,
        ),
        evidence=(
            Evidence(name=field, value=first.get(field), expected=fault != "reused", note=site),
            Evidence(name="calls", value=len(calls), expected=0, note=f"of {asynchronous} asynchronous ones"),
            Evidence(name="ranks", value=ranks[: T.RANKS_SHOWN]),
        ),
        cause={
            "reused": "the buffer was read or written while the collective could still be running",
            "stream": "the collective runs on a stream of its own and no event makes its readers wait",
            "unwaited": "its handle was dropped: the result may be used before it is there",
        }[fault],
        next=("wait directly after the call and see whether the numbers become repeatable",),
        fix=("wait for the handle before the buffer is touched", "a second buffer for what goes on meanwhile"),
    )
