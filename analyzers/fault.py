"""The words of the counterfactual engine: what a fault is, what was observed, and what a verdict says."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from . import finding
from .rounding import UNIT_ROUNDOFF, Noise

Array = NDArray[np.float64]
Value = float | Array
Spec = Hashable
Status = Literal["healthy", "confirmed", "likely", "undetermined"]

#: ``reference(case, spec, noise, rows)``: the value under a specification in FP64, NaN where it cannot be computed.
#: ``noise`` perturbs the inputs (None: exact); ``rows`` asks a tensor reference for these leading rows only.
Reference = Callable[[Any, Any, Noise | None, NDArray[np.intp] | None], Value]


def always(case: Any) -> bool:
    """The applicability of a fault that can occur in every case."""
    return True


@dataclass(frozen=True)
class Fault:
    """A named edit of the specification. ``knob``: what it turns; a pair never turns one knob twice."""

    name: str
    knob: str
    edit: Callable[[Any], Any]
    when: Callable[[Any], bool] = always


@dataclass(frozen=True)
class Observation:
    """One number (or tensor) of the job and how exactly it is known.

    Attributes:
        name: what it is, for the reader.
        case: inputs of the reference.
        reference: the computation.
        value: what the job got; a float or an array.
        decimals: decimals as printed; None where the value has full precision.
        value_roundoff: unit roundoff of the dtype in which the value itself was computed.
        input_roundoff: unit roundoff of the dtype in which the inputs were used, or stored if that is coarser.
    """

    name: str
    case: Any
    reference: Reference
    value: Value
    decimals: int | None = None
    value_roundoff: float = UNIT_ROUNDOFF["float32"]
    input_roundoff: float = UNIT_ROUNDOFF["float32"]

    @property
    def is_tensor(self) -> bool:
        """Whether the observation is an array."""
        return isinstance(self.value, np.ndarray)


@dataclass(frozen=True)
class Verdict:
    """What the engine says.

    Attributes:
        status: healthy, confirmed, likely (the number is consistent with the fault), or undetermined.
        classes: sets of faults that reproduce every observation; within one set they are equivalent on this input.
        z: distance of the best fit in tolerances, NaN where nothing fits.
        chance: expected number of candidates that match by chance.
        runner_up: nearest candidate outside the fitting class.
        inert: applicable faults that change nothing on this input: not testable here, and not excluded.
        reasons: why the verdict is not confirmed, each a short sentence.
        table: the same as the report shows it, at the observation that the healthy reference misses most.
    """

    status: Status
    classes: tuple[tuple[tuple[str, ...], ...], ...]
    z: float
    chance: float
    runner_up: finding.Candidate | None
    inert: tuple[str, ...]
    reasons: tuple[str, ...]
    table: finding.Counterfactual
