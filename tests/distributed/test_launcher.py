"""What torchrun itself does when a rank dies or all of them hang, and what is known of it afterwards."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.distributed.lab.faults import FOREVER
from tests.distributed.lab.judge import first_finding, names_site, report_on, unexplained
from tests.distributed.lab.launch import Launch

pytestmark = pytest.mark.timeout(300)


def test_torchrun_ends_the_others_when_a_rank_is_killed(tmp_path: Path):
    name = "out-of-memory kill"
    with Launch(tmp_path, 2, [name], plain=True) as launch:
        assert launch.status() == 1
        assert launch.left() == []
    report = report_on(launch.place(name))
    found = first_finding(report)
    assert (found.rule, found.where.rank) == ("distributed/rank-died-first", 1), found.summary
    assert unexplained(report, found.rule) == {}


def test_a_hang_that_nothing_ends_is_written_down_before_the_job_is_killed(tmp_path: Path):
    (name,) = FOREVER
    with Launch(tmp_path, 2, [name], plain=True) as launch:
        while not hangs(launch.place(name)):
            launch.wait()
        time.sleep(0.5)  # the other rank has been told
        launch.kill()
        assert launch.left() == []
    report = report_on(launch.place(name))
    found = first_finding(report)
    assert (found.rule, found.where.rank) == (FOREVER[name].rule, 1), found.summary
    assert names_site(found, FOREVER[name]), found
    assert unexplained(report, found.rule) == {}


def hangs(capsule: Path) -> bool:
    """Whether a rank has written that it hangs."""
    return any(b'"hang"' in path.read_bytes() for path in capsule.glob("ranks/*/rank.json"))
