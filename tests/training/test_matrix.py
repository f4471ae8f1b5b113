"""Real training with one thing wrong is named by its first divergence; without it nothing is.

One seed of each run; ``python -m benchmarks training`` prints all seeds in float32 and bfloat16.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from llmconsole.analyzers.report import ALARMS, CapsuleReport
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule

from tests.training.lab.faults import FAULTS, HONEST
from tests.training.lab.loop import Lab, record


def report_on(lab: Lab, directory: Path) -> CapsuleReport:
    report = analyze(Capsule.open(record(directory, lab)))
    assert not report.errors
    return report


@pytest.mark.quiet(
    "data/bos-count", "data/duplicate-batch", "data/packing-contamination", "data/poison-sample",
    "numerics/learning-rate", "objective/all-masked", "objective/labels-not-shifted",
    "objective/labels-shifted-twice", "objective/pad-in-loss", "objective/prompt-in-loss", "objective/reduction",
    "optimizer/decay-on-norm-or-bias", "optimizer/frozen-not-frozen", "optimizer/gradient-chain-cut",
    "optimizer/no-master-weights", "optimizer/not-owned", "optimizer/order", "optimizer/overflow-step-applied",
    "optimizer/state-not-restored", "optimizer/step-mismatch",
)  # fmt: skip
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_run_raises_no_alarm(name: str, tmp_path: Path):
    found = report_on(HONEST[name], tmp_path).findings
    assert not {each.rule: each.summary for each in found if each.severity in ALARMS}


@pytest.mark.recorded(
    "data/bos-count", "data/duplicate-batch", "data/packing-contamination", "data/pad-is-eos", "data/poison-sample",
    "numerics/eval-mode", "numerics/learning-rate", "objective/all-masked", "objective/labels-not-shifted",
    "objective/labels-shifted-twice", "objective/pad-in-loss", "objective/prompt-in-loss", "objective/reduction",
    "optimizer/adapter-merged-twice", "optimizer/decay-on-norm-or-bias", "optimizer/frozen-not-frozen",
    "optimizer/gradient-chain-cut", "optimizer/no-master-weights", "optimizer/not-owned", "optimizer/order",
    "optimizer/overflow-step-applied", "optimizer/state-not-restored", "optimizer/step-mismatch",
)  # fmt: skip
@pytest.mark.parametrize("name", FAULTS)
def test_the_first_divergence_names_the_fault(name: str, tmp_path: Path):
    fault = FAULTS[name]
    report = report_on(fault.lab, tmp_path)
    first = report.first_divergence
    assert first is not None
    assert (first.rule, first.where.step) == (fault.rule, fault.step), first.summary
    assert next(each for each in report.findings if each.rule == first.rule).confidence == fault.confidence
    rest = [each for each in report.findings if each.severity in ALARMS and each.rule != fault.rule]
    assert {each.rule: each.caused_by for each in rest if each.caused_by != fault.rule} == {}


def test_the_marks_of_the_matrix_name_all_its_rules_but_the_one_to_come():
    (recorded,) = [each for each in test_the_first_divergence_names_the_fault.pytestmark if each.name == "recorded"]
    assert {*recorded.args} == {fault.rule for fault in FAULTS.values()}
