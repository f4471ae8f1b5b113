"""The gradient that each rank steps with: one for all replicas, and the mean of theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Confidence, Evidence, Finding, Where
from ..registry import NotCaptured, NotJudged, rule
from . import thresholds as T
from .averaging import averaging
from .layout import Layout, layout, shards
from .reduction import ByRank, norms, scale, several, spread
from .replicas import parameters_part_at, parameters_stay_equal
from .words import named_ranks

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "distributed/gradient-scale",
    stage="distributed",
    needs=("scalars.grad_norm_reduced|scalars.grad_norm",),
    explained_by=(  # calls that pair up wrongly reduce what does not belong together
        "distributed/collective-mismatch",
        "distributed/group-order",
        "distributed/rank-conditional",
        "distributed/uneven-steps",
    ),
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
        checksums of the parameters part, too, or a reduction was seen; likely else, and where something as large as the
        model is reduced all the same. A mean is never longer than the
        mean of the local norms (triangle inequality): a reduced norm beyond it by 1 % (by 20 % where only some ranks'
        are known) is a sum, or a mean that is multiplied; more than √W is no root. Confirmed where each rank's loss is
        known to be the mean over its own tokens, undetermined under accumulation, where the local norm may be that of
        one micro-batch, likely else. Nor is it shorter than 1/√W of the local norms, which
        independent gradients have: below 0.75 of that, in the median over five steps, it was divided once too often;
        likely. Local norms that agree to 0.01 % on all ranks come from equal gradients: then a ratio of 1/W or 1/√W is
        named.

    Looks like it but is not:
        Parts of one model (tensor, pipeline), and shards (FSDP, ZeRO), whose norms differ by design; norms taken before
        a reduction that is called by hand: checksums of parameters that stay equal show it; models that are averaged
        every few steps (local SGD), which the calls on record show; losses divided by the
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
    reduced = norms(capsule, "grad_norm_reduced", where)
    local = norms(capsule, "grad_norm_local", where)
    after = bool(reduced)
    shown = several(reduced) if after else several(norms(capsule, "grad_norm", where))
    if not shown and not (after and local):
        raise NotCaptured(
            "gradient norms of two data-parallel ranks at one step, or of one before and after the reduction"
        )
    apart = _apart(shown)
    if apart is not None:
        finding = _not_synchronised(capsule, where, shown, local, apart, after)
        if finding is not None:
            yield finding
        elif not after:
            raise NotJudged("norms after the reduction: those there are may be from before it")
        return
    finding = scale(capsule, where, reduced, local)
    if finding is not None:
        yield finding


@dataclass(frozen=True)
class _Apart:
    """Steps at which the norms of replicas differ."""

    first: int
    steps: int
    of: int
    spread: float


def _apart(shown: Mapping[int, ByRank]) -> _Apart | None:
    odd = [step for step, each in shown.items() if spread(each) > T.SAME_NORM]
    if not odd or len(odd) < min(T.NORM_STEPS, len(shown)):
        return None
    return _Apart(odd[0], len(odd), len(shown), float(np.median([spread(shown[step]) for step in odd])))


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
    often = averaging(capsule)
    if often == "now and then":
        raise NotJudged("a job that averages at every step: this one does so now and then, by design")
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
    # Something that large is reduced: if not the gradients, then the parameters, and replicas are kept together by it.
    unclear = often == "every step" and (not after or len(unreduced) == len(here))
    sure = (parted is not None or (after and local and where.known)) and not unclear
    confidence: Confidence = "confirmed" if sure else "likely"
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
