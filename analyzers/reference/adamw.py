"""One step of Adam and AdamW in FP64.

    m' = β₁·m + (1 − β₁)·g        v' = β₂·v + (1 − β₂)·g²
    Δ  = −lr · (m' / (1 − β₁ᵗ)) / (√(v' / (1 − β₂ᵗ)) + ε)

Conventions: torch.optim.AdamW (Loshchilov & Hutter 2019, algorithm 2) takes w·(1 − lr·λ) before the step and leaves
the gradient alone; torch.optim.Adam with ``weight_decay`` adds λ·w to g instead (L2). t counts this step and starts at
1. The paper (Kingma & Ba 2015, end of section 2) also has a form that scales the rate by √(1 − β₂ᵗ)/(1 − β₁ᵗ) and adds
ε to √v' as it is, which earlier implementations use. AMSGrad and ``maximize`` are not covered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Settings:
    """What a step depends on beside its tensors.

    Attributes:
        lr: learning rate.
        beta1: of the first moment.
        beta2: of the second moment.
        eps: ε.
        weight_decay: λ.
        step: t, the number of this step from 1.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: float


@dataclass(frozen=True)
class Form:
    """How the step is computed; the defaults are those of torch.optim.AdamW.

    Attributes:
        decay: decoupled, l2, none, or without-lr (w·(1 − λ)).
        decay_last: the decoupled decay follows the step instead of preceding it.
        corrected: the moments are divided by 1 − βᵗ.
        eps: outside (√v + ε), inside (√(v + ε)), or uncorrected (the paper's second form).
    """

    decay: Literal["decoupled", "l2", "none", "without-lr"] = "decoupled"
    decay_last: bool = False
    corrected: bool = True
    eps: Literal["outside", "inside", "uncorrected"] = "outside"


@dataclass(frozen=True)
class Stepped:
    """Parameters and moments after a step; all of one shape."""

    parameter: Floats
    exp_avg: Floats
    exp_avg_sq: Floats


ADAMW = Form()
ADAM = Form(decay="l2")


def step(
    parameter: Floats,
    gradient: Floats,
    exp_avg: Floats,
    exp_avg_sq: Floats,
    settings: Settings,
    form: Form = ADAMW,
    powers: tuple[float, float] | None = None,
) -> Stepped:
    """Take one step.

    Args:
        parameter: w, any shape.
        gradient: g as the optimizer gets it: unscaled, averaged and clipped.
        exp_avg: m, zeros before the first step.
        exp_avg_sq: v, zeros before the first step.
        settings: rates and counters.
        form: the implementation.
        powers: (β₁ᵗ, β₂ᵗ) where they are known otherwise than from ``settings`` (their own rounding, say).
    """
    lr, decay = settings.lr, settings.weight_decay
    if form.decay == "l2":
        gradient = gradient + decay * parameter
    m = settings.beta1 * exp_avg + (1.0 - settings.beta1) * gradient
    v = settings.beta2 * exp_avg_sq + (1.0 - settings.beta2) * gradient**2
    if form.corrected:
        power1, power2 = powers or (settings.beta1**settings.step, settings.beta2**settings.step)
        correction1, correction2 = 1.0 - power1, 1.0 - power2
    else:
        correction1, correction2 = 1.0, 1.0
    with np.errstate(invalid="ignore", divide="ignore"):
        if form.eps == "inside":
            scale = np.sqrt(v / correction2 + settings.eps)
        elif form.eps == "uncorrected":
            scale = (np.sqrt(v) + settings.eps) / np.sqrt(correction2)
        else:
            scale = np.sqrt(v / correction2) + settings.eps
        # 0/0 without ε and without a gradient ever: such an element stays where it is.
        change = np.where(m == 0.0, 0.0, -lr * (m / correction1) / scale)
    shrink = {"decoupled": 1.0 - lr * decay, "without-lr": 1.0 - decay}.get(form.decay, 1.0)
    if form.decay_last:
        return Stepped((parameter + change) * shrink, m, v)
    return Stepped(parameter * shrink + change, m, v)
