"""Two ranks: what can be known of them is said, and where it would take a third to say which is wrong, that is said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.lab.faults import FAULTS
from tests.distributed.lab.judge import alarms, first_finding, names_site, report_on, unexplained
from tests.distributed.lab.launch import Launch, looked_at

pytestmark = pytest.mark.timeout(400)

#: Which of two different calls is wrong takes a third rank to say.
UNDECIDED = (
    "missing call",
    "extra call",
    "different shape",
    "different dtype",
    "different op",
    "groups in different order",
    "perturbed parameters",
)
#: A rank that is behind, ends, or is slow is known from its own record.
DECIDED = ("a rank that never comes", "uneven steps", "exception", "slow rank", "gradients not averaged")
HONEST = ("healthy",)


@pytest.fixture(scope="module")
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    with Launch(tmp_path_factory.mktemp("two"), 2, looked_at(request)) as launch:
        yield launch
        assert launch.status() == 0
        assert launch.left() == []


@pytest.mark.parametrize("name", UNDECIDED)
def test_which_of_two_is_wrong_is_left_open(name: str, launch: Launch):
    fault, report = FAULTS[name], report_on(launch.capsule(name))
    found = first_finding(report)
    assert found.rule == fault.rule, found.summary
    assert found.where.rank is None, found.summary
    assert found.confidence == "undetermined" or found.rule == "distributed/replicas-diverged"
    assert names_site(found, fault), found
    assert unexplained(report, fault.rule) == {}


@pytest.mark.parametrize("name", DECIDED)
def test_the_first_divergence_names_the_fault(name: str, launch: Launch):
    fault, report = FAULTS[name], report_on(launch.capsule(name))
    found = first_finding(report)
    assert found.rule == fault.rule, found.summary
    assert (None if fault.odd is None else 1) == found.where.rank, found.summary
    assert names_site(found, fault), found
    assert unexplained(report, fault.rule) == {}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_job_raises_no_alarm(name: str, launch: Launch):
    assert alarms(report_on(launch.capsule(name))) == {}
    assert set(launch.ended(name).values()) == {0}, launch.words(name)
