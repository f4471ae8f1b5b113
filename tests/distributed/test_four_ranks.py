"""Jobs of four ranks with one thing wrong are named by their first divergence, with rank and line; honest ones are not.

All of them are played by one launch of torchrun, and each test waits for the job that it looks at.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from llmconsole.app.answers import two_ranks

from tests.distributed.lab.faults import FAULTS
from tests.distributed.lab.honest import HONEST
from tests.distributed.lab.judge import alarms, first_finding, names_site, report_on, site, unexplained
from tests.distributed.lab.launch import Launch, Started, looked_at

pytestmark = pytest.mark.timeout(400)  # the first test waits for all the launch that comes before its job


@pytest.fixture(scope="module")
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    with Launch(tmp_path_factory.mktemp("four"), 4, looked_at(request)) as launch:
        yield launch
        assert launch.status() == 0
        assert launch.left() == []


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_divergence_names_the_fault(name: str, launch: Launch):
    fault, report = FAULTS[name], report_on(launch.capsule(name))
    found = first_finding(report)
    assert found.rule == fault.rule, found.summary
    assert found.confidence in ("confirmed", "likely")
    assert fault.odd in (None, found.where.rank), found.summary
    assert names_site(found, fault), (site(fault), found)
    assert unexplained(report, fault.rule) == {}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_job_raises_no_alarm(name: str, launch: Launch):
    assert alarms(report_on(launch.capsule(name))) == {}
    assert set(launch.ended(name).values()) == {0}, launch.words(name)
    assert "recording" not in launch.words(name)


@pytest.mark.parametrize("names", [("missing call", "different op", "groups in different order")], ids=["three"])
def test_the_smallest_reproduction_hangs_or_fails_too(names: tuple[str, ...], launch: Launch, tmp_path: Path):
    with Started() as started:
        running = {}
        for name in names:
            made, said = two_ranks(str(launch.capsule(name))), tmp_path / f"{name}.txt"
            assert site(FAULTS[name]).strip() in made["frame"]
            path = tmp_path / f"{name}.py"
            path.write_text(made["script"])
            running[name] = started.start([sys.executable, str(path)], tmp_path, said), said
        for name, (process, said) in running.items():
            assert process.wait() == 1, (name, said.read_text())
            assert "Timed out waiting" in said.read_text()
        assert started.left() == []
