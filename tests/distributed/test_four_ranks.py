"""Jobs of four ranks with one thing wrong are named by their first divergence, with rank and line; honest ones are not.

All of them are played by one launch of torchrun, and each test waits for the job that it looks at.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import msgspec
import pytest
from llmconsole.analyzers.report import ALARMS, CapsuleReport
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule

from tests.distributed.lab.faults import FAULTS, Fault
from tests.distributed.lab.honest import HONEST
from tests.distributed.lab.launch import Launch

pytestmark = pytest.mark.timeout(300)  # the first test waits for all the launch that comes before its job


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    with Launch(tmp_path_factory.mktemp("four"), 4, [*FAULTS, *HONEST]) as launch:
        yield launch
        launch.process.wait()
        assert launch.left() == []


@pytest.fixture(scope="module")
def report_on(launch: Launch) -> Callable[[str], CapsuleReport]:
    def report_on(name: str) -> CapsuleReport:
        report = analyze(Capsule.open(launch.capsule(name)))
        assert not report.errors
        return report

    return report_on


def site(fault: Fault) -> str | None:
    """file:line that the report is to name."""
    lines, first = inspect.getsourcelines(fault.run)
    found = [first + at for at, line in enumerate(lines) if line.rstrip().endswith("# here")]
    return f"faults.py:{found[0]}" if found else None


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_divergence_names_the_fault(name: str, report_on: Callable[[str], CapsuleReport]):
    fault, report = FAULTS[name], report_on(name)
    first = report.first_divergence
    assert first is not None
    assert first.rule == fault.rule, first.summary
    named = next(each for each in report.findings if (each.rule, each.where) == (first.rule, first.where))
    assert named.confidence in ("confirmed", "likely")
    if fault.odd is not None:
        assert first.where.rank == fault.odd, first.summary
    assert (site(fault) or "") in msgspec.json.encode(named).decode()
    rest = [each for each in report.findings if each.severity in ALARMS and each.rule != fault.rule]
    assert {each.rule: (each.caused_by, each.summary) for each in rest if each.caused_by != fault.rule} == {}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_job_raises_no_alarm(name: str, launch: Launch, report_on: Callable[[str], CapsuleReport]):
    found = report_on(name).findings
    assert {each.rule: each.summary for each in found if each.severity in ALARMS} == {}
    assert set(launch.ended(name).values()) == {0}, launch.words(name)
    assert "recording" not in launch.words(name)
