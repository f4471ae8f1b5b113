"""A low-rank adapter in FP64: y = x·Wᵀ + s · (x·Aᵀ)·Bᵀ.

Convention of the LoRA paper (2021, section 4.1) as peft has it: A is [r, in], B is [out, r], s = α/r (α/√r for
rank-stabilised adapters), and merging adds s·B·A to W [out, in] once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def delta(inputs: Floats, a: Floats, b: Floats, scaling: float) -> Floats:
    """What the adapter adds to the output: s·(x·Aᵀ)·Bᵀ; [..., in] → [..., out]."""
    return scaling * ((inputs @ a.T) @ b.T)


def adapted(base_output: Floats, inputs: Floats, a: Floats, b: Floats, scaling: float, times: float = 1.0) -> Floats:
    """Output [..., out] of a layer with its adapter applied ``times`` times; 1 is right."""
    return base_output + times * delta(inputs, a, b, scaling)


def merged(weight: Floats, a: Floats, b: Floats, scaling: float, times: float = 1.0) -> Floats:
    """The weight [out, in] with the adapter merged in ``times`` times."""
    return weight + times * scaling * (b @ a)
