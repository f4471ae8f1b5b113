"""When a run leaves its path: non-finite tensors that are not lawful, losses and gradient norms out of line.

Pure functions on series and statistics. They name no cause; the rules that look for one agree on the moment here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..series import Curve, Floats, Ints, curve, deviation, first_maximum, trailing
from . import thresholds as T

if TYPE_CHECKING:
    from ...capsules import Capsule

Bools = NDArray[np.bool_]

#: Roles whose −inf alone is a mask at work: attention scores, masked logits, additive masks.
MAY_BE_MASKED = ("input", "activation", "logits")

#: Roles in which size is a matter of the forward pass; gradients are judged apart, since a scaler handles theirs.
FORWARD = ("activation", "logits", "input", "loss")

#: Magnitudes from which a float16 tensor is near the end of its range, and from which an Inf can come from size.
FLOAT16_NEAR = T.DTYPE_MAX["float16"] / T.NEAR_FACTOR
FLOAT16_SIZED = T.DTYPE_MAX["float16"] / T.INF_NEIGHBOUR_FACTOR


@dataclass(frozen=True)
class Symptom:
    """The first step at which something went wrong, what it was, and the number beside its expectation."""

    step: int
    kind: str
    value: float
    expected: float


def start_level(values: Floats) -> float:
    """Size of a loss at the start of the record: the scale that tells a rise from a trifle."""
    return abs(float(np.median(values[: T.RECENT_WINDOW]))) if values.size else math.nan


def is_learned(loss: Curve, level: float) -> bool:
    """Whether a level is next to nothing beside the first losses: there is nothing left to learn, or nothing to do."""
    first = np.abs(loss.value[: T.RECENT_WINDOW])
    return bool(first.size) and abs(level) <= T.CONVERGED_SHARE * float(first.max())


def skipped_steps(capsule: Capsule) -> frozenset[int]:
    """Steps that a gradient scaler skipped: overflow flags, skip events, or a falling loss scale."""
    flags = curve(capsule, "overflow")
    steps = {int(step) for step in flags.step[flags.value > 0]}
    for event in capsule.records("events"):
        if event.get("kind") == "optimizer_step_skipped" and event.get("step") is not None:
            steps.add(int(event["step"]))
    scale = curve(capsule, "loss_scale")
    fell = np.flatnonzero(np.diff(scale.value) < 0)
    # The scale may have been read before or after the scaler's update: either step can be the skipped one.
    for index in fell:
        steps.update((int(scale.step[index]), int(scale.step[index + 1])))
    return frozenset(steps)


def has_scaler(capsule: Capsule) -> bool:
    """Whether a gradient scaler was at work (a loss scale of −1, 0 or 1 is a placeholder, not a scale)."""
    return bool((curve(capsule, "loss_scale").value > 1).any())


def unlawful(capsule: Capsule, stats: Any) -> Bools:
    """Which rows hold non-finite values that should not be there.

    Lawful: −inf alone where a mask may have written it, and gradients of a step that the scaler skipped. In float16 a
    negative overflow looks the same and is told by the large finite elements beside it. A row that
    carries only an infinite norm (nothing was counted) is judged by the loss of its step: a mask leaves it finite.
    """
    bad: Bools = np.asarray(stats.nonfinite, bool).copy()
    if not bad.any():
        return bad
    role = np.asarray(stats.role, dtype=object)
    maskable: Bools = np.isin(role.astype(str), MAY_BE_MASKED)
    overflowed = (stats.dtype == "float16") & (stats.absmax >= FLOAT16_SIZED) & ~mask_filled(stats)
    bad &= ~(maskable & (stats.nan == 0) & (stats.posinf == 0) & (stats.neginf > 0) & ~overflowed)
    uncounted: Bools = bad & maskable & (stats.nan < 0) & (stats.neginf < 0) & np.isposinf(stats.rms)
    if uncounted.any():
        loss = curve(capsule, "loss").finite()
        bad &= ~(uncounted & np.isin(stats.step, loss.step))
    gradients: Bools = bad & (role == "gradient")
    if gradients.any():
        skipped = skipped_steps(capsule)
        bad &= ~(gradients & np.isin(stats.step, list(skipped)))
    return bad


def mask_filled(stats: Any) -> Bools:
    """Rows whose magnitude is that of a mask constant: all that is large is negative, near or beyond finfo.min."""
    return (stats.min <= -FLOAT16_NEAR) & (np.abs(stats.max) < -stats.min / T.INF_NEIGHBOUR_FACTOR)


def execution_order(stats: Any, rows: Ints) -> Ints:
    """Row numbers sorted by (step, execution order, forward before backward, rank)."""
    backward = np.asarray(stats.role, dtype=object)[rows] == "gradient"
    return rows[np.lexsort((stats.rank[rows], backward, stats.order[rows], stats.step[rows]))]


def first_nonfinite(capsule: Capsule, stats: Any) -> int | None:
    """Row number of the first unlawful non-finite tensor, or None."""
    rows = np.flatnonzero(unlawful(capsule, stats))
    return int(execution_order(stats, rows)[0]) if rows.size else None


def loss_rise(loss: Curve) -> Symptom | None:
    """First finite loss that leaves its earlier level for good or by far.

    Early on a loss above 1.5 × everything before; later one above median + max(6σ, half the median) of the last 20
    that the next step does not take back.
    """
    finite = loss.finite()
    values = finite.value
    if len(values) < 2:
        return None
    early = np.arange(len(values)) < T.SYMPTOM_MIN_HISTORY
    median = trailing(values, T.RECENT_WINDOW, np.median)
    margin = np.maximum(
        T.SYMPTOM_SIGMA * trailing(values, T.RECENT_WINDOW, deviation), T.SYMPTOM_RELATIVE * abs(median)
    )
    later_limit = median + np.maximum(margin, T.SYMPTOM_OF_START * start_level(values))
    limit = np.where(early, T.EARLY_FACTOR * first_maximum(values, len(values)), later_limit)
    # The next value confirms a rise; after the last one there is none.
    stays = np.append(values[1:], np.inf) > (median + limit) / 2
    rises = np.flatnonzero((values > limit) & (limit > 0) & (stays | early))
    if not rises.size:
        return None
    at = int(rises[0])
    return Symptom(int(finite.step[at]), "loss-rise", float(values[at]), float(limit[at]))


def gradient_rise(gradient: Curve, ignore: frozenset[int]) -> Symptom | None:
    """First gradient norm above 10 × the maximum of the first steps which the next step does not take back."""
    keep = np.isfinite(gradient.value) & ~np.isin(gradient.step, list(ignore))
    step, value = gradient.step[keep], gradient.value[keep]
    highest = first_maximum(value, T.FIRST_STEPS)
    stays = np.append(value[1:], np.inf) > highest
    known = np.arange(len(value)) >= T.MIN_HISTORY
    rises = np.flatnonzero((value > T.EXPLOSION_FACTOR * highest) & (highest > 0) & stays & known)
    if not rises.size:
        return None
    at = int(rises[0])
    return Symptom(int(step[at]), "gradient-rise", float(value[at]), T.EXPLOSION_FACTOR * float(highest[at]))


def first_symptom(capsule: Capsule) -> Symptom | None:
    """The earliest of: loss out of line or non-finite, gradient norm out of line, a non-finite tensor."""
    loss, gradient = curve(capsule, "loss"), curve(capsule, "grad_norm")
    found: list[Symptom] = []
    lost = np.flatnonzero(~np.isfinite(loss.value))
    if lost.size:
        found.append(Symptom(int(loss.step[lost[0]]), "loss-nonfinite", float(loss.value[lost[0]]), math.nan))
    looks: tuple[Callable[[], Symptom | None], ...] = (
        lambda: loss_rise(loss),
        lambda: gradient_rise(gradient, skipped_steps(capsule)),
    )
    found.extend(symptom for look in looks if (symptom := look()) is not None)
    if capsule.has("stats"):
        stats = capsule.stats()
        row = first_nonfinite(capsule, stats)
        if row is not None:
            found.append(Symptom(int(stats.step[row]), "tensor-nonfinite", float(stats.rms[row]), math.nan))
    return min(found, key=lambda symptom: symptom.step, default=None)
