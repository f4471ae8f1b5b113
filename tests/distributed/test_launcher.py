"""What torchrun itself does when a rank dies or all of them hang, and what is known of it afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmconsole.capsules import Capsule

from tests.distributed.lab.faults import FOREVER
from tests.distributed.lab.judge import first_finding, names_site, report_on, unexplained
from tests.distributed.lab.launch import Launch

pytestmark = pytest.mark.timeout(400)


def test_torchrun_ends_the_others_when_a_rank_is_killed(tmp_path: Path):
    name = "out-of-memory kill"
    with Launch(tmp_path, 2, [name], plain=True) as launch:
        assert launch.status() == 1
        assert launch.left() == []
    report = report_on(launch.place(name))
    found = first_finding(report)
    assert found.rule == "distributed/rank-died-first", found.summary
    assert found.summary.startswith("Rank 1 was killed")
    # DDP's own calls are not on disk before they are made: of two ranks it stays open whether one of them ended it.
    assert (found.confidence, found.where.rank) == ("undetermined", None)
    assert {*unexplained(report, found.rule)} <= {"distributed/missing-rank"}


def test_a_hang_that_nothing_ends_is_written_down_before_the_job_is_killed(tmp_path: Path):
    (name,) = FOREVER
    with Launch(tmp_path, 2, [name], plain=True) as launch:
        while not all(stands(launch.place(name), rank) for rank in range(2)):
            launch.wait()
        launch.kill()
        assert launch.left() == []
    report = report_on(launch.place(name))
    found = first_finding(report)
    assert found.rule == FOREVER[name].rule, found.summary
    assert found.confidence == "undetermined"  # of two ranks, one may as well have made a call too many
    assert names_site(found, FOREVER[name]), found
    assert unexplained(report, found.rule) == {}
    stacks = [each for each in Capsule.open(launch.place(name)).records("events") if each["kind"] == "stack"]
    (stuck,) = (each["frames"] for each in stacks if each["rank"] == 1)
    assert (stuck[0]["name"], Path(stuck[0]["file"]).name) == ("after", "faults.py")


def stands(capsule: Path, rank: int) -> bool:
    """Whether a rank has written where it stands."""
    path = capsule / f"ranks/rank{rank:05}/records/events.jsonl"
    return path.exists() and b'"stack"' in path.read_bytes()
