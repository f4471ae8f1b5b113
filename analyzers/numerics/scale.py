"""The loss scale of a float16 run: a search that ends, or a fall to the floor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Where
from ..series import curve
from . import thresholds as T
from .symptoms import FORWARD, skipped_steps, unlawful

if TYPE_CHECKING:
    from ...capsules import Capsule


@dataclass(frozen=True)
class Collapse:
    """A loss scale that fell and never rose again, or that stands at its floor while every step is skipped."""

    step: int
    values: tuple[float, ...]
    skipped: int


def scale_path(capsule: Capsule) -> tuple[list[int], list[float]]:
    """The values of the loss scale in turn and the last step of each, from the series and the scaler's updates.

    −1 and 0 are placeholders. A log that speaks of the scale only at an overflow (DeepSpeed) shows growth in the value
    before the next one.
    """
    points: list[tuple[int, int, float]] = []
    scale = curve(capsule, "loss_scale").finite()
    points += [(int(step), 0, float(value)) for step, value in zip(scale.step, scale.value, strict=True)]
    for event in capsule.records("events"):
        step = event.get("step")
        if event.get("kind") != "scaler_update" or step is None:
            continue
        for order, name in ((1, "scale_before"), (2, "scale_after")):
            value = event.get(name)
            if isinstance(value, int | float):
                points.append((int(step), order, float(value)))
    steps: list[int] = []
    values: list[float] = []
    for step, _, value in sorted(points):
        if not value > 0 or not np.isfinite(value):
            continue
        if values and value == values[-1]:
            steps[-1] = step
        else:
            steps.append(step)
            values.append(value)
    return steps, values


def scale_collapse(capsule: Capsule) -> Collapse | None:
    """A loss scale that only halves until nothing is left to halve, or None.

    A search at the start ends at a scale that works, long before the floor.
    """
    steps, values = scale_path(capsule)
    if not values or values[-1] > T.SCALE_FLOOR:
        return None
    skipped = skipped_steps(capsule)
    rises = np.flatnonzero(np.diff(values) > 0)
    start = int(rises[-1]) + 1 if rises.size else 0
    if len(values) - 1 - start >= T.MIN_HALVINGS:
        return Collapse(steps[start], tuple(values[start:]), len(skipped))
    logged = curve(capsule, "overflow").finite()
    since = steps[-2] + 1 if len(steps) > 1 else 0
    overflows = logged.where(logged.step >= since).value
    if overflows.size >= T.MIN_HALVINGS and bool((overflows[-T.MIN_HALVINGS :] > 0).all()):
        return Collapse(since, tuple(values[-1:]), len(skipped))
    return None


def collapse_finding(collapse: Collapse) -> Finding:
    """What fp16-overflow says of a collapse."""
    values, halvings = collapse.values, len(collapse.values) - 1
    path = f"{values[0]:g} → {values[-1]:g}"
    return Finding(
        title="The loss scale halves to its floor" if halvings else "Every step overflows at the smallest loss scale",
        summary=(
            f"From step {collapse.step} the loss scale only falls, {path} in {halvings} halvings without a rise: "
            "gradients overflow float16 at every scale."
            if halvings
            else f"The loss scale is {values[-1]:g}, with nothing left to halve, and the optimizer skips every step."
        ),
        where=Where(step=collapse.step),
        evidence=(
            Evidence(name="loss_scale", value=values[-1], expected=f"> {T.SCALE_FLOOR:g}", note="last value"),
            Evidence(name="loss_scale trajectory", value=list(values[-12:])),
            Evidence(name="halvings in a row", value=halvings, expected=f"< {T.MIN_HALVINGS}"),
            Evidence(name="skipped steps", value=collapse.skipped, unit="steps"),
        ),
        cause="gradients are not finite at any loss scale: a value in the backward pass exceeds the float16 range",
        next=("record gradient statistics at a skipped step", "run the captured step in bfloat16"),
        fix=("train in bfloat16, or find the layer whose gradient is not finite at scale 1",),
    )


def scale_search(capsule: Capsule) -> Finding | None:
    """What the search at the start costs, where the scale begins far above any that could work; info."""
    scale, skipped = curve(capsule, "loss_scale").finite(), curve(capsule, "overflow").finite()
    if not len(scale) or scale.value[0] < T.SEARCH_FROM or len(skipped) < len(scale):
        return None
    flags = np.isin(scale.step, skipped.step[skipped.value > 0])
    points = len(scale) if flags.all() else int(np.argmin(flags))
    if points < T.SEARCH_STEPS or (np.diff(scale.value[:points]) >= 0).any():
        return None
    first, last = int(scale.step[0]), int(scale.step[points - 1])
    ended = points < len(scale)
    time = curve(capsule, "step_time").between(first, last).finite().value
    spent = f", {float(time.sum()):,.0f} s," if time.size == points else ""
    return Finding(
        severity="info",
        kind="hygiene",
        title="The search for a loss scale begins far too high",
        summary=(
            f"The loss scale begins at {scale.value[0]:.4g} and is lowered at each of the first {points} logged steps"
            f"{spent} all of them skipped"
            + (
                f"; it settles at {scale.value[points]:.4g}."
                if ended
                else ": the record ends within the search. That is normal and no divergence."
            )
        ),
        where=Where(step=first),
        evidence=(
            Evidence(name="loss_scale", value=float(scale.value[0]), expected=f"< {T.SEARCH_FROM:g}", note="first"),
            Evidence(name="skipped steps", value=points, expected=f"< {T.SEARCH_STEPS}", unit="steps"),
            *([Evidence(name="time spent", value=float(time.sum()), unit="s")] if spent else []),
        ),
        cause="the scaler's initial scale is a default that no job needs",
        next=("see at which scale it settles",),
        fix=("begin with that scale (initial_loss_scale, initial_scale_power 16)",),
    )


def forward_nonfinite(capsule: Capsule, step: int) -> bool:
    """Whether the forward pass was already non-finite when the scale began to fall: then scaling is not the matter."""
    loss = curve(capsule, "loss")
    if bool((~np.isfinite(loss.value) & (loss.step <= step + 1)).any()):
        return True
    if not capsule.has("stats"):
        return False
    stats = capsule.stats()
    forward = np.isin(stats.role.astype(str), FORWARD)
    return bool((unlawful(capsule, stats) & forward & (stats.step <= step + 1)).any())
