"""Errors that a process prints as it is torn down, and what launchers and schedulers say of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llmconsole.analyzers.report import CapsuleReport

FAILED, DIED = "runtime/job-failed", "distributed/rank-died-first"
LOSS_NAN = "numerics/loss-nonfinite"
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


class TestLaunchers:
    @pytest.mark.fires(FAILED)
    @pytest.mark.parametrize(
        ("line", "rank"),
        [
            (
                "[2026-11-01 07:12:45,112] [ERROR] [launch.py:325:sigkill_handler] ['/usr/bin/python3', '-u', "
                "'train.py', '--local_rank=1'] exits with return code = -9",
                1,
            ),
            ("mpirun noticed that process rank 3 with PID 0 on node n1 exited on signal 9 (Killed).", 3),
        ],
    )
    def test_one_line_of_a_launcher_names_who_ended_how(self, read: Read, line: str, rank: int):
        found = finding(read(f"{STEPS}{line}\n"))
        assert found.where.rank == rank
        assert "SIGKILL" in found.summary

    @pytest.mark.fires(FAILED)
    @pytest.mark.quiet(DIED)
    def test_on_several_machines_it_names_one_of_them_and_no_rank(self, read: Read):
        line = (
            "[2026-11-01 07:12:45,112] [ERROR] [launch.py:325:sigkill_handler] ['python3', '--local_rank=1'] exits "
            "with return code = {}"
        )
        before = [f"node0{1 + number % 2}: {each}\n" for number, each in enumerate(STEPS.splitlines())]
        report = read("".join(before) + f"node02: {line.format(-9)}\n")
        assert "exit code -9 (SIGKILL), local rank 1 on node02" in finding(report).summary
        assert finding(report).where.rank is None
        assert finding(report, DIED) is None
        assert finding(read("".join(before) + f"node02: {line.format(-15)}\n")) is None

    @pytest.mark.quiet(FAILED)
    def test_a_process_that_it_stops_or_that_ends_well_is_none(self, read: Read):
        line = "[2026-11-01 07:12:45,112] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 41000\n"
        well = "[2026-11-01 07:12:45,112] [INFO] [launch.py:347:main] Process 41000 exits successfully.\n"
        assert finding(read(STEPS + line + well)) is None

    def test_what_the_host_or_a_scheduler_kills_is_no_rank(self, read: Read):
        found = finding(
            read(STEPS + "srun: error: n7: task 2: Out Of Memory\nslurmstepd: error: Detected 1 oom_kill\n")
        )
        assert found is None or found.where.rank is None
        found = finding(read(STEPS + "slurmstepd: error: Detected 1 oom_kill event in StepId=8812.0.\n"))
        assert (found.title, found.where.rank) == ("The host's memory ran out", None)


class TestScheduler:
    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-05-27T21:52:36 DUE TO TIME LIMIT ***", "time limit"),
            ("slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-05-27T21:52:36 DUE TO PREEMPTION ***", "preempt"),
            ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-05-27T21:52:36 ***", "cancelled"),
        ],
    )
    def test_a_job_that_it_ended_is_a_remark(self, read: Read, line: str, words: str):
        report = read(f"{STEPS}{line}\n")
        found = finding(report)
        assert (found.severity, found.kind, report.first_divergence) == ("info", "hygiene", None)
        assert words in found.summary

    @pytest.mark.quiet(FAILED)
    def test_an_older_job_in_the_same_log_is_none(self, read: Read):
        line = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-05-27T21:52:36 DUE TO TIME LIMIT ***\n"
        again = "".join(f"step {step} loss 2.4\n" for step in range(4, 40))
        assert finding(read(STEPS + line + again)) is None


class TestComputedAgain:
    NAN = "Unexpected result nan on rank 5 at iteration #9 invocation #3 (message='found NaN in local forward loss')\n"

    @pytest.mark.fires(LOSS_NAN)
    @pytest.mark.parametrize(
        ("verdict", "confidence"),
        [
            ("First rerun: unexpected result is reproducible within the tolerance (result = nan)", "undetermined"),
            ("First rerun: unexpected result is not reproducible within the tolerance (0.1 != nan)", "likely"),
            ("Possible transient error!", "likely"),
        ],
    )
    def test_a_loss_that_is_nan_on_one_rank(self, read: Read, verdict: str, confidence: str):
        found = finding(read(f"{STEPS}{self.NAN}{verdict}\n"), LOSS_NAN)
        assert (found.where.step, found.where.rank, found.confidence) == (9, 5, confidence)
        assert ("device of this rank" in (found.cause or "")) == (confidence == "likely")

    @pytest.mark.quiet(LOSS_NAN)
    def test_a_number_that_was_not_expected_is_none(self, read: Read):
        spike = self.NAN.replace("result nan", "result 12.5").replace("NaN", "spiky loss")
        assert finding(read(STEPS + spike), LOSS_NAN) is None


class TestWords:
    UNUSED = (
        '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/job/train.py", line 8, in main\n'
        "[rank1]: RuntimeError: Expected to have finished reduction in the prior iteration. " + "Words. " * 80 + "\n"
        "[rank1]: Parameter indices which did not receive grad for rank 1: 4 5 6\n"
    )

    @pytest.mark.fires(FAILED)
    def test_the_parameters_at_the_end_of_a_long_message_are_said(self, read: Read):
        found = finding(read(STEPS + self.UNUSED))
        assert found.summary.endswith("Without a gradient: parameter 4, parameter 5, parameter 6.")
        other = "[rank1]: Traceback (most recent call last):\n[rank1]: RuntimeError: bad row\n"
        assert "gradient" not in finding(read(STEPS + other)).summary

    def test_a_type_that_the_message_holds_is_said_once(self, read: Read):
        line = "RuntimeError: [enforce fail] can't allocate memory: you tried to allocate 68719476736 bytes."
        found = finding(read(f"{STEPS}Traceback (most recent call last):\n{line}\n"))
        assert found.summary.count("RuntimeError") == 1
