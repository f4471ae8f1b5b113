"""Loss spikes and exploding gradients, told apart from benign ones by what happens in the steps after."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import rule
from ..series import Curve, curve, periodic, segments, spread, trailing
from . import thresholds as T
from .spike_causes import falls_after, other_data, spike_cause
from .symptoms import start_level

if TYPE_CHECKING:
    from ...capsules import Capsule


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
        horizon = _horizon(loss, at)
        back = _back_at(values, at, horizon, level + T.RECOVERY_SIGMA * max(robust, 0.02 * abs(level)))
        seen = horizon < count - 1 or step + T.RECOVERY_STEPS <= int(loss.step[-1])
        recovered = True if back is not None else (False if seen else None)
        back_step = int(loss.step[back]) if back is not None else None
        found.append(Spike(step, value, limit, test, level, float(sigma[at]), recovered, back_step))
        blocked = back if back is not None else count
    return found


def _horizon(loss: Curve, index: int) -> int:
    """Last point at which a spike can still recover: 30 steps on, and five points at least in a sparse log."""
    within = int(np.searchsorted(loss.step, loss.step[index] + T.RECOVERY_STEPS, side="right")) - 1
    return min(len(loss) - 1, max(within, index + T.RECOVERY_POINTS))


def _back_at(values: np.ndarray, index: int, horizon: int, limit: float) -> int | None:
    """First value after ``index`` from which two in a row (or the last one) are back below ``limit``."""
    for later in range(index + 1, horizon + 1):
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
        "optimizer/overflow-step-applied",
        "optimizer/state-not-restored",
        "optimizer/step-mismatch",
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
        A spike in a stretch that a resume replaced (info); noise of small batches; the steep fall at the start; ticks
        once an epoch; a constant loss; jumps of a memorised set whose loss is next to nothing; the first steps after a
        resume, which have no past here.

    What to try next:
        Replay the captured batch with the weights before the spike: if the loss is high again, it is the data; if not,
        the state or the update.

    Fix:
        Skip the batch, clip the gradient norm, lower the learning rate or the second beta; resume from before it.
    """
    loss, gradient = curve(capsule, "loss"), curve(capsule, "grad_norm")
    spikes = find_spikes(loss, gradient)
    yield from _undone(capsule, gradient)
    if not spikes or periodic([spike.step for spike in spikes], int(loss.step[0]), T.RECENT_WINDOW):
        return
    usual = max((spike.value / spike.level for spike in spikes if spike.recovered and spike.level > 0), default=0.0)
    benign = [spike for spike in spikes if _benign(spike, usual)]
    for spike in spikes:
        if not _benign(spike, usual):
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


def _undone(capsule: Capsule, gradient: Curve) -> Iterator[Finding]:
    """Spikes of stretches that were left behind: somebody resumed from before them."""
    parts = segments(capsule, "loss")
    for part, following in pairwise(parts):
        resumed = int(following.step[0])
        left = [spike for spike in find_spikes(part, gradient) if spike.step >= resumed and not _benign(spike)]
        if left:
            yield Finding(
                severity="info",
                title="A loss spike that a resume undid",
                summary=(
                    f"At step {left[0].step} the loss went from {left[0].level:.4g} to {left[0].value:.4g}; the run "
                    f"was resumed at step {resumed}, before it."
                ),
                where=Where(step=left[0].step),
                evidence=_numbers(left[0]),
                cause="what followed was replaced by the resumed run",
                next=("compare the batches of this step before and after the resume",),
            )


def _benign(spike: Spike, usual: float = 0.0) -> bool:
    """Whether it passed; where the record ends in it, whether it is small, or no larger than ones that passed."""
    if spike.recovered is None:
        if 0 < spike.value <= usual * spike.level:
            return True
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
    changed = other_data(capsule, spike.step)
    cause, evidence = changed or spike_cause(capsule, spike.step)
    learned = changed is not None and falls_after(curve(capsule, "loss"), spike.step)
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
