"""What lies behind a loss spike: the classes of cause that the evidence around its step can show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence
from ..samples import Outlier, samples_by_step, token_shift, worst_sample
from ..series import Curve, curve, resumes
from . import thresholds as T
from .symptoms import skipped_steps

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Events that change what the loss is measured on, or the state it is measured with.
CHANGES = ("mixture_changed", "context_length_changed", "checkpoint_loaded", "weights_loaded", "learning_rate_changed")


def other_data(capsule: Capsule, step: int) -> tuple[str, tuple[Evidence, ...]] | None:
    """The cause, where the captured batches from the step on hold other tokens than those before."""
    shift = token_shift(capsule, step, T.RECENT_WINDOW)
    if shift is None or shift[0] <= max(T.DATA_SHIFT, T.DATA_SHIFT_OF_USUAL * shift[1]):
        return None
    return "the data changed at this step", (
        Evidence(
            name="distance of the token frequencies",
            value=shift[0],
            expected=f"≤ {max(T.DATA_SHIFT, T.DATA_SHIFT_OF_USUAL * shift[1]):.2g}",
            note=f"from the captured batches before, which scatter by {shift[1]:.2g}",
        ),
    )


def falls_after(loss: Curve, step: int) -> bool:
    """Whether the loss falls again over the steps in which a spike would have recovered."""
    after = loss.between(step, step + T.RECOVERY_STEPS).finite().value
    third = len(after) // 3
    if third < 3:
        return False
    return float(np.median(after[-third:])) < float(np.median(after[:third])) - T.SPIKE_MIN_RISE * after[0]


def spike_cause(capsule: Capsule, step: int) -> tuple[str | None, tuple[Evidence, ...]]:
    """The first cause class that the evidence around a spike shows."""
    if step in skipped_steps(capsule):
        return "the step overflowed", (Evidence(name="overflow", value=1, expected=0, note=f"step {step}"),)
    steps = samples_by_step(capsule)
    now = steps.get(step, [])
    before = [each for at, rows in steps.items() if step - T.RECENT_WINDOW <= at < step for each in rows]
    worst = worst_sample(now, before, far=T.SAMPLE_HIGH)
    if worst is not None and worst.z > T.SAMPLE_SIGMA:
        number = Evidence(
            name="worst sample",
            value=worst.sample.loss,
            expected=worst.median,
            unit="nats/token",
            note=f"sample {worst.sample.id}; the others {worst.others_median:.4g}",
        )
        if worst.alone and worst.others:
            return _one_sample(capsule, worst, number)
        if worst.others and worst.others_median > worst.median + T.SAMPLE_HIGH * worst.sigma:
            return "every sample of the step is high: the state of the model or the whole batch", (number,)
    local, reduced = curve(capsule, "grad_norm_local").at(step), curve(capsule, "grad_norm_reduced").at(step)
    run = capsule.manifest.run
    world = run.world_size if run is not None and run.world_size else len(capsule.ranks)
    if world and world > 1 and local > 0 and reduced > 0:
        ratio = max(local / reduced, reduced / local)
        if abs(ratio / world - 1) < 0.05:
            return "the gradient was scaled by the number of ranks", (
                Evidence(name="norm before / after the reduction", value=ratio, expected=1, note=f"{world} ranks"),
            )
    for event in capsule.records("events"):
        at = event.get("step")
        if event.get("kind") in CHANGES and at is not None and 0 <= step - int(at) <= T.EVENT_NEIGHBOURHOOD:
            return f"it follows {str(event['kind']).replace('_', ' ')} at step {at}", (
                Evidence(name="event", value=str(event["kind"]), note=f"step {at}"),
            )
    for at in resumes(capsule):
        if 0 <= step - at <= T.EVENT_NEIGHBOURHOOD:
            return f"it follows the resume at step {at}", (Evidence(name="event", value="resume", note=f"step {at}"),)
    return None, ()


def _one_sample(capsule: Capsule, worst: Outlier, number: Evidence) -> tuple[str, tuple[Evidence, ...]]:
    """A hard sample is high at most of its tokens; a bad one at a few, or nobody captured which."""
    sample = worst.sample
    rows = [
        np.asarray(row, np.float64)
        for batch in capsule.batches(rank=sample.rank, step=sample.step)
        if batch.split in (None, "train") and batch.token_loss is not None
        for row in np.asarray(batch.token_loss)
    ]
    tokens = rows[sample.row] if sample.row < len(rows) else np.empty(0)
    tokens = tokens[np.isfinite(tokens) & (tokens != 0)]  # 0: masked
    middle = float(np.median(tokens)) if tokens.size else 0.0
    if not middle > worst.median + T.SAMPLE_HIGH * worst.sigma:
        return f"one bad sample: {sample.id}", (number,)
    return f"one hard sample: {sample.id}, high at most of its tokens", (
        number,
        Evidence(name="median token loss", value=middle, expected=worst.median, unit="nats/token", note=str(sample.id)),
    )
