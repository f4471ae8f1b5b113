"""Out of memory because the job needs more than the device has, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..finding import Evidence, Finding, Where
from ..registry import rule
from .configuration import plan
from .fitting import Fitting, fitting
from .oom import Failure, Verdict, gib, told_by
from .thresholds import LITTLE_SLACK

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "memory/capacity",
    stage="runtime",
    severity="warning",
    needs=("records.events",),
    explained_by=(
        "memory/eval-graph",
        "memory/leak",
        "memory/logged-tensors",
        "memory/long-tail",
        "memory/serving-admission",
        "memory/serving-cancelled",
        "memory/serving-output-limit",
        "memory/serving-pages",
        "memory/serving-prefix-references",
    ),
    cases=("out-of-memory-after-hours",),
)
def capacity(capsule: Capsule) -> Iterator[Finding]:
    """Out of memory: the job needs more than the device has.

    What it checks:
        Every out-of-memory failure of a device that the events tell of (a log, a recording, a snapshot).
    Why it matters:
        The trace names whoever asked last, not whoever holds the memory. Whether the device is full, split into
        useless pieces, or shared decides which of three different cures helps.
    How it decides:
        Likely where the request and what is in use together exceed the device (or a limit that the job set itself),
        where it exceeds what is free on the device and unused in the allocator together, where it exceeds what is free
        and the allocator holds less than 5 % of the device unused, or where both together are less than 2 %. Failures
        whose numbers are absent or fit several causes are said here as undetermined. What would fit is computed from
        the configuration where the manifest has it.
    Looks like it but is not:
        Fragmentation (enough is unused, in pieces), memory of another process, the host's memory (a killed process),
        a failure that was caught and after which training went on (info).
    What to try next:
        Log the peak of the first steps with half the micro-batch. Where the cause is open, write an allocator
        snapshot and run nvidia-smi on the node.
    Fix:
        One of what would fit: a smaller micro-batch with more accumulation, shorter rows, activation checkpointing,
        sharding of optimizer and gradients, fewer bytes a number.
    """
    told = told_by(capsule, "memory/capacity")
    if told:
        yield _finding(told, fitting(plan(capsule), told[0][0]))


def _finding(told: Sequence[tuple[Failure, Verdict]], what: Fitting) -> Finding:
    failure, verdict = told[0]
    open_ = verdict.kind == "undecided"
    limited = failure.limited and not open_
    words = failure_words(told)
    words += f" It may be {' or '.join(verdict.between)}." if open_ else f" {what.words}"
    return Finding(
        severity="info" if failure.caught else None,
        confidence="undetermined" if open_ else "likely",
        title="Out of memory"
        if open_
        else "Out of memory: the job's own limit is reached"
        if limited
        else "Out of memory: the device is full",
        summary=words,
        where=Where(step=failure.step, rank=failure.rank),
        evidence=failure_evidence(told) + (() if open_ else what.evidence),
        cause=None
        if open_
        else f"the job needs more memory than {'its own limit allows' if limited else 'the device has'}",
        next=_next(failure, open_),
        fix=(("raise the limit that the job sets itself (set_per_process_memory_fraction)",) if limited else ())
        + tuple(each.words for each in what.changes if each.fits)
        or ("a smaller micro-batch with more accumulation, shorter rows, activation checkpointing or sharding",),
    )


def failure_words(told: Sequence[tuple[Failure, Verdict]]) -> str:
    """One or two sentences about the first of several failures that one rule speaks of."""
    failure, verdict = told[0]
    words = verdict.because[:1].upper() + verdict.because[1:] + "."
    if (phase := _PHASES.get(failure.phase or "")) is not None:
        words = f"{phase}, {words[:1].lower()}{words[1:]}"
    if failure.allocated is not None and failure.capacity and "are in use, of" not in words:
        share = failure.allocated / failure.capacity
        words += f" {gib(failure.allocated)} of {gib(failure.capacity)} ({share:.1%}) are in use."
    if failure.caught:
        words += " Training went on after it."
    ranks = {each.rank for each, _ in told if each.rank is not None}
    return words + (f" {len(ranks)} ranks failed." if len(ranks) > 1 else "")


def failure_evidence(told: Sequence[tuple[Failure, Verdict]]) -> tuple[Evidence, ...]:
    """The numbers of the first of several failures, and how many there are."""
    failure, verdict = told[0]
    room, idle = failure.room, failure.idle
    slack = None if room is None else room + (idle or 0)
    sizes = (
        ("free", failure.free, None, "on the device"),
        ("allowed", failure.allowed, None, "the job's own limit"),
        ("allocated", failure.allocated, None, ""),
        ("reserved", failure.reserved, None, ""),
        ("reserved, not allocated", idle, _little(failure, verdict), ""),
        ("largest free block", failure.largest_free, None, ""),
        ("capacity", failure.capacity, None, ""),
        ("held by other processes", failure.held_by_others, 0, ""),
        ("outside of the allocator", failure.not_accounted, None, "contexts, libraries, other processes"),
    )
    return (
        Evidence(
            name="requested", value=failure.requested, expected=None if slack is None else f"≤ {slack:,}", unit="B"
        ),
        *(
            Evidence(name=name, value=value, expected=expected, unit="B", note=note)
            for name, value, expected, note in sizes
            if value is not None
        ),
        *(
            Evidence(name="other process", value=each.bytes, unit="B", note=f"pid {each.pid}")
            for each in failure.others[:16]
        ),
        *([Evidence(name="device", value=failure.device)] if failure.device is not None else ()),
        Evidence(name="failures", value=len(told), expected=0),
    )


#: Where the job was, as a sentence begins.
_PHASES = {
    "forward": "In the forward pass",
    "backward": "In the backward pass",
    "optimizer": "In the optimizer's step",
    "eval": "In an evaluation",
    "communication": "In communication",
}


def _little(failure: Failure, verdict: Verdict) -> str | None:
    if failure.capacity is None or verdict.kind != "capacity":
        return None
    return f"≤ {LITTLE_SLACK * failure.capacity:,.0f}"


def _next(failure: Failure, open_: bool) -> tuple[str, ...]:
    half = "log the peak of the first steps with half the micro-batch and compare"
    if not open_:
        return (half,)
    if failure.requested is None:
        return ("read the lines above it for the sizes, and write an allocator snapshot at the failure", half)
    return ("run nvidia-smi on the node for other processes", "write an allocator snapshot at the failure", half)
