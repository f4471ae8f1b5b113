"""The optimizer step computed again: which arithmetic took it, on which gradient, and whether it should have been."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Confidence, Evidence, Finding, Severity, Where
from ..registry import NotJudged, rule
from ..rounding import UNIT_ROUNDOFF
from .gradient_path import broken_path
from .step_case import taken_steps
from .step_faults import BY_NAME, StepSpec, lawful_specs, take_step
from .step_verdict import Judged, judged_windows

if TYPE_CHECKING:
    from ...capsules import Capsule

#: What each observation is called in words.
WORDS = {"after": "weights", "exp_avg_after": "first moment", "exp_avg_sq_after": "second moment"}


@rule(
    "optimizer/step-mismatch",
    stage="numerics",
    needs=("tensors.optimizer/*/after",),
    explained_by=("optimizer/order", "optimizer/overflow-step-applied"),
)
def step_mismatch(capsule: Capsule) -> Iterator[Finding]:
    """The optimizer step is not the one that was declared.

    What it checks:
        Weights and moments after a captured step against Adam or AdamW computed in FP64 from the weights, the gradient
        and the moments before it; and the gradient that entered the step against the one that backward left.

    Why it matters:
        A wrong optimizer trains, only worse: decay that adaptive scaling distorts, a gradient that is a thousand times
        too small and is hidden by Adam's own scaling, clipping that never or always bites. No curve names it.

    How it decides:
        Counterfactuals: the declared step, then each single fault, then pairs (L2 for decoupled decay and the reverse,
        decay missing or without the learning rate, no bias correction, count one behind or ahead, ε inside the root,
        betas swapped, gradient not unscaled or divided by the new scale, not clipped, clipped twice or before the
        unscaling, the rate of the step before, weights rounded to bfloat16). One fits where the largest error is
        within 8 standard deviations of rounding and the overall one within 2.5 (16-bit types: 5 and 1.5). Confirmed
        where one class of faults fits all weights and moments of a window and chance ≤ 1e-3 (16-bit types: of two
        windows).

    Looks like it but is not:
        Any other optimizer (Lion, Muon, Adafactor, NAdam, 8-bit): not judged. AMSGrad, maximise, a closure: not judged.
        Fused, foreach and capturable arithmetic; several groups with settings of their own; the older forms of Adam
        that other libraries use; a hook of the optimizer that changes gradients; clipping by value; skipped steps.

    What to try next:
        Take one step with torch.optim.AdamW from the captured weights, gradient and moments, and compare. Print class
        and groups of the optimizer that the job really built.

    Fix:
        The finding's own: it follows from the fault that reproduces the step.
    """
    finding = next(broken_path(capsule, taken_steps(capsule)), None)
    if finding is not None:
        yield finding
        return
    judged = judged_windows(capsule)
    wrong = [each for each in judged if each.verdict.status != "healthy" and not each.hooked]
    if not wrong:
        if all(each.hooked for each in judged):
            raise NotJudged("the gradient was changed between its capture and the step: hooks of the optimizer")
        return
    for status in ("confirmed", "likely", "undetermined"):
        for each in wrong:
            if each.verdict.status == status:
                yield _finding(each, _seen_once(each, wrong))
                return


def _seen_once(judged: Judged, wrong: list[Judged]) -> bool:
    """Whether a fault of 16-bit weights shows in one window only: their rounding hides too much to confirm by one."""
    if all(case.roundoff < UNIT_ROUNDOFF["float16"] for case in judged.cases):
        return False
    return sum(each.verdict.classes == judged.verdict.classes for each in wrong) < 2


def _finding(judged: Judged, seen_once: bool) -> Finding:
    verdict, case = judged.verdict, judged.cases[0]
    healthy = lawful_specs(list(judged.cases))[0]
    where = Where(step=judged.step, rank=judged.rank, tensor=case.names[0])
    common = (
        Evidence(name="optimizer", value=case.optimizer or "not recorded", note=f"parameters in {case.dtype}"),
        Evidence(name="parameters", value=sorted({name for each in judged.cases for name in each.names})),
    )
    if verdict.status == "undetermined":
        several = [" or ".join(" + ".join(names) for names in members) for members in verdict.classes if members[0]]
        text = "several faults reproduce it equally well" if several else "no named fault reproduces it"
        return Finding(
            severity="warning",
            confidence="undetermined",
            title="The optimizer step is not the declared one",
            summary=f"Step {judged.step}: weights or moments after the step are off the declared step, and {text}.",
            where=where,
            evidence=(
                *_errors(judged, healthy, None),
                *common,
                *([Evidence(name="fits", value=several)] * bool(several)),
            ),
            next=(
                "capture the step after another one: some faults look alike in a single step",
                "compare with torch.optim.AdamW from the captured state",
            ),
            fix=("look at what the optimizer's class does beside Adam (projection, noise, its own decay)",),
            counterfactual=verdict.table,
        )
    members = [[BY_NAME[name] for name in names] for names in verdict.classes[0]]
    spec = healthy
    for fault in members[0]:
        spec = fault.fault.edit(spec)
    cause = " or ".join(dict.fromkeys("; and ".join(each.cause for each in names) for names in members))
    label = " or ".join(" + ".join(each.fault.name for each in names) for names in members)
    confidence: Confidence = "confirmed" if verdict.status == "confirmed" and not seen_once else "likely"
    severity: Severity | None = None if confidence == "confirmed" else "warning"
    verb = "is reproduced by" if confidence == "confirmed" else "is consistent with"
    return Finding(
        severity=severity,
        confidence=confidence,
        title=(cause if len(cause) <= 110 else label)[0].upper() + (cause if len(cause) <= 110 else label)[1:],
        summary=f"The optimizer step of window {judged.step} {verb} {label}, not by the declared step.",
        where=where,
        evidence=(*_errors(judged, healthy, spec), *common, *_more(verdict)),
        cause=cause,
        next=(*verdict.reasons, *(["capture a second step: 16-bit weights need two that agree"] if seen_once else [])),
        fix=tuple(dict.fromkeys(each.fix for names in members for each in names)),
        counterfactual=verdict.table,
    )


def _errors(judged: Judged, healthy: StepSpec, fault: StepSpec | None) -> tuple[Evidence, ...]:
    """For weights and moments: size of the change that the job made, and how far each computation is from it."""
    rows: list[Evidence] = []
    fields = {"after": "parameter", "exp_avg_after": "exp_avg", "exp_avg_sq_after": "exp_avg_sq"}
    for name, field in fields.items():
        cases = [case for case in judged.cases if name in case.observed]
        if not cases:
            continue

        def collect(spec: StepSpec | None, name: str = name, field: str = field, cases: list = cases) -> np.ndarray:  # type: ignore[type-arg]
            parts = [
                (case.observed[name] if spec is None else getattr(take_step(case, spec, None), field))
                - getattr(case, field)
                for case in cases
            ]
            return np.concatenate(parts)

        seen, declared = collect(None), collect(healthy)
        rows.append(
            Evidence(
                name=f"change of the {WORDS[name]}",
                value=_rms(seen),
                expected=_rms(declared),
                unit="rms",
                note=f"the declared step misses it by {_rms(declared - seen):.3g}"
                + (f", the named fault by {_rms(collect(fault) - seen):.3g}" if fault is not None else ""),
            )
        )
    return tuple(rows)


def _rms(values: np.ndarray) -> float:  # type: ignore[type-arg]
    return float(np.sqrt(np.mean(np.square(values))))


def _more(verdict: object) -> tuple[Evidence, ...]:
    from ..fault import Verdict

    assert isinstance(verdict, Verdict)
    rows = [Evidence(name="matches_by_chance", value=verdict.chance, expected=1e-3, note="expected number of faults")]
    if verdict.runner_up is not None:
        name = " + ".join(verdict.runner_up.faults) or "as declared"
        rows.append(Evidence(name="runner_up", value=name, note=f"off by {verdict.runner_up.off_by:.3g} (rms)"))
    if verdict.inert:
        note = "these change nothing in this step: not testable here"
        rows.append(Evidence(name="not_testable", value=list(verdict.inert), note=note))
    return tuple(rows)
