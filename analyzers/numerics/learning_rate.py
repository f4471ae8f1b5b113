"""The learning rate: too high, jumping, zero, or not moving although the schedule says so."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import rule
from ..samples import samples_by_step, worst_sample
from ..series import Curve, curve
from . import thresholds as T
from .layers import find_outlier, finite_tracks
from .nonfinite import update_ratio
from .symptoms import Symptom, first_symptom, skipped_steps, start_level

if TYPE_CHECKING:
    from ...capsules import Capsule

SYMPTOM_WORDS = {
    "loss-rise": "the loss left its level",
    "loss-nonfinite": "the loss was no longer finite",
    "gradient-rise": "the gradient norm exploded",
    "tensor-nonfinite": "a tensor was no longer finite",
    "layer-growth": "the activations of one layer had grown away from the others'",
}


@rule(
    "numerics/learning-rate",
    cases=("learning-rate-too-high",),
    stage="numerics",
    needs=("scalars.learning_rate|scalars.update_norm",),
)
def learning_rate(capsule: Capsule) -> Iterator[Finding]:
    """The learning rate is too high, jumps, is zero, or does not follow its schedule.

    What it checks:
        The size of each update relative to the weights, and the learning rate over the steps.

    Why it matters:
        A step that moves the weights by a large part of their own size replaces what they held. The loss rises, norms
        explode, float16 overflows: all of them follow from one number in the configuration.

    How it decides:
        Too high: something went wrong (loss out of its level or not finite, gradient norm 10 × beyond its range, a
        non-finite tensor, one layer's activations growing away from the others) and in one of the 20 steps before
        ‖Δw‖/‖w‖ was 0.1 or more while the gradient norm of that step was ordinary; 0.05 without a warm-up in the first
        20 steps; after 0.4 or more a loss that only bounces is enough, and without any symptom it is info. Jump: 10 ×
        or more from one step to the next, and such a symptom within 50 steps. Zero: ten steps that were not skipped,
        with a loss that does not move. Frozen: one value over 20 steps in which the schedule of the manifest moves by
        10 % or more. Info: a rate that moved on at nine tenths of ten or more steps that a scaler skipped, when those
        are a tenth of the run: the schedule runs ahead.

    Looks like it but is not:
        The large first steps of Adam, about rate ÷ weight size (0.001 ÷ 0.02 = 5 %), after which the loss falls; a bad
        sample or a growing activation with ordinary updates; an update made large by its gradient; a restart of a
        cyclic schedule without harm; zero in the first step of a warm-up, in the last few of a decay, or while a scaler
        skips steps (a scheduler that stands still with the optimizer is right); the flat part of a
        warm-up–stable–decay schedule.

    What to try next:
        Run the first steps again from the same state with a tenth of the rate, everything else as it was.

    Fix:
        A rate at which the first updates stay below a few percent of the weights; a warm-up; a bound on the gradient
        norm. For a frozen scheduler: one scheduler step an optimizer step, on the scheduler that owns this optimizer.
    """
    rate = curve(capsule, "learning_rate").finite()
    symptom = _earliest(first_symptom(capsule), _outlier(capsule))
    finding = _jump(rate, symptom) or _too_high(capsule, rate, symptom)
    if finding is not None:
        yield finding
        return
    finding = _zero(capsule, rate) or _frozen(capsule, rate) or _brisk(capsule, rate) or _ahead(capsule, rate)
    if finding is not None:
        yield finding


def _jump(rate: Curve, symptom: Symptom | None) -> Finding | None:
    """A rate that multiplies from one step to the next, and the symptom that follows it."""
    if symptom is None or len(rate) < 2:
        return None
    before, after = rate.value[:-1], rate.value[1:]
    # A warm-up climbs from next to nothing: only a rise above every earlier rate is a jump.
    highest = np.maximum.accumulate(before)
    jumps = np.flatnonzero((before > 0) & (after >= T.JUMP_FACTOR * before) & (after > highest))
    for index in jumps:
        step = int(rate.step[index + 1])
        if 0 <= symptom.step - step <= T.JUMP_WINDOW:
            factor = float(after[index] / before[index])
            return Finding(
                title="The learning rate jumped",
                summary=(
                    f"The learning rate went from {before[index]:.3g} to {after[index]:.3g} (× {factor:.3g}) at step "
                    f"{step}; {SYMPTOM_WORDS[symptom.kind]} at step {symptom.step}."
                ),
                where=Where(step=step),
                evidence=(
                    Evidence(name="learning_rate", value=float(after[index]), expected=float(before[index])),
                    Evidence(name="factor", value=factor, expected=f"< {T.JUMP_FACTOR:g}"),
                    _symptom_evidence(symptom),
                ),
                cause="the learning rate was multiplied in one step",
                next=("resume before this step with the earlier rate",),
                fix=("look at what sets the rate here: a resumed scheduler, a group's own rate, a changed batch size",),
            )
    return None


def _too_high(capsule: Capsule, rate: Curve, symptom: Symptom | None) -> Finding | None:
    """Updates that replaced the weights before the first symptom, with gradients that were ordinary."""
    ratio = update_ratio(capsule)
    if not len(ratio):
        return None
    symptom = _earliest(symptom, _weak_symptom(capsule, ratio))
    if symptom is None:
        return None
    gradient = curve(capsule, "grad_norm").finite()
    warm = _warms_up(rate)
    early = not warm and symptom.kind == "loss-rise" and symptom.step - int(ratio.step[0]) <= T.NO_WARMUP_STEPS
    limit = T.UPDATE_RATIO_NO_WARMUP if early else T.UPDATE_RATIO
    window = ratio.between(symptom.step - T.CAUSE_WINDOW, symptom.step - 1)
    for step, value in zip(window.step.tolist(), window.value.tolist(), strict=True):
        if value < limit or not _ordinary_gradient(gradient, step):
            continue
        if _one_sample(capsule, symptom.step) and value < T.UPDATE_RATIO:
            return None  # the symptom belongs to a sample, and the updates are no more than brisk
        limit = T.UPDATE_RATIO if value >= T.UPDATE_RATIO else limit
        now = rate.at(step)
        what = "The learning rate is too high" if value >= T.UPDATE_RATIO else "No warm-up for this learning rate"
        rated = f" at learning rate {now:.3g}" if math.isfinite(now) else ""
        return Finding(
            severity=None if value >= T.UPDATE_RATIO else "warning",
            title=what,
            summary=(
                f"Step {step} changed the weights by {100 * value:.3g} % of their norm{rated}, with an ordinary "
                f"gradient norm; {SYMPTOM_WORDS[symptom.kind]} at step {symptom.step}."
            ),
            where=Where(step=step),
            evidence=(
                Evidence(name="update_norm / param_norm", value=value, expected=f"< {limit:g}", note=f"step {step}"),
                *([Evidence(name="learning_rate", value=now)] if math.isfinite(now) else []),
                *(
                    [Evidence(name="warm-up", value="none", note="the first step has the full rate")]
                    if not warm
                    else []
                ),
                *(
                    [Evidence(name="grad_norm", value=gradient.at(step), note="ordinary at this step")]
                    if math.isfinite(gradient.at(step))
                    else []
                ),
                _symptom_evidence(symptom),
            ),
            cause="the learning rate is too high for these weights" + ("" if warm else ", and there is no warm-up"),
            next=("run the same first steps with a tenth of the rate and nothing else changed",),
            fix=("lower the learning rate until the first updates are a few percent of the weights", "add a warm-up"),
        )
    return None


def _brisk(capsule: Capsule, rate: Curve) -> Finding | None:
    """Steps that replaced the weights in a run that did not break: worth knowing, no fault shown."""
    ratio = update_ratio(capsule)
    if not len(ratio) or float(ratio.value.max()) < T.UPDATE_REPLACED:
        return None
    step, value = int(ratio.step[ratio.value.argmax()]), float(ratio.value.max())
    return Finding(
        severity="info",
        title="One update replaced much of the weights",
        summary=f"Step {step} changed the weights by {100 * value:.3g} % of their norm; nothing broke after it.",
        where=Where(step=step),
        evidence=(
            Evidence(name="update_norm / param_norm", value=value, expected=f"< {T.UPDATE_REPLACED:g}"),
            Evidence(name="learning_rate", value=rate.at(step), note="at that step"),
        ),
        cause="a learning rate that is large for these weights",
        next=("compare the loss after 50 steps with that of a third of the rate",),
        fix=("a lower rate or a warm-up, if the loss settles lower with it",),
    )


def _weak_symptom(capsule: Capsule, ratio: Curve) -> Symptom | None:
    """A loss above all before it, or well above the lowest: enough after a step that replaced the weights."""
    loss = curve(capsule, "loss").finite()
    for index in range(1, len(loss)):
        step, earlier = int(loss.step[index]), loss.value[:index]
        limit = min(T.WEAK_OVER_HIGHEST * float(earlier.max()), T.WEAK_OVER_LOWEST * float(earlier.min()))
        before = ratio.between(step - T.REPLACED_WINDOW, step - 1)
        if loss.value[index] > limit > 0 and len(before) and before.value.max() >= T.UPDATE_REPLACED:
            return Symptom(step, "loss-rise", float(loss.value[index]), limit)
    return None


def _outlier(capsule: Capsule) -> Symptom | None:
    """A layer that left the others: where large updates come before it, it is their doing."""
    outlier = find_outlier(finite_tracks(capsule)) if capsule.has("stats.activation") else None
    return Symptom(outlier.step, "layer-growth", outlier.growth, T.OUTLIER_GROWTH) if outlier else None


def _earliest(*symptoms: Symptom | None) -> Symptom | None:
    return min((symptom for symptom in symptoms if symptom), key=lambda symptom: symptom.step, default=None)


def _ordinary_gradient(gradient: Curve, step: int) -> bool:
    """Whether the gradient norm of a step is within 10 × the median of those before (unknown counts as ordinary)."""
    past = gradient.value[gradient.step < step]
    now = gradient.at(step)
    return not past.size or not math.isfinite(now) or now <= T.GRADIENT_ORDINARY * float(np.median(past))


def _one_sample(capsule: Capsule, step: int) -> bool:
    """Whether the step's rise is one sample's, the others being where they were."""
    steps = samples_by_step(capsule)
    before = [each for at, rows in steps.items() if step - T.RECENT_WINDOW <= at < step for each in rows]
    worst = worst_sample(steps.get(step, []), before, far=T.SAMPLE_HIGH)
    return worst is not None and worst.others > 0 and worst.alone and worst.z > T.SAMPLE_SIGMA


def _warms_up(rate: Curve) -> bool:
    """Whether the rate starts below its maximum of the first steps."""
    return len(rate) > 1 and float(rate.value[0]) < 0.9 * float(rate.value[: T.FIRST_STEPS].max())


def _symptom_evidence(symptom: Symptom) -> Evidence:
    expected: Any = "finite" if math.isnan(symptom.expected) else f"≤ {symptom.expected:.4g}"
    return Evidence(name=symptom.kind, value=symptom.value, expected=expected, note=f"step {symptom.step}")


def _zero(capsule: Capsule, rate: Curve) -> Finding | None:
    """Ten steps at zero that no scaler skipped, in which the weights and the loss stand still."""
    skipped = skipped_steps(capsule)
    live = ~np.isin(rate.step, list(skipped))
    step, value = rate.step[live], rate.value[live]
    zero = value == 0
    if zero.sum() < T.ZERO_STEPS:
        return None
    starts = np.flatnonzero(zero & ~np.concatenate(([False], zero[:-1])))
    for start in starts:
        length = int(np.argmin(zero[start:])) if not zero[start:].all() else len(zero) - int(start)
        if length < max(T.ZERO_STEPS, T.ZERO_SHARE * int(start)):
            continue
        first, last = int(step[start]), int(step[start + length - 1])
        update = curve(capsule, "update_norm").between(first, last).finite()
        if (update.value > 0).any() or _learns(curve(capsule, "loss").between(first, last)):
            continue
        ended = start > 0
        return Finding(
            severity="warning",
            title="The learning rate is zero",
            summary=f"The learning rate is 0 for {length} steps from step {first} on"
            + (": the schedule ended and the run goes on." if ended else "."),
            where=Where(step=first),
            evidence=(
                Evidence(name="learning_rate", value=0.0, expected="> 0", note=f"steps {first} to {last}"),
                Evidence(name="steps at zero", value=length, expected=f"< {T.ZERO_STEPS}", unit="steps"),
            ),
            cause="the schedule reached its end before the run"
            if ended
            else "the learning rate is zero from the start",
            next=("print the schedule's total steps beside the planned steps",),
            fix=("give the scheduler the number of optimizer steps, not of epochs or micro-batches",),
        )
    return None


def _ahead(capsule: Capsule, rate: Curve) -> Finding | None:
    """A schedule that moves on at steps which the scaler skipped: it reaches its end before the optimizer does."""
    flags = curve(capsule, "overflow").finite()
    skipped = flags.step[flags.value > 0]
    before = np.isin(rate.step[:-1], skipped) & (np.diff(rate.step) == 1)
    if before.sum() < T.ZERO_STEPS or before.sum() < T.SKIPPED_SHARE * len(rate):
        return None
    moved = np.diff(rate.value) != 0
    if not moved[~before].any() or moved[before].mean() < 0.9:
        return None
    first, count = int(rate.step[:-1][before][0]), int(before.sum())
    return Finding(
        severity="info",
        title="The schedule moves on at skipped steps",
        summary=f"{count} of {len(rate)} steps were skipped by the scaler, and the learning rate moved on at each.",
        where=Where(step=first),
        evidence=(
            Evidence(name="skipped steps", value=count, expected=0, note=f"of {len(rate)}"),
            Evidence(name="rate moved at", value=float(moved[before].mean()), expected=0.0, unit="of the skipped"),
        ),
        cause="the scheduler is stepped whether or not the optimizer was",
        next=("compare the scheduler's step count with the optimizer's",),
        fix=("step the scheduler only where the optimizer stepped",),
    )


def _learns(loss: Curve) -> bool:
    """Whether a loss falls by more than noise between the ends of a stretch."""
    values = loss.finite().value
    if values.size < T.ZERO_STEPS:
        return False
    third = max(3, values.size // 3)
    fall = float(np.median(values[:third]) - np.median(values[-third:]))
    return fall > T.LEARNING_FALL * start_level(values)


def _frozen(capsule: Capsule, rate: Curve) -> Finding | None:
    """One constant rate over steps in which the declared schedule moves."""
    training = capsule.manifest.training
    schedule = training.schedule if training is not None else None
    live = ~np.isin(rate.step, list(skipped_steps(capsule)))
    step, value = rate.step[live], rate.value[live]
    if schedule is None or len(step) < T.FROZEN_STEPS or value[0] == 0 or (value != value[0]).any():
        return None
    first, last = int(step[0]), int(step[-1])
    # Over the whole stretch: a warm-up from 0 and a decay to 0 begin and end alike.
    places = np.unique(np.linspace(first, last, min(last - first + 1, 256)).astype(int)).tolist()
    shares = [
        share
        for at in places
        if (share := predicted_share(schedule.name or "", at, schedule.warmup_steps or 0, schedule.total_steps))
        is not None
    ]
    if len(shares) < len(places):
        return None
    change = max(shares) - min(shares)
    if change < T.FROZEN_CHANGE:
        return None
    return Finding(
        severity="warning",
        title="The learning rate does not follow its schedule",
        summary=(
            f"The learning rate is {value[0]:.3g} at every step from {first} to {last}, where a {schedule.name} "
            f"schedule moves by {100 * change:.0f} % of its peak."
        ),
        where=Where(step=first),
        evidence=(
            Evidence(name="learning_rate", value=float(value[0]), note=f"constant over {len(step)} steps"),
            Evidence(name="scheduled change", value=change, expected=0.0, unit="of the peak", note=schedule.name or ""),
        ),
        cause="the scheduler is not stepped, or steps another optimizer",
        next=("print the scheduler's last rate beside the optimizer's",),
        fix=("call the scheduler once an optimizer step, on the optimizer that trains",),
    )


def predicted_share(name: str, step: int, warmup: int, total: int | None) -> float | None:
    """Share of the peak rate that a schedule asks for at a step; None where the name or the length says too little.

    Linear warm-up to 1, then linear or cosine decay to 0 at ``total``, or constant.
    """
    kind = name.lower()
    if step < warmup:
        return step / warmup
    if kind.startswith("constant"):
        return 1.0
    if total is None or total <= warmup or "restart" in kind:
        return None
    done = min(1.0, (step - warmup) / (total - warmup))
    if kind.startswith("linear"):
        return 1.0 - done
    if kind.startswith("cosine"):
        return 0.5 * (1.0 + math.cos(math.pi * done))
    return None
