"""Which computation took the captured optimizer steps: one counterfactual run a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from ..counterfactual import explain
from ..fault import Observation, Verdict
from ..rounding import UNIT_ROUNDOFF
from . import thresholds as T
from .step_case import StepCase, cases_by_window, taken_steps
from .step_faults import CATALOGUE, REFERENCES, NamedFault, lawful_specs, take_step

if TYPE_CHECKING:
    from ...capsules import Capsule


@dataclass(frozen=True)
class Judged:
    """One window with what the engine says of it; ``hooked``: the step is right, on another gradient than captured."""

    step: int
    rank: int
    cases: tuple[StepCase, ...]
    verdict: Verdict
    hooked: bool = False


_runs: WeakKeyDictionary[Capsule, tuple[Judged, ...]] = WeakKeyDictionary()


def judged_windows(capsule: Capsule) -> tuple[Judged, ...]:
    """The captured windows that were read, judged; computed once a capsule.

    Raises:
        NotJudged: no captured step can be computed again.
    """
    if capsule not in _runs:
        windows = sorted(cases_by_window(capsule, taken_steps(capsule)).items())
        _runs[capsule] = tuple(judge(step, rank, cases) for (step, rank), cases in windows)
    return _runs[capsule]


def judge(step: int, rank: int, cases: list[StepCase], catalogue: Sequence[NamedFault] = CATALOGUE) -> Judged:
    """What the engine says of one window under ``catalogue``."""
    observations = [observation for case in cases for observation in observations_of(case)]
    healthy = lawful_specs(cases)
    if all(case.roundoff < UNIT_ROUNDOFF["float16"] for case in cases):
        # In float32 a step that is surely right needs no other candidate; most steps are.
        verdict = explain(observations, healthy, ())
        if verdict.status == "healthy" and verdict.z <= T.SURELY_RIGHT:
            return Judged(step, rank, tuple(cases), verdict)
    verdict = explain(observations, healthy, [each.fault for each in catalogue])
    hooked = verdict.status == "undetermined" and all(_fits_its_own_gradient(case) for case in cases)
    return Judged(step, rank, tuple(cases), verdict, hooked)


def observations_of(case: StepCase) -> list[Observation]:
    """What the job got of one case; the moments where they were captured."""
    return [
        Observation(
            name=f"{name} of step {case.step}",
            case=case,
            reference=REFERENCES[name],
            value=value,
            value_roundoff=case.roundoff if name == "after" else case.moment_roundoff,
            # The arithmetic of a step runs in the parameter's type, or in the moments' where that is coarser.
            input_roundoff=max(case.roundoff, case.moment_roundoff),
        )
        for name, value in case.observed.items()
    ]


def _fits_its_own_gradient(case: StepCase) -> bool:
    """Whether weights and second moment are right for the gradient that the first moment says was used.

    A hook of the optimizer may change gradients after they were captured. Only then one gradient explains all three.
    """
    m, beta1 = case.observed.get("exp_avg_after"), case.declared.settings.beta1
    if m is None or "exp_avg_sq_after" not in case.observed or not 0 <= beta1 < 1:
        return False
    gradient = (m - beta1 * case.exp_avg) / (1.0 - beta1)
    known = replace(case.declared, state="exact")
    own = replace(case, gradient=gradient, declared=known)
    # What the division has amplified of the moment's rounding.
    size = np.abs(m) + np.abs(beta1 * case.exp_avg)
    roundoff = max(case.roundoff, case.moment_roundoff)
    slack = roundoff * size / (1.0 - beta1)
    healthy = lawful_specs([case])[0]
    result, shifted = (take_step(each, healthy, None) for each in (own, replace(own, gradient=gradient + slack)))
    for name, exact, moved, u in (
        ("after", result.parameter, shifted.parameter, case.roundoff),
        ("exp_avg_sq_after", result.exp_avg_sq, shifted.exp_avg_sq, case.moment_roundoff),
    ):
        allowed = 8.0 * (np.abs(moved - exact) + u * np.abs(exact) + UNIT_ROUNDOFF["float32"] * np.abs(exact))
        allowed += 8.0 * roundoff * np.abs(result.parameter - case.parameter) if name == "after" else 0.0
        if np.mean(np.abs(case.observed[name] - exact) <= allowed) < 0.999:
            return False
    return True
