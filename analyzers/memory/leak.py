"""Memory that rises step after step and is not given back: in a snapshot's trace by stack, in a log as a curve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import NotCaptured, rule
from ..series import Curve, align, curve, segments, theil_sen
from .allocator import histories, located, of_devices
from .growth import Growth, growth, growth_evidence, growth_words, long_enough, too_short
from .lengths import length_curves, rank_correlation
from .names import is_value
from .oom import failures, gib
from .standing import Standing, open_question, standing
from .thresholds import (
    CURVE_BYTES,
    CURVE_CLEARED,
    CURVE_EVEN,
    CURVE_JUMP,
    CURVE_POINTS,
    CURVE_RESET,
    CURVE_RISE,
    FOLLOWS_LENGTHS,
    GROWTH_STEPS,
    TINY_A_STEP,
)

if TYPE_CHECKING:
    from ...capsules import Capsule
    from ...capsules.allocator import History

#: Stacks that are named in one finding.
_MOST_NAMED = 3


@rule(
    "memory/leak",
    stage="runtime",
    severity="warning",
    needs=("tensors.allocator/action|files.snapshot|scalars.memory_allocated",),
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
        Curve: after the start it rises by 2 % and 32 MiB or more, evenly in all four quarters, no one point bringing
        more than a quarter of it; it may fall back at the ends of epochs (likely; a remark where it fell back three
        times and no allocation failed).
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
    elif not any(map(long_enough, traced.values())) and not _curves(capsule):
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


@dataclass(frozen=True)
class Rise:
    """A stretch of a curve that rises evenly: where, by how much a step, from and to which level."""

    rank: int
    first: int
    last: int
    slope: float
    low: float
    high: float
    resets: tuple[int, ...]


def _curves(capsule: Capsule) -> bool:
    """Whether allocated memory is on record over steps, long enough to be judged."""
    return any(
        len(capsule.scalars(key.name, rank=key.rank, side=key.side)) >= CURVE_POINTS
        for key in capsule.scalar_keys()
        if key.name == "memory_allocated" and key.side != "allocator"
    )


def rising(capsule: Capsule) -> list[Rise]:
    """The curves of allocated memory that rise evenly over steps, by rank."""
    found: list[Rise] = []
    for key in capsule.scalar_keys():
        if key.name != "memory_allocated" or key.side == "allocator":  # those go over events, not over steps
            continue
        sided = (curve(capsule, key.name, key.rank, key.side),)
        for part in segments(capsule, key.name, key.rank) if key.side is None else sided:
            rise = _even_rise(capsule, part.finite(), key.rank)
            found += [rise] if rise is not None else []
    return sorted(found, key=lambda each: (each.rank, each.first))


def _even_rise(capsule: Capsule, whole: Curve, rank: int) -> Rise | None:
    """The longest stretch between two falls, where it rises evenly; None where none does."""
    whole = whole.where(slice(max(2, len(whole) // 20), None))
    if len(whole) < CURVE_POINTS:
        return None
    cuts = _falls(whole)
    edges = [0, *cuts, len(whole)]
    start, end = max(pairwise(edges), key=lambda each: each[1] - each[0])
    part = whole.where(slice(start, end))
    if len(part) < CURVE_POINTS:
        return None
    slope = theil_sen(part)
    span = float(part.step[-1] - part.step[0])
    if slope is None or slope.low <= 0:
        return None
    rise = slope.value * span
    if rise < max(CURVE_BYTES, CURVE_RISE * float(np.median(part.value))):
        return None
    quarters = np.array([np.median(each) for each in np.array_split(part.value, 4)])
    if np.diff(quarters).min() < CURVE_EVEN * rise / 4 or np.diff(part.value).max() > CURVE_JUMP * rise:
        return None
    if _follows_lengths(capsule, part, rank):
        return None
    resets = tuple(int(whole.step[each]) for each in cuts)
    low, high = float(part.value.min()), float(part.value.max())
    return Rise(rank, int(part.step[0]), int(part.step[-1]), slope.value, low, high, resets)


def _falls(curve: Curve) -> list[int]:
    """Indices at which a curve gives back most of what it had gained since the last such place."""
    found: list[int] = []
    lowest = highest = float(curve.value[0])
    least = max(CURVE_BYTES, CURVE_RISE * highest)
    for at, value in enumerate(curve.value.tolist()):
        gained = highest - lowest
        if gained >= least and highest - value > CURVE_RESET * gained:
            found.append(at)
            lowest = highest = value
        lowest, highest = min(lowest, value), max(highest, value)
    return found


def _follows_lengths(capsule: Capsule, part: Curve, rank: int) -> bool:
    for lengths in length_curves(capsule, rank):
        _, memory, length = align(part, lengths)
        if len(memory) >= 10 and rank_correlation(memory, length) >= FOLLOWS_LENGTHS:
            return True
    return False


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
