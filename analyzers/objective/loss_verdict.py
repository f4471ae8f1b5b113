"""Which computation gave the reported loss: one counterfactual run a capsule, and the finding that names a fault."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from ..counterfactual import explain
from ..fault import Observation, Verdict
from ..finding import Confidence, Evidence, Finding, Severity, Where
from ..registry import NotJudged
from ..rounding import scalar_tolerance
from .gradients import divided_afterwards
from .loss_faults import (
    BY_NAME,
    CATALOGUE,
    HARMLESS,
    LAWFUL_CHOICES,
    LossSpec,
    NamedFault,
    lawful_specs,
    reported_loss,
)
from .loss_windows import Observed, observed_windows
from .thresholds import SMALL

if TYPE_CHECKING:
    from ...capsules import Capsule

#: What the counterfactuals compute from.
NEEDS = (
    "batches.input_ids",
    "batches.logits|batches.target_logits",
    "batches.reported_loss|scalars.loss",
)
#: Reductions a manifest may declare.
REDUCTIONS = ("token-mean", "sequence-mean", "sum")
#: What a batch must be for its loss to be computed again.
COMPARABLE = (
    "a batch whose labels are its own tokens (unshifted, or shifted by one; none at all where training.objective is "
    "causal-lm), with a finite loss and its logits"
)
#: Faults that a loop which divides its gradients instead of its loss would show without having them; and those of
#: them that are not confirmed before the gradients were seen.
UNDIVIDED = frozenset({"accumulation-not-divided", "times-accumulation", "sum"})
NEEDS_GRADIENTS = frozenset({"accumulation-not-divided", "times-accumulation"})
#: Settings that add to the loss or change the logits after they were captured: then a number that is no plain
#: cross-entropy is no surprise.
_EXTRA = re.compile(
    r"label_smoothing|z_loss|aux_loss|router_.*coef|load_balanc|soft_?cap|focal|class_weight|mtp|distill", re.IGNORECASE
)

_Run = tuple[Verdict, tuple[Observed, ...]] | None
_runs: WeakKeyDictionary[Capsule, _Run] = WeakKeyDictionary()


def loss_verdict(capsule: Capsule) -> _Run:
    """The verdict over all windows that can be computed again, and those windows; None where there is none.

    Computed once a capsule: the rules below share it.
    """
    if capsule not in _runs:
        _runs[capsule] = explain_windows(capsule, observed_windows(capsule))
    return _runs[capsule]


def explain_windows(capsule: Capsule, windows: list[Observed], catalogue: Sequence[NamedFault] = CATALOGUE) -> _Run:
    """The verdict on ``windows`` under ``catalogue``; None where not even the declared loss can be computed."""
    reduction = declared_reduction(capsule)
    observed = [
        each
        for each in windows
        if np.isfinite(reported_loss(each.window, LossSpec(reduction=reduction or "token-mean"), None, None))
    ]
    if not observed:
        return None
    verdict = explain(
        [
            Observation(
                name=f"loss of step {each.window.step} on rank {each.window.rank}",
                case=each.window,
                reference=reported_loss,
                value=each.value,
                decimals=each.decimals,
                value_roundoff=each.value_roundoff,
                input_roundoff=each.input_roundoff,
            )
            for each in observed
        ],
        lawful_specs(reduction, observed[0].window),
        [each.fault for each in catalogue],
    )
    return verdict, tuple(observed)


def declared_reduction(capsule: Capsule) -> str | None:
    """The reduction of the manifest, None where absent or unknown."""
    training = capsule.manifest.training
    reduction = training.reduction if training is not None else None
    return reduction if reduction in REDUCTIONS else None


def declared_extras(capsule: Capsule) -> tuple[str, ...]:
    """Settings of the resolved configuration that change the loss beyond cross-entropy, as ``key = value``."""
    found: list[str] = []

    def walk(value: Any, depth: int) -> None:
        if isinstance(value, Mapping) and depth < 6:
            for key, inner in value.items():
                number = isinstance(inner, int | float) and not isinstance(inner, bool)
                if number and inner != 0 and _EXTRA.search(str(key)):
                    found.append(f"{key} = {inner:g}")
                walk(inner, depth + 1)

    walk(capsule.manifest.config, 0)
    return tuple(found)


def named_by(capsule: Capsule, rule_id: str) -> Iterator[Finding]:
    """The finding of ``rule_id``, where the verdict names one of its faults and no earlier rule speaks for the set.

    Raises:
        NotJudged: no captured batch can be computed again.
    """
    yield from finding_of(capsule, rule_id, judged(capsule))


def judged(capsule: Capsule) -> tuple[Verdict, tuple[Observed, ...]]:
    """The verdict of ``loss_verdict``.

    Raises:
        NotJudged: there is none, though the evidence is there.
    """
    run = loss_verdict(capsule)
    if run is None:
        raise NotJudged(COMPARABLE)
    return run


def finding_of(capsule: Capsule, rule_id: str, run: _Run) -> Iterator[Finding]:
    """The finding of ``run`` where it names a fault and ``rule_id`` speaks for it; a set of faults speaks once."""
    if run is None or run[0].status not in ("confirmed", "likely"):
        return
    verdict, observed = run
    members = [[BY_NAME[name] for name in member] for member in verdict.classes[0]]
    involved = sorted({each.fault.name: each for member in members for each in member}.values(), key=CATALOGUE.index)
    harmless = any(all(each.fault.name in HARMLESS for each in member) for member in members)
    if ("objective/reduction" if harmless else involved[0].rule) != rule_id:
        return
    confidence: Confidence = verdict.status if verdict.status == "confirmed" else "likely"
    severity: Severity | None = None
    following = list(verdict.reasons)
    if len({tuple(each.rule for each in member) for member in members}) > 1:
        confidence = "likely"
        following.append(
            "these faults give the same number here: vary accumulation, world size or batch shape to part them"
        )
    names = {each.fault.name for each in involved}
    divided = None
    if names <= UNDIVIDED:
        divided = divided_afterwards(capsule, {each.window.step for each in observed})
        if divided:
            return  # the gradients were divided instead of the loss: the step is right, and its number is a sum
        if divided is None and names <= NEEDS_GRADIENTS:
            confidence = "likely"
            following.append("capture gradient norms of every micro-batch: the gradients may be divided afterwards")
    if any(each.assumed for window in observed for each in window.window.micros):
        following.append("capture the labels, which the model made itself: every token was taken for one")
        if not all(any(each.fault.knob == "shift" for each in member) for member in members):
            confidence, severity = "likely", "info"  # which tokens were meant to count is not on record
    reduction_alone = any(all(each.rule == "objective/reduction" for each in member) for member in members)
    if declared_reduction(capsule) is None and reduction_alone:
        # Nobody said which reduction is meant, so none can be wrong for sure; some are an ordinary choice. A fault of
        # another kind beside it stays what it is.
        confidence = "likely"
        small = abs(verdict.table.observed - verdict.table.healthy) <= SMALL * abs(verdict.table.healthy)
        severity = "info" if small or names <= LAWFUL_CHOICES else "warning"
        following.append("declare the reduction that is meant (manifest training.reduction)")
    elif verdict.status != "confirmed":
        following.append("capture the loss of a second step at full precision, or at four decimals and more")
    if harmless:
        severity = "info"
    table = verdict.table
    chosen = table.candidates[0]
    label = " or ".join(" and ".join(each.fault.name for each in member) for member in members)
    verb = "is reproduced by" if confidence == "confirmed" else "is consistent with"
    yield Finding(
        title=_title(members),
        summary=(
            f"The reported loss {table.observed:.7g}{_at(observed, table.observed)} {verb} {label} "
            f"({chosen.value:.7g}, tolerance {table.tolerance:.2g}); computed as declared it is {table.healthy:.7g}."
        ),
        severity=severity,
        confidence=confidence,
        where=Where(step=0),
        evidence=(*evidence_rows(capsule, verdict, observed), *_witness(divided)),
        cause=_cause(members),
        next=tuple(following),
        fix=tuple(dict.fromkeys(each.fix for each in involved)),
        counterfactual=table,
    )


def _at(observed: tuple[Observed, ...], value: float) -> str:
    """Where the number stands that the table shows: the finding itself is static and counts from step 0."""
    steps = [each.window.step for each in observed if each.value == value]
    return f" of step {steps[0]:,}" if steps else ""


def _witness(divided: bool | None) -> tuple[Evidence, ...]:
    """That the gradients were looked at, where they decided something."""
    if divided is None:
        return ()
    note = "they grew up to the optimizer step: nothing divided them after the last backward"
    return (Evidence(name="gradients_divided", value=divided, note=note),)


def _cause(members: list[list[NamedFault]]) -> str:
    """What all sets of faults share, then what they differ in."""
    common = [each for each in members[0] if all(each in member for member in members)]
    rest = [[each.cause for each in member if each not in common] for member in members]
    parts = [each.cause for each in common]
    if any(rest):
        parts.append(" or ".join(dict.fromkeys(" and ".join(causes) for causes in rest)))
    return "; and ".join(parts)


def _title(members: list[list[NamedFault]]) -> str:
    """The whole cause where it is short, else the first fault of it."""
    text = _cause(members)
    text = text if len(text) <= 120 else members[0][0].cause.partition(":")[0]
    return text[0].upper() + text[1:]


def boundaries_asked_for(capsule: Capsule) -> Iterator[Finding]:
    """A remark where a healthy number holds the first tokens of packed documents, and the labels ask for them."""
    verdict, observed = judged(capsule)
    first = observed[0]
    windows = [each.window for each in observed]
    asked = sum(int((m.boundary & m.supervised).sum()) for w in windows for m in w.micros if m.boundary is not None)
    if verdict.status != "healthy" or not asked:
        return

    def misses(inside: bool) -> list[float]:
        """Distance of the nearest lawful reading from each number, in roundings of it."""
        specs = [
            spec
            for spec in lawful_specs(declared_reduction(capsule), first.window)
            if (spec.positions == "inside-documents") == inside or spec.scope != "own"
        ]
        specs = [replace(spec, positions="inside-documents" if inside else "supervised") for spec in specs]
        return [
            min(abs(each.value - reported_loss(each.window, spec, None, None)) for spec in specs)
            / scalar_tolerance(each.value, 0.0, each.value_roundoff, each.decimals)
            for each in observed
        ]

    if max(misses(inside=True)) < 3 * max(1.0, max(misses(inside=False))):
        return
    inside = reported_loss(
        first.window,
        replace(LossSpec(reduction=declared_reduction(capsule) or "token-mean"), positions="inside-documents"),
        None,
        None,
    )
    yield Finding(
        title="The loss crosses the boundaries of packed documents",
        summary=(
            f"The labels ask for the first token of {asked:,} packed documents, scored on the document before; the "
            f"reported loss {first.value:.7g} holds them, without them it is {inside:.7g}."
        ),
        severity="info",
        confidence="likely",
        where=Where(step=0),
        evidence=(
            Evidence(name="reported_loss", value=first.value, expected=inside, unit="nats/token", note="inside only"),
            Evidence(name="boundary_tokens", value=asked, expected=0, unit="tokens", note="asked for by the labels"),
        ),
        cause="the labels of first tokens are not masked",
        next=(
            "decide whether it is meant: end-of-text and the next document's start are noise, though often harmless",
        ),
        fix=("set the label of each document's first token to the ignore index",),
    )


def evidence_rows(capsule: Capsule, verdict: Verdict, observed: tuple[Observed, ...]) -> tuple[Evidence, ...]:
    """The numbers a verdict rests on."""
    table = verdict.table
    unit = "nats/token"
    note = "full precision" if observed[0].decimals is None else f"{observed[0].decimals} printed decimals"
    rows = [
        Evidence(name="reported_loss", value=table.observed, expected=table.healthy, unit=unit, note=note),
        Evidence(name="tolerance", value=table.tolerance, unit=unit, note="rounding of print, inputs and loss"),
        Evidence(name="matches_by_chance", value=verdict.chance, expected=1e-3, note="expected number of candidates"),
        Evidence(name="steps", value=sorted({each.window.step for each in observed}), note="windows computed again"),
    ]
    if table.candidates and table.candidates[0].fits:
        first = table.candidates[0]
        rows.insert(1, Evidence(name=" + ".join(first.faults), value=first.value, expected=table.observed, unit=unit))
    if verdict.runner_up is not None:
        name = " + ".join(verdict.runner_up.faults) or "as declared"
        rows.append(Evidence(name="runner_up", value=verdict.runner_up.value, unit=unit, note=name))
    if verdict.inert:
        note = "these change nothing on this input: not testable here"
        rows.append(Evidence(name="not_testable", value=list(verdict.inert), note=note))
    reduction = declared_reduction(capsule)
    note = "" if reduction else "not declared: the token mean is assumed"
    rows.append(Evidence(name="reduction", value=reduction, note=note))
    return tuple(rows)
