"""The report that ``analyze --json`` prints: ``llmconsole.report/1`` as types.

Field names and order are a contract with other people's scripts.
"""

from __future__ import annotations

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


def exit_status(report: Report | CapsuleReport) -> int:
    """1 where any finding is a warning or worse, else 0; an error inside a rule does not change it."""
    reports = report.reports if isinstance(report, Report) else (report,)
    return int(any(finding.severity in ALARMS for each in reports for finding in each.findings))
