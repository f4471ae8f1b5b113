"""A loss that a logger made presentable: logs show progress while the job has been computing NaN for a while."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Confidence, Evidence, Finding, Severity, Where
from ..registry import rule
from ..series import Curve, curve
from .thresholds import FILTER_RATIO, HIDDEN_POINTS

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "objective/loss-hidden",
    stage="objective",
    needs=("scalars.loss", "scalars.grad_norm|scalars.eval_loss"),
    explained_by=(
        *("data/poison-sample", "data/nonfinite-input", "objective/all-masked", "objective/logits-nonfinite"),
        *("numerics/learning-rate", "numerics/fp16-overflow", "numerics/first-nonfinite"),
    ),
    cases=("nan-in-mid-run",),
)
def loss_hidden(capsule: Capsule) -> Iterator[Finding]:
    """The logged loss hides that the real one is no longer a number.

    What it checks:
        The logged loss where the gradient norm (or the evaluation loss) is not finite.
    Why it matters:
        Some trainers leave NaN losses out of the mean they log: the curve falls or sits at 0.0 and looks like progress,
        while every weight has been NaN since the onset and the rest of the run is lost.
    How it decides:
        Loss exactly 0.0 beside a gradient norm that is not finite: critical, confirmed from two points on. A gradient
        norm that stays non-finite to the end of the log while the loss falls, or is no longer logged (two points):
        likely. Where the loss is the mean over several steps, the fall that the filter of Hugging Face makes of a
        window with j finite of k steps, j(k+1) / k(j+1), is compared and tells the step of onset. Without gradient
        norms: a loss of 0.0 to the end after other values, beside an evaluation loss that is not finite.
    Looks like it but is not:
        GRPO, whose loss is 0 with finite gradients; steps that a loss scaler skips, after which the norm is finite
        again; a norm that was never logged; a loss that is logged as NaN, which hides nothing.
    What to try next:
        Switch the filter off (logging_nan_inf_filter=False) and log every step; load the last checkpoint before the
        onset and look for the first non-finite tensor.
    Fix:
        Find what made the first NaN; go back to a checkpoint before the onset, since later ones hold NaN weights.
    """
    loss, norm = curve(capsule, "loss"), curve(capsule, "grad_norm")
    finding = _zeros(loss, norm) or _stays_away(capsule, loss, norm) if len(norm) else _zero_to_the_end(capsule, loss)
    if finding is not None:
        yield finding


def _zeros(loss: Curve, norm: Curve) -> Finding | None:
    """Losses of exactly 0.0 at steps whose gradient is not finite."""
    lost = norm.step[~np.isfinite(norm.value)]
    zero = loss.step[(loss.value == 0.0) & np.isin(loss.step, lost)]
    if not len(zero):
        return None
    sound = norm.finite().before(int(zero[0]), 1).step  # the norm may have been lost some points before
    onset, hint = _onset(loss, int(lost[lost > sound[0]][0]) if len(sound) else int(lost[0]))
    if not hint and loss.interval > 1:
        hint = f"at one of the steps {onset - loss.interval + 1:,} to {onset:,}, of which that point is the mean"
    return _finding(
        f"The loss is exactly 0.0 at {len(zero):,} points whose gradient norm is not finite, first at step {zero[0]:,}",
        onset,
        hint,
        (
            Evidence(name="loss", value=0.0, expected="NaN", note=f"logged at step {zero[0]}"),
            Evidence(name="grad_norm", value=norm.at(int(zero[0])), expected="finite", note=f"step {zero[0]}"),
            Evidence(name="points", value=len(zero), expected=HIDDEN_POINTS, note="from here on confirmed"),
        ),
        "confirmed" if len(zero) >= HIDDEN_POINTS else "likely",
        "critical",
    )


def _stays_away(capsule: Capsule, loss: Curve, norm: Curve) -> Finding | None:
    """A gradient norm that is not finite up to the end of the log, beside a loss that falls or is missing."""
    finite = np.flatnonzero(np.isfinite(norm.value))
    if not len(finite) or finite[-1] == len(norm) - 1:
        return None  # never finite: it was not logged; or finite again
    first, tail = int(norm.step[finite[-1] + 1]), norm.where(slice(int(finite[-1]) + 1, None))
    before, after = loss.finite().before(first), loss.where(loss.step >= first)
    if not len(before) or not np.isfinite(after.value).all():
        return None
    scaled = bool((curve(capsule, "loss_scale").value > 1).any() or (curve(capsule, "overflow").value > 0).any())
    evidence = (
        Evidence(name="grad_norm", value=float(tail.value[0]), expected="finite", note=f"step {first} to the end"),
        Evidence(name="points", value=len(tail), expected=1, note="at the end of the log"),
    )
    if not len(after):
        logged_together = np.isin(norm.step[: finite[-1] + 1], loss.step).mean() > 0.5
        if len(tail) < HIDDEN_POINTS or not logged_together:
            return None
        what = f"The loss is missing from step {first:,} on, where the gradient norm is no longer finite"
        row = Evidence(name="loss", value=None, expected=float(before.value[-1]), note=f"not logged from step {first}")
        return _finding(what, first, "", (row, *evidence), "likely", "warning")
    onset, hint = _onset(loss, first)
    if scaled or not after.value[-1] < before.value[-1] or (_is_float16(capsule) and not hint):
        return None
    what = (
        f"The loss falls from {before.value[-1]:.5g} to {after.value[-1]:.5g} while the gradient norm is not finite "
        f"from step {first:,} to the end"
    )
    row = Evidence(name="loss", value=float(after.value[0]), expected="NaN", note=f"step {int(after.step[0])}")
    return _finding(what, onset, hint, (row, *evidence), "likely", "warning" if not hint else "critical")


def _is_float16(capsule: Capsule) -> bool:
    """Whether a loss scaler may be at work without its scale being logged."""
    training = capsule.manifest.training
    return "16" in str(training.precision or "") and "bf16" not in str(training.precision) if training else False


def _zero_to_the_end(capsule: Capsule, loss: Curve) -> Finding | None:
    """Without gradient norms: losses of exactly 0.0 to the end, and an evaluation that is not finite."""
    evaluation = curve(capsule, "eval_loss")
    other = np.flatnonzero(loss.value != 0.0)
    if not len(other) or len(loss) - 1 - other[-1] < HIDDEN_POINTS:
        return None
    onset = int(loss.step[other[-1] + 1])
    lost = evaluation.step[~np.isfinite(evaluation.value) & (evaluation.step >= onset)]
    if not len(lost):
        return None
    return _finding(
        f"The loss is exactly 0.0 from step {onset:,} to the end and the evaluation loss is not finite",
        onset,
        "",
        (
            Evidence(name="loss", value=0.0, expected="NaN", note=f"step {onset} to the end"),
            Evidence(name="eval_loss", value=evaluation.at(int(lost[0])), expected="finite", note=f"step {lost[0]}"),
        ),
        "likely",
        "critical",
    )


def _onset(loss: Curve, first: int) -> tuple[int, str]:
    """(step at which the loss turned NaN, how that is known) for a log whose first bad point is ``first``.

    A trainer that logs every k steps and replaces a NaN by the running mean reports j(k+1) / k(j+1) of the mean of the
    j finite steps, of which the point before is the best guess.
    """
    every, before, value = loss.interval, loss.finite().before(first, 1), loss.at(first)
    if every < 2 or not len(before) or not np.isfinite(value) or before.value[0] <= 0:
        return first, ""
    if value == 0.0:
        return first - every + 1, "no step of that window was finite"
    ratio = value / float(before.value[0])
    shares = {j: j * (every + 1) / (every * (j + 1)) for j in range(1, every)}
    j = min(shares, key=lambda each: abs(shares[each] / ratio - 1))
    if abs(shares[j] / ratio - 1) > FILTER_RATIO or ratio > 1 - FILTER_RATIO / 2:
        return first, ""
    words = f"{ratio:.3f} of the point before: the filter gives {shares[j]:.3f} with {j} of {every} steps finite"
    return first - every + 1 + j, words


def _finding(
    what: str, onset: int, hint: str, evidence: tuple[Evidence, ...], confidence: Confidence, severity: Severity
) -> Finding:
    rows = (*evidence, Evidence(name="onset", value=onset, unit="step", note=hint))
    return Finding(
        title="The logged loss hides a loss that is not a number",
        summary=f"{what}: the logger left out what was not finite{f' ({hint})' if hint else ''}.",
        severity=severity,
        confidence=confidence,
        where=Where(step=onset),
        evidence=rows,
        cause="the trainer filters NaN out of the loss it logs; the computation has been NaN since the onset",
        next=(
            "log every step without the filter (logging_nan_inf_filter=False)",
            "look for the first non-finite tensor from the last checkpoint before the onset",
        ),
        fix=("go back to a checkpoint before the onset: later ones hold NaN weights",),
    )
