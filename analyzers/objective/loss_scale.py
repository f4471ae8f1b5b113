"""What the size of losses and gradient norms tells of a missing division, where no logits were captured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Where
from ..series import curve
from .level import first_loss, log_vocabulary
from .thresholds import EVAL_POINTS, EVAL_RATIO, FACTOR_ABOVE, FACTOR_BELOW, LOSS_RATIO, NORM_RATIO

if TYPE_CHECKING:
    from ...capsules import Capsule

_FIX = ("divide by the number of micro-batches, or by the supervised tokens of the whole window",)
#: Largest number of accumulation steps that a ratio of two norms is taken for where none is declared.
_MOST_STEPS = 1024


def scale_findings(capsule: Capsule) -> Iterator[Finding]:
    """objective/reduction by sizes alone: the first look that says something speaks, and never for certain."""
    for look in (_ratio_of_norms, _ratio_of_losses, _initial_factor, _evaluation_ratio):
        if (finding := look(capsule)) is not None:
            yield finding
            return


def comparable(capsule: Capsule) -> bool:
    """Whether any of these sizes can be compared at all."""
    sides = {(key.name, key.side) for key in capsule.scalar_keys() if key.side is not None}
    several = any(sum(name == each for each, _ in sides) == 2 for name in ("grad_norm", "loss"))
    start = first_loss(capsule) is not None and log_vocabulary(capsule) is not None
    return several or start or (bool(declared_factors(capsule)) and capsule.has("scalars.eval_loss"))


def declared_factors(capsule: Capsule) -> dict[int, str]:
    """Numbers that a loss may have missed a division by, with their names: those above 1 that the manifest states."""
    training, run = capsule.manifest.training, capsule.manifest.run
    accumulation = (training.accumulation_steps if training is not None else None) or 1
    world = (run.world_size if run is not None else None) or 1
    factors = {accumulation * world: "accumulation steps times ranks"}
    factors |= {world: "the number of ranks", accumulation: "the number of accumulation steps"}
    return {value: name for value, name in factors.items() if value > 1}


def _is_sum(capsule: Capsule) -> bool:
    training = capsule.manifest.training
    return training is not None and training.reduction == "sum"


def _initial_factor(capsule: Capsule) -> Finding | None:
    """The first loss of an untrained model is a multiple of ln V that the job has a number for."""
    first, nats, model = first_loss(capsule), log_vocabulary(capsule), capsule.manifest.model
    pretrained = model is not None and model.initialised == "pretrained"
    if first is None or nats is None or pretrained or _is_sum(capsule):
        return None
    step, loss = first
    factor, name = min(
        declared_factors(capsule).items(), key=lambda each: abs(loss / nats / each[0] - 1), default=(0, "")
    )
    if not factor or not -FACTOR_BELOW <= loss / nats / factor - 1 <= FACTOR_ABOVE:
        return None
    return Finding(
        title=f"The first loss is {factor} times ln V",
        summary=(
            f"The first loss {loss:.5g} of an untrained model is {loss / nats:.3f} times ln V = {nats:.5g}: "
            f"the factor is {name}."
        ),
        severity="warning",
        confidence="likely",
        where=Where(step=0),
        evidence=(
            Evidence(name="first_loss", value=loss, expected=nats, unit="nats/token", note=f"ln V, step {step}"),
            Evidence(name="factor", value=loss / nats, expected=1.0, note=f"{name}: {factor}"),
        ),
        cause=f"the loss is not divided by {name}",
        next=("capture one window with logits: the counterfactual then decides",),
        fix=_FIX,
    )


def _ratio_of_norms(capsule: Capsule) -> Finding | None:
    return _ratio_of_sides(capsule, "grad_norm", "gradient norm", NORM_RATIO)


def _ratio_of_losses(capsule: Capsule) -> Finding | None:
    return _ratio_of_sides(capsule, "loss", "loss", LOSS_RATIO)


def _ratio_of_sides(capsule: Capsule, name_of_series: str, words: str, within: float) -> Finding | None:
    """Two sides of one run, whole batch and accumulated, whose first numbers are a whole number apart.

    Only the first step that both have counts: there they still stand at the same weights. AdamW hides such a factor
    afterwards, but for clipping.
    """
    sides = sorted({key.side for key in capsule.scalar_keys() if key.name == name_of_series and key.side is not None})
    if len(sides) != 2:
        return None
    curves = [curve(capsule, name_of_series, side=side).finite() for side in sides]
    shared = np.intersect1d(curves[0].step, curves[1].step)
    if not len(shared):
        return None
    step = int(shared[0])
    (small, low), (large, high) = sorted(zip((each.at(step) for each in curves), sides, strict=True))
    factor = round(large / small) if small > 0 else 0
    factors = declared_factors(capsule)
    off = abs(large / small / factor - 1) if factor else np.inf
    if not 2 <= factor <= _MOST_STEPS or off > (within if factor in factors else NORM_RATIO):
        return None
    if factors and factor not in factors:
        return None
    name = factors.get(factor, "the number of accumulation steps, as it seems")
    return Finding(
        title=f"The {words} is {factor} times the other side's",
        summary=(
            f"At step {step:,} the {words} is {large:.10g} ({high}) beside {small:.10g} ({low}): "
            f"{large / small:.6f} times, {name}. It is a missing division and no learning rate."
        ),
        severity="warning",
        confidence="likely",
        where=Where(step=step),
        evidence=(
            Evidence(name=name_of_series, value=large, expected=small, note=f"{high} beside {low}, step {step}"),
            Evidence(name="ratio", value=large / small, expected=1.0, note=f"{name}: {factor}"),
        ),
        cause=f"the loss of {high} is not divided by {name}",
        next=(
            "divide the loss of each micro-batch by hand in one run: the norms must then agree",
            "with clipping every step of the larger side is clipped, so its updates are smaller than they look",
        ),
        fix=_FIX,
    )


def _evaluation_ratio(capsule: Capsule) -> Finding | None:
    """The training loss stands at a multiple of the evaluation's that the job has a number for, all along."""
    loss, evaluation = curve(capsule, "loss").finite(), curve(capsule, "eval_loss").finite()
    factors = declared_factors(capsule)
    if not factors or len(loss) < EVAL_POINTS or len(evaluation) < EVAL_POINTS or _is_sum(capsule):
        return None
    ratios: list[float] = []
    for step, value in zip(evaluation.step, evaluation.value, strict=True):
        before = loss.value[loss.step <= step][-3:]
        if len(before) and value > 0:
            ratios.append(float(np.median(before)) / float(value))
    if len(ratios) < EVAL_POINTS:
        return None
    middle = float(np.median(ratios))
    factor, name = min(factors.items(), key=lambda each: abs(middle / each[0] - 1))
    if not all(abs(each / factor - 1) <= EVAL_RATIO for each in ratios):
        return None
    return Finding(
        title=f"The training loss is {factor} times the evaluation loss",
        summary=(
            f"At {len(ratios)} evaluations the training loss is {middle:.3g} times the evaluation loss throughout: "
            f"the factor is {name}."
        ),
        severity="warning",
        confidence="likely",
        where=Where(step=int(loss.step[0])),
        evidence=(
            Evidence(name="loss_over_eval_loss", value=middle, expected=1.0, note=f"{name}: {factor}"),
            Evidence(name="evaluations", value=len(ratios), expected=EVAL_POINTS, note="at least"),
        ),
        cause=f"the training loss is not divided by {name}",
        next=(
            "compare with a run of accumulation 1: the evaluation loss must agree, the training loss must too",
            "look at the gradient norm: where it has the same factor, the step is wrong and not only the report",
        ),
        fix=_FIX,
    )
