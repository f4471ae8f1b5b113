"""The order of the calls around a step, from the events: unscale, finite check, norm, clip, step, zero."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import NotJudged, rule
from .records import windows as parameters
from .step_case import CLIP_EPS, number, taken_steps

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Kinds of events that say something about a step.
KINDS = ("backward", "unscale", "finite_check", "grad_norm", "clip", "optimizer_step", "optimizer_step_skipped")
CHAIN = (*KINDS, "scaler_update", "zero_grad")


@dataclass(frozen=True)
class Calls:
    """The calls of one window on one rank in order, and its loss scale (1 without a scaler)."""

    step: int
    rank: int
    events: tuple[dict[str, Any], ...]
    scale: float

    def first(self, kind: str, after: int = 0) -> int | None:
        """Place of the first event of a kind from a place on."""
        return next((at for at in range(after, len(self.events)) if self.events[at]["kind"] == kind), None)

    @property
    def words(self) -> list[str]:
        """The kinds in order, nested calls in brackets."""
        return [f"({each['kind']})" if each.get("nested") else each["kind"] for each in self.events]


def windows(capsule: Capsule) -> list[Calls]:
    """Windows that have an event of the chain, in order."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in capsule.records("events"):
        if event.get("kind") in CHAIN and isinstance(event.get("step"), int):
            found[event["step"], event["rank"]].append(event)
    series = capsule.scalars("loss_scale")
    scales = dict(zip(series.step.tolist(), series.value.tolist(), strict=True))
    calls: list[Calls] = []
    for (step, rank), events in sorted(found.items()):
        updates = [number(each, "scale_before") for each in events if each["kind"] == "scaler_update"]
        scale = next((each for each in updates if each), None) or scales.get(step) or 1.0
        calls.append(Calls(step, rank, tuple(events), scale if math.isfinite(scale) and scale > 0 else 1.0))
    return calls


@rule("optimizer/order", stage="numerics", needs=("records.events.kind",), cases=())
def order(capsule: Capsule) -> Iterator[Finding]:
    """Unscaling, clipping and the optimizer step come in the wrong order.

    What it checks:
        The calls between backward and the end of each window: unscale, finite check, norm, clip, step.

    Why it matters:
        Gradients that are clipped while they are multiplied by a loss scale of 65,536 keep a norm of max_norm / 65,536:
        learning all but stops, with a finite loss and no error. Stepping on gradients that were never unscaled is the
        reverse.

    How it decides:
        With a loss scale other than 1: a clip by norm before the first unscale of its window (also one inside
        GradScaler.step) is confirmed where the norm at that clip, which is the scaled one, exceeds max_norm; where it
        does not, the clip did nothing and it is a warning. A step outside GradScaler.step in a window without any
        unscale is confirmed. A clip after the step, before the next backward, is a warning: it limits nothing.
        zero_grad after the last backward and before the first step is confirmed where no sampled parameter has a
        gradient then. Two steps after one backward, with a step count that grows by two a window, are likely wrong.

    Looks like it but is not:
        GradScaler.step unscaling by itself where nothing is clipped; fused optimizers, which unscale inside their
        step; a scaler that is disabled or whose scale is 1; no scaler at all; one clip for each of several optimizers;
        one optimizer's zero_grad before another one's step; two backward passes with a step each.

    What to try next:
        Log the gradient norm right before the step: it should be at most max_norm and not 1/scale of it.

    Fix:
        scaler.unscale_(optimizer), then clip_grad_norm_, then scaler.step(optimizer), then scaler.update().
    """
    calls = windows(capsule)
    if not any(each.first("optimizer_step") is not None or each.first("clip") is not None for each in calls):
        raise NotJudged("events of clipping and of optimizer steps")
    for check in (_clip_before_unscale, _never_unscaled, _zeroed_before_step, _stepped_twice, _clip_after_step):
        found = [(each, wrong) for each in calls if (wrong := check(capsule, each)) is not None]
        if found:
            worst = min(found, key=lambda pair: (pair[1].severity == "warning", pair[0].step))
            yield _with_count(worst[1], len(found), len(calls))
            return


def _with_count(finding: Finding, wrong: int, of: int) -> Finding:
    import msgspec

    row = Evidence(name="windows", value=wrong, expected=0, note=f"of {of} recorded")
    return msgspec.structs.replace(finding, evidence=(*finding.evidence, row))


def _clip_before_unscale(capsule: Capsule, calls: Calls) -> Finding | None:
    clip, unscale = calls.first("clip"), calls.first("unscale")
    if calls.scale == 1.0 or clip is None or unscale is None or clip > unscale:
        return None
    event = calls.events[clip]
    limit, norm = number(event, "max_norm"), number(event, "norm")
    if limit is None and number(event, "clip_value") is None:
        training = capsule.manifest.training
        limit = training.max_grad_norm if training is not None else None
    norm = norm if norm is not None else logged_norm(capsule, calls)
    bites = limit is None or norm is None or norm > limit
    left = limit / calls.scale if limit is not None else None
    rows = [
        Evidence(name="order of the calls", value=calls.words, expected="unscale before clip"),
        Evidence(
            name="loss_scale", value=calls.scale, expected=1.0, note="still in the gradients when they are clipped"
        ),
    ]
    if limit is not None:
        rows.append(Evidence(name="max_norm", value=limit))
    if norm is not None:
        rows.append(Evidence(name="norm at the clip", value=norm, note=f"unscaled it is {norm / calls.scale:.4g}"))
        if limit is not None:
            true = norm / calls.scale
            rows.append(
                Evidence(
                    name="norm after both",
                    value=true * min(1.0, limit / (norm + CLIP_EPS)),
                    expected=true * min(1.0, limit / (true + CLIP_EPS)),
                    note="max_norm / loss scale" if bites else "the clip changed nothing",
                )
            )
    kept = f"a norm of {limit:g} / {calls.scale:g} = {left:.3g} is left" if left is not None else "the limit is wrong"
    certain = bites and norm is not None and limit is not None
    return Finding(
        severity=None if bites else "warning",
        confidence="confirmed" if certain else "likely",
        title="Gradients are clipped before they are unscaled",
        summary=f"At step {calls.step} gradients are clipped while multiplied by {calls.scale:g}: "
        + (kept if bites else "their norm was below the limit, so nothing was changed yet")
        + ".",
        where=Where(step=calls.step, rank=calls.rank),
        evidence=tuple(rows),
        cause="clipping runs on gradients that are still multiplied by the loss scale",
        next=("log the norm of the gradients right before the optimizer steps",),
        fix=("call scaler.unscale_(optimizer) before clip_grad_norm_",),
    )


def logged_norm(capsule: Capsule, calls: Calls) -> float | None:
    """The gradient norm on record for a window, None where it is absent or not finite."""
    series = capsule.scalars("grad_norm", rank=calls.rank)
    at = np.flatnonzero(series.step == calls.step)
    return float(series.value[at[-1]]) if len(at) and math.isfinite(series.value[at[-1]]) else None


def _never_unscaled(capsule: Capsule, calls: Calls) -> Finding | None:
    step = calls.first("optimizer_step")
    if calls.scale == 1.0 or step is None or calls.first("unscale") is not None or calls.first("backward") is None:
        return None
    # Inside GradScaler.step without an unscale: a fused optimizer, which unscales by itself.
    if any(each.get("nested") for each in calls.events if each["kind"] == "optimizer_step"):
        return None
    fused = any(each.attributes.get("fused") is True for each in capsule.tensors("optimizer/*/before")[:64])
    if fused or calls.first("optimizer_step_skipped") is not None:
        return None
    return Finding(
        # Imported events may leave a nested unscale out; only a recorder's own finite check would have shown it.
        severity=None if capsule.scalars("loss_scale").value.size else "warning",
        confidence="likely",
        title="The optimizer steps on scaled gradients",
        summary=f"At step {calls.step} the loss was scaled by {calls.scale:g}, and the step came without unscaling.",
        where=Where(step=calls.step, rank=calls.rank),
        evidence=(
            Evidence(name="order of the calls", value=calls.words, expected="unscale before optimizer_step"),
            Evidence(name="loss_scale", value=calls.scale),
        ),
        cause="the optimizer is stepped by itself while GradScaler scales the loss",
        next=("compare the gradient norm before the step with one of a run without a scaler",),
        fix=("step with scaler.step(optimizer), which unscales",),
    )


def _zeroed_before_step(capsule: Capsule, calls: Calls) -> Finding | None:
    kinds = [each["kind"] for each in calls.events]
    if "optimizer_step" not in kinds or "backward" not in kinds[: kinds.index("optimizer_step")]:
        return None
    step = kinds.index("optimizer_step")
    last = max(at for at, kind in enumerate(kinds[:step]) if kind == "backward")
    if "zero_grad" not in kinds[last:step] or "backward" in kinds[step:]:
        return None
    taken = [each for each in taken_steps(capsule) if (each.step, each.rank) == (calls.step, calls.rank)]
    taken = [each for each in taken if np.any(each.arrays.get("gradient_raw", 0)) and "before" in each.arrays]
    if not taken or any(np.any(each.arrays.get("gradient", 0)) for each in taken):
        return None  # it was another optimizer's, or nothing says whether a gradient was left
    return Finding(
        confidence="confirmed",
        title="Gradients are zeroed between backward and the step",
        summary=f"At step {calls.step} zero_grad ran after the last backward and before the optimizer's step, which "
        f"found no gradient in any of {len(taken)} sampled parameters; backward had left one in each.",
        where=Where(step=calls.step, rank=calls.rank),
        evidence=(
            Evidence(name="order of the calls", value=calls.words, expected="backward, optimizer_step, zero_grad"),
            Evidence(name="sampled parameters with a gradient", value=0, expected=len(taken), note="at the step"),
        ),
        cause="zero_grad is called between backward and the step",
        next=("print a gradient right before the optimizer steps",),
        fix=("call zero_grad after the step, or before the first backward of a window",),
    )


def _stepped_twice(capsule: Capsule, calls: Calls) -> Finding | None:
    kinds = [each["kind"] for each in calls.events]
    if "backward" not in kinds:
        return None
    last = max(at for at, kind in enumerate(kinds) if kind == "backward")
    steps = kinds[last:].count("optimizer_step")
    rows = {each.name: each for each in parameters(capsule).get((calls.step, calls.rank), []) if each.count}
    later = [key for key in parameters(capsule) if key[0] > calls.step and key[1] == calls.rank]
    if steps < 2 or not rows or not later:
        return None
    following = {each.name: each for each in parameters(capsule)[later[0]]}
    windows_between = later[0][0] - calls.step
    grown = [(following[name].count or 0) - (each.count or 0) for name, each in rows.items() if name in following]
    if not grown or any(each != steps * windows_between for each in grown):
        return None  # several optimizers, or one inside another
    return Finding(
        severity="warning",
        title="The optimizer steps more than once on the same gradients",
        summary=f"In the window of step {calls.step} the optimizer stepped {steps} times after one backward; its own "
        f"count grew by {grown[0]} over the next {windows_between} windows.",
        where=Where(step=calls.step, rank=calls.rank),
        evidence=(
            Evidence(name="order of the calls", value=calls.words, expected="one optimizer_step"),
            Evidence(name="growth of the step count", value=grown[0], expected=windows_between),
        ),
        cause="optimizer.step() is called in two places of the loop",
        next=("count the calls of optimizer.step() in one pass of the loop, callbacks and wrappers included",),
        fix=("step once a window",),
    )


def _clip_after_step(capsule: Capsule, calls: Calls) -> Finding | None:
    steps = [at for at, each in enumerate(calls.events) if each["kind"] == "optimizer_step"]
    clips = [at for at, each in enumerate(calls.events) if each["kind"] == "clip"]
    backward = [at for at, each in enumerate(calls.events) if each["kind"] == "backward"]
    if not steps or not clips or not backward or min(clips) < max(steps) or min(clips) < max(backward):
        return None
    return Finding(
        severity="warning",
        title="Gradients are clipped after the step",
        summary=f"At step {calls.step} gradients are clipped only after the optimizer has used them.",
        where=Where(step=calls.step, rank=calls.rank),
        evidence=(Evidence(name="order of the calls", value=calls.words, expected="clip before optimizer_step"),),
        cause="clipping comes after the step, where it limits nothing",
        next=("log the norm before the step",),
        fix=("clip between backward and the step",),
    )


@rule(
    "optimizer/overflow-step-applied",
    stage="numerics",
    needs=("records.events.kind|scalars.overflow|tensors.optimizer/*/after",),
)
def overflow_step_applied(capsule: Capsule) -> Iterator[Finding]:
    """A step was taken on gradients that overflowed.

    What it checks:
        Steps at which the scaled gradients held Inf or NaN: whether weights or moments changed there all the same.

    Why it matters:
        A scaler finds overflows so that the step is left out. One step on Inf turns weights into NaN, or Adam's
        moments into Inf, and everything after it is lost.

    How it decides:
        With a loss scale: the finite check found Inf (event, or overflow = 1, or non-finite captured gradient) and in
        the same window the optimizer stepped and changed something: the norm of the update is not 0, or captured
        weights or moments differ before and after. One such step is confirmed.

    Looks like it but is not:
        A skipped step; a fused optimizer that is called on an overflow and does nothing; an overflow flag without any
        sign of a change; NaN gradients without a loss scale (numerics/first-nonfinite).

    What to try next:
        Look at the first of these steps: which gradient overflowed, and was scaler.step used for every optimizer?

    Fix:
        scaler.step(optimizer) instead of optimizer.step(); with a loss scale of one's own, look at the norm for Inf and
        NaN and skip the step on every rank.
    """
    overflowed = _overflows(capsule)
    calls = {(each.step, each.rank): each for each in windows(capsule)}
    if not calls and not overflowed:
        raise NotJudged("events of the loop or overflow flags")
    changed = _changed(capsule)
    for (step, rank), sign in sorted(overflowed.items()):
        window = calls.get((step, rank))
        skipped = window is not None and window.first("optimizer_step_skipped") is not None
        stepped = window is None or window.first("optimizer_step") is not None
        moves = changed.get((step, rank))
        if skipped or not stepped or moves is None:
            continue
        yield Finding(
            confidence="confirmed",
            title="A step was taken on overflowed gradients",
            summary=f"Step {step}: {sign} and the optimizer stepped all the same: {moves[0]} {_say(moves[1])}.",
            where=Where(step=step, rank=rank),
            evidence=(
                Evidence(name="overflow", value=sign, expected="none, or the step is skipped"),
                Evidence(name=moves[0], value=moves[1], expected=0.0, note="a skipped step changes nothing"),
                *([Evidence(name="order of the calls", value=window.words)] if window is not None else []),
                Evidence(name="overflowed steps", value=len(overflowed), note="in the whole record"),
            ),
            cause="the optimizer stepped although the gradients were not finite",
            next=("find the tensor that overflowed: numerics/first-nonfinite at this step",),
            fix=("step through scaler.step(optimizer), or skip the step on every rank where the norm is not finite",),
        )
        return


def _say(value: float) -> str:
    return "is not finite" if not math.isfinite(value) else f"{value:.3g}"


def _overflows(capsule: Capsule) -> dict[tuple[int, int], str]:
    """(step, rank) → what shows that scaled gradients were not finite there."""
    found: dict[tuple[int, int], str] = {}
    scaled = capsule.scalars("loss_scale")
    has_scale = bool((scaled.value > 1).any()) or any(
        event.get("kind") == "scaler_update" for event in capsule.records("events")
    )
    for rank in capsule.ranks:
        flags = capsule.scalars("overflow", rank=rank)
        for step in flags.step[flags.value > 0].tolist():
            found[int(step), rank] = "the overflow flag is set"
    for event in capsule.records("events"):
        if event.get("kind") == "finite_check" and isinstance(event.get("step"), int):
            value = event.get("found_inf")
            if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                found[event["step"], event["rank"]] = "the finite check found Inf or NaN"
    if has_scale:
        for taken in taken_steps(capsule):
            gradient = taken.arrays.get("gradient_raw", taken.arrays.get("gradient"))
            if gradient is not None and not np.isfinite(gradient).all():
                found.setdefault((taken.step, taken.rank), f"the gradient of {taken.name} is not finite")
    return found


def _changed(capsule: Capsule) -> dict[tuple[int, int], tuple[str, float]]:
    """(step, rank) → what changed there, and by how much."""
    found: dict[tuple[int, int], tuple[str, float]] = {}
    for rank in capsule.ranks:
        updates = capsule.scalars("update_norm", rank=rank)
        for step, value in zip(updates.step.tolist(), updates.value.tolist(), strict=True):
            if value != 0:  # NaN is a change, too
                found[int(step), rank] = ("update_norm", float(value))
    for taken in taken_steps(capsule):
        for member in ("exp_avg", "exp_avg_sq", "before"):
            now = "after" if member == "before" else f"{member}_after"
            if member in taken.arrays and now in taken.arrays:
                difference = taken.arrays[now] - taken.arrays[member]
                if not np.all(difference == 0):
                    what = "weights changed by" if member == "before" else f"{member} changed by"
                    size = float(np.abs(difference).max()) if np.isfinite(difference).all() else math.nan
                    found.setdefault((taken.step, taken.rank), (f"{taken.name}: {what}", size))
    return found
