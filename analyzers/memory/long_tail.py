"""A peak of memory that the longest sample (or the largest image) makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import NotJudged, rule
from ..series import Curve, curve
from .oom import Failure, failures, gib
from .records import whole
from .thresholds import (
    TAIL_FALL,
    TAIL_LONG,
    TAIL_PEAK,
    TAIL_RECORDS,
    TAIL_SAME,
    TAIL_STEP,
    TAIL_STEPS,
    TAIL_WARM_UP,
)

if TYPE_CHECKING:
    from ...capsules import Capsule

_CURVES: Final = ("memory_peak", "memory_allocated", "memory_reserved", "memory_device_used")


@dataclass(frozen=True)
class _Largest:
    """The largest sample of each step: its size, and its name."""

    steps: np.ndarray[Any, Any]
    sizes: np.ndarray[Any, Any]
    names: tuple[str | None, ...]
    unit: str


@rule(
    "memory/long-tail",
    stage="runtime",
    severity="warning",
    needs=(
        "records.samples.length|records.samples.image_size",
        "scalars.memory_peak|scalars.memory_allocated|scalars.memory_reserved|scalars.memory_device_used|records.events",
    ),
    cases=("out-of-memory-after-hours",),
)
def long_tail(capsule: Capsule) -> Iterator[Finding]:
    """The peak of memory is made by the longest sample.

    What it checks:
        The steps at which memory reached a new height, and out-of-memory failures, beside the longest sample (or the
        largest image) of each step.
    Why it matters:
        The job fits for hours and fails at the one batch with the longest row. It looks like a leak and is a cap that
        is missing; the trace names an innocent line.
    How it decides:
        After a warm-up of three points memory rises by 20 % or more in all, and every rise of 2 % or more stands at a
        step whose longest sample is the longest so far, while such steps are few (at most 30 %). Or the device ran out
        of memory at a step whose longest sample is the longest so far and 1.2 times the median. Info where nothing
        failed and the peak is below 1.5 times the usual level.
    Looks like it but is not:
        Packed or padded rows, whose length is constant; the peak of the first steps; lengths that grow in order
        (each step is then the longest so far); a leak, which rises without longer samples.
    What to try next:
        Run one step with the named sample alone; plot memory over the longest length of the batch.
    Fix:
        Cap the length or the pixels of a sample, bucket by length, or size batches by tokens instead of rows.
    """
    packed = capsule.manifest.training is not None and capsule.manifest.training.packing
    by_rank = {rank: found for rank in _ranks(capsule) if (found := _largest(capsule, rank)) is not None}
    if not by_rank:
        raise NotJudged("lengths of samples by step")
    for rank, largest in by_rank.items():
        if packed or largest.sizes.max() <= TAIL_SAME * largest.sizes.min():
            continue
        failed = _failure(capsule, rank, largest)
        if failed is not None:
            yield failed
            return
        for name in _CURVES:
            found = _peak(curve(capsule, name, rank).finite(), name, rank, largest)
            if found is not None:
                yield found
                return


def _peak(memory: Curve, name: str, rank: int, largest: _Largest) -> Finding | None:
    memory = memory.where(np.isin(memory.step, largest.steps))
    if len(memory) < TAIL_STEPS:
        return None
    sizes = largest.sizes[np.searchsorted(largest.steps, memory.step)]
    names = [largest.names[at] for at in np.searchsorted(largest.steps, memory.step).tolist()]
    longest = np.maximum.accumulate(sizes)
    new = np.concatenate([[True], sizes[1:] > longest[:-1]])
    highest = np.maximum.accumulate(memory.value)
    rises = np.flatnonzero(np.diff(highest) > TAIL_STEP * highest[:-1]) + 1
    rises = rises[rises >= TAIL_WARM_UP]
    base = float(highest[TAIL_WARM_UP - 1])
    peak = float(highest[-1])
    if not len(rises) or base <= 0 or peak < TAIL_PEAK * base or new[TAIL_WARM_UP:].mean() > TAIL_RECORDS:
        return None
    if not bool(new[rises].all()):
        return None
    if name in ("memory_allocated", "memory_device_used") and not _falls(memory, rises):
        return None
    at = int(rises[-1])
    usual = float(np.median(memory.value))
    return Finding(
        severity=None if peak >= TAIL_FALL * usual else "info",
        confidence="likely",
        title="The peak of memory is made by the longest sample",
        summary=(
            f"Memory rises from {gib(base)} to {gib(peak)} at {len(rises)} steps, each with the longest sample so far; "
            f"at step {int(memory.step[at])} it has {int(sizes[at]):,} {largest.unit}, the median of the steps is "
            f"{float(np.median(sizes)):,.0f}."
        ),
        where=Where(step=int(memory.step[at]), rank=rank, sample=names[at]),
        evidence=(
            Evidence(name=name, value=round(peak), expected=f"≤ {TAIL_PEAK * base:,.0f}", unit="B"),
            Evidence(
                name="longest sample",
                value=int(sizes[at]),
                expected=f"median {float(np.median(sizes)):,.0f}",
                unit=largest.unit,
            ),
            Evidence(
                name="rises with a new longest sample", value=len(rises), expected=0, note=f"of {len(rises)} rises"
            ),
        ),
        cause="memory follows the longest sample of the batch, and nothing caps it",
        next=("run one step with this sample alone", "plot memory over the longest length of the batch"),
        fix=("cap the length of a sample, bucket by length, or size batches by tokens",),
    )


def _falls(memory: Curve, rises: np.ndarray[Any, Any]) -> bool:
    """Whether a level that is no high-water mark comes down again after a rise: what stays up is no single sample's."""
    at = int(rises[-1])
    after = memory.value[at + 1 :]
    return not len(after) or float(after.min()) < float(memory.value[at])


def _failure(capsule: Capsule, rank: int, largest: _Largest) -> Finding | None:
    for failure in failures(capsule):
        if failure.step is None or (failure.rank or 0) != rank:
            continue
        found = _at_failure(failure, failure.step, rank, largest)
        if found is not None:
            return found
    return None


def _at_failure(failure: Failure, step: int, rank: int, largest: _Largest) -> Finding | None:
    at = int(np.searchsorted(largest.steps, step))
    if at < TAIL_STEPS or at >= len(largest.steps) or largest.steps[at] != step:
        return None
    before = largest.sizes[:at]
    size, usual = int(largest.sizes[at]), float(np.median(before))
    if size <= before.max() or size < TAIL_LONG * usual or (np.diff(before) >= 0).mean() > 0.9:
        return None
    return Finding(
        severity="info" if failure.caught else None,
        confidence="likely",
        title="Out of memory at the longest sample so far",
        summary=(
            f"The device ran out of memory at step {step}, whose longest sample has {size:,} {largest.unit}: the "
            f"longest so far (before: at most {int(before.max()):,}, median {usual:,.0f})."
        ),
        where=Where(step=step, rank=rank, sample=largest.names[at]),
        evidence=(
            Evidence(name="longest sample", value=size, expected=f"≤ {int(before.max()):,}", unit=largest.unit),
            Evidence(name="requested", value=failure.requested, unit="B"),
        ),
        cause="memory follows the longest sample of the batch, and nothing caps it",
        next=("run one step with this sample alone",),
        fix=("cap the length of a sample, bucket by length, or size batches by tokens",),
    )


def _ranks(capsule: Capsule) -> list[int]:
    return sorted({whole(each.get("rank")) or 0 for each in capsule.records("samples")})


def _largest(capsule: Capsule, rank: int) -> _Largest | None:
    """The largest sample of each step of a rank: tokens where there are any, else pixels."""
    for unit, measure in (("tokens", _length), ("pixels", _pixels)):
        best: dict[int, tuple[int, str | None]] = defaultdict(lambda: (0, None))
        for record in capsule.records("samples"):
            step, size = whole(record.get("step")), measure(record)
            if step is None or not size or record.get("split") == "validation":
                continue
            if (whole(record.get("rank")) or 0) == rank and size > best[step][0]:
                best[step] = size, str(record["id"]) if record.get("id") is not None else None
        if len(best) >= TAIL_STEPS:
            steps = sorted(best)
            sizes = np.array([best[step][0] for step in steps], np.int64)
            return _Largest(np.array(steps, np.int64), sizes, tuple(best[step][1] for step in steps), unit)
    return None


def _length(record: Any) -> int | None:
    return whole(record.get("length"))


def _pixels(record: Any) -> int | None:
    size: Any = record.get("image_size")
    if isinstance(size, dict):
        size = [size.get("width"), size.get("height")]  # pyright: ignore[reportUnknownMemberType]
    if isinstance(size, list | tuple):
        sides = [side for each in size if (side := whole(each)) is not None]  # pyright: ignore[reportUnknownVariableType]
        return sides[0] * sides[1] if len(sides) >= 2 else None
    side = whole(size)
    return side * side if side else None
