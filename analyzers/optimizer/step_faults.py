"""Adam's step under a specification, and the catalogue of ways in which it goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ..fault import Array, Fault, Value
from ..reference.adamw import ADAMW, Form, Settings, Stepped, step
from ..rounding import UNIT_ROUNDOFF, Noise
from .step_case import Floats, StepCase


@dataclass(frozen=True)
class StepSpec:
    """A way to take the step; the defaults are those of torch.optim.AdamW on an unscaled, clipped gradient.

    Attributes:
        form: the implementation; its decay is that of ``decay``.
        decay: declared (what each case's optimizer is), or the name of a form of decay for all of them.
        offset: added to the step count.
        swapped: β₁ and β₂ have changed places.
        unscale: once, not, new-scale (divided by the scale after the update).
        clip: once, not, twice, before-unscale.
        lr: now, previous.
        rounded: the parameter is rounded to bfloat16 after the step.
    """

    form: Form = ADAMW
    decay: str = "declared"
    offset: int = 0
    swapped: bool = False
    unscale: str = "once"
    clip: str = "once"
    lr: str = "now"
    rounded: bool = False


@dataclass(frozen=True)
class NamedFault:
    """A fault of the catalogue with the words for it."""

    fault: Fault
    cause: str
    fix: str


def used_gradient(case: StepCase, spec: StepSpec, gradient: Floats) -> Floats:
    """The gradient that enters the moments, from the captured one in the state it was captured in."""
    known = case.declared
    scale, clip = known.scale or 1.0, known.clip if known.clip is not None else 1.0
    if known.state == "exact":
        return gradient
    raw = gradient * scale
    if known.state == "scaled":
        raw = gradient
    elif known.state == "clipped" and clip > 0:
        raw = gradient / clip * scale
    divisor = {"not": 1.0, "new-scale": known.new_scale or scale}.get(spec.unscale, scale)
    early = known.clip_scaled if known.clip_scaled is not None else clip
    factor = {"not": 1.0, "twice": clip * clip, "before-unscale": early}.get(spec.clip, clip)
    return raw * (factor / divisor)


@lru_cache(maxsize=256)
def take_step(case: StepCase, spec: StepSpec, noise: Noise | None) -> Stepped:
    """The step of ``case`` under ``spec``; ``noise`` perturbs inputs, rate and bias corrections.

    Kept for a while: weights and moments are asked for one by one.
    """
    arrays = [case.parameter, case.gradient, case.exp_avg, case.exp_avg_sq]
    declared = case.declared.settings
    count = declared.step + spec.offset
    lr = declared.lr
    if spec.lr == "previous" and case.declared.lr_previous is not None:
        lr = case.declared.lr_previous
    betas = (declared.beta2, declared.beta1) if spec.swapped else (declared.beta1, declared.beta2)
    powers = (betas[0] ** count, betas[1] ** count)
    if noise is not None:
        names = ("parameter", "gradient", "exp_avg", "exp_avg_sq")
        arrays = [noise(array, name) for array, name in zip(arrays, names, strict=True)]
        single = np.ones(3)
        # Rates and corrections are float32 at worst, whatever the parameters are.
        signs = (noise(single, "settings") - 1.0) / noise.roundoff * UNIT_ROUNDOFF["float32"]
        lr *= 1.0 + float(signs[0])
        powers = (powers[0] * (1.0 + float(signs[1])), powers[1] * (1.0 + float(signs[2])))
    parameter, gradient, exp_avg, exp_avg_sq = arrays
    settings = Settings(lr, betas[0], betas[1], declared.eps, declared.weight_decay, count)
    form = replace(spec.form, decay=decay_of(case, spec))
    result = step(parameter, used_gradient(case, spec, gradient), exp_avg, exp_avg_sq, settings, form, powers)
    if spec.rounded:
        return Stepped(to_bfloat16(result.parameter), result.exp_avg, result.exp_avg_sq)
    return result


def decay_of(case: StepCase, spec: StepSpec) -> Any:
    """The form of decay of a case under a specification."""
    if spec.decay != "declared":
        return spec.decay
    return "l2" if case.declared.decoupled is False else "decoupled"


def to_bfloat16(values: Floats) -> Floats:
    """Rounded to the nearest bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def _reference(field: str) -> Any:
    def reference(case: Any, spec: Any, noise: Noise | None, rows: Any) -> Value:
        value: Array = getattr(take_step(case, spec, noise), field)
        return value if rows is None else value[rows]

    return reference


#: Reference functions of the engine by the name of what they compute.
REFERENCES = {
    "after": _reference("parameter"),
    "exp_avg_after": _reference("exp_avg"),
    "exp_avg_sq_after": _reference("exp_avg_sq"),
}


def _decays(case: Any) -> bool:
    return case.declared.settings.weight_decay != 0


def _form(**edit: Any) -> Callable[[StepSpec], StepSpec]:
    return lambda spec: replace(spec, form=replace(spec.form, **edit))


def _edit(**edit: Any) -> Callable[[StepSpec], StepSpec]:
    return lambda spec: replace(spec, **edit)


def _scaled(case: Any) -> bool:
    return case.declared.scale not in (None, 1.0) and case.declared.state != "exact"


def _clips(case: Any) -> bool:
    return case.declared.clip not in (None, 1.0) and case.declared.state != "exact"


CATALOGUE: tuple[NamedFault, ...] = (
    NamedFault(
        Fault(
            "l2-for-decoupled", "decay", _edit(decay="l2"), lambda c: _decays(c) and c.declared.decoupled is not False
        ),
        "weight decay is added to the gradient (L2) instead of taken from the weights",
        "use AdamW, or take weight · lr · decay from the weights outside the moments",
    ),
    NamedFault(
        Fault(
            "decoupled-for-l2",
            "decay",
            _edit(decay="decoupled"),
            lambda c: _decays(c) and c.declared.decoupled is False,
        ),
        "weight decay is taken from the weights instead of added to the gradient",
        "declare AdamW, or use Adam with weight_decay",
    ),
    NamedFault(
        Fault("decay-without-lr", "decay", _edit(decay="without-lr"), _decays),
        "weight decay is not multiplied by the learning rate",
        "decay by 1 − lr · weight_decay",
    ),
    NamedFault(
        Fault("decay-missing", "decay", _edit(decay="none"), _decays),
        "the declared weight decay is not applied",
        "apply the decay of the parameter's group",
    ),
    NamedFault(
        Fault("no-bias-correction", "bias", _form(corrected=False)),
        "the moments are not corrected for their start at zero",
        "divide the moments by 1 − βᵗ",
    ),
    NamedFault(
        Fault("step-one-behind", "count", _edit(offset=-1), lambda c: c.declared.counted),
        "bias correction uses the number of the step before",
        "count the step before the corrections are computed",
    ),
    NamedFault(
        Fault("step-one-ahead", "count", _edit(offset=1), lambda c: c.declared.counted),
        "bias correction uses the number of the next step",
        "count each step once",
    ),
    NamedFault(
        Fault("eps-inside-root", "eps", _form(eps="inside")),
        "epsilon is added inside the square root",
        "add epsilon to the root: √v + ε",
    ),
    NamedFault(
        Fault("betas-swapped", "betas", _edit(swapped=True)),
        "beta1 and beta2 have changed places",
        "pass betas as (beta1, beta2)",
    ),
    NamedFault(
        Fault("gradient-not-unscaled", "unscale", _edit(unscale="not"), _scaled),
        "the gradient is still multiplied by the loss scale",
        "call scaler.unscale_(optimizer) or step through scaler.step(optimizer)",
    ),
    NamedFault(
        Fault(
            "unscaled-with-new-scale",
            "unscale",
            _edit(unscale="new-scale"),
            lambda c: _scaled(c) and c.declared.new_scale is not None,
        ),
        "the gradient is divided by the loss scale after its update instead of the one that backward used",
        "update the scaler after the step",
    ),
    NamedFault(
        Fault("gradient-not-clipped", "clip", _edit(clip="not"), _clips),
        "the gradient is not clipped",
        "clip after unscaling and before the step, on the parameters that the optimizer holds",
    ),
    NamedFault(
        Fault("clipped-twice", "clip", _edit(clip="twice"), _clips),
        "the clip coefficient is applied twice",
        "clip once a step",
    ),
    NamedFault(
        Fault(
            "clipped-before-unscale",
            "clip",
            _edit(clip="before-unscale"),
            lambda c: _scaled(c) and c.declared.clip_scaled is not None,
        ),
        "the gradient is clipped while it is still multiplied by the loss scale",
        "call scaler.unscale_(optimizer) before clipping",
    ),
    NamedFault(
        Fault("lr-of-previous-step", "lr", _edit(lr="previous"), lambda c: c.declared.lr_previous is not None),
        "the learning rate is that of the step before",
        "set the rate of a step before the optimizer steps, in one place",
    ),
    NamedFault(
        Fault("rounded-to-bfloat16", "rounding", _edit(rounded=True), lambda c: c.dtype in ("float32", "float64")),
        "the updated weights are rounded to bfloat16: there are no master weights",
        "keep the weights that the optimizer updates in float32",
    ),
)
BY_NAME = {each.fault.name: each for each in CATALOGUE}


def lawful_specs(cases: list[StepCase]) -> list[StepSpec]:
    """The healthy specifications: one for torch's own classes, more where implementation or count is unknown."""
    decays = ("declared", "l2") if any(case.declared.decoupled is None for case in cases) else ("declared",)
    forms = [ADAMW]
    if not all(case.declared.genuine for case in cases):
        forms += [replace(ADAMW, eps="uncorrected"), replace(ADAMW, decay_last=True)]
    offsets = (0,) if all(case.declared.counted for case in cases) else (0, -1)
    return [StepSpec(form, decay, offset) for decay in decays for form in forms for offset in offsets]
