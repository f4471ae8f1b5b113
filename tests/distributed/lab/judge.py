"""What a report says about a job with a fault, beside what it is to say."""

from __future__ import annotations

import inspect
from pathlib import Path

import msgspec
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.report import ALARMS, CapsuleReport
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule

from .faults import Fault


def report_on(capsule: Path) -> CapsuleReport:
    """Every rule's say on a capsule; none may fail."""
    report = analyze(Capsule.open(capsule))
    assert not report.errors
    return report


def first_finding(report: CapsuleReport) -> Finding:
    """The finding that is the first divergence."""
    first = report.first_divergence
    assert first is not None, [each.summary for each in report.findings]
    return next(each for each in report.findings if (each.rule, each.where) == (first.rule, first.where))


def alarms(report: CapsuleReport) -> dict[str, str]:
    """Whatever is loud, by rule."""
    return {each.rule: each.summary for each in report.findings if each.severity in ALARMS}


def unexplained(report: CapsuleReport, rule: str) -> dict[str, str]:
    """Whatever is loud beside a rule and does not follow from it."""
    rest = [each for each in report.findings if each.rule != rule and each.caused_by != rule]
    return {each.rule: each.summary for each in rest if each.severity in ALARMS and each.kind != "hygiene"}


def site(fault: Fault) -> str:
    """file:line that is to be named; nothing where the fault has no line of its own."""
    lines, first = inspect.getsourcelines(fault.run)
    found = [first + at for at, line in enumerate(lines) if line.rstrip().endswith("# here")]
    return f"faults.py:{found[0]} " if found else ""


def names_site(finding: Finding, fault: Fault) -> bool:
    """Whether a finding names the fault's line (and not one of which the number begins alike)."""
    return site(fault) in msgspec.json.encode(finding).decode().replace(")", " )").replace('"', ' "')
