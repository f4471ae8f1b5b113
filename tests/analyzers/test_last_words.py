"""Errors that a process prints as it is torn down, and what launchers and schedulers say of processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmconsole.analyzers.report import CapsuleReport
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import import_files

FAILED, DIED = "runtime/job-failed", "distributed/rank-died-first"
STEPS = "".join(f"step {step} loss {2.5 - step / 100:.2f}\n" for step in range(1, 9))
LOST = (
    "[rank{0}]:[E1101 07:12:33.1 ProcessGroupNCCL.cpp:1484] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Process group "
    "watchdog thread terminated with exception: NCCL error: {1}, NCCL version 2.21.5\n"
)
REMOTE = "remote process exited or there was a network error"
MORE = "ncclRemoteError: A call failed\nLast error:\nsocketProgress: Connection closed by remote peer n3<4321>\n"
SEGFAULT = (
    "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f2 (most recent call first):\n"
    '  File "/usr/lib/python3.11/random.py", line 3 in pick\n  File "/job/data.py", line 31 in __getitem__\n'
)

Read = Callable[[str], CapsuleReport]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """The report of one log."""

    def run(text: str) -> CapsuleReport:
        (tmp_path / "job.out").write_text(text)
        report = analyze(Capsule.open(import_files([tmp_path / "job.out"], tmp_path / "made", attach=False)))
        assert not report.errors
        return report

    return run


def finding(report: CapsuleReport, rule: str = FAILED) -> Any:
    return next((each for each in report.findings if each.rule == rule), None)


def summary(*ends: tuple[int, int, str]) -> str:
    """torchrun's, of (rank, exit code, time)."""
    return "".join(
        f"  time      : 2026-11-01_07:{time}\n  host      : n0\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: {3000 + rank})\n  error_file: <N/A>\n"
        for rank, code, time in ends
    )


class TestTornDown:
    @pytest.mark.fires(FAILED)
    def test_a_rank_that_lost_its_peer_is_no_rank_without_an_error(self, read: Read):
        report = read(STEPS + LOST.format(5, REMOTE) + MORE + summary((5, -6, "12:34"), (4, -6, "22:35")))
        found = finding(report)
        assert "Rank 5 says only that its peer was gone" in found.summary
        assert "on n3" in found.summary
        assert found.where.rank is None
        assert finding(report, DIED) is None

    def test_a_rank_that_ended_before_it_without_a_word_is_still_the_first(self, read: Read):
        report = read(STEPS + LOST.format(5, REMOTE) + MORE + summary((5, -6, "12:34"), (4, -9, "12:20")))
        assert finding(report, DIED).where.rank == 4

    @pytest.mark.fires(FAILED)
    def test_an_error_of_its_own_in_the_library_is_its_own(self, read: Read):
        found = finding(read(STEPS + LOST.format(5, "unhandled cuda error") + summary((5, -6, "12:34"))))
        assert (found.where.rank, "unhandled cuda error" in found.summary) == (5, True)

    @pytest.mark.fires(FAILED)
    def test_a_segmentation_fault_is_said_with_its_line_and_is_the_rank_that_the_summary_names(self, read: Read):
        found = finding(read(STEPS + SEGFAULT + summary((0, -15, "12:36"), (3, -11, "12:34"))))
        assert "Fatal Python error: Segmentation fault" in found.summary
        assert found.where.rank == 3
        assert "/job/data.py:31 in __getitem__" in [each.value for each in found.evidence]

    @pytest.mark.quiet(FAILED)
    def test_a_watchdog_that_ends_well_and_a_text_on_faults_are_quiet(self, read: Read):
        words = "[rank5]:[I1101 07:12:33.1 ProcessGroupNCCL.cpp:9] watchdog thread terminated normally\n"
        assert finding(read(STEPS + words + "see 'Fatal Python error: Segmentation fault' in the handbook\n")) is None
