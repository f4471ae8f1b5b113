"""Memory that rises step after step and is not given back: in a snapshot's trace by stack, in a log as a curve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..finding import Evidence, Finding, Where
from ..registry import NotCaptured, rule
from .allocator import histories, located, of_devices
from .growth import Growth, growth, growth_evidence, growth_words, long_enough, too_short
from .names import is_value
from .oom import Failure, failures, gib
from .rising import Rise, long_curves, rising, rising_reserve
from .standing import Standing, open_question, standing
from .thresholds import CURVE_CLEARED, GROWTH_STEPS, TINY_A_STEP

if TYPE_CHECKING:
    from ...capsules import Capsule
    from ...capsules.allocator import History

#: Stacks that are named in one finding.
_MOST_NAMED = 3


@rule(
    "memory/leak",
    stage="runtime",
    severity="warning",
    needs=(
        "tensors.allocator/action|files.snapshot|scalars.memory_allocated|records.memory"
        "|scalars.memory_reserved|scalars.memory_device_used",
    ),
    explained_by=("memory/eval-graph", "memory/logged-tensors"),
    cases=("out-of-memory-after-hours",),
)
def leak(capsule: Capsule) -> Iterator[Finding]:
    """Live memory rises with every step and is not given back.

    What it checks:
        The trace of an allocator snapshot: stacks and lines whose blocks become more with each step, or with each
        n-th one, up to the failure or the end. Without one, the curve of allocated bytes that a log holds.
    Why it matters:
        Such a job dies after hours, at a line that has nothing to do with it, and a larger device only postpones that.
    How it decides:
        Trace: a stack gets new blocks in at least 8 steps, evenly, to the end, and gives fewer than a fifth of them
        back; 3 steps will do where 48 blocks from before the trace stand for the others. Stacks of one line of the
        program are counted together. Steps are known by the optimizer's stacks or the calls of backward (likely).
        Undetermined: only the trace's rhythm shows the steps, unless the stack is no part of a forward pass and holds
        32 blocks; the blocks are states, weights, a store by its name, or of a private pool; they come in bouts, 6 to 7
        equal ones of 32 MiB in all at equal distances. Below 4 KiB a step it is info.
        Curve (or records of one phase), 20 points or more: after the start it rises by 2 % and 32 MiB or more, evenly
        in all four quarters, no one point bringing more than a quarter of it; it may fall back at the ends of epochs
        (likely; a remark where it fell back three times and no allocation failed). 10 points will do where each is
        higher than the one before, by 20 % in all. Where only what is reserved is on record, and rose like that until
        an allocation failed: undetermined.
    Looks like it but is not:
        The first steps, the optimizer's state, a cache that fills up and stays, a window of the last losses, a KV
        cache or activations that grow with the lengths, outputs that an evaluation keeps till its end, memory that
        is only reserved, a curve that goes up and down.
    What to try next:
        Record a snapshot over some twenty steps (torch.cuda.memory._record_memory_history, _dump_snapshot) and look at
        the stack that is named; print len() of the lists that live longer than a step.
    Fix:
        Give up what is kept: detach and take .item() of what is logged, clear lists at the end of a step, do not hold
        outputs, and drop references to exceptions, whose tracebacks hold tensors.
    """
    traced = histories(capsule)
    found = {rank: grown for rank, history in traced.items() if (grown := growth(history))}
    for rank, grown in found.items():
        yield _from_trace(capsule, traced[rank], rank, grown, len(found))
        return  # ranks of one job leak alike; the first one speaks for them
    curves, blocks = rising(capsule), standing(capsule)
    if blocks is not None and is_value(blocks.history, blocks.stack):
        blocks = None  # memory/logged-tensors speaks of them
    if curves:
        yield _from_curve(capsule, curves, blocks)
    elif blocks is not None:
        yield open_question(capsule, blocks)
    elif (ended := [each for each in failures(capsule) if not each.caught]) and (rise := rising_reserve(capsule)):
        yield _from_reserve(rise, ended[0])
    elif not any(map(long_enough, traced.values())) and not long_curves(capsule):
        raise NotCaptured(f"{too_short(traced)}, or a curve of them")


def _from_trace(capsule: Capsule, history: History, rank: int, grown: tuple[Growth, ...], others: int) -> Finding:
    most = grown[0]
    sure = any(each.sure for each in grown)
    words = f"{growth_words(history, most)}, and none is given back."
    if len(grown) > 1:
        words = (
            f"{sum(each.count for each in grown):,} live blocks ({gib(sum(each.size for each in grown))}) of "
            f"{len(grown)} lines came step after step and were not given back. Most: {growth_words(history, most)}."
        )
    tiny = sum(each.pace for each in grown) <= TINY_A_STEP
    return Finding(
        severity="info" if tiny else None,
        confidence="likely" if sure else "undetermined",
        title="Memory leaks step after step" if sure else "Blocks of one line become more and more",
        summary=words + of_devices(capsule, history, others) + (" So little a step fills no device." if tiny else ""),
        where=located(capsule, rank),
        evidence=tuple(line for each in grown[:_MOST_NAMED] for line in growth_evidence(history, each)),
        cause="what these lines make is kept beyond the step" if sure else None,
        next=(
            "look at the named line: what holds its result after the step?",
            *(() if sure else (_longer(most),)),
        ),
        fix=("detach, take .item() or clear what is kept; hold no outputs, losses or exceptions beyond a step",),
    )


def _longer(each: Growth) -> str:
    """What to record, where growth may still be something else."""
    if each.every > 1:
        return f"record a trace of some {GROWTH_STEPS * 2 * each.every:,} steps: does it go on?"
    return "record a trace of some twenty steps that begins before a step does"


def _from_curve(capsule: Capsule, rises: list[Rise], blocks: Standing | None) -> Finding:
    first = rises[0]
    capacity = max((each.capacity for each in failures(capsule) if each.capacity is not None), default=None)
    words = (
        f"Allocated memory rises by {gib(first.slope)} a step from step {first.first:,} to {first.last:,}: "
        f"{gib(first.low)} became {gib(first.high)}."
    )
    if first.resets:
        words += (
            f" It fell back at step {', '.join(f'{each:,}' for each in first.resets[:4])}, as at the end of an epoch."
        )
    if blocks is not None and blocks.is_pace_of(first.slope):
        words += f" {blocks.words}"
    else:
        blocks = None
    # What was given back so often, and filled no device, is a list that is cleared in time.
    bounded = len(first.resets) >= CURVE_CLEARED and not failures(capsule)
    ranks = {each.rank for each in rises}
    full = [] if capacity is None else [Evidence(name="capacity", value=capacity, unit="B")]
    return Finding(
        severity="info" if bounded else None,
        confidence="likely",
        title="Memory rises and is given back" if bounded else "Memory leaks step after step",
        summary=words + (f" {len(ranks)} ranks do the same." if len(ranks) > 1 else ""),
        where=Where(step=first.first, rank=first.rank),
        evidence=(
            Evidence(name="growth", value=round(first.slope), expected=0, unit="B/step"),
            Evidence(name="memory_allocated", value=first.high, expected=f"≈ {first.low:,.0f}", unit="B"),
            Evidence(
                name="falls back", value=len(first.resets), note=", ".join(f"{each:,}" for each in first.resets[:8])
            ),
            *full,
            *(() if blocks is None else blocks.evidence),
        ),
        cause="something made in a step is kept beyond it"
        + (", until the epoch ends: a list of losses or outputs" if first.resets else ""),
        next=("record an allocator snapshot over some twenty steps: it names the line",),
        fix=("detach, take .item() or clear what is kept; hold no outputs, losses or exceptions beyond a step",),
    )


def _from_reserve(rise: Rise, failure: Failure) -> Finding:
    """Where only what is reserved is on record: it rose, and what made it rise is open."""
    return Finding(
        confidence="undetermined",
        title="Memory rises until the device is full",
        summary=(
            f"Reserved memory rises by {gib(rise.slope)} a step from step {rise.first:,} to {rise.last:,}: "
            f"{gib(rise.low)} became {gib(rise.high)}, and then the device was full. What is kept beyond a step, "
            "longer rows and pieces that do not fit again make it rise alike: what is allocated is not on record."
        ),
        where=Where(step=rise.first, rank=rise.rank),
        evidence=(
            Evidence(name="growth", value=round(rise.slope), expected=0, unit="B/step"),
            Evidence(name="reserved", value=rise.high, expected=f"≈ {rise.low:,.0f}", unit="B"),
            *(() if failure.capacity is None else (Evidence(name="capacity", value=failure.capacity, unit="B"),)),
        ),
        next=(
            "log torch.cuda.memory_allocated() at the end of each step beside the longest row of its batch",
            "record an allocator snapshot over some twenty steps: it names the line",
        ),
    )
