"""Gradient norms that leave the range they had, told apart from single ones that passed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import rule
from ..series import Curve, Ints, curve, first_maximum, spread, trailing
from . import thresholds as T
from .symptoms import skipped_steps

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "numerics/gradient-explosion",
    cases=("loss-spike",),
    stage="numerics",
    severity="warning",
    needs=("scalars.grad_norm",),
    explained_by=(
        "numerics/learning-rate",
        "numerics/fp16-overflow",
        "numerics/first-nonfinite",
        "objective/loss-hidden",
        "data/poison-sample",
        "data/token-out-of-vocabulary",
        "optimizer/overflow-step-applied",
        "optimizer/state-not-restored",
        "optimizer/step-mismatch",
    ),
)
def gradient_explosion(capsule: Capsule) -> Iterator[Finding]:
    """The gradient norm leaves its range by a factor of ten.

    What it checks:
        The gradient norm before clipping, step by step.

    Why it matters:
        One step along an exploded gradient can undo a thousand. Clipping bounds the step and hides the cause.

    How it decides:
        Above 10 × the maximum of the first 100 steps (of all before it while there are fewer, at least 20), or above
        100, above 3 × the recent median and with a loss that rises; NaN or Inf to the end of the record where no scaler
        skipped the step and the loss was finite up to it (norms that are finite again show that the step was skipped:
        info). The step is that from which on every norm is above twice the median of the 20 before. A single step after
        which norm and loss are ordinary again is info.

    Looks like it but is not:
        The large gradients of the first steps and of a warm-up; norms that are large throughout, as with summed losses;
        one hard sample in a batch of one; steps that the gradient scaler skipped.

    What to try next:
        Compare the norm of each layer at this step with the step before; replay the batch.

    Fix:
        Clip the norm; lower the learning rate; look for a missing normalisation or a loss summed where it was averaged.
    """
    loss, gradient = curve(capsule, "loss"), curve(capsule, "grad_norm")
    skipped = skipped_steps(capsule)
    keep = ~np.isin(gradient.step, list(skipped))
    gradient = Curve(gradient.step[keep], gradient.value[keep])
    lost, skips = _nonfinite(gradient, loss)
    gradient = gradient.finite()
    step, value = gradient.step, gradient.value
    first = T.EXPLOSION_FACTOR * first_maximum(value, T.FIRST_STEPS)
    recent = trailing(value, T.RECENT_WINDOW, np.median)
    large = (value > first) | ((value > T.GRADIENT_LARGE) & (value > T.GRADIENT_GROWN * recent))
    passed: Finding | None = None
    for index in np.flatnonzero(large & (np.arange(len(value)) >= T.MIN_HISTORY) & (recent > 0)).tolist():
        norm, at = float(value[index]), int(step[index])
        if lost.size and at > lost[0]:
            break
        beyond = norm > first[index]
        if not beyond and not _loss_rises(loss, at):
            continue
        after = value[index + 1 : index + 1 + T.RECENT_WINDOW]
        subsides = after.size > 0 and float(np.median(after)) < norm / T.EXPLOSION_FACTOR
        limit, test = (
            (float(first[index]), f"{T.EXPLOSION_FACTOR:g} × the maximum of the first {min(index, T.FIRST_STEPS)}")
            if beyond
            else (T.GRADIENT_LARGE, "with a rising loss")
        )
        if not subsides or _loss_stays_up(loss, at):
            yield _explosion(at, norm, limit, test, True, _onset(gradient, index))
            return
        passed = passed or _explosion(at, norm, limit, test, False)
    if lost.size and not _lost_before(loss, int(lost[0])):
        norm = float(curve(capsule, "grad_norm").at(int(lost[0])))
        yield _explosion(int(lost[0]), norm, math.inf, "finite", True)
    elif passed is not None:
        yield passed
    elif skips.size:
        yield _explosion(int(skips[0]), float(curve(capsule, "grad_norm").at(int(skips[0]))), math.inf, "finite", False)


def _onset(gradient: Curve, index: int) -> int:
    """Step from which on every norm up to the exploded one is out of line with those before: where it began to rise."""
    value, onset, lowest = gradient.value, index, float(gradient.value[index])
    for start in range(index, max(T.MIN_HISTORY, index - T.LONGEST_RISE) - 1, -1):
        lowest = min(lowest, float(value[start]))
        if lowest > T.GRADIENT_PARTNER * float(np.median(value[max(0, start - T.RECENT_WINDOW) : start])):
            onset = start
    return int(gradient.step[onset])


def _nonfinite(gradient: Curve, loss: Curve) -> tuple[Ints, Ints]:
    """Steps whose norm is no number to the end of the record, and those after which norm and loss are finite again.

    Weights that such a gradient had reached would make every later loss NaN: somebody skipped the step.
    """
    finite = np.isfinite(gradient.value)
    last = int(np.flatnonzero(finite)[-1]) if finite.any() else -1
    step = gradient.step[~finite]
    back = step[step < gradient.step[last]] if last >= 0 else step[:0]
    if back.size and not np.isfinite(loss.after(int(back[0])).value).all():
        return step, step[:0]
    return step[len(back) :], back


def _lost_before(loss: Curve, step: int) -> bool:
    """Whether the loss was not finite by then: the gradient of such a loss is no number, and that is all it says."""
    return bool((~np.isfinite(loss.value[loss.step <= step])).any())


def _loss_rises(loss: Curve, step: int) -> bool:
    """Whether the loss of the step, or the next, is above the recent median by more than its noise."""
    before = loss.finite()
    past = before.value[before.step < step][-T.RECENT_WINDOW :]
    now = before.value[before.step >= step][:2]
    if past.size < T.MIN_HISTORY or not now.size:
        return False
    median, sigma = spread(past)
    return bool(float(now.max()) > median + max(T.RECOVERY_SIGMA * sigma, 0.1 * abs(median)))


def _loss_stays_up(loss: Curve, step: int) -> bool:
    """Whether the median of the next losses is above the level before by more than its noise."""
    past, after = loss.value[loss.step < step][-T.RECENT_WINDOW :], loss.value[loss.step > step][: T.RECOVERY_STEPS]
    if past.size < T.MIN_HISTORY or not after.size:
        return False
    if not np.isfinite(after).all():
        return True
    median, sigma = spread(past[np.isfinite(past)])
    return float(np.median(after[-T.RECENT_WINDOW :])) > median + max(2 * sigma, 0.1 * abs(median))


def _explosion(step: int, norm: float, limit: float, test: str, lasting: bool, onset: int | None = None) -> Finding:
    finite = math.isfinite(norm)
    rises = f"rises from step {onset} on and " if onset is not None and onset < step else ""
    shown = f"{norm:.4g}" if finite else ("NaN" if math.isnan(norm) else "Infinity")
    return Finding(
        severity=None if lasting else "info",
        title="The gradient explodes" if lasting else "A large gradient that passed",
        summary=f"The gradient norm {rises}is {shown} at step {step}"
        + (f", above {limit:.4g} ({test})" if finite else " and no scaler is known to have skipped the step" * lasting)
        + ("." if lasting else "; norm and loss are ordinary again after it."),
        where=Where(step=step if onset is None else onset),
        evidence=(
            Evidence(name="grad_norm", value=norm, expected=f"≤ {limit:.4g}" if finite else "finite", note=test),
        ),
        cause="the gradient left the range that it had before" if lasting else "a benign spike",
        next=("compare the gradient of each layer with the step before", "replay the batch of this step"),
        fix=("clip the gradient norm", "lower the learning rate"),
    )
