"""The gradient that each rank steps with: one for all replicas, and the mean of theirs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Confidence, Evidence, Finding, Where
from ..registry import NotCaptured, NotJudged, rule
from ..series import curve
from . import thresholds as T
from .layout import Layout, layout, shards
from .replicas import parameters_part_at, parameters_stay_equal
from .words import named_ranks

if TYPE_CHECKING:
    from ...capsules import Capsule

ByRank = dict[int, float]


@rule(
    "distributed/gradient-scale",
    stage="distributed",
    needs=("scalars.grad_norm_reduced|scalars.grad_norm",),
    cases=("several-gpus-odd-loss",),
)
def gradient_scale(capsule: Capsule) -> Iterator[Finding]:
    """The gradients of the replicas are not synchronised, or not averaged.

    What it checks:
        The norm of each rank's own gradient and of what the reduction made of it, rank by rank and step by step.

    Why it matters:
        Replicas that step with gradients of their own drift apart and train as many models as there are ranks, while
        the loss of rank 0 looks ordinary. A sum in place of a mean is a learning rate that grows with the number of
        ranks, hidden by clipping and by Adam until the schedule or the weight decay no longer fits.

    How it decides:
        Norms after the reduction that differ between replicas by more than 0.1 %: not synchronised; confirmed where the
        checksums of the parameters part, too, or a reduction was seen; likely else. A mean is never longer than the
        mean of the local norms (triangle inequality): a reduced norm beyond it by 1 % is a sum, or a mean that is
        multiplied; by W where the local gradients agree, and more than √W is no root. Confirmed where each rank's loss
        is known to be the mean over its own tokens, likely else. Local norms that agree to 0.01 % on all ranks come
        from equal gradients: then the reduced norm must be equal to them, and a ratio of 1/W or 1/√W is named.

    Looks like it but is not:
        Parts of one model (tensor, pipeline), and shards (FSDP, ZeRO), whose norms differ by design; norms taken before
        a reduction that is called by hand: checksums of parameters that stay equal show it; losses divided by the
        token count of all ranks, whose gradients are rightly summed; independent gradients, whose mean is shorter than
        each of them by up to √W; steps that overflowed.

    What to try next:
        One step on two ranks with the same batch: the reduced gradient must equal the local one bit for bit.

    Fix:
        Call the wrapped module, not the inner one, in forward; no no_sync around the last micro-batch; divide by the
        world size after a sum, once.
    """
    where = layout(capsule)
    if where is None:
        raise NotJudged("sizes of the parallel axes that divide the number of ranks")
    if shards(capsule).gradients:
        raise NotJudged("norms of whole gradients: each rank holds a part of them")
    reduced = _norms(capsule, "grad_norm_reduced", where)
    after = bool(reduced)
    if not after:
        reduced = _norms(capsule, "grad_norm", where)
    if not reduced:
        raise NotCaptured("gradient norms of two data-parallel ranks at one step")
    local = _norms(capsule, "grad_norm_local", where)
    apart = _apart(reduced)
    if apart is not None:
        finding = _not_synchronised(capsule, where, reduced, local, apart, after)
        if finding is not None:
            yield finding
        elif not after:
            raise NotJudged("norms after the reduction: those there are may be from before it")
        return
    if local:
        finding = _scale(capsule, reduced, local)
        if finding is not None:
            yield finding


def _norms(capsule: Capsule, name: str, where: Layout) -> dict[int, ByRank]:
    """Step → rank → norm > 0, of ranks with the same parameters and different shares of the data."""
    groups: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for rank in sorted({key.rank for key in capsule.scalar_keys() if key.name == name and key.side is None}):
        groups[where.parameters(rank)].setdefault(where.batch.get(rank, rank), rank)
    found: dict[int, ByRank] = defaultdict(dict)
    largest = max(groups.values(), key=len, default={})
    for rank in largest.values():
        points = curve(capsule, name, rank).finite()
        for step, value in zip(points.step.tolist(), points.value.tolist(), strict=True):
            if value > 0:
                found[step][rank] = value
    return {step: each for step, each in sorted(found.items()) if len(each) > 1}


@dataclass(frozen=True)
class _Apart:
    """Steps at which the norms of replicas differ."""

    first: int
    steps: int
    of: int
    spread: float


def _apart(norms: Mapping[int, ByRank]) -> _Apart | None:
    odd = [step for step, each in norms.items() if _spread(each) > T.SAME_NORM]
    if not odd or len(odd) < min(T.NORM_STEPS, len(norms)):
        return None
    return _Apart(odd[0], len(odd), len(norms), float(np.median([_spread(norms[step]) for step in odd])))


def _spread(norms: ByRank) -> float:
    return max(norms.values()) / min(norms.values()) - 1


def _not_synchronised(
    capsule: Capsule,
    where: Layout,
    reduced: Mapping[int, ByRank],
    local: Mapping[int, ByRank],
    apart: _Apart,
    after: bool,
) -> Finding | None:
    """None where the norms may be from before a reduction: parameters agree, or nothing says whether they do."""
    parted = parameters_part_at(capsule, where)
    if parameters_stay_equal(capsule, where, apart.first):
        return None
    if not after and parted is None:
        return None
    here = reduced[apart.first]
    own = local.get(apart.first, {})
    unreduced = [rank for rank, norm in here.items() if rank in own and abs(norm / own[rank] - 1) <= T.SAME_NORM]
    groups = _equal(here)
    if unreduced and len(unreduced) == len(here):
        how = "on every rank the norm after the reduction is that before it: nothing was reduced"
    elif any(len(each) > 1 for each in groups) and len(groups) > 1:
        how = "; ".join(f"{named_ranks(each)}: {here[each[0]]:.6g}" for each in groups[:6])
    else:
        how = f"from {min(here.values()):.6g} to {max(here.values()):.6g}"
    minority = groups[-1] if len(here) > 2 and len(groups[-1]) * 2 < len(here) and len(groups) == 2 else []
    confidence: Confidence = "confirmed" if parted is not None or (after and local and where.known) else "likely"
    return Finding(
        severity="critical" if confidence == "confirmed" else "warning",
        confidence=confidence,
        title="Gradients are not synchronised",
        summary=(
            f"The gradient norms of the replicas differ by {apart.spread:.2g} of their size at {apart.steps} of "
            f"{apart.of} steps, first at step {apart.first} ({how})"
            + (f"; the parameters part at step {parted}." if parted is not None else ".")
        ),
        where=Where(step=apart.first, rank=minority[0] if len(minority) == 1 else None),
        evidence=(
            *(
                Evidence(
                    name=f"{'grad_norm_reduced' if after else 'grad_norm'} of rank {rank}",
                    value=norm,
                    expected=float(np.median(list(here.values()))),
                    note=f"before the reduction {own[rank]:.6g}" if rank in own else "",
                )
                for rank, norm in list(here.items())[: T.RANKS_SHOWN]
            ),
            Evidence(name="spread of the norms", value=apart.spread, expected=f"≤ {T.SAME_NORM:g}"),
        ),
        cause=(
            "no reduction takes place: each rank steps with the gradient of its own batch"
            if len(unreduced) == len(here) or not after
            else "the reduction does not reach all replicas, or gradients are changed on some of them after it"
        ),
        next=("one step on two ranks with the same batch: the reduced gradient must equal the local one",),
        fix=("call the wrapped module in forward, and let the last micro-batch of a step synchronise",),
    )


def _equal(norms: ByRank) -> list[list[int]]:
    """Groups of ranks with equal norms, the largest first."""
    groups: list[list[int]] = []
    for rank in sorted(norms):
        for group in groups:
            if abs(norms[rank] / norms[group[0]] - 1) <= T.EQUAL_NORM:
                group.append(rank)
                break
        else:
            groups.append([rank])
    return sorted(groups, key=len, reverse=True)


def _scale(capsule: Capsule, reduced: Mapping[int, ByRank], local: Mapping[int, ByRank]) -> Finding | None:
    """The reduced norm beside the bound that holds for a mean, and beside equal local norms."""
    steps = [step for step in reduced if step in local and reduced[step].keys() == local[step].keys()]
    if len(steps) < 1:
        return None
    ranks = len(reduced[steps[0]])
    ratios = np.array([_middle(reduced[step]) / float(np.mean(list(local[step].values()))) for step in steps])
    alike = np.array([_spread(local[step]) <= T.EQUAL_NORM for step in steps])
    beyond = ratios > 1 + T.BEYOND_MEAN
    world = max(ranks, _declared(capsule, ranks))
    if beyond.sum() >= max(1, T.MOST_OF_STEPS * len(steps)):
        at = int(np.flatnonzero(beyond)[0])
        if _divided_by_all(capsule, steps, ranks):
            return None
        return _too_long(capsule, steps, reduced, local, ratios, at, world)
    exact = ratios[alike]
    if len(exact) >= min(T.NORM_STEPS, len(steps)) and len(exact) > T.MOST_OF_STEPS * len(steps):
        ratio = float(np.median(exact))
        for factor, words in ((1 / world, "1/W"), (1 / math.sqrt(world), "1/√W")):
            if abs(ratio / factor - 1) <= T.BEYOND_MEAN and float(np.ptp(exact)) <= T.BEYOND_MEAN * factor:
                return _too_short(steps[int(np.flatnonzero(alike)[0])], reduced, local, ratio, words, world)
    return None


def _middle(norms: ByRank) -> float:
    return float(np.median(list(norms.values())))


def _declared(capsule: Capsule, ranks: int) -> int:
    training = capsule.manifest.training
    return (training.data_parallel if training is not None else None) or ranks


def _divided_by_all(capsule: Capsule, steps: Sequence[int], ranks: int) -> bool:
    """Whether each rank divides its loss by the tokens of all: then the sum of the gradients is their mean."""
    means = _own_means(capsule)
    shown = [
        loss / means[rank, step]
        for rank in {rank for rank, _ in means}
        for step, loss in zip(*_loss(capsule, rank), strict=True)
        if (rank, step) in means and means[rank, step] > 0
    ]
    return bool(shown) and float(np.median(shown)) < 1 - (1 - 1 / ranks) / 2


def _divided_by_own(capsule: Capsule) -> bool:
    """Whether each rank's loss is seen to be the mean over its own tokens."""
    means = _own_means(capsule)
    shown = [
        abs(loss / means[rank, step] - 1)
        for rank in {rank for rank, _ in means}
        for step, loss in zip(*_loss(capsule, rank), strict=True)
        if (rank, step) in means and means[rank, step] > 0
    ]
    return bool(shown) and float(np.median(shown)) <= T.BEYOND_MEAN


def _loss(capsule: Capsule, rank: int) -> tuple[list[int], list[float]]:
    points = curve(capsule, "loss", rank).finite()
    return points.step.tolist(), points.value.tolist()


def _own_means(capsule: Capsule) -> dict[tuple[int, int], float]:
    """(rank, step) → mean loss a supervised token of the rank's own micro-batches."""
    sums: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for record in capsule.records("microbatches"):
        step, total, tokens = record.get("step"), record.get("loss_sum"), record.get("tokens")
        if isinstance(step, int) and total is not None and tokens and math.isfinite(total):
            sums[record["rank"], step][0] += total
            sums[record["rank"], step][1] += tokens
    return {key: total / tokens for key, (total, tokens) in sums.items() if tokens > 0}


def _too_long(
    capsule: Capsule,
    steps: Sequence[int],
    reduced: Mapping[int, ByRank],
    local: Mapping[int, ByRank],
    ratios: np.ndarray[tuple[int], np.dtype[np.float64]],
    at: int,
    world: int,
) -> Finding:
    step = steps[at]
    root = math.sqrt(world)
    largest = float(ratios.max())
    if abs(float(np.median(ratios)) / world - 1) <= T.BEYOND_MEAN or root * (1 + T.BEYOND_MEAN) < largest:
        words = "the gradients are summed over the ranks, not averaged"
        over = largest > world * (1 + T.BEYOND_MEAN)
        words = "the gradients are summed and multiplied once more" if over else words
    else:
        words = f"the gradients are summed over the ranks, or divided by √{world} in place of {world}"
    sure = _divided_by_own(capsule)
    bound = float(np.mean(list(local[step].values())))
    return Finding(
        severity=None if sure else "warning",
        confidence="confirmed" if sure else "likely",
        title="Gradients are not averaged over the ranks",
        summary=(
            f"The norm after the reduction is {_middle(reduced[step]):.6g} at step {step}, the mean of the ranks' own "
            f"norms {bound:.6g}, and no mean is longer than that: {ratios[at]:.3g} times it (up to {largest:.3g} over "
            f"{len(steps)} steps, {world} ranks)."
        ),
        where=Where(step=step),
        evidence=(
            Evidence(name="grad_norm_reduced", value=_middle(reduced[step]), expected=f"≤ {bound:.6g}"),
            *(
                Evidence(name=f"grad_norm_local of rank {rank}", value=norm)
                for rank, norm in list(local[step].items())[: T.RANKS_SHOWN]
            ),
            Evidence(name="largest ratio", value=largest, expected="≤ 1", note=f"√W = {root:.3g}, W = {world}"),
        ),
        cause=words,
        next=("one step on two ranks with the same batch: the reduced gradient must equal the local one",),
        fix=("divide by the world size after the sum, or reduce with the mean",),
    )


def _too_short(
    step: int, reduced: Mapping[int, ByRank], local: Mapping[int, ByRank], ratio: float, words: str, world: int
) -> Finding:
    own, after = _middle(local[step]), _middle(reduced[step])
    return Finding(
        severity="warning",
        confidence="likely",
        title="Gradients are divided once too often",
        summary=(
            f"All ranks have the same local gradient norm ({own:.6g} at step {step}), and so has their mean; the norm "
            f"after the reduction is {after:.6g}, {ratio:.4g} = {words} of it ({world} ranks)."
        ),
        where=Where(step=step),
        evidence=(
            Evidence(name="grad_norm_reduced", value=after, expected=own),
            Evidence(name="ratio", value=ratio, expected=1.0, note=words),
        ),
        cause="the gradient is divided by the world size twice"
        if words == "1/W"
        else "it is divided by a root too much",
        next=("one step on two ranks with the same batch: the reduced gradient must equal the local one",),
        fix=("divide once: in the loss or in the reduction",),
    )
