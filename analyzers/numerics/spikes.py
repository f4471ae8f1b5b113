"""Loss spikes and exploding gradients, told apart from benign ones by what happens in the steps after."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import rule
from ..samples import samples_by_step, token_shift, worst_sample
from ..series import Curve, curve, first_maximum, periodic, spread, trailing
from . import thresholds as T
from .symptoms import skipped_steps, start_level

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Events that change what the loss is measured on, or the state it is measured with.
CHANGES = ("mixture_changed", "context_length_changed", "checkpoint_loaded", "weights_loaded", "learning_rate_changed")


@dataclass(frozen=True)
class Spike:
    """A loss out of line: which test it failed, and whether it came back (None: the record ends too early)."""

    step: int
    value: float
    limit: float
    test: str
    level: float
    sigma: float
    recovered: bool | None
    back_at: int | None


def find_spikes(loss: Curve, gradient: Curve) -> list[Spike]:
    """Every separate spike of a loss, in step order; the steps of one excursion count once."""
    loss = loss.finite()
    values, count = loss.value, len(loss)
    if not count:
        return []
    index = np.arange(count)
    mean, sigma = trailing(values, T.SPIKE_WINDOW, np.mean), trailing(values, T.SPIKE_WINDOW, np.std)
    recent = trailing(values, T.RECENT_WINDOW, np.median)
    never = np.full(count, np.inf)
    by_noise = np.where((index >= T.SPIKE_MIN_WINDOW) & (sigma > 0), mean + T.SPIKE_SIGMA * sigma, never)
    by_first = np.where(index >= T.FIRST_STEPS, T.EXPLOSION_FACTOR * values[: T.FIRST_STEPS].max(), never)
    by_recent = np.where(index >= T.RECENT_WINDOW, T.RECENT_FACTOR * recent, never)
    rises = values - recent >= T.SPIKE_MIN_RISE * start_level(values)

    found: list[Spike] = []
    blocked = 0
    for at in np.flatnonzero(rises & (values > np.minimum(np.minimum(by_noise, by_first), by_recent))).tolist():
        step, value = int(loss.step[at]), float(values[at])
        tests = [
            (float(by_noise[at]), f"mean + {T.SPIKE_SIGMA:g}σ of the previous {min(at, T.SPIKE_WINDOW)}"),
            (float(by_first[at]), f"{T.EXPLOSION_FACTOR:g} × the maximum of the first {T.FIRST_STEPS}"),
        ]
        if value > by_recent[at] and _partner(gradient, step):
            tests.append((float(by_recent[at]), f"{T.RECENT_FACTOR:g} × the median of the previous {T.RECENT_WINDOW}"))
        limit, test = min(tests)
        if at < blocked or value <= limit:
            continue
        level, robust = spread(values[max(0, at - T.RECENT_WINDOW) : at])
        back = _back_at(values, at, level + T.RECOVERY_SIGMA * max(robust, 0.02 * abs(level)))
        seen = count - 1 - at >= T.RECOVERY_STEPS
        recovered = True if back is not None else (False if seen else None)
        back_step = int(loss.step[back]) if back is not None else None
        found.append(Spike(step, value, limit, test, level, float(sigma[at]), recovered, back_step))
        blocked = back if back is not None else count
    return found


def _back_at(values: np.ndarray, index: int, limit: float) -> int | None:
    """First of the next 30 values from which two in a row (or the last one) are back below ``limit``."""
    for later in range(index + 1, min(index + T.RECOVERY_STEPS, len(values) - 1) + 1):
        if (values[later : later + 2] <= limit).all():
            return later
    return None


def _partner(gradient: Curve, step: int) -> bool:
    """Whether the gradient norm of the step is out of line, too (not finite counts)."""
    now = gradient.at(step)
    before = gradient.value[(gradient.step < step) & np.isfinite(gradient.value)][-T.RECENT_WINDOW :]
    if step not in gradient.step or before.size < T.RECENT_WINDOW:
        return False
    return not math.isfinite(now) or now > T.GRADIENT_PARTNER * float(np.median(before))


@rule(
    "numerics/loss-spike",
    cases=("loss-spike",),
    stage="numerics",
    severity="warning",
    needs=("scalars.loss",),
    explained_by=(
        "numerics/learning-rate",
        "numerics/fp16-overflow",
        "numerics/first-nonfinite",
        "data/poison-sample",
        "data/token-out-of-vocabulary",
    ),
)
def loss_spike(capsule: Capsule) -> Iterator[Finding]:
    """The loss jumps out of its noise.

    What it checks:
        The loss series against its own recent past.

    Why it matters:
        Most spikes pass within a few steps and cost nothing; one that does not is where a run was lost, and the batch
        and the state of that step are the evidence.

    How it decides:
        Above mean + 6σ of the previous 128 (at least 32), or above 10 × the maximum of the first 100, or above 2 × the
        median of the previous 20 while the gradient norm is above 2 × its own; and by at least 2 % of the loss at the
        start. Back within 30 steps (3 robust σ of the level before): info. Not back: warning. A record that ends inside
        a spike: warning from 12σ or twice the level on, info below; info, too, where the captured batches hold other
        tokens from this step on and the loss falls again. The cause is named where samples, loss scale, norms
        before and after the reduction, or events show it; undetermined otherwise.

    Looks like it but is not:
        Noise of small batches; the steep fall at the start; ticks once an epoch; a constant loss; jumps of a memorised
        set whose loss is next to nothing; the first steps after a resume, which have no past here.

    What to try next:
        Replay the captured batch with the weights before the spike: if the loss is high again, it is the data; if not,
        the state or the update.

    Fix:
        Skip the batch, clip the gradient norm, lower the learning rate or the second beta; resume from before it.
    """
    loss, gradient = curve(capsule, "loss"), curve(capsule, "grad_norm")
    spikes = find_spikes(loss, gradient)
    if not spikes or periodic([spike.step for spike in spikes], int(loss.step[0]), T.RECENT_WINDOW):
        return
    benign = [spike for spike in spikes if _benign(spike)]
    for spike in spikes:
        if not _benign(spike):
            yield _spike_finding(capsule, spike)
            break
    if benign:
        worst = max(benign, key=lambda spike: spike.value - spike.level)
        yield Finding(
            severity="info",
            title="Loss spikes that passed" if len(benign) > 1 else "A loss spike that passed",
            summary=(
                f"{len(benign)} loss spike{'s' if len(benign) > 1 else ''} that passed or stayed small; the "
                f"largest at step {worst.step}: {worst.value:.4g} against {worst.level:.4g} before"
                + (f", back at step {worst.back_at}." if worst.back_at is not None else ", at the end of the record.")
            ),
            where=Where(step=worst.step),
            evidence=_numbers(worst),
            cause="a benign spike",
            next=("none needed; look at the batch if they become more frequent",),
        )


def _benign(spike: Spike) -> bool:
    if spike.recovered is None:
        within = min(spike.level + T.END_SIGMA * spike.sigma, T.RECENT_FACTOR * spike.level)
        return spike.value < within
    return spike.recovered


def _numbers(spike: Spike) -> tuple[Evidence, ...]:
    return (
        Evidence(name="loss", value=spike.value, expected=f"≤ {spike.limit:.4g}", unit="nats/token", note=spike.test),
        Evidence(name="level before", value=spike.level, unit="nats/token", note="median of the previous steps"),
        Evidence(
            name="back at step",
            value=spike.back_at if spike.back_at is not None else "not in the record",
            expected=f"within {T.RECOVERY_STEPS} steps",
        ),
    )


def _spike_finding(capsule: Capsule, spike: Spike) -> Finding:
    changed = _other_data(capsule, spike.step)
    cause, evidence = changed or _spike_cause(capsule, spike.step)
    learned = changed is not None and _falls_after(curve(capsule, "loss"), spike.step)
    stays = "does not come back" if spike.recovered is False else "is where the record ends"
    return Finding(
        severity="info" if learned else None,
        title="The loss jumped and did not come back" if spike.recovered is False else "The loss jumped",
        summary=f"At step {spike.step} the loss went from {spike.level:.4g} to {spike.value:.4g} ({spike.test}: "
        f"{spike.limit:.4g}) and {stays}.",
        where=Where(step=spike.step),
        confidence="likely" if cause else "undetermined",
        evidence=(*_numbers(spike), *evidence),
        cause=cause,
        next=(
            "replay the batch of this step with the weights before it",
            *(() if cause else ("capture per-sample losses, update norms and tensor statistics around this step",)),
        ),
        fix=("resume from before the spike, skip the batch or lower the learning rate",),
    )


def _other_data(capsule: Capsule, step: int) -> tuple[str, tuple[Evidence, ...]] | None:
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


def _falls_after(loss: Curve, step: int) -> bool:
    """Whether the loss falls again over the steps in which a spike would have recovered."""
    after = loss.between(step, step + T.RECOVERY_STEPS).finite().value
    third = len(after) // 3
    if third < 3:
        return False
    return float(np.median(after[-third:])) < float(np.median(after[:third])) - T.SPIKE_MIN_RISE * after[0]


def _spike_cause(capsule: Capsule, step: int) -> tuple[str | None, tuple[Evidence, ...]]:
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
            return f"one bad sample: {worst.sample.id}", (number,)
        if worst.others and worst.others_median > worst.median + T.SAMPLE_HIGH * worst.sigma:
            return "every sample of the step is high: the state of the model or the whole batch", (number,)
    local, reduced = curve(capsule, "grad_norm_local").at(step), curve(capsule, "grad_norm_reduced").at(step)
    world = capsule.manifest.run.world_size if capsule.manifest.run is not None else None
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
    return None, ()


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
        "data/poison-sample",
        "data/token-out-of-vocabulary",
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
        100, above 3 × the recent median and with a loss that rises; NaN or Inf where no scaler skipped the step. A
        single step after which norm and loss are ordinary again is info.

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
    lost = gradient.step[~np.isfinite(gradient.value)]
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
            yield _explosion(at, norm, limit, test, lasting=True)
            return
        passed = passed or _explosion(at, norm, limit, test, lasting=False)
    if lost.size:
        norm = float(curve(capsule, "grad_norm").at(int(lost[0])))
        yield _explosion(int(lost[0]), norm, math.inf, "finite", lasting=True)
    elif passed is not None:
        yield passed


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


def _explosion(step: int, norm: float, limit: float, test: str, *, lasting: bool) -> Finding:
    finite = math.isfinite(norm)
    shown = f"{norm:.4g}" if finite else ("NaN" if math.isnan(norm) else "Infinity")
    return Finding(
        severity=None if lasting else "info",
        title="The gradient explodes" if lasting else "A large gradient that passed",
        summary=f"The gradient norm is {shown} at step {step}"
        + (f", above {limit:.4g} ({test})" if finite else " and no scaler skipped the step")
        + ("." if lasting else "; norm and loss are ordinary again after it."),
        where=Where(step=step),
        evidence=(
            Evidence(name="grad_norm", value=norm, expected=f"≤ {limit:.4g}" if finite else "finite", note=test),
        ),
        cause="the gradient left the range that it had before" if lasting else "a benign spike",
        next=("compare the gradient of each layer with the step before", "replay the batch of this step"),
        fix=("clip the gradient norm", "lower the learning rate"),
    )
