"""The report that ``analyze --json`` prints: ``llmconsole.report/1`` as types.

Field names and order are a contract with other people's scripts.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from .finding import Finding, Severity, Where
from .stages import Stage

FORMAT = "llmconsole.report/1"

#: What a rung of the ladder says, from loudest to quietest. ``quiet`` means that rules ran and found nothing;
#: ``not captured`` that no rule of the stage had its evidence; ``error`` that none of those that had it finished.
Mark = Literal["divergence", "undetermined", "consequence", "note", "error", "quiet", "not captured"]

#: What stands for a rule in an error of the importer: a raw file that could not be read whole.
IMPORT = "import"
#: The rule that tells how a job ended: its remark belongs beside the news that nothing was found.
END = "runtime/job-failed"
#: Severities that make ``analyze`` exit with status 1.
ALARMS: frozenset[Severity | None] = frozenset({"critical", "warning"})


class CapsuleName(msgspec.Struct, frozen=True, kw_only=True):
    """Which capsule a report is about."""

    id: str
    title: str
    path: str


class FirstDivergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first place where the job left the expected path."""

    rule: str
    stage: Stage
    where: Where
    summary: str


class Rung(msgspec.Struct, frozen=True, kw_only=True):
    """One of the eight stages with its mark, and the rule that set the mark where a finding did."""

    stage: Stage
    mark: Mark
    rule: str | None = None


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that could not run, and the names of the evidence it lacks."""

    rule: str
    missing: tuple[str, ...]


class RuleError(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that raised, in one line. The others ran."""

    rule: str
    error: str


class CapsuleReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the rules say about one capsule."""

    capsule: CapsuleName
    first_divergence: FirstDivergence | None
    findings: tuple[Finding, ...]
    ladder: tuple[Rung, ...]
    quiet: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    errors: tuple[RuleError, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one call of ``analyze`` prints."""

    format: str = FORMAT
    reports: tuple[CapsuleReport, ...] = ()


def judged(report: CapsuleReport) -> bool:
    """Whether any rule that looks beyond the capsule itself came to an answer."""
    return any(each.stage != "capture" and each.mark not in ("not captured", "error") for each in report.ladder)


def lacking(report: CapsuleReport) -> list[tuple[str, int]]:
    """What the skipped rules lack, each with the number of rules, the most wanted first.

    Where a rule had an answer, names of evidence, which can be captured, come before sentences, of which some say that
    a rule does not apply. Where none had, the sentences come first: they are of rules that had evidence of the kind
    that was given, and tell what is wrong with it. Those of rules about the capsule itself come last.
    """
    needs = Counter(need for each in report.skipped for need in each.missing)
    if judged(report):
        return sorted(needs.items(), key=lambda each: (-each[1], " " in each[0]))
    own = {need for each in report.skipped if not each.rule.startswith("capsule/") for need in each.missing}
    return sorted(needs.items(), key=lambda each: (each[0] not in own, " " not in each[0], -each[1]))


def unjudged(report: CapsuleReport) -> str:
    """That nothing was said of the job, and what it would take; empty where a rule had an answer or none was asked."""
    if judged(report) or all(each.rule.startswith("capsule/") for each in report.skipped):
        return ""
    need, _ = next(iter(lacking(report)), ("", 0))
    if " " in need:
        return f"Nothing could be judged; wanted: {need}"
    return "" if report.errors else "Nothing could be judged: no rule had the evidence it needs"


def exit_status(report: Report | CapsuleReport) -> int:
    """1 where any finding is a warning or worse, else 0; an error inside a rule does not change it."""
    reports = report.reports if isinstance(report, Report) else (report,)
    return int(any(finding.severity in ALARMS for each in reports for finding in each.findings))
