"""Real training with one thing wrong is named by its first divergence; without it nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmconsole.analyzers.report import CapsuleReport
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule

from tests.training.lab.faults import FAULTS, HONEST
from tests.training.lab.loop import Lab, record


def report_on(lab: Lab, directory: Path) -> CapsuleReport:
    report = analyze(Capsule.open(record(directory, lab)))
    assert not report.errors
    return report


def alarms(report: CapsuleReport) -> dict[str, str]:
    return {each.rule: each.summary for each in report.findings if each.severity in ("critical", "warning")}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_run_raises_no_alarm(name: str, tmp_path: Path):
    assert not alarms(report_on(HONEST[name], tmp_path))


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_divergence_names_the_fault(name: str, tmp_path: Path):
    fault = FAULTS[name]
    report = report_on(fault.lab, tmp_path)
    first = report.first_divergence
    assert first is not None
    assert (first.rule, first.where.step) == (fault.rule, fault.step)
    assert next(each for each in report.findings if each.rule == first.rule).confidence == fault.confidence
    rest = {each.rule: each.caused_by for each in report.findings if each.kind == "consequence"}
    assert set(rest.values()) <= {fault.rule}
