"""Whether what else is in a batch changes what a sample is worth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..finding import Confidence, Evidence, Finding, Where
from ..passes import Row, compute_roundoff, evaluated_rows, root_mean_square
from ..registry import NotCaptured, NotJudged, rule
from .evaluation import repeated, tolerance

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "numerics/eval-padding",
    stage="numerics",
    needs=(
        "batches.input_ids|batches.sample_ids",
        "batches.token_loss|batches.logsumexp|batches.logits",
    ),
    explained_by=("data/attention-mask-mismatch", "data/missing-field"),
    cases=("validation-jumps-training-fine",),
)
def eval_padding(capsule: Capsule) -> Iterator[Finding]:
    """A sample's evaluation depends on the padding or the other samples of its batch.

    What it checks:
        Rows with the same tokens that were evaluated under the same weights in batches that pad them differently, or
        that put other rows beside them.

    Why it matters:
        The score then depends on batch size and order. Two evaluations of one model are not comparable, and what is
        served one request at a time is another model than the one that was measured.

    How it decides:
        The losses of the row's own tokens must agree within the rounding of the dtype in which the model computes,
        root mean square over the tokens. Confirmed where no random numbers were drawn, or where rows whose place did
        not change do agree. Batches in training mode are left out.

    Looks like it but is not:
        Right padding under causal attention, which no real token sees; rounding, since another shape takes another
        kernel; dropout (numerics/eval-mode); weights that moved between the two; experts with a capacity, where rows
        compete: that is said as undetermined.

    What to try next:
        Evaluate one sample alone and beside a long one, and compare token by token: the first token that differs shows
        whether attention sees the padding or positions count it.

    Fix:
        Pass the attention mask to the model; derive position_ids from the mask where padding is on the left.
    """
    rows = [each for each in evaluated_rows(capsule) if each.ran is None or not each.ran.training]
    roundoff = compute_roundoff(capsule)
    moved: list[tuple[Row, Row, float, float]] = []
    still: list[tuple[Row, Row, float, float]] = []
    for group in repeated(rows):
        for right in group[1:]:
            apart, limit = root_mean_square(group[0], right), tolerance(group[0], right, roundoff)
            if math.isnan(apart):
                continue
            alike = group[0].same_place(right) and group[0].beside == right.beside
            (still if alike else moved).append((group[0], right, apart, limit))
    if not moved:
        raise NotCaptured("one sample evaluated twice with the same weights, alone and in a padded batch")
    if any(apart > limit for _, _, apart, limit in still):
        raise NotJudged("an evaluation that agrees with itself where padding does not change: see numerics/eval-mode")
    broken = sorted((each for each in moved if each[2] > each[3]), key=lambda each: -each[2])
    if broken:
        yield _depends_on_neighbours(capsule, broken, len(moved), len(still))


def _depends_on_neighbours(
    capsule: Capsule, broken: list[tuple[Row, Row, float, float]], moved: int, still: int
) -> Finding:
    left, right, apart, limit = broken[0]
    quiet = all(each.ran is not None and each.ran.random is False for each in (left, right))
    padded = any(not a.same_place(b) for a, b, _, _ in broken)
    experts = (capsule.manifest.model.experts or 0) > 1 if capsule.manifest.model is not None else False
    sure = quiet or still > 0
    confidence: Confidence = "undetermined" if experts or not (padded or sure) else "confirmed" if sure else "likely"
    step = min(each[0].step for each in broken)
    before = f"{left.left} before and {left.width - left.tokens - left.left} after it"
    after = f"{right.left} before and {right.width - right.tokens - right.left} after it"
    return Finding(
        severity="warning" if confidence == "undetermined" else None,
        confidence=confidence,
        title="Padding enters the evaluation" if padded else "The other rows of a batch enter the evaluation",
        summary=f"{left.sample} has {left.mean:.4g} nats/token in rows of {left.width} tokens and {right.mean:.4g} in "
        f"rows of {right.width}, under the same weights; {len(broken)} of {moved} samples evaluated twice differ so.",
        where=Where(step=step, rank=left.rank, sample=left.sample),
        evidence=(
            Evidence(
                name="difference of its tokens' losses",
                value=apart,
                expected=f"≤ {limit:.2g}",
                unit="nats/token",
                note=f"root mean square over {len(left.losses)} tokens",
            ),
            Evidence(name="loss, less padded", value=left.mean, unit="nats/token", note=f"padding {before}"),
            Evidence(name="loss, more padded", value=right.mean, unit="nats/token", note=f"padding {after}"),
            Evidence(name="samples that differ", value=len(broken), expected=0, note=f"of {moved} evaluated twice"),
            Evidence(name="pairs padded alike that agree", value=still),
        ),
        cause="attention sees the padding, or positions count it"
        if padded
        else "something is computed over the rows of a batch together",
        next=(
            "evaluate this sample alone and beside a long one, and compare token by token",
            "see whether the attention mask reaches the model: print the arguments of its forward",
        ),
        fix=("pass attention_mask to the model", "derive position_ids from the mask where padding is on the left"),
    )
