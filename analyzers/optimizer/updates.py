"""How much a step changes the weights, as a share of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import NotJudged, rule
from . import thresholds as T
from .records import overflowed

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "optimizer/update-ratio",
    stage="numerics",
    needs=("scalars.update_norm", "scalars.param_norm"),
    explained_by=(
        "numerics/learning-rate",
        "optimizer/order",
        "optimizer/step-mismatch",
        "optimizer/no-master-weights",
        "optimizer/not-owned",
        "optimizer/overflow-step-applied",
    ),
    cases=("learning-rate-too-high",),
)
def update_ratio(capsule: Capsule) -> Iterator[Finding]:
    """A step changes the weights by far too little or far too much.

    What it checks:
        update_norm / param_norm of each step: the share of themselves by which the weights move.

    Why it matters:
        About 1e-3 is usual. A ratio of 1e-9 means that nothing is learned whatever the loss does for other reasons; one
        above 10 means that the weights were replaced.

    How it decides:
        Outside [1e-8, 10] is critical: above it in one step, below it (or exactly 0 with a gradient) in two steps or
        more. A median outside [1e-5, 0.1] is info. Small ratios count only where the learning rate is at least a tenth
        of the run's largest.

    Looks like it but is not:
        Learning rate 0 or the first steps of a warm-up; steps that a scaler skipped; weights that are all zero; a
        gradient norm of 0 or unknown beside an update of exactly 0; non-finite norms (numerics/first-nonfinite).

    What to try next:
        Look at the ratio of each parameter, and at learning rate, clip and loss scale of the same step.

    Fix:
        Too small: see that gradients are unscaled before they are clipped, and that the weights can hold the update.
        Too large: a lower learning rate, a warm-up, a bound on the gradient norm.
    """
    ratio, rate, gradient = _ratios(capsule)
    if not ratio:
        raise NotJudged("update_norm and param_norm of one step, above zero")
    low, high = T.RATIO_CRITICAL
    large = [step for step, value in ratio.items() if value > high]
    series = capsule.scalars("loss")
    loss = dict(zip(series.step.tolist(), series.value.tolist(), strict=True))
    start = max((value for value in loss.values() if math.isfinite(value)), default=0.0)
    top = max((value for value in rate.values() if math.isfinite(value)), default=math.nan)

    def counts(step: int) -> bool:
        now = rate.get(step, math.nan)
        if math.isfinite(now) and (now <= 0 or now < T.SMALL_RATE * top):
            return False
        if loss.get(step, math.inf) < T.SOLVED * start:
            return False  # an optimizer that stops at a tolerance (L-BFGS) has nothing left to do
        return ratio[step] > 0 or (gradient.get(step, 0.0) > 0 and now > 0)

    small = [step for step, value in ratio.items() if value < low and counts(step)]
    if large or len(small) >= T.RATIO_STEPS:
        step = (large or small)[0]
        what = "replaces the weights" if large else "hardly changes the weights"
        cause = "the update is larger than the weights" if large else "the update is too small to change anything"
        yield Finding(
            title=f"A step {what}",
            summary=f"‖Δw‖/‖w‖ is {ratio[step]:.3g} at step {step}, as in {len(large or small)} of {len(ratio)} steps.",
            where=Where(step=step),
            evidence=(
                Evidence(name="update_norm / param_norm", value=ratio[step], expected=f"{low:g} to {high:g}"),
                Evidence(name="steps", value=len(large or small), expected=0, note=f"of {len(ratio)}"),
                Evidence(name="learning_rate", value=rate.get(step)),
                Evidence(name="grad_norm", value=gradient.get(step)),
            ),
            cause=cause,
            next=("look at learning rate, loss scale and clip of this step",),
            fix=("lower the learning rate or add a warm-up",)
            if large
            else ("unscale before clipping; keep float32 weights; see that the optimizer holds the model's tensors",),
        )
        return
    usual = float(np.median([value for step, value in ratio.items() if counts(step)] or [math.nan]))
    low, high = T.RATIO_USUAL
    if math.isfinite(usual) and not low <= usual <= high:
        yield Finding(
            severity="info",
            kind="hygiene",
            title="Steps are unusually " + ("large" if usual > high else "small"),
            summary=f"The median of ‖Δw‖/‖w‖ is {usual:.3g}; {low:g} to {high:g} is usual.",
            where=Where(step=next(iter(ratio))),
            evidence=(
                Evidence(name="update_norm / param_norm", value=usual, expected=f"{low:g} to {high:g}", note="median"),
                Evidence(name="learning_rate", value=top if math.isfinite(top) else None, note="largest"),
            ),
            cause="the learning rate is large for these weights" if usual > high else "the learning rate is small",
            next=("compare the loss after 50 steps with that of another rate",),
            fix=("another learning rate, if the loss settles lower with it",),
        )


def _ratios(capsule: Capsule) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
    """Ratio, learning rate and gradient norm by step; skipped steps and weights of norm 0 are left out."""

    def column(name: str) -> dict[int, float]:
        series = capsule.scalars(name)
        return {int(step): float(value) for step, value in zip(series.step, series.value, strict=True)}

    skipped, parameters = overflowed(capsule), column("param_norm")
    ratio = {
        step: update / parameters[step]
        for step, update in column("update_norm").items()
        if step not in skipped and parameters.get(step, 0.0) > 0 and math.isfinite(update) and update >= 0
        and math.isfinite(parameters[step])
    }  # fmt: skip
    return ratio, column("learning_rate"), column("grad_norm")
