"""The ladder: which finding is the first divergence, which ones only follow from it, and one mark a stage.

Rules know nothing of each other. Each declares which rules would explain its finding (``explained_by``); here those
declarations meet what fired.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from .finding import Finding
from .report import ALARMS, FirstDivergence, Mark, Rung
from .stages import STAGES, Stage

#: Tier of a finding that does not compete.
_OUT = 9


def tier(finding: Finding) -> int:
    """0 confirmed critical, 1 likely critical, 2 warning, 3 undetermined; larger where it does not compete."""
    if finding.kind != "divergence" or finding.severity not in ALARMS:
        return _OUT
    if finding.confidence == "undetermined":
        return 3
    if finding.severity == "warning":
        return 2
    return 0 if finding.confidence == "confirmed" else 1


def position(finding: Finding) -> tuple[int, int, int, int]:
    """(step, stage, execution order, rank); what has no step is static and counts as step 0."""
    where = finding.where
    return (
        where.step if where.step is not None else 0,
        STAGES.index(finding.stage),
        where.order if where.order is not None else 0,
        where.rank if where.rank is not None else 0,
    )


def transitive(explained_by: Mapping[str, Iterable[str]]) -> dict[str, frozenset[str]]:
    """Close the declarations: where A is explained by B and B by C, A is explained by C even if B stayed quiet."""
    closed: dict[str, frozenset[str]] = {}
    for start in explained_by:
        reached: set[str] = set()
        pending = list(explained_by[start])
        while pending:
            rule = pending.pop()
            if rule not in reached:
                reached.add(rule)
                pending.extend(explained_by.get(rule, ()))
        closed[start] = frozenset(reached - {start})
    return closed


def attribute(findings: Sequence[Finding], explained_by: Mapping[str, Iterable[str]]) -> tuple[Finding, ...]:
    """Turn each divergence that an earlier finding explains into a consequence.

    An explanation must itself be sure of something: it competes for the ladder (or is a consequence of one that
    does) and is not undetermined. ``caused_by`` names the root, so a chain reads from its start. Two rules that
    explain each other never both disappear: the earlier one stays.

    Args:
        findings: complete findings (rule, stage, kind and severity filled).
        explained_by: rule id → ids of the rules that would explain it.

    Returns:
        The same findings in ladder order.
    """
    ordered = sorted(findings, key=lambda each: (position(each), tier(each), each.rule))
    closed = transitive(explained_by)
    cause: dict[int, int] = {}

    def root(index: int) -> int:
        while index in cause:
            index = cause[index]
        return index

    for index, finding in enumerate(ordered):
        if finding.kind == "hygiene":
            continue
        explaining = [
            other
            for other, candidate in enumerate(ordered)
            if candidate.rule in closed.get(finding.rule, ())
            and tier(candidate) < 3
            and position(candidate)[0] <= position(finding)[0]
            and root(other) != index
        ]
        if explaining:
            cause[index] = min(explaining, key=lambda other: (position(ordered[other]), tier(ordered[other])))

    return tuple(
        msgspec.structs.replace(finding, kind="consequence", caused_by=ordered[root(index)].rule)
        if index in cause
        else finding
        for index, finding in enumerate(ordered)
    )


def first_divergence(findings: Iterable[Finding]) -> FirstDivergence | None:
    """The divergence of the best tier with the smallest (step, stage, order, rank), or None."""
    competing = [each for each in findings if tier(each) < _OUT]
    if not competing:
        return None
    first = min(competing, key=lambda each: (tier(each), position(each), each.rule))
    return FirstDivergence(rule=first.rule, stage=first.stage, where=first.where, summary=first.summary)


def marks(
    findings: Iterable[Finding], quiet: Collection[Stage], failed: Collection[Stage], first: FirstDivergence | None
) -> tuple[Rung, ...]:
    """One mark for each of the eight stages.

    Args:
        findings: findings after ``attribute``.
        quiet: stages of which at least one rule ran and found nothing.
        failed: stages of which at least one rule raised.
        first: the first divergence; its stage shows its rule even where another finding is as loud.
    """
    loudest: dict[Stage, tuple[tuple[int, bool, int, tuple[int, int, int, int]], Mark, str]] = {}
    for finding in findings:
        mark: Mark
        level = tier(finding)
        if level < 3:
            mark, rank = "divergence", 0
        elif level == 3:
            mark, rank = "undetermined", 1
        elif finding.kind == "consequence" and finding.severity in ALARMS:
            mark, rank = "consequence", 2
        else:
            mark, rank = "note", 3
        is_first = first is not None and (finding.rule, finding.where) == (first.rule, first.where)
        key = (rank, not is_first, level, position(finding))
        if finding.stage not in loudest or key < loudest[finding.stage][0]:
            loudest[finding.stage] = (key, mark, finding.rule)

    def rung(stage: Stage) -> Rung:
        if stage in loudest:
            _, mark, rule = loudest[stage]
            return Rung(stage=stage, mark=mark, rule=rule)
        if stage in quiet:
            return Rung(stage=stage, mark="quiet")
        return Rung(stage=stage, mark="error" if stage in failed else "not captured")

    return tuple(rung(stage) for stage in STAGES)
