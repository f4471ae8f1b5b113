"""Out of memory although enough is unused: in pieces, none of which is large enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...capsules.allocator import ALLOC, OOM, SEGMENT_MAP
from ..finding import Confidence, Evidence, Finding, Where
from ..registry import rule
from ..series import Curve
from .allocator import history_of, own_frame
from .capacity import failure_evidence, failure_words
from .lengths import growing_lengths, grows
from .oom import Failure, Verdict, gib, told_by
from .records import segment_for

if TYPE_CHECKING:
    from ...capsules import Capsule
    from ...capsules.allocator import History, Segments

#: Stacks of blocks that are named as those that split the memory.
_MOST_NAMED = 3
#: Share of a segment that is unused where its live blocks split it.
_SPLIT = 0.1
#: What two printed decimals may be off, as a share.
_PRINTED = 0.006
#: Share by which a snapshot and an error may differ where they tell of one state.
_ALIKE = 0.01
_MIB = 1 << 20


@rule(
    "memory/fragmentation",
    stage="runtime",
    severity="warning",
    needs=("records.events",),
    explained_by=("memory/eval-graph", "memory/leak", "memory/logged-tensors"),
    cases=("out-of-memory-after-hours",),
)
def fragmentation(capsule: Capsule) -> Iterator[Finding]:
    """Out of memory although the allocator holds enough unused: no one piece is large enough.

    What it checks:
        Failures of which the numbers, or the snapshot taken with them, tell what the allocator held and how large its
        largest unused piece was.
    Why it matters:
        A smaller model hides it for a while. The memory is there; the order or the lifetime of the blocks is wrong.
    How it decides:
        Reserved less allocated is at least what was asked for, and no unused piece is. Confirmed where a snapshot
        shows every piece that the request could have used, likely from the numbers of an error's text, undetermined
        where the unused part is as small as any full device leaves. The stacks are named whose live blocks lie in the
        segments with most unused memory, and whether the lengths grow from batch to batch: then each batch asks for
        blocks larger than any that was given back.
    Looks like it but is not:
        A full device (less is unused than asked for), memory of other processes, unused memory of another stream or of
        a captured graph (it is said, and is no fragmentation), memory that is reserved and not needed.
    What to try next:
        PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and separately the longest batches first; compare the peaks
        of reserved and of allocated memory.
    Fix:
        Longest batches first or a few padded lengths; expandable segments; allocate what lives long before the first
        step; keep no small blocks beyond their step.
    """
    told = told_by(capsule, "memory/fragmentation")
    if told:
        yield _finding(capsule, told)


@dataclass(frozen=True)
class _Unused:
    """What was unused at a failure: that the request could have used, its largest piece, and that of other places."""

    usable: int
    largest: int
    elsewhere: int
    pins: tuple[tuple[int, int, int, int], ...]  # stack, blocks, their bytes, unused bytes beside them
    grown: tuple[int, int, int] | None  # sizes that the failing stack asked for: first, last, how many


def _finding(capsule: Capsule, told: Sequence[tuple[Failure, Verdict]]) -> Finding:
    # A log and a snapshot tell of one failure: the one that can be looked at comes first.
    told = sorted(told, key=lambda each: _seen(capsule, each[0])[1] is None)
    failure, verdict = told[0]
    history, at = _seen(capsule, failure)
    unused = None if history is None or at is None else _look(history, at)
    requested = failure.requested or 0
    lengths = growing_lengths(capsule, failure.rank)
    elsewhere = unused is not None and unused.usable < requested
    confidence: Confidence = "likely"
    if verdict.kind == "undecided":
        confidence = "undetermined"
    elif unused is not None and unused.usable >= requested > unused.largest:
        confidence = "confirmed"
    words = failure_words(told)
    cause = "the unused memory is split into pieces by blocks that live longer than what was beside them"
    if unused is not None:
        words += f" The largest unused piece has {gib(unused.largest)}."
    if elsewhere and unused is not None:
        cause = "the unused memory belongs to another stream or to the pool of a captured graph"
        words += f" Only {gib(unused.usable)} of the unused memory are where this request looks."
    elif history is not None and unused is not None and unused.pins:
        stack, count, size, beside = unused.pins[0]
        words += (
            f" {count:,} blocks ({gib(size)}) of {own_frame(history, stack)} lie among {gib(beside)} that are unused."
        )
    growing = lengths is not None or (unused is not None and unused.grown is not None)
    if growing and not elsewhere:
        words += " Each batch asks for more than the one before, so that no block that was given back fits again."
        cause = "the lengths grow from batch to batch: no block that was given back is large enough for the next batch"
    expands = history is not None and bool((history.action == SEGMENT_MAP).any())
    return Finding(
        severity="info" if failure.caught else None,
        confidence=confidence,
        title="Out of memory: enough is unused, in pieces"
        if not elsewhere
        else "Out of memory: unused memory elsewhere",
        summary=words,
        where=Where(step=failure.step, rank=failure.rank),
        evidence=(*failure_evidence(told), *_evidence(history, unused, requested), *_lengths(lengths)),
        cause=cause,
        next=(
            "the longest batches first: compare the peaks of reserved memory",
            *(() if expands else ("the same job with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",)),
            *(() if unused is not None else ("a snapshot at the failure names the blocks that split the memory",)),
        ),
        fix=(
            "process the longest batches first, or pad to a few lengths"
            if growing
            else "allocate what lives long before the first step, keep nothing small beyond its step",
            *(() if expands else ("use expandable segments",)),
        ),
    )


def _seen(capsule: Capsule, failure: Failure) -> tuple[History | None, int | None]:
    """The history that a failure belongs to, and its event there."""
    history = history_of(capsule, failure.rank, failure.device)
    return history, None if history is None else _place(history, failure)


def _place(history: History, failure: Failure) -> int | None:
    """The event of a failure in its rank's trace: of those that asked for as much, the one nearest in time."""
    requested = failure.requested or 0
    found = [
        at
        for at in history.failures.tolist()
        if any(abs(size - requested) <= _PRINTED * requested for size in _sizes_said(int(history.size[at])))
    ]
    if not found and _at_the_end(history, failure):
        return history.end
    if failure.t is None:
        return found[-1] if found else None
    return min(found, key=lambda at: abs(history.time_us[at] / 1e6 - (failure.t or 0.0)), default=None)


def _at_the_end(history: History, failure: Failure) -> bool:
    """Whether a snapshot without the failure's event was written while the memory was as the failure says."""
    if len(history.failures) or not failure.reserved or not failure.allocated or history.end < 0:
        return False
    held = ((history.reserved[-1], failure.reserved), (history.allocated[-1], failure.allocated))
    return all(abs(seen - said) <= _ALIKE * said for seen, said in held)


def _sizes_said(size: int) -> tuple[int, int]:
    """What an event and what an error's text give for one request: the block, and the segment it would have taken."""
    return size, segment_for(size)


def _look(history: History, at: int) -> _Unused:
    found = history.segments(at)
    own = np.ones(len(found.start), np.bool_)
    if history.action[at] == OOM:
        own = (found.stream == history.stream[at]) & (found.pool == history.pool[at])
    usable = own[found.free_segment] if len(found.free_segment) else np.zeros(0, np.bool_)
    return _Unused(
        usable=int(found.free_size[usable].sum()),
        largest=int(found.free_size[usable].max(initial=0)),
        elsewhere=int(found.free_size[~usable].sum()),
        pins=_pins(found, own),
        grown=_grown(history, at),
    )


def _pins(found: Segments, own: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[tuple[int, int, int, int], ...]:
    """Stacks of the live blocks that split segments, those with most unused memory beside them first."""
    unused = np.bincount(found.free_segment, found.free_size.astype(np.float64), len(found.start))
    split = own & (unused > _SPLIT * (found.end - found.start)) & (unused >= _MIB)
    inside = found.block_segment >= 0
    inside[inside] = split[found.block_segment[inside]]
    blocks, segment = found.blocks.where(inside), found.block_segment[inside]
    rows: list[tuple[int, int, int, int]] = []
    for stack in np.unique(blocks.stack).tolist():
        mine = blocks.stack == stack
        beside = int(unused[np.unique(segment[mine])].sum())
        rows.append((stack, int(mine.sum()), int(blocks.size[mine].sum()), beside))
    return tuple(sorted(rows, key=lambda each: (-each[3], each[2]))[:_MOST_NAMED])


def _grown(history: History, at: int) -> tuple[int, int, int] | None:
    """Sizes that the stack of the failed request asked for before, where they grew: first, last, how many."""
    if history.action[at] != OOM:
        return None
    stack = int(history.stack[at])
    asked = np.flatnonzero((history.stack[: at + 1] == stack) & np.isin(history.action[: at + 1], (ALLOC, OOM)))
    asked = asked[asked >= history.prologue]
    sizes = history.size[asked]
    return (int(sizes[0]), int(sizes[-1]), len(sizes)) if stack > 0 and grows(sizes.astype(np.float64)) else None


def _evidence(history: History | None, unused: _Unused | None, requested: int) -> Iterator[Evidence]:
    if history is None or unused is None:
        return
    yield Evidence(name="unused, for this request", value=unused.usable, expected=f"≥ {requested:,}", unit="B")
    yield Evidence(name="its largest piece", value=unused.largest, expected=f"≥ {requested:,}", unit="B")
    if unused.elsewhere:
        yield Evidence(name="unused, of other streams and pools", value=unused.elsewhere, unit="B")
    for stack, count, size, beside in unused.pins:
        note = f"{count:,} blocks, {size:,} B, of {own_frame(history, stack)}"
        yield Evidence(name="unused beside live blocks", value=beside, unit="B", note=note)
    if unused.grown is not None:
        first, last, times = unused.grown
        note = f"{times:,} requests of the stack that failed"
        yield Evidence(name="size asked for", value=last, expected=f"≈ {first:,}", unit="B", note=note)


def _lengths(lengths: Curve | None) -> Iterator[Evidence]:
    if lengths is not None:
        first, last = float(lengths.value[0]), float(lengths.value[-1])
        yield Evidence(name="length", value=last, expected=f"≈ {first:,.0f}", note=f"over {len(lengths):,} batches")
