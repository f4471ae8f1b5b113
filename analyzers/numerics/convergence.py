"""A run that does not get better: it diverges, stands still, or swings, each beside its noise and what explains it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..finding import Confidence, Evidence, Finding, Severity, Where
from ..registry import NotJudged, rule
from ..samples import samples_by_step
from ..series import Curve, Floats, Slope, carried, curve, deviation, noise, spread, theil_sen, trailing
from . import thresholds as T
from .symptoms import is_learned, start_level

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Objectives whose loss is no measure of progress.
NOT_MONOTONE = ("grpo", "ppo", "dpo", "reinforce", "rloo", "policy", "gan", "adversarial")


@dataclass(frozen=True)
class Tail:
    """The last part of a loss: its level, its noise, and its slope with a 95 % interval."""

    curve: Curve
    level: float
    noise: float
    slope: Slope

    @property
    def first(self) -> int:
        """First step."""
        return int(self.curve.step[0])

    @property
    def span(self) -> int:
        """Steps from first to last."""
        return int(self.curve.step[-1] - self.curve.step[0])

    def residual(self) -> Floats:
        """The values around their own trend."""
        return self.curve.value - self.level - self.slope.value * (self.curve.step - np.median(self.curve.step))


def tail_of(loss: Curve, share: float) -> Tail | None:
    """The last ``share`` of a finite loss."""
    part = loss.where(slice(len(loss) - int(share * len(loss)), None))
    slope = theil_sen(part)
    if slope is None:
        return None
    level = float(np.median(part.value))
    trend = part.value - slope.value * (part.step - np.median(part.step))
    return Tail(part, level, spread(trend)[1], slope)


def sampling_noise(capsule: Capsule, first: int) -> float | None:
    """Noise that drawing other samples adds to the loss of a step: their spread ÷ √ samples; None where unknown."""
    found = [
        float(np.std(losses, ddof=1)) / math.sqrt(len(losses))
        for step, rows in samples_by_step(capsule).items()
        if step >= first and len(losses := [row.loss for row in rows if math.isfinite(row.loss)]) > 1
    ]
    return float(np.median(found)) if found else None


@rule(
    "numerics/no-convergence",
    cases=("loss-stuck-at-ln-v",),
    stage="numerics",
    severity="warning",
    needs=("scalars.loss",),
    explained_by=(
        "numerics/learning-rate",
        "numerics/gradients-lost",
        "numerics/gradient-vanishing",
        "numerics/underflow",
        "numerics/loss-spike",
        "numerics/gradient-explosion",
        "numerics/loss-nonfinite",
        "numerics/first-nonfinite",
        "numerics/fp16-overflow",
        "objective/uniform-guess",
        "objective/unexplained-loss",
        "objective/all-masked",
        "objective/loss-hidden",
        "optimizer/gradient-chain-cut",
        "optimizer/no-master-weights",
        "optimizer/not-owned",
        "optimizer/order",
        "optimizer/step-mismatch",
        "optimizer/state-not-restored",
        "optimizer/overflow-step-applied",
        "data/poison-sample",
    ),
)
def no_convergence(capsule: Capsule) -> Iterator[Finding]:
    """The loss diverges, stands still or swings instead of falling.

    What it checks:
        The level, noise and slope of the loss over the last part of the run.

    Why it matters:
        A loss that does not fall costs as much a step as one that does. What to change depends on which of the three
        it is, and on whether its noise comes from the batch or from the updates.

    How it decides:
        At least 60 losses. Divergence: the last third and the last sixth rise (Theil–Sen intervals of 95 % above 0),
        and the end is above the lowest level before by 10 % and 6σ. Plateau: over the last half the interval holds 0
        and allows a fall of at most 2 % of the level, while the level is at least half of that at the start.
        Oscillation: noise of 10 % of the level or more and no progress, while the noise is three times what the spread
        of the samples ÷ √batch explains, or four times that of the calmest tenth of the run before; or neighbours
        alternate (correlation below −0.5; undetermined). A plateau of a run that did not start from scratch is info.

    Looks like it but is not:
        A slow fall within the noise of a small batch; the flat end of a schedule whose rate is spent; a warm-up that
        has not ended; a memorised set; a step up to harder data, after which the loss falls; losses of reinforcement
        learning and preference tuning.

    What to try next:
        Divergence and oscillation: a third of the learning rate, and a lower second beta (0.95), everything else as it
        was. Plateau: overfit one batch; if that works, ten times the rate. Noise as large as the samples explain: a
        larger batch, not another rate.

    Fix:
        That of the test that helped.
    """
    training = capsule.manifest.training
    objective = (training.objective or "").lower() if training is not None else ""
    if any(word in objective for word in NOT_MONOTONE):
        raise NotJudged(f"a loss that measures progress (that of {objective} does not)")
    loss = curve(capsule, "loss").finite()
    if len(loss) < T.CONVERGENCE_POINTS or start_level(loss.value) < T.LOSS_LIKE or (loss.value < 0).any():
        return
    finding = _divergence(capsule, loss) or _oscillation(capsule, loss) or _plateau(capsule, loss)
    if finding is not None:
        yield finding


def _divergence(capsule: Capsule, loss: Curve) -> Finding | None:
    tail = tail_of(loss, T.DIVERGENCE_TAIL)
    latest = tail_of(loss, T.DIVERGENCE_TAIL / 2)  # a step up to other data rises once and not to the end
    if tail is None or latest is None or min(tail.slope.low, latest.slope.low) <= 0:
        return None
    levels = trailing(loss.value, 5, np.median)
    lowest = int(np.nanargmin(levels[5:])) + 5
    low = float(levels[lowest])
    end = float(np.median(loss.value[-max(3, len(tail.curve) // 4) :]))
    scatter = noise(loss.value[max(0, lowest - T.RECENT_WINDOW) : lowest + T.RECENT_WINDOW])
    limit = low + max(T.DIVERGENCE_RISE * low, T.DIVERGENCE_SIGMA * scatter)
    if not end > limit:
        return None
    step = int(loss.step[lowest])
    return Finding(
        title="The loss diverges",
        cases=("learning-rate-too-high",),
        summary=f"The loss rises from {low:.4g} around step {step} to {end:.4g} at the end and goes on rising.",
        where=Where(step=step),
        evidence=(
            Evidence(name="loss at the end", value=end, expected=f"≤ {limit:.4g}", unit="nats/token"),
            Evidence(name="lowest level", value=low, unit="nats/token", note=f"median of five, step {step}"),
            *_slope(tail),
            *settings(capsule, tail),
        ),
        cause="each update makes the model worse: the steps are too large, or the data has changed",
        next=("resume from before the rise with a third of the learning rate, and separately with beta2 = 0.95",),
        fix=("a lower learning rate, a longer warm-up, a bound on the gradient norm",),
    )


def _plateau(capsule: Capsule, loss: Curve) -> Finding | None:
    tail = tail_of(loss, T.CONVERGENCE_TAIL)
    start = float(loss.value[: max(1, len(loss) // 20)].max())
    if tail is None or not tail.slope.holds_zero or tail.level < T.PLATEAU_LEVEL * start:
        return None
    possible = -tail.slope.low * tail.span
    if possible > T.PLATEAU_FALL * tail.level:
        return None
    rate = curve(capsule, "learning_rate").finite()
    used = carried(rate, tail.curve.step)
    used = used[np.isfinite(used)]
    if used.size and float(np.median(used)) < T.RATE_SPENT * float(rate.value.max()) and rate.value.max() > 0:
        return None  # spent, or still on its way up
    if used.size and used[-1] == rate.value.max() and used[-1] > 1.2 * used[0]:
        return None  # the warm-up has not ended
    model = capsule.manifest.model
    declared = model.initialised if model is not None else None
    scratch = declared == "random" or (declared is None and float(loss.value[0]) >= T.SCRATCH_LOSS)
    severity: Severity = "warning" if scratch else "info"
    confidence: Confidence = "likely" if used.size and scratch else "undetermined"
    return Finding(
        severity=severity,
        confidence=confidence,
        title="The loss stands still",
        summary=(
            f"From step {tail.first} to {int(tail.curve.step[-1])} the loss stays at {tail.level:.4g}: it fell by no "
            f"more than {max(0.0, possible):.2g} (95 %). It started at {start:.4g}."
        ),
        where=Where(step=tail.first),
        evidence=(
            Evidence(name="level", value=tail.level, expected=f"< {start:.4g}", unit="nats/token"),
            *_slope(tail),
            *settings(capsule, tail),
        ),
        cause="the updates no longer improve the model",
        next=("overfit one batch with this configuration", "then ten times the learning rate for a hundred steps"),
        fix=("where one batch cannot be learned: labels, masks and gradient chain; else the rate and its schedule",),
    )


def _oscillation(capsule: Capsule, loss: Curve) -> Finding | None:
    tail = tail_of(loss, T.CONVERGENCE_TAIL)
    if tail is None or tail.noise < T.OSCILLATION_NOISE * tail.level or tail.slope.high < 0:
        return None
    if is_learned(loss, tail.level):
        return None
    rest = tail.residual()
    if _one_jump(tail.curve.value - tail.level):
        return None
    neighbours = float(np.corrcoef(rest[:-1], rest[1:])[0, 1])
    sampled = sampling_noise(capsule, tail.first)
    before = loss.where(loss.step < tail.first).value
    widths = trailing(before - trailing(before, 5, np.median), T.RECENT_WINDOW, deviation)[T.RECENT_WINDOW + 5 :]
    calm = float(np.nanquantile(widths, 0.1)) if np.isfinite(widths).any() else math.nan
    excess = sampled is not None and tail.noise > T.OSCILLATION_EXCESS * sampled
    grown = sampled is None and calm > 0 and tail.noise > T.OSCILLATION_GROWN * calm
    alternates = sampled is None and neighbours < T.ALTERNATION
    if not (excess or grown or alternates):
        return None
    confidence: Confidence = "likely" if excess or grown else "undetermined"
    return Finding(
        confidence=confidence,
        title="The loss swings without falling",
        cases=("learning-rate-too-high",),
        summary=(
            f"From step {tail.first} on the loss swings by ±{tail.noise:.3g} around {tail.level:.4g} and does not fall"
            + (f"; the samples explain ±{sampled:.2g} of it." if sampled is not None else ".")
        ),
        where=Where(step=tail.first),
        evidence=(
            Evidence(
                name="noise of the loss",
                value=tail.noise,
                expected=f"≤ {T.OSCILLATION_EXCESS * sampled:.3g}"
                if sampled is not None
                else f"≤ {T.OSCILLATION_NOISE * tail.level:.3g}",
                unit="nats/token",
                note="robust standard deviation around the trend",
            ),
            Evidence(name="correlation of neighbours", value=neighbours, expected=0.0, note="−1: alternating"),
            *([Evidence(name="noise of the calmest stretch before", value=calm)] if math.isfinite(calm) else []),
            *_slope(tail),
            *settings(capsule, tail),
        ),
        cause="the updates overshoot: the noise is theirs, not the samples'",
        next=("a third of the learning rate, everything else as it was", "beta2 = 0.95, everything else as it was"),
        fix=("a lower learning rate or a longer warm-up", "a larger batch, where the samples explain the noise"),
    )


def _one_jump(rest: Floats) -> bool:
    """Whether values part into two levels, before and after one point, rather than swing around one."""
    count = np.arange(1, len(rest))
    before, whole = np.cumsum(rest)[:-1], float(rest.sum())
    gain = before**2 / count + (whole - before) ** 2 / (len(rest) - count) - whole**2 / len(rest)
    at = int(gain.argmax()) + 1
    parted = max(spread(rest[:at])[1], spread(rest[at:])[1])
    return parted < T.OSCILLATION_PARTED * spread(rest)[1]


def _slope(tail: Tail) -> tuple[Evidence, ...]:
    interval = f"95 %: {tail.slope.low:.2g} to {tail.slope.high:.2g}, {len(tail.curve)} points"
    return (Evidence(name="slope", value=tail.slope.value, expected="< 0", unit="nats/token a step", note=interval),)


def settings(capsule: Capsule, tail: Tail) -> Iterator[Evidence]:
    """What noise and step size depend on: samples, batch size, learning rate, betas and epsilon, as far as known."""
    sampled = sampling_noise(capsule, tail.first)
    if sampled is not None:
        yield Evidence(
            name="noise that the samples explain", value=sampled, unit="nats/token", note="spread ÷ √samples"
        )
    rows = [len(each) for step, each in samples_by_step(capsule).items() if step >= tail.first]
    if rows:
        yield Evidence(name="samples a step", value=int(np.median(rows)))
    rate = curve(capsule, "learning_rate").finite()
    at = carried(rate, tail.curve.step[-1:])
    if at.size and math.isfinite(at[0]):
        yield Evidence(name="learning_rate", value=float(at[0]), note="at the end")
    training = capsule.manifest.training
    optimizer: Any = training.optimizer if training is not None else None
    for name in ("betas", "eps"):
        value = getattr(optimizer, name, None)
        if value is not None:
            yield Evidence(name=name, value=value)
