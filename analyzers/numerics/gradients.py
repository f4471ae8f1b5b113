"""Gradients that are too small or absent, told apart from norms that were never measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..finding import Confidence, Evidence, Finding, Where
from ..registry import rule
from ..series import Curve, curve, noise, placeholder
from . import thresholds as T
from .symptoms import is_learned, skipped_steps, start_level

if TYPE_CHECKING:
    from ...capsules import Capsule


@dataclass(frozen=True)
class ZeroNorm:
    """A lasting stretch in which the logged gradient norm is exactly 0, and what the loss did meanwhile.

    ``falls`` is None where the loss cannot tell, ``earlier`` whether the norm had been larger before, ``moves``
    whether the recorded weights changed all the same.
    """

    first: int
    last: int
    points: int
    loss_before: float
    loss_after: float
    falls: bool | None
    earlier: bool
    moves: bool
    wired: bool

    @property
    def is_artefact(self) -> bool:
        """Whether learning goes on, so that it is the metric that is empty and not the gradient."""
        return self.moves or self.falls is True


def gradient_norm(capsule: Capsule) -> Curve:
    """The gradient norm as logged; without a log, as clipping saw it, or 0 where no trainable parameter has a gradient.

    A loop whose gradients are all None has nothing to take a norm of, so nothing is logged just where it matters.
    """
    logged = curve(capsule, "grad_norm").finite()
    if len(logged):
        return logged
    found: dict[int, float] = {}
    for record in capsule.records("param_groups"):
        step = record.get("step")
        if step is None or record.get("requires_grad") is False or record.get("has_grad") is None:
            continue
        found[int(step)] = math.inf if record["has_grad"] or found.get(int(step)) == math.inf else 0.0
    for event in capsule.records("events"):
        step, norm = event.get("step"), event.get("norm")
        if event.get("kind") in ("grad_norm", "clip") and step is not None and isinstance(norm, int | float):
            found[int(step)] = float(norm)
    steps = sorted(step for step, norm in found.items() if math.isfinite(norm))
    return Curve(np.array(steps, np.int64), np.array([found[step] for step in steps], np.float64))


def zero_norm(capsule: Capsule) -> ZeroNorm | None:
    """The last lasting stretch of zero gradient norms, or None.

    Steps that a scaler skipped are left out: some loops report 0 there.
    """
    norm = gradient_norm(capsule)
    norm = norm.where(~np.isin(norm.step, list(skipped_steps(capsule))))
    zero = norm.value == 0
    if not zero.any():
        return None
    edges = np.flatnonzero(np.diff(np.concatenate(([False], zero, [False])).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    longest = int(np.argmax(ends - starts))
    start, end = int(starts[longest]), int(ends[longest])
    first, last, points = int(norm.step[start]), int(norm.step[end - 1]), end - start
    if points < T.ZERO_NORM_POINTS and not (points >= 2 and last - first >= T.ZERO_NORM_SPAN):
        return None
    loss = curve(capsule, "loss").finite()
    during = loss.between(first, last)
    falls, before, after = _falls(during, start_level(loss.value))
    update = curve(capsule, "update_norm").between(first, last).finite()
    others = (placeholder(curve(capsule, name)) for name in ("loss_scale", "param_norm", "num_zeros", "num-zeros"))
    return ZeroNorm(
        first=first,
        last=last,
        points=points,
        loss_before=before,
        loss_after=after,
        falls=falls,
        earlier=bool((norm.value > 0).any()),
        moves=bool((update.value > 0).any()),
        wired=all(each is None for each in others),
    )


def _falls(loss: Curve, level: float) -> tuple[bool | None, float, float]:
    """Whether a stretch of loss falls by more than its noise, and its level at both ends."""
    values = loss.value
    if values.size < 2:
        return None, math.nan, math.nan
    third = max(1, values.size // 3)
    before, after = float(np.median(values[:third])), float(np.median(values[-third:]))
    scatter = noise(values)
    margin = max(T.FLAT_LOSS * level, 0.0 if math.isnan(scatter) else 2 * scatter / math.sqrt(third))
    return before - after > margin, before, after


@rule(
    "numerics/gradients-lost",
    cases=("loss-stuck-at-ln-v",),
    stage="numerics",
    needs=("scalars.grad_norm|records.events.norm|records.param_groups.has_grad", "scalars.loss"),
    explained_by=(
        "data/token-out-of-vocabulary",
        "objective/all-masked",
        "optimizer/gradient-chain-cut",
        "optimizer/order",
        "numerics/first-nonfinite",
        "numerics/loss-nonfinite",
    ),
)
def gradients_lost(capsule: Capsule) -> Iterator[Finding]:
    """No gradient arrives: its norm is exactly 0 and the loss does not fall.

    What it checks:
        The gradient norm and the loss over the same steps.

    Why it matters:
        The job runs at full speed, logs a plausible loss and learns nothing. Every hour of it is lost, and only the
        two numbers together show it.

    How it decides:
        A norm of exactly 0 at three reported steps in a row (or two that are five or more steps apart) that no scaler
        skipped, while the loss falls by no more than 1 % of its starting level and its noise. Critical where the norm
        had been larger before, or the record begins with the run; a warning while there are few points; undetermined
        where the record begins in the middle of a run or other numbers of the same log are placeholders, too.

    Looks like it but is not:
        A norm that is read after the gradients were freed or was never wired, while the loss falls or the weights
        move (info, by numerics/gradient-vanishing and numerics/not-reported); a loss that has reached 0, whose gradient
        is rightly 0; steps skipped by a gradient scaler; the first steps of a warm-up, in which no loss moves.

    What to try next:
        Right after backward print the gradient of the output layer and of the first layer: None, zero or a number?
        Then print loss.requires_grad and loss.grad_fn.

    Fix:
        Remove the detach, item(), no_grad or argmax between weights and loss; gradients zeroed between backward and
        step; a custom backward that returns zeros; parameters that the backward pass of a wrapper does not see.
    """
    zero = zero_norm(capsule)
    if zero is None or zero.is_artefact or zero.falls is None:
        return
    loss = curve(capsule, "loss").finite()
    if is_learned(loss, zero.loss_after):
        return  # nothing is left to learn: zero is the right gradient
    rate = curve(capsule, "learning_rate").between(zero.first, zero.last).finite().value
    warming = rate.size > 1 and bool(rate[-1] > 1.5 * rate[0]) and zero.points < T.ZERO_NORM_SURE
    from_start = zero.first <= max(T.RUN_START, gradient_norm(capsule).interval)
    decided = (zero.earlier or from_start) and zero.wired and not warming
    confidence: Confidence = "likely" if decided else "undetermined"
    yield Finding(
        severity=None if decided and zero.points >= T.ZERO_NORM_SURE else "warning",
        confidence=confidence,
        title="No gradient arrives at the weights",
        summary=(
            f"The gradient norm is exactly 0 from step {zero.first} to {zero.last} ({zero.points} points); the loss "
            f"went from {zero.loss_before:.5g} to {zero.loss_after:.5g}."
        ),
        where=Where(step=zero.first),
        evidence=(
            Evidence(name="grad_norm", value=0.0, expected="> 0", note=f"{zero.points} points in a row"),
            Evidence(name="loss", value=zero.loss_after, expected=f"< {zero.loss_before:.5g}", unit="nats/token"),
            *([] if zero.wired else [Evidence(name="other placeholders", value="yes", note="0 or −1 throughout")]),
        ),
        cause="the graph between loss and weights is cut, or the gradients are gone before they are used",
        next=(
            "print loss.grad_fn and, right after backward, the gradient of the last and the first layer",
            *(() if decided else ("log the norm from the gradients themselves: it may never have been wired",)),
        ),
        fix=(
            "remove the detach, no_grad, item or argmax between the weights and the loss",
            "zero the gradients after the optimizer step, never between backward and step",
        ),
    )


@rule(
    "numerics/gradient-vanishing",
    stage="numerics",
    severity="warning",
    needs=("scalars.grad_norm|stats.gradient",),
    explained_by=(
        "numerics/gradients-lost",
        "numerics/outlier-growth",
        "numerics/learning-rate",
        "optimizer/gradient-chain-cut",
        "optimizer/order",
    ),
)
def gradient_vanishing(capsule: Capsule) -> Iterator[Finding]:
    """Gradients are too small to move the weights.

    What it checks:
        The gradient norm, and the mean magnitude of each parameter's gradient where tensor statistics are on record.

    Why it matters:
        Below about 1e-8 Adam divides by its epsilon instead of by the gradient, and float16 cannot hold the number at
        all: those layers stand still while the rest trains on top of them.

    How it decides:
        A gradient norm above 0 and below 1e-7 at three reported steps or more, up to the end of the record, while the
        loss does not fall. By layer: mean magnitude of a parameter's gradient above 0 and below 1e-7 in the last three
        full records or more, not growing, and either a thousandth of what the other parameters get (vectors left out),
        or true for all of them with a norm below 1e-4. A norm of exactly 0 while the loss falls or the weights move is
        info: the metric was read after the gradients were freed.

    Looks like it but is not:
        Very large models, whose single elements are small while the norm is ordinary; gradients of activations, which
        shrink with the number of tokens; an adapter's first factor while the second is still near 0; embeddings of
        tokens that did not occur and experts without tokens (exactly 0); the end of a run that has memorised its data;
        a bias that a softmax, a normalisation or a difference cancels (of attention keys, before BatchNorm).

    What to try next:
        Print the gradient norm by layer from output to input and look where it falls off.

    Fix:
        Residual connections and normalisation before each branch; another initialisation; float32 or a loss scale for
        what float16 cannot hold; a smaller optimizer epsilon.
    """
    zero = zero_norm(capsule)
    if zero is not None and zero.is_artefact:
        yield Finding(
            severity="info",
            kind="hygiene",
            title="The gradient norm is logged as 0 while the model learns",
            summary=(
                f"The gradient norm is 0 from step {zero.first} to {zero.last} and "
                + ("the weights move" if zero.moves else f"the loss falls to {zero.loss_after:.5g}")
                + ": it is read after the gradients were freed, or was never wired."
            ),
            where=Where(step=zero.first),
            evidence=(
                Evidence(name="grad_norm", value=0.0, note=f"{zero.points} points"),
                Evidence(name="loss", value=zero.loss_after, note=f"from {zero.loss_before:.5g}", unit="nats/token"),
            ),
            cause="the metric, not the gradient, is empty",
            next=("read the norm between backward and the optimizer step",),
        )
    finding = _small_layers(capsule) or _small_norm(capsule)
    if finding is not None:
        yield finding


def _small_norm(capsule: Capsule) -> Finding | None:
    """A gradient norm that stays next to nothing to the end of the record."""
    norm = curve(capsule, "grad_norm").finite()
    norm = norm.where(norm.value > 0)
    small = norm.value < T.VANISHING
    points = len(norm) if small.all() else int(np.argmin(small[::-1]))
    if points < T.VANISHING_RECORDS:
        return None
    first, loss = int(norm.step[-points]), curve(capsule, "loss").finite()
    falls, before, after = _falls(loss.between(first, int(norm.step[-1])), start_level(loss.value))
    if falls or is_learned(loss, after):
        return None
    return _vanishing(
        first,
        None,
        f"The gradient norm is {norm.value[-1]:.3g} and below {T.VANISHING:g} from step {first} on ({points} points).",
        Evidence(name="grad_norm", value=float(norm.value[-1]), expected=f"≥ {T.VANISHING:g}", note=f"{points} points"),
        Evidence(name="loss", value=after, expected=f"< {before:.5g}", unit="nats/token"),
    )


def _small_layers(capsule: Capsule) -> Finding | None:
    """Parameters whose gradients are next to nothing in all of the last records, beside those of the others."""
    stats = capsule.stats(role="gradient")
    parameters = set(capsule.stats(role="parameter").name.tolist())
    parameters |= {str(each.get("name")) for each in capsule.records("param_groups")}
    mean = np.where(np.isfinite(stats.absmean), stats.absmean, stats.rms)
    keep = np.isfinite(mean) & (mean > 0) & (np.isin(stats.name.astype(str), list(parameters)) | (not parameters))
    # What a softmax or a normalisation cancels (a bias of attention keys, say) has no gradient but rounding.
    vectors = {name for name, shape in zip(stats.name.astype(str).tolist(), stats.shape, strict=True) if _vector(shape)}
    by_name: dict[str, list[tuple[int, float]]] = {}
    for name, step, value in zip(stats.name[keep], stats.step[keep].tolist(), mean[keep].tolist(), strict=True):
        by_name.setdefault(str(name), []).append((int(step), float(value)))
    small: dict[str, list[tuple[int, float]]] = {}
    usual: list[float] = []
    for name, rows in by_name.items():
        tail: list[tuple[int, float]] = []
        for row in reversed(rows):
            if row[1] >= T.VANISHING:
                break
            tail.insert(0, row)
        grows = bool(tail) and tail[-1][1] > T.VANISHING_GROWS * tail[0][1]
        if len({step for step, _ in tail}) >= T.VANISHING_RECORDS and not grows:
            small[name] = tail
        else:
            usual.append(rows[-1][1])
    if usual:
        small = {name: tail for name, tail in small.items() if name not in vectors}
    if not small:
        return None
    norm = curve(capsule, "grad_norm").finite().value
    if usual:
        limit = T.VANISHING_SHARE * float(np.median(usual))
        small = {name: tail for name, tail in small.items() if tail[-1][1] < limit}
    elif norm.size and norm[-1] >= T.NORM_ALIVE:
        return None  # a very large model: each element is small, all together are not
    if not small:
        return None
    name, tail = min(small.items(), key=lambda each: (each[1][0][0], each[1][-1][1]))
    beside = float(np.median(usual)) if usual else math.nan
    return _vanishing(
        tail[0][0],
        name,
        f"The gradient of {name} has a mean magnitude of {tail[-1][1]:.3g} over {len(tail)} records"
        + (f" ({len(small)} parameters in all); the others get {beside:.3g}." if usual else ", as has every other."),
        Evidence(
            name="mean magnitude",
            value=tail[-1][1],
            expected=f"≥ {T.VANISHING:g}",
            note=f"{name}, steps {tail[0][0]} to {tail[-1][0]}",
        ),
        Evidence(name="parameters below", value=len(small), expected=0, note=f"of {len(by_name)}"),
        *([Evidence(name="median of the others", value=beside)] if usual else []),
    )


def _vector(shape: tuple[int, ...]) -> bool:
    return len(shape) > 0 and sum(each > 1 for each in shape) < 2


def _vanishing(step: int, tensor: str | None, summary: str, *evidence: Any) -> Finding:
    return Finding(
        title="Gradients vanish",
        summary=summary,
        where=Where(step=step, tensor=tensor),
        evidence=evidence,
        cause="the gradient shrinks on its way from the loss to these weights",
        next=("print the gradient norm by layer from output to input",),
        fix=("normalise before each branch and keep the residual path free", "check the initialisation and saturation"),
    )
