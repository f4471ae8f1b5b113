"""The allocator gives its cache back and asks the device again, step after step, and throughput pays for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import rule
from ..series import curve
from .thresholds import RETRIES, STARVED

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "memory/allocator-thrash",
    stage="runtime",
    severity="warning",
    needs=("scalars.alloc_retries", "scalars.throughput|scalars.step_time"),
)
def allocator_thrash(capsule: Capsule) -> Iterator[Finding]:
    """The allocator frees and asks again at step after step, and the throughput pays for it.

    What it checks:
        The count of allocation retries beside throughput (or step time).
    Why it matters:
        Each retry gives all cached blocks back to the driver and waits for the device. The job runs, a tenth or ten
        times slower, and is one longer batch away from running out of memory.
    How it decides:
        The count rose at three logged points or more, and at one of them, or at the end, the throughput is below 80 %
        of the best of the run. Points before the second are the warm-up. Info where the throughput holds.
    Looks like it but is not:
        One retry in the first steps, while the allocator finds its sizes; a slow first step; a drop without retries.
    What to try next:
        The same job with a slightly smaller micro-batch, and separately with
        PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; compare the throughput.
    Fix:
        Leave a few percent of the device free: a smaller micro-batch, activation checkpointing, a cap on row length.
    """
    retries = curve(capsule, "alloc_retries").finite()
    # Logs name the count only where there is one: before the first point it is 0.
    rises = retries.where(np.diff(retries.value, prepend=0.0) > 0)
    if len(rises) < RETRIES:
        return
    speed = curve(capsule, "throughput").finite()
    name, unit = "throughput", "tokens/s"
    if not len(speed):
        spent = curve(capsule, "step_time").finite()
        speed = spent.where(spent.value > 0)
        speed, name, unit = type(speed)(speed.step, 1 / speed.value), "steps a second", "1/s"
    warm = speed.where(slice(1, None))
    if not len(warm):
        return
    best = float(warm.value.max())
    during = warm.where(np.isin(warm.step, rises.step))
    worst = during if len(during) else warm.where(slice(-1, None))
    at = int(worst.value.argmin())
    slow, step = float(worst.value[at]), int(worst.step[at])
    starved = slow < STARVED * best
    share = curve(capsule, "memory_reserved(%)").finite()
    yield Finding(
        severity=None if starved else "info",
        title="The allocator is starved" if starved else "The allocator retries, at no visible cost",
        summary=(
            f"Allocations were retried at {len(rises)} logged points from step {int(rises.step[0])} on, "
            f"{int(retries.value[-1])} in all; the {name} is {slow:.4g} at step {step}, "
            f"{slow / best:.0%} of the best ({best:.4g})."
        ),
        where=Where(step=int(rises.step[0])),
        evidence=(
            Evidence(name="alloc_retries", value=float(retries.value[-1]), expected=0),
            Evidence(name=name, value=slow, expected=f"≥ {STARVED * best:.4g}", unit=unit, note=f"step {step}"),
            *(
                [Evidence(name="memory reserved", value=float(share.value.max()), unit="%", note="highest")]
                if len(share)
                else []
            ),
        ),
        cause="the job needs all of the device's memory: the allocator gives its cache back and asks again",
        next=("a slightly smaller micro-batch, and separately expandable segments: compare the throughput",),
        fix=("leave a few percent of the device free",),
    )
