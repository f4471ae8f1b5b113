"""Low-rank adapters: is the output base + scaling · B · A, once?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...capsules.errors import EvidenceError
from ..counterfactual import explain
from ..fault import Array, Fault, Observation, Value, Verdict
from ..finding import Evidence, Finding, Where
from ..reference.adapter import adapted, delta
from ..registry import NotJudged, rule
from ..rounding import UNIT_ROUNDOFF, Noise
from . import thresholds as T
from .step_case import number

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Rows (tokens) of the output that are computed again.
MOST_ROWS = 64
_MEMBERS = ("input", "base_output", "a", "b", "output")


@dataclass(frozen=True)
class AdapterSpec:
    """How the adapter enters the output; the defaults are right.

    Attributes:
        times: how often it is added.
        scaling: declared, none (1), squared, alpha (not divided by the rank).
    """

    times: float = 1.0
    scaling: str = "declared"


@dataclass(frozen=True, eq=False)
class AdapterCase:
    """A layer's adapter: inputs [N, in], base_output [N, out], a [r, in], b [out, r]."""

    inputs: Array
    base_output: Array
    a: Array
    b: Array
    scaling: float


@dataclass(frozen=True)
class NamedFault:
    """A fault with its words."""

    fault: Fault
    cause: str
    fix: str


def layer_output(case: Any, spec: Any, noise: Noise | None, rows: Any) -> Value:
    """Output [N, out] of the adapted layer under a specification."""
    inputs, base, a, b = case.inputs, case.base_output, case.a, case.b
    if noise is not None:
        inputs, base, a, b = noise(inputs, "input"), noise(base, "base"), noise(a, "a"), noise(b, "b")
    if rows is not None:
        inputs, base = inputs[rows], base[rows]
    scaling = {"none": 1.0, "squared": case.scaling**2, "alpha": case.scaling * len(case.a)}.get(
        spec.scaling, case.scaling
    )
    return adapted(base, inputs, a, b, scaling, spec.times)


def _edit(**change: Any) -> Callable[[AdapterSpec], AdapterSpec]:
    return lambda spec: replace(spec, **change)


CATALOGUE = (
    NamedFault(
        Fault("merged-twice", "times", _edit(times=2.0)),
        "the adapter is applied twice: merged into the weights and added again",
        "merge once, and unload the adapter that was merged",
    ),
    NamedFault(
        Fault("not-applied", "times", _edit(times=0.0)),
        "the adapter is not applied: the output is that of the base",
        "load, enable or merge the adapter",
    ),
    NamedFault(
        Fault("subtracted", "times", _edit(times=-1.0)),
        "the adapter is subtracted: it was unmerged from weights that it was not in",
        "unmerge only what was merged",
    ),
    NamedFault(
        Fault("scaling-missing", "scaling", _edit(scaling="none")),
        "the adapter is added without its scaling",
        "multiply by alpha / rank",
    ),
    NamedFault(
        Fault("scaling-twice", "scaling", _edit(scaling="squared")),
        "the scaling is applied twice",
        "scale either when merging or when saving, not both",
    ),
    NamedFault(
        Fault("alpha-not-divided", "scaling", _edit(scaling="alpha")),
        "alpha is not divided by the rank",
        "scale by alpha / rank",
    ),
)
BY_NAME = {each.fault.name: each for each in CATALOGUE}


@rule(
    "optimizer/adapter-merged-twice",
    stage="numerics",
    needs=("tensors.adapter/*/output",),
    cases=("good-training-poor-inference",),
)
def adapter_merged_twice(capsule: Capsule) -> Iterator[Finding]:
    """An adapter is not applied exactly once.

    What it checks:
        The output of an adapted layer against base + scaling · B · A · x in FP64, from captured input, base output and
        adapter matrices.

    Why it matters:
        Merging an adapter and then loading it again doubles it; a merge that did not happen leaves the base model. Both
        answer fluently and wrongly.

    How it decides:
        Counterfactuals: once, twice, not at all, subtracted, without its scaling, with it squared, with alpha not
        divided by the rank. Confirmed where one of them alone reproduces every row to the dtype's rounding.

    Looks like it but is not:
        An adapter whose B matrix is zero (nothing to tell; optimizer/gradient-chain-cut looks at it); one so small that
        rounding hides it; two adapters at once, which are not judged.

    What to try next:
        Compare the merged weight with base + scaling · B · A, and the loaded adapters with what is merged already.

    Fix:
        The finding's own: it follows from what reproduces the output.
    """
    judged = [(name, step, run) for name, step, run in _verdicts(capsule) if run is not None]
    if not judged:
        raise NotJudged("input, base_output, a, b and output of an adapter that is not zero, with its scaling")
    for name, step, verdict in judged:
        if verdict.status == "healthy":
            continue
        if verdict.status == "undetermined":
            several = [" + ".join(each) for members in verdict.classes for each in members]
            yield Finding(
                severity="warning",
                confidence="undetermined",
                title="An adapted layer's output is not base + adapter",
                summary=f"{name}: the output is off base + scaling · B · A, and no single named fault reproduces it.",
                where=Where(step=step, tensor=name),
                evidence=(Evidence(name="fits", value=several, expected=["as declared"]),),
                next=("capture the output with one adapter active", "compare the merged weight with base + s·B·A"),
                fix=("look for a second adapter, dropout in the adapter, or another base",),
                counterfactual=verdict.table,
            )
            return
        faults = [BY_NAME[each] for members in verdict.classes[0] for each in members]
        label = " or ".join(" + ".join(each) for each in verdict.classes[0])
        certain = verdict.status == "confirmed"
        cause = " or ".join(dict.fromkeys(each.cause for each in faults))
        yield Finding(
            severity=None if certain else "warning",
            confidence="confirmed" if certain else "likely",
            title=faults[0].cause[0].upper() + faults[0].cause[1:],
            summary=f"The output of {name} {'is reproduced by' if certain else 'is consistent with'} {label}.",
            where=Where(step=step, tensor=name),
            evidence=(
                Evidence(
                    name="output",
                    value=verdict.table.observed,
                    expected=verdict.table.healthy,
                    unit="rms",
                    note=f"{label} gives {verdict.table.candidates[0].value:.6g}",
                ),
                Evidence(name="layers judged", value=len(judged)),
                Evidence(name="matches_by_chance", value=verdict.chance, expected=1e-3),
            ),
            cause=cause,
            next=verdict.reasons,
            fix=tuple(dict.fromkeys(each.fix for each in faults)),
            counterfactual=verdict.table,
        )
        return


def _verdicts(capsule: Capsule) -> Iterator[tuple[str, int, Verdict | None]]:
    members: dict[tuple[int, int, str], dict[str, Any]] = defaultdict(dict)
    for tensor in capsule.tensors("adapter/*"):
        name, _, member = tensor.name.partition("/")[2].rpartition("/")
        if name and member in _MEMBERS:
            members[tensor.step, tensor.rank, name].setdefault(member, tensor)
    for (step, _, name), tensors in sorted(members.items())[:32]:
        yield name, step, _judge(tensors)


def _judge(tensors: dict[str, Any]) -> Verdict | None:
    """The verdict on one layer; None where it cannot be computed again or the adapter is too small to be told."""
    if set(_MEMBERS) - set(tensors):
        return None
    try:
        arrays = {member: np.asarray(tensor.array(), np.float64) for member, tensor in tensors.items()}
    except (EvidenceError, ValueError, TypeError):
        return None
    scaling = next((s for each in tensors.values() if (s := number(each.attributes, "scaling")) is not None), None)
    inputs, base, a, b, output = (arrays[member] for member in _MEMBERS)
    if scaling is None or a.ndim != 2 or b.ndim != 2 or not inputs.ndim or not base.ndim or base.shape != output.shape:
        return None
    inputs, base, output = (each.reshape(-1, each.shape[-1]) for each in (inputs, base, output))
    if inputs.shape[1] != a.shape[1] or a.shape[0] != b.shape[1] or b.shape[0] != base.shape[1]:
        return None
    if len(inputs) != len(base) or not len(inputs) or not all(np.isfinite(each).all() for each in arrays.values()):
        return None
    chosen = np.unique(np.linspace(0, len(inputs) - 1, min(len(inputs), MOST_ROWS)).astype(int))
    roundoff = max(UNIT_ROUNDOFF.get(tensor.dtype, UNIT_ROUNDOFF["float32"]) for tensor in tensors.values())
    roundoff = max(roundoff, UNIT_ROUNDOFF["float32"])
    part = delta(inputs[chosen], a, b, scaling)
    size = math.sqrt(float(np.mean(np.square(output[chosen]))))
    if not np.any(part) or math.sqrt(float(np.mean(np.square(part)))) <= max(T.ADAPTER_SHARE, 4 * roundoff) * size:
        return None
    case = AdapterCase(inputs[chosen], base[chosen], a, b, scaling)
    observation = Observation(
        name="output",
        case=case,
        reference=layer_output,
        value=output[chosen],
        value_roundoff=roundoff,
        input_roundoff=roundoff,
    )
    return explain([observation], [AdapterSpec()], [each.fault for each in CATALOGUE])
