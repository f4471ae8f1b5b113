"""Run the rules on one capsule, each by itself: what is absent is skipped, what raises is a row, the rest goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from . import ladder
from .finding import Finding, Kind, Severity
from .registry import NotCaptured, NotJudged, Rule, all_rules, plugin_warnings
from .report import CapsuleName, CapsuleReport, RuleError, Skipped
from .stages import Stage

if TYPE_CHECKING:
    from ..capsules import Capsule

#: Findings kept of one rule; a rule that says more is cut there and the report says so.
MAX_FINDINGS_PER_RULE = 32

_SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
_KINDS: tuple[Kind, ...] = ("hygiene", "consequence", "divergence")


def analyze(capsule: Capsule, rules: Sequence[Rule] | None = None) -> CapsuleReport:
    """Run ``rules`` on ``capsule`` and rank what they say. Never raises.

    Args:
        capsule: an open capsule; it is not changed.
        rules: the rules to run; every registered one where None.
    """
    findings: list[Finding] = []
    skipped: list[Skipped] = []
    errors: list[RuleError] = []
    silent: list[Rule] = []
    failed: set[Stage] = set()
    unjudged: set[Stage] = set()  # silence of the other rules of such a stage is no health

    import numpy as np

    if rules is None:
        rules = all_rules()
        errors.extend(RuleError(rule="plug-in", error=_line(warning)) for warning in plugin_warnings())
    for rule in rules:
        try:
            missing = tuple(need for need in rule.needs if not capsule.has(need))
            if missing:
                skipped.append(Skipped(rule=rule.id, missing=missing))
                continue
            before = len(findings)
            # Evidence of a broken job overflows and is not a number: rules look at values, not at NumPy's warnings.
            with np.errstate(all="ignore"):
                complete = _collect(rule, capsule, findings)
            if not complete:
                cut = f"more than {MAX_FINDINGS_PER_RULE} findings: the first {MAX_FINDINGS_PER_RULE} are shown"
                errors.append(RuleError(rule=rule.id, error=cut))
        except NotJudged as reason:
            skipped.append(Skipped(rule=rule.id, missing=(_line(str(reason)),)))
            if not isinstance(reason, NotCaptured):
                unjudged.add(rule.stage)
            continue
        except Exception as error:  # a rule's fault must not silence the others
            errors.append(RuleError(rule=rule.id, error=_line(f"{type(error).__name__}: {error}")))
            failed.add(rule.stage)
            continue
        if len(findings) == before:
            silent.append(rule)

    ranked = ladder.attribute(findings, {rule.id: rule.explained_by for rule in rules})
    first = ladder.first_divergence(ranked)
    heard: set[Stage] = {rule.stage for rule in silent}
    return CapsuleReport(
        capsule=CapsuleName(id=str(capsule.id), title=str(capsule.title), path=str(capsule.path)),
        first_divergence=first,
        findings=ranked,
        ladder=ladder.marks(ranked, heard - unjudged, failed, first),
        quiet=tuple(rule.id for rule in silent),
        skipped=tuple(skipped),
        errors=tuple(errors),
    )


def _collect(rule: Rule, capsule: Capsule, findings: list[Finding]) -> bool:
    """Append what a rule says, one by one: what was said before it raised stays said. False where it was cut."""
    for said, finding in enumerate(rule.function(capsule)):
        if said == MAX_FINDINGS_PER_RULE:
            return False
        findings.append(_complete(finding, rule))
    return True


def _complete(finding: Finding, rule: Rule) -> Finding:
    """Fill what the declaration says; a finding may be milder than its rule, never louder."""
    severity = finding.severity or rule.severity
    kind = finding.kind or rule.kind
    return msgspec.structs.replace(
        finding,
        rule=rule.id,
        stage=rule.stage,
        severity=min(severity, rule.severity, key=_SEVERITIES.index),
        kind=min(kind, rule.kind, key=_KINDS.index),
        cause=None if finding.confidence == "undetermined" else finding.cause,
        cases=finding.cases or rule.cases,
        caused_by=None,
    )


def _line(text: str, limit: int = 400) -> str:
    """The text on one line, cut to ``limit`` characters."""
    joined = " ".join(text.split())
    return joined if len(joined) <= limit else joined[: limit - 1] + "…"
