"""What a reduction made of the ranks' own gradients, from the norms before and after it.

A mean of W vectors is at most as long as the mean of their lengths, and equally long where they are equal. Vectors that
have nothing to do with each other have a mean of 1/√W of their length.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Confidence, Evidence, Finding, Where
from ..series import curve
from . import thresholds as T
from .accounts import in_step_until
from .layout import Layout

if TYPE_CHECKING:
    from ...capsules import Capsule

ByRank = dict[int, float]

#: Norms outside are those of a job that broke otherwise.
_SMALLEST, _LARGEST = 1e-100, 1e100


def norms(capsule: Capsule, name: str, where: Layout) -> dict[int, ByRank]:
    """Step → rank → norm > 0, of ranks with the same parameters and different shares of the data."""
    groups: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for rank in sorted({key.rank for key in capsule.scalar_keys() if key.name == name and key.side is None}):
        groups[where.parameters(rank)].setdefault(where.batch.get(rank, rank), rank)
    found: dict[int, ByRank] = defaultdict(dict)
    until = in_step_until(capsule)
    for rank in max(groups.values(), key=len, default={}).values():
        points = curve(capsule, name, rank).finite()
        for step, value in zip(points.step.tolist(), points.value.tolist(), strict=True):
            if _SMALLEST < value < _LARGEST and (until is None or step < until):
                found[step][rank] = value
    return dict(sorted(found.items()))


def several(found: Mapping[int, ByRank]) -> dict[int, ByRank]:
    """The steps for which more than one rank has a norm."""
    return {step: each for step, each in found.items() if len(each) > 1}


def spread(found: ByRank) -> float:
    """By which share the largest norm exceeds the smallest."""
    return max(found.values()) / min(found.values()) - 1


def scale(
    capsule: Capsule, where: Layout, reduced: Mapping[int, ByRank], local: Mapping[int, ByRank]
) -> Finding | None:
    """What is wrong with the length of the reduced gradient, None where nothing is known to be.

    Args:
        capsule: for losses and tokens.
        where: how many replicas there are.
        reduced: norms after the reduction, by step and rank.
        local: norms before it; of all replicas, or of some.
    """
    steps = [step for step in reduced if step in local]
    world = len(set(where.batch.values()))
    if not steps or world < 2:
        return None
    whole = all(len(local[step]) == world for step in steps)
    ratios = np.array([_middle(reduced[step]) / float(np.mean(list(local[step].values()))) for step in steps])
    bound = 1 + (T.BEYOND_MEAN if whole else T.BEYOND_SOME)
    beyond = ratios > bound
    if beyond.sum() >= max(1 if whole else T.RATIO_STEPS, T.MOST_OF_STEPS * len(steps)):
        if _divided_by_all(capsule, world):
            return None
        at = int(np.flatnonzero(beyond)[0])
        return _too_long(capsule, steps[at], reduced, local, float(ratios[at]), ratios, world)
    alike = np.array([whole and spread(local[step]) <= T.EQUAL_NORM for step in steps])
    exact = ratios[alike]
    if len(exact) >= min(T.NORM_STEPS, len(steps)) and len(exact) > T.MOST_OF_STEPS * len(steps):
        ratio = float(np.median(exact))
        for factor, words in ((1 / world, "1/W"), (1 / math.sqrt(world), "1/√W")):
            if abs(ratio / factor - 1) <= T.BEYOND_MEAN and float(np.ptp(exact)) <= T.BEYOND_MEAN * factor:
                return _too_short(steps[int(np.flatnonzero(alike)[0])], reduced, local, ratio, words, world)
        return None
    squares = [math.sqrt(float(np.mean(np.square(list(local[step].values()))))) for step in steps]
    ratios = np.array([_middle(reduced[step]) / each for step, each in zip(steps, squares, strict=True)])
    if len(steps) >= T.RATIO_STEPS and float(np.median(ratios)) < T.UNRELATED / math.sqrt(world):
        return _too_short(steps[0], reduced, local, float(np.median(ratios)), "", world)
    return None


def _middle(found: ByRank) -> float:
    return float(np.median(list(found.values())))


def _shares(capsule: Capsule) -> Iterator[float]:
    """Loss that a rank reports over the mean of its own tokens, for each rank and step where both are known."""
    sums: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for record in capsule.records("microbatches"):
        step, total, tokens = record.get("step"), record.get("loss_sum"), record.get("tokens")
        if isinstance(step, int) and total is not None and tokens and math.isfinite(total):
            sums[record["rank"], step][0] += total
            sums[record["rank"], step][1] += tokens
    means = {key: total / tokens for key, (total, tokens) in sums.items() if total > 0}
    for rank in {rank for rank, _ in means}:
        points = curve(capsule, "loss", rank).finite()
        for step, loss in zip(points.step.tolist(), points.value.tolist(), strict=True):
            if (rank, step) in means:
                yield loss / means[rank, step]


def _divided_by_all(capsule: Capsule, world: int) -> bool:
    """Whether each rank divides its loss by the tokens of all: then the sum of the gradients is their mean."""
    shares = list(_shares(capsule))
    return bool(shares) and float(np.median(shares)) < (1 + 1 / world) / 2


def _divided_by_own(capsule: Capsule) -> bool:
    """Whether each rank's loss is seen to be the mean over its own tokens."""
    shares = list(_shares(capsule))
    return bool(shares) and abs(float(np.median(shares)) - 1) <= T.BEYOND_MEAN


def _locals(found: ByRank) -> Sequence[Evidence]:
    return [
        Evidence(name=f"grad_norm_local of rank {rank}", value=norm)
        for rank, norm in list(found.items())[: T.RANKS_SHOWN]
    ]


def _too_long(
    capsule: Capsule,
    step: int,
    reduced: Mapping[int, ByRank],
    local: Mapping[int, ByRank],
    ratio: float,
    ratios: np.ndarray[tuple[int], np.dtype[np.float64]],
    world: int,
) -> Finding:
    root, largest = math.sqrt(world), float(ratios.max())
    if largest > world * (1 + T.BEYOND_MEAN) and len(local[step]) == world:
        cause = "the gradients are summed over the ranks and multiplied once more"
    elif largest > root * (1 + T.BEYOND_SOME):
        cause = "the gradients are summed over the ranks, not averaged"
    else:
        cause = f"the gradients are summed over the ranks, or divided by √{world} in place of {world}"
    whole = len(local[step]) == world
    sure = whole and _divided_by_own(capsule)
    accumulation = (capsule.manifest.training.accumulation_steps if capsule.manifest.training else None) or 1
    confidence: Confidence = "confirmed" if sure else "likely" if accumulation == 1 else "undetermined"
    bound = float(np.mean(list(local[step].values())))
    known = "the mean of the ranks' own norms" if whole else f"the norm before it on {len(local[step])} of the ranks"
    return Finding(
        severity=None if sure else "warning",
        confidence=confidence,
        title="Gradients are not averaged over the ranks",
        summary=(
            f"The norm after the reduction is {_middle(reduced[step]):.6g} at step {step}, {known} {bound:.6g}, and no "
            f"mean is longer than that: it is {ratio:.3g} times as long (at most {largest:.3g} in {len(ratios)} steps; "
            f"{world} ranks)."
        ),
        where=Where(step=step),
        evidence=(
            Evidence(name="grad_norm_reduced", value=_middle(reduced[step]), expected=f"≤ {bound:.6g}"),
            *_locals(local[step]),
            Evidence(name="largest ratio", value=largest, expected="≤ 1", note=f"√W = {root:.3g}, W = {world}"),
        ),
        cause=cause,
        next=("one step on two ranks with the same batch: the reduced gradient must equal the local one",),
        fix=("divide by the world size after the sum, or reduce with the mean",),
    )


def _too_short(
    step: int, reduced: Mapping[int, ByRank], local: Mapping[int, ByRank], ratio: float, words: str, world: int
) -> Finding:
    own, after = float(np.mean(list(local[step].values()))), _middle(reduced[step])
    if words:
        cause = "the gradient is divided by the world size twice" if words == "1/W" else "a root too much divides it"
        told = f"all ranks have the same norm before it, {own:.6g}, and so has their mean; {ratio:.4g} = {words} of it"
        expected = 1.0
    else:
        cause = "the gradient is divided once too often, in the loss and in the reduction"
        told = f"before it {own:.6g}: {ratio:.3g} in the median, where even gradients that share nothing keep 1/√W"
        expected = f"≥ {1 / math.sqrt(world):.3g}"
    return Finding(
        severity="warning",
        confidence="likely",
        title="Gradients are divided once too often",
        summary=f"The norm after the reduction is {after:.6g} at step {step}, {told} ({world} ranks).",
        where=Where(step=step),
        evidence=(
            Evidence(name="grad_norm_reduced", value=after),
            *_locals(local[step]),
            Evidence(name="ratio", value=ratio, expected=expected, note=words),
        ),
        cause=cause,
        next=("one step on two ranks with the same batch: the reduced gradient must equal the local one",),
        fix=("divide once: in the loss or in the reduction",),
    )
