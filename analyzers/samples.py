"""Loss of single samples, step by step, and whether one of them stands alone among its neighbours.

Several families ask the same question of a step (one bad sample, or the whole model?), so the answer lives here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .series import MAD_TO_SIGMA

if TYPE_CHECKING:
    from ..capsules import Capsule

#: A spread is never taken as smaller than this share of the median, or a memorised set has outliers everywhere.
MIN_RELATIVE_SPREAD = 0.02
#: Another sample whose excess is less than this share of the worst one's is not high with it: among seven ordinary
#: samples of few tokens one stands at 3 σ now and then, where noise stands at 18.
DWARFED = 0.25

#: Ids beyond this many are left out of token frequencies.
MOST_TOKENS = 1 << 19


@dataclass(frozen=True)
class Sample:
    """One training sample in one step; ``row`` is its place in the step.

    ``loss`` is its own mean in nats a token, over ``loss_tokens`` of its ``length`` tokens (None where not on record).
    """

    step: int
    rank: int
    row: int
    id: str
    loss: float
    length: int | None
    source: str | None = None
    loss_tokens: int | None = None

    @property
    def weight(self) -> int | None:
        """How many tokens its loss is a mean over, as far as known."""
        return self.length if self.loss_tokens is None else self.loss_tokens


@dataclass(frozen=True)
class Outlier:
    """The worst sample of a step beside its neighbours and beside what came before.

    ``z`` is the distance ``excess`` from the trailing window's median in robust standard deviations ``sigma`` (NaN
    without a window), ``usual_excess`` the largest distance that the window itself held, ``alone`` whether no other
    sample of the step is as far out, and ``share`` its part of the sum over the step's samples.
    """

    sample: Sample
    others_median: float
    others: int
    others_finite: bool
    share: float
    z: float
    sigma: float
    median: float
    excess: float
    usual_excess: float
    alone: bool


def samples_by_step(capsule: Capsule) -> dict[int, list[Sample]]:
    """Training samples with a loss of their own, by step: from the sample records, else from captured batches."""
    steps: dict[int, list[Sample]] = defaultdict(list)
    seen: dict[tuple[int, int], int] = defaultdict(int)
    for record in capsule.records("samples"):
        step, loss = record.get("step"), record.get("loss")
        if step is None or record.get("split") not in (None, "train"):
            continue
        step, rank = int(step), int(record.get("rank") or 0)
        row = seen[step, rank]
        seen[step, rank] += 1
        if loss is None:
            continue
        name = record.get("id") or str(record.get("sha256") or "")[:12] or f"row {row}"
        length, source, tokens = record.get("length"), record.get("source"), record.get("loss_tokens")
        steps[step].append(
            Sample(
                step,
                rank,
                row,
                str(name),
                float(loss),
                int(length) if length is not None else None,
                str(source) if source is not None else None,
                int(tokens) if tokens is not None else None,
            )
        )
    if not steps:
        for batch in capsule.batches():
            if batch.split in (None, "train") and (rows := _batch_samples(batch)):
                steps[batch.step].extend(rows)
    return dict(sorted(steps.items()))


def _batch_samples(batch: Any) -> list[Sample]:
    """Per-row mean of a captured batch's token losses over its supervised positions."""
    if batch.token_loss is None:
        return []
    token_loss: NDArray[np.float64] = np.asarray(batch.token_loss, np.float64)  # [B, T]
    supervised = np.ones(token_loss.shape, bool)
    if batch.labels is not None and np.shape(batch.labels) == token_loss.shape:
        labels = np.asarray(batch.labels)
        supervised = labels >= 0
        if batch.label_layout == "unshifted":  # position t predicts the label of t + 1
            supervised = np.zeros_like(supervised)
            supervised[:, :-1] = labels[:, 1:] >= 0
    elif batch.attention_mask is not None and np.shape(batch.attention_mask) == token_loss.shape:
        supervised = np.asarray(batch.attention_mask) > 0
    ids: Sequence[str] = batch.sample_ids or ()
    rows: list[Sample] = []
    for row in range(len(token_loss)):
        tokens = int(supervised[row].sum())
        if tokens:
            name = str(ids[row]) if row < len(ids) else f"row {row}"
            mean = float(token_loss[row][supervised[row]].mean())
            rows.append(Sample(batch.step, batch.rank or 0, row, name, mean, tokens, loss_tokens=tokens))
    return rows


def distinct_share(capsule: Capsule, sample: Sample) -> tuple[float, float] | None:
    """Share of distinct tokens in a captured sample, and the smallest such share among the other rows of its step.

    Returns:
        None where the rows of the step were not captured, or there is no other.
    """
    rows: list[NDArray[np.int64]] = []
    for batch in capsule.batches(rank=sample.rank, step=sample.step):
        if batch.input_ids is None or batch.split not in (None, "train"):
            continue
        ids, mask = np.asarray(batch.input_ids, np.int64), batch.attention_mask
        masked = mask is not None and np.shape(mask) == ids.shape
        rows += [row[np.asarray(mask)[index] > 0] if masked else row for index, row in enumerate(ids)]
    shares = [len(np.unique(row)) / len(row) if len(row) else math.nan for row in rows]
    if sample.row >= len(rows) or len(rows) < 2 or math.isnan(shares[sample.row]):
        return None
    others = [share for row, share in enumerate(shares) if row != sample.row and not math.isnan(share)]
    return (shares[sample.row], min(others)) if others else None


def token_shift(capsule: Capsule, step: int, back: int) -> tuple[float, float] | None:
    """How far the tokens of a step lie from those of the captured steps before it, and those from each other.

    Both are total variation distances of token frequencies, 0 to 1: of the step from all earlier ones together, and
    the largest of an earlier one from the rest.

    Args:
        capsule: with captured batches of training.
        step: the step to judge.
        back: how many steps before it count.

    Returns:
        None where the step or two earlier ones were not captured. Of the step and the later captured ones the nearest
        counts: one odd batch is no change of the data.
    """
    counts: dict[int, NDArray[np.float64]] = {}
    for batch in capsule.batches():
        if batch.input_ids is not None and batch.split in (None, "train") and batch.step >= step - back:
            ids, mask = np.asarray(batch.input_ids, np.int64), batch.attention_mask
            ids = ids[np.asarray(mask) > 0] if mask is not None and np.shape(mask) == ids.shape else ids.ravel()
            found = np.bincount(ids[(ids >= 0) & (ids < MOST_TOKENS)], minlength=MOST_TOKENS).astype(np.float64)
            counts[batch.step] = counts.get(batch.step, 0.0) + found
    earlier = [counts[at] for at in sorted(counts) if at < step]
    if step not in counts or len(earlier) < 2:
        return None
    usual = max(_distance(each, sum(earlier) - each) for each in earlier)
    away = [_distance(counts[at], sum(earlier)) for at in sorted(counts) if at >= step]
    return (min(away), usual)


def _distance(left: Any, right: Any) -> float:
    """Total variation distance of two sets of counts; 0 where one is empty."""
    if not left.sum() or not right.sum():
        return 0.0
    return float(np.abs(left / left.sum() - right / right.sum()).sum()) / 2


def worst_sample(step: Sequence[Sample], before: Sequence[Sample], *, far: float) -> Outlier | None:
    """The sample of a step with the largest (or a non-finite) loss, measured against the others and the past.

    The deviation of a sample whose loss covers fewer tokens than usual is divided by √(usual tokens / its tokens): a
    mean over few tokens is noisier.

    Args:
        step: samples of one step.
        before: samples of the trailing window (earlier steps only); may be empty.
        far: robust standard deviations from which another sample of the step counts as far out, too, where its excess
            is more than a quarter of the worst one's.

    Returns:
        None for an empty step.
    """
    if not step:
        return None
    losses = np.array([each.loss for each in step])
    worst = int(np.argmax(np.where(np.isfinite(losses), losses, np.inf)))
    others = np.delete(losses, worst)
    finite_others = others[np.isfinite(others)]
    past = np.array([each.loss for each in before if math.isfinite(each.loss)])
    sample = step[worst]

    z = sigma = median = excess = usual_excess = math.nan
    alone = len(finite_others) == len(others)
    if past.size:
        median = float(np.median(past))
        sigma = max(float(np.median(np.abs(past - median))) * MAD_TO_SIGMA, MIN_RELATIVE_SPREAD * abs(median), 1e-12)
        weights = [each.weight for each in before if each.weight]
        if sample.weight and weights:
            sigma *= math.sqrt(max(1.0, float(np.median(weights)) / sample.weight))
        excess = sample.loss - median
        z = excess / sigma
        usual_excess = float(past.max()) - median
        dwarfed = DWARFED * excess if math.isfinite(excess) else 0.0
        alone = alone and not bool((finite_others > median + max(far * sigma, dwarfed)).any())
    total = float(losses.sum())
    return Outlier(
        sample=sample,
        others_median=float(np.median(finite_others)) if finite_others.size else math.nan,
        others=len(others),
        others_finite=len(finite_others) == len(others) > 0,
        share=sample.loss / total if math.isfinite(total) and total > 0 else math.nan,
        z=z,
        sigma=sigma,
        median=median,
        excess=excess,
        usual_excess=usual_excess,
        alone=alone,
    )
