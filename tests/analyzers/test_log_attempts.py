"""Verdicts on logs of several attempts, of an unknown number of ranks, and beside dumps of another life of the job."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmconsole.analyzers.report import CapsuleReport
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import import_files

MISSING, DIED, UNEVEN = "distributed/missing-rank", "distributed/rank-died-first", "distributed/uneven-steps"
COVERAGE, FAILED = "distributed/coverage", "runtime/job-failed"

Read = Callable[..., CapsuleReport]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """The report of files, given by name as text or bytes."""

    def run(**files: str | bytes) -> CapsuleReport:
        paths: list[Path] = []
        for name, content in files.items():
            paths.append(tmp_path / name)
            paths[-1].write_bytes(content.encode() if isinstance(content, str) else content)
        report = analyze(Capsule.open(import_files(paths, tmp_path / "made", attach=False)))
        assert not report.errors
        return report

    return run


def steps(first: int, last: int) -> str:
    return "".join(f"step {step} loss {9 - step / 1000:.3f}\n" for step in range(first, last + 1))


def watchdog(rank: int, seq: int, day: int = 1, *, queued: int = 0) -> str:
    queued = queued or seq
    return (
        f"[rank{rank}]:[E11{day:02} 07:10:00.1 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective "
        f"operation timeout: WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran "
        "for 600029 milliseconds before timing out.\n"
        f"[rank{rank}]:[E11{day:02} 07:10:00.2 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
        f"Exception (either an error or timeout) detected by watchdog at work: {seq}, last enqueued NCCL work: "
        f"{queued}, last completed NCCL work: {seq - 1}.\n"
    )


def summary(rank: int, code: int) -> str:
    return (
        f"  time      : 2023-11-01_07:10:05\n  host      : n0\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: {3000 + rank})\n  error_file: <N/A>\n"
    )


RAISED = "[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: bad row\n"


def dump(rank: int, reached: int, completed: int = 36, ranks: int = 4) -> bytes:
    """A flight-recorder dump whose rank entered ``reached`` calls of the default group."""
    calls = [
        {
            **{"record_id": seq - 1, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": seq},
            **{"p2p_seq_id": 0, "op_id": seq, "profiling_name": "nccl:all_reduce", "input_sizes": [[8]]},
            **{"time_created_ns": 1_700_000_000_000_000_000 + seq * 10**9, "output_sizes": [[8]]},
            **{"input_dtypes": ["Float"], "output_dtypes": ["Float"], "timeout_ms": 600_000, "is_p2p": False},
            **{"state": "completed" if seq <= completed else "started", "retired": seq <= completed, "frames": []},
        }
        for seq in range(30, reached + 1)
    ]
    status = {"last_enqueued_collective": reached, "last_started_collective": -1}
    content = {
        **{"version": "2.5", "entries": calls},
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}},
        "pg_status": {"0": {**status, "last_completed_collective": completed}},
    }
    return pickle.dumps(content, 2)


#: Rank 1 stopped before call 37; the others have queued up to 39.
DUMPS = {f"comm_lib_trace_rank_{rank}": dump(rank, 36 if rank == 1 else 39) for rank in range(4)}


def finding(report: CapsuleReport, rule: str) -> Any:
    return next((each for each in report.findings if each.rule == rule), None)


class TestNumberOfRanks:
    @pytest.mark.fires(COVERAGE)
    def test_that_it_is_not_on_record_is_said_of_watchdogs(self, read: Read):
        three = steps(1, 9) + "".join(watchdog(rank, 121) for rank in (0, 1, 2))
        assert finding(read(log=three), COVERAGE).title == "How many ranks the job has is not on record"
        assert finding(read(log="world_size=3\n" + three), COVERAGE) is None

    def test_ranks_that_all_wait_are_all_only_where_their_number_is_known(self, read: Read):
        three = steps(1, 9) + "".join(watchdog(rank, 121) for rank in (0, 1, 2))
        found = finding(read(log=three), MISSING)
        assert "Ranks 0 to 2 entered" in found.summary
        assert "a rank that printed nothing may be missing" in found.summary
        found = finding(read(log="world_size=3\n" + three), MISSING)
        assert "All ranks entered" in found.summary
        assert "no rank is missing" in found.summary

    @pytest.mark.fires(MISSING)
    def test_a_silent_rank_of_the_highest_number_is_the_one_that_can_be_missing(self, read: Read):
        stated = "n0:41:41 [0] NCCL INFO comm 0x5 rank 0 nranks 4 cudaDev 0 busId 1000 commId 0x3 - Init COMPLETE\n"
        report = read(log=steps(1, 9) + stated + "".join(watchdog(rank, 121) for rank in (0, 1, 2)))
        assert "only rank 3 can be missing, of which there is no evidence." in finding(report, MISSING).summary

    @pytest.mark.fires(DIED)
    def test_a_rank_that_raised_is_one_of_them(self, read: Read):
        raised = "[rank3]: Traceback (most recent call last):\n[rank3]: ValueError: bad row\n"
        report = read(log=steps(1, 9) + raised + "".join(watchdog(rank, 121) for rank in (0, 1, 2)))
        assert report.first_divergence is not None
        assert (report.first_divergence.rule, report.first_divergence.where.rank) == (DIED, 3)
        assert "no rank is missing" not in finding(report, MISSING).summary
        assert "rank 3" in finding(report, COVERAGE).title

    def test_members_of_a_group_that_no_line_lists_may_be_silent(self, read: Read):
        def of(group: int, text: str) -> str:
            return text.replace("[PG ID 0 PG GUID 0(default_pg)", f"[PG ID 2 PG GUID {group}(TENSOR)")

        waits = of(5, watchdog(0, 901) + watchdog(1, 901)) + of(7, watchdog(4, 881))
        found = finding(read(log="world_size=8\n" + steps(1, 9) + waits), MISSING)
        assert "which ranks belong to group 5 is not on record" in found.summary.lower()
        assert "rank 4 in all_reduce 881 of group 7" in found.summary

    def test_the_watchdog_of_a_rank_that_is_not_the_first_accuses_nobody_below_it(self, read: Read):
        found = finding(read(log=steps(1, 9) + watchdog(1, 121)), MISSING)
        assert "of no other rank there is evidence" in found.summary
        assert found.confidence == "undetermined"


class TestPastAttempts:
    @pytest.mark.quiet(MISSING)
    def test_a_hang_after_which_training_went_on_is_a_remark(self, read: Read):
        hung = steps(1, 40) + "".join(watchdog(rank, 121) for rank in (0, 1, 3))
        report = read(log=hung + steps(31, 300))
        assert report.first_divergence is None
        found = finding(report, MISSING)
        assert (found.severity, found.kind, found.where.step) == ("info", "hygiene", 40)
        assert finding(read(log=hung), MISSING).severity == "critical"

    @pytest.mark.fires(MISSING)
    def test_the_last_attempt_decides(self, read: Read):
        first = "".join(watchdog(rank, 121) for rank in (0, 1, 3))
        last = "".join(watchdog(rank, 37, day=2, queued=39) for rank in (0, 1, 2))
        report = read(log="world_size=4\n" + steps(1, 40) + first + steps(31, 35) + last)
        found = finding(report, MISSING)
        assert "only rank 3 can be missing" in found.summary
        assert found.where.step == 35

    @pytest.mark.fires(MISSING)
    def test_the_order_of_one_log_tells_attempts_apart_whatever_the_clocks_say(self, read: Read):
        ended = summary(1, -6).replace("11-01_07:10", "11-09_17:10")  # the launcher's clock is of another zone
        first, last = ("".join(watchdog(rank, seq, day=1) for rank in (0, 1, 3)) for seq in (121, 241))
        report = read(log=steps(1, 40) + first + ended + steps(41, 90) + last)
        assert finding(report, MISSING).severity == "critical"
        assert "241" in finding(report, MISSING).title

    @pytest.mark.quiet(DIED)
    def test_an_error_of_an_earlier_attempt_is_not_what_the_last_one_waits_for(self, read: Read):
        raised = "[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: bad row\n"
        waits = "".join(watchdog(rank, 37, day=2) for rank in (0, 1, 2))
        assert finding(read(log=steps(1, 40) + raised + steps(31, 35) + waits), DIED) is None
        assert finding(read(log=steps(1, 40) + raised + waits.replace("[rank1]", "[rank3]")), DIED) is not None

    @pytest.mark.fires(FAILED)
    def test_an_error_of_the_last_attempt_is_said_though_an_earlier_one_came_further(self, read: Read):
        raised = "Traceback (most recent call last):\nValueError: {0}\n"
        report = read(log=steps(1, 40) + raised.format("once") + steps(31, 35) + raised.format("again"))
        assert "again" in finding(report, FAILED).summary

    @pytest.mark.fires(FAILED)
    @pytest.mark.parametrize("last", ["", summary(1, 1)], ids=["alone", "with a summary"])
    def test_the_same_error_ends_two_attempts(self, read: Read, last: str):
        report = read(log=steps(1, 40) + RAISED + steps(31, 40) + RAISED + last)
        assert report.first_divergence is not None
        assert (report.first_divergence.rule, report.first_divergence.where.rank) == (FAILED, 1)
        assert "ValueError: bad row" in finding(report, FAILED).summary
        assert finding(read(log=steps(1, 40) + RAISED + steps(31, 300)), FAILED) is None

    @pytest.mark.fires(MISSING)
    @pytest.mark.quiet(DIED)
    def test_the_summary_of_a_launcher_ends_an_attempt_though_no_step_follows(self, read: Read):
        ended = summary(1, 1) + summary(3, -15)
        waits = "".join(watchdog(rank, 3, day=2) for rank in (0, 1, 2))
        report = read(log="world_size=4\n" + steps(1, 40) + RAISED + ended + waits + summary(1, -6))
        assert report.first_divergence is not None
        assert (report.first_divergence.rule, report.first_divergence.where.rank) == (MISSING, None)
        assert "only rank 3 can be missing" in finding(report, MISSING).summary
        assert finding(report, DIED) is None
        # That of another machine comes while ranks still wait.
        waits = "".join(watchdog(rank, 3) for rank in (0, 2))
        report = read(log="world_size=4\n" + steps(1, 40) + RAISED + summary(1, 1) + waits)
        assert (report.first_divergence.rule, report.first_divergence.where.rank) == (DIED, 1)

    @pytest.mark.fires(DIED)
    def test_a_rank_that_the_launcher_stopped_waited_for_the_one_that_raised(self, read: Read):
        waits = "".join(watchdog(rank, 3) for rank in (0, 3))
        ended = summary(0, -15) + summary(3, 143) + summary(1, 1)  # codes without the names of signals
        found = finding(read(log=steps(1, 40) + RAISED + waits + ended), DIED)
        assert (found.where.rank, "ranks 0 and 3 only waited" in found.summary) == (1, True)
        assert finding(read(log=steps(1, 40) + waits + summary(2, -15) + summary(0, -6)), DIED) is None

    def test_an_error_before_any_step_of_the_second_attempt_is_its_end(self, read: Read):
        waits = "".join(watchdog(rank, 121) for rank in (0, 1, 3))
        report = read(log=steps(1, 40) + waits + summary(1, -6) + RAISED + summary(1, 1))
        assert report.first_divergence is not None
        assert (report.first_divergence.rule, report.first_divergence.where.rank) == (FAILED, 1)

    def test_logs_of_ranks_that_report_no_steps_follow_the_one_that_does(self, read: Read):
        report = read(**{"rank0.log": steps(1, 40) + watchdog(0, 121) + steps(31, 300), "rank1.log": watchdog(1, 121)})
        assert report.first_divergence is None
        later = watchdog(1, 121) + watchdog(1, 40, day=2)
        report = read(**{"rank0.log": steps(1, 40) + watchdog(0, 121) + steps(31, 300), "rank1.log": later})
        assert report.first_divergence is not None


class TestLocalRanks:
    """torchrun's ``[default1]:`` counts the processes of one machine."""

    LOCAL = RAISED.replace("[rank1]", "[default1]")

    @staticmethod
    def steps_of(before: str) -> str:
        return "".join(f"{before}{line}\n" for line in steps(1, 9).splitlines())

    @pytest.mark.fires(DIED)
    def test_it_is_a_rank_where_no_rank_beyond_those_of_one_machine_is_known(self, read: Read):
        waits = "".join(f"[default{rank}]:{line}\n" for rank in (0, 2) for line in watchdog(rank, 37).splitlines())
        report = read(log=self.steps_of("[default0]:") + self.LOCAL + waits)
        assert report.first_divergence is not None
        assert (report.first_divergence.rule, report.first_divergence.where.rank) == (DIED, 1)

    @pytest.mark.quiet(DIED)
    @pytest.mark.parametrize("before", ["", "node02: "])
    def test_it_is_none_of_the_job_where_there_may_be_several_machines(self, read: Read, before: str):
        waits = "".join(watchdog(rank, 37) for rank in (0, 1, 2, 3, 4, 6, 7)).splitlines()
        text = self.steps_of("[default0]:") + self.LOCAL + "".join(f"{line}\n" for line in waits)
        report = read(log="".join(f"{before}{line}\n" for line in text.splitlines()))
        assert finding(report, DIED) is None
        assert "ValueError: bad row" in finding(report, FAILED).summary
        assert finding(report, FAILED).where.rank is None

    @pytest.mark.quiet(DIED)
    def test_a_rank_that_is_in_the_call_with_the_others_is_not_what_they_wait_for(self, read: Read):
        waits = "".join(watchdog(rank, 37) for rank in (0, 1, 2))
        assert finding(read(log=steps(1, 9) + RAISED + waits), DIED) is None
        other = "".join(watchdog(rank, 37) for rank in (0, 2)) + watchdog(1, 36)
        assert finding(read(log=steps(1, 9) + RAISED + other), DIED).where.rank == 1


class TestDumpsAndLogs:
    @pytest.mark.fires(MISSING)
    @pytest.mark.parametrize(
        "log",
        [
            "".join(watchdog(rank, 456) for rank in (0, 1, 2)),
            "".join(watchdog(rank, 456) for rank in (0, 1, 2))
            + steps(1, 2)
            + "".join(watchdog(rank, 37, day=2, queued=39) for rank in (0, 2, 3)),
            "".join(watchdog(rank, 12) for rank in (0, 1, 2, 3)),
        ],
        ids=["further", "two attempts", "less far"],
    )
    def test_what_a_dump_contradicts_is_of_another_life_of_the_job(self, read: Read, log: str):
        report = read(**DUMPS, **{"old.log": log})
        assert report.first_divergence is not None
        assert (report.first_divergence.rule, report.first_divergence.where.rank) == (MISSING, 1)
        assert report.first_divergence.where.order == 37

    @pytest.mark.quiet(DIED)
    @pytest.mark.parametrize(("day", "rule"), [("11-12", MISSING), ("11-14", DIED)], ids=["days before", "that day"])
    def test_an_end_of_another_day_is_not_what_the_dumps_wait_for(self, read: Read, day: str, rule: str):
        """The dumps are of 14 November 2023."""
        ended = (
            f"  time      : 2023-{day}_20:00:00\n  host      : n0\n  rank      : 1 (local_rank: 1)\n"
            "  exitcode  : 1 (pid: 3001)\n  error_file: <N/A>\n"
        )
        raised = "[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: bad row\n"
        report = read(**DUMPS, **{"old.log": raised + ended})
        assert report.first_divergence is not None
        assert (report.first_divergence.rule, report.first_divergence.where.rank) == (rule, 1)

    def test_a_log_that_agrees_stands_for_the_dump_that_is_not_there(self, read: Read):
        dumps = {name: each for name, each in DUMPS.items() if name[-1] in "02"}
        log = watchdog(0, 37, queued=39) + watchdog(3, 37, queued=39)
        found = finding(read(**dumps, **{"train.log": log}), MISSING)
        assert "only rank 1 can be missing" in found.summary
        assert "the watchdog of ranks 0 and 3 gave up" not in finding(read(**dumps), MISSING).summary


class TestUnknownRanks:
    @pytest.mark.fires(UNEVEN)
    def test_a_sample_left_out_by_nobody_knows_whom_accuses_no_rank(self, read: Read):
        log = steps(1, 9) + "<worker-1> skipped sample: 12 < 32\n" + "".join(watchdog(rank, 37) for rank in (0, 2, 3))
        found = finding(read(log=log), UNEVEN)
        assert (found.confidence, found.where.rank) == ("undetermined", None)

    @pytest.mark.parametrize(
        ("words", "rank"),
        [("rank 1: ", 1), ("on global rank 1: ", 1), ("dp rank 1: ", None), ("data-parallel rank 1: ", None)],
    )
    def test_the_rank_within_a_group_is_none_of_the_job(self, read: Read, words: str, rank: int | None):
        waits = "".join(watchdog(each, 37) for each in (0, 2, 3))
        found = finding(read(log=steps(1, 9) + f"{words}skipped sample: 12 < 32\n" + waits), UNEVEN)
        assert found.where.rank == rank

    @pytest.mark.quiet(UNEVEN)
    def test_nor_does_one_where_nobody_waits(self, read: Read):
        log = steps(1, 9) + "<worker-1> skipped sample: 12 < 32\n[rank1]: step 9 loss 8.0\n"
        assert finding(read(log=log), UNEVEN) is None
