"""How ranks ended, and what logs alone say: deaths that come first, watchdogs, fingerprints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llmconsole.analyzers.distributed.reproduction import reproduction
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.registry import all_rules
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, underway
from llmconsole.capsules.importers import import_job

from tests.analyzers.played_jobs import T0, C, play, same

DIED = "distributed/rank-died-first"
MISSING = "distributed/missing-rank"
MISMATCH = "distributed/collective-mismatch"
PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
LATE = "torch.distributed.DistBackendError: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)"
RULES = [each for each in all_rules() if each.id in (DIED, MISSING, MISMATCH, "distributed/uneven-steps")]


def loud(capsule: Capsule) -> list[Finding]:
    report = analyze(capsule, RULES)
    assert not report.errors, report.errors
    return [each for each in report.findings if each.severity != "info"]


def value(finding: Finding, name: str) -> Any:
    return next(each.value for each in finding.evidence if each.name == name)


def ended(kind: str, t: float | None = 0.0, message: str = "") -> dict[str, Any]:
    return {"kind": kind, "message": message} | ({"t": T0 + t} if t is not None else {})


def job(exits: list[dict[str, Any] | None], events: list[dict[str, Any]] | None = None) -> Any:
    """Ranks that wait for rank 2 in call 9, and how each ended."""
    played = play(same(len(exits)), stuck=lambda rank, at: rank == 2 and at >= 8)

    def fill(w: Any) -> None:
        for rank, end in enumerate(exits):
            w.records("collectives", played.calls[rank], rank=rank)
            w.record("ranks", {"steps": 2} | ({"exit": end} if end else {}), rank=rank)
        for each in events or ():
            w.record("events", {name: given for name, given in each.items() if name != "rank"}, rank=each["rank"])

    return fill


class TestDeaths:
    @pytest.mark.fires(DIED)
    @pytest.mark.parametrize(
        ("end", "word"),
        [
            (ended("oom", 1.0, "CUDA out of memory. Tried to allocate 2.00 GiB"), "ran out of memory"),
            (ended("exception", 1.0, "ValueError: sample 17 is not valid"), "raised"),
            (ended("signal", 1.0, "SIGSEGV"), "was killed"),
            (ended("exception", None, "KeyError: 'labels'"), "raised"),
        ],
    )
    def test_a_rank_that_ended_by_itself_comes_before_the_others_time_outs(
        self, build: Any, end: dict[str, Any], word: str
    ) -> None:
        exits = [ended("exception", 600.0, LATE), ended("exception", 600.0, LATE), end, ended("hang", 600.0)]
        died, missing = loud(build(job(exits)))
        assert (died.rule, died.where.rank, died.kind) == (DIED, 2, "divergence")
        assert word in died.title
        assert value(died, "affected_ranks") == [0, 1, 3]
        assert (missing.rule, missing.kind, missing.caused_by) == (MISSING, "consequence", DIED)
        assert value(missing, "missing_ranks") == [2]

    def test_the_line_that_raised_is_named(self, build: Any) -> None:
        frames = [{"name": "load", "file": "data.py", "line": 31}, {"name": "main", "file": "train.py", "line": 9}]
        raised = {"kind": "exception", "type": "ValueError", "message": "sample 17", "frames": frames, "t": T0 + 1}
        exits = [ended("exception", 2.0, PEER), ended("exception", 2.0, PEER), ended("exception", 1.0, "ValueError")]
        died = loud(build(job(exits, [raised | {"rank": 2}])))[0]
        assert (died.where.rank, value(died, "raised_at")) == (2, "data.py:31 in load")
        assert "data.py:31" in died.summary

    def test_one_rank_that_was_asked_to_end_before_the_others_lost_it_died_first(self, build: Any) -> None:
        exits = [ended("exception", 2.0, PEER), ended("exception", 2.0, PEER), ended("signal", 1.0, "SIGTERM")]
        died = loud(build(job(exits)))[0]
        assert (died.rule, died.where.rank) == (DIED, 2)

    def test_of_two_ranks_one_that_vanished_is_not_accused(self, build: Any) -> None:
        played = play(same(2), stuck=lambda rank, at: rank == 0 and at >= 8)

        def fill(w: Any) -> None:
            for rank, end in enumerate([None, ended("exception", 1.0, PEER)]):
                w.records("collectives", played.calls[rank], rank=rank)
                w.record("ranks", {"steps": 2} | ({"exit": end} if end else {}), rank=rank)

        found = loud(build(fill))
        assert {(each.confidence, each.where.rank) for each in found} == {("undetermined", None)}

    def test_a_process_that_was_killed_without_a_word_is_the_one_the_others_lost(self, build: Any) -> None:
        exits = [ended("exception", 1.0, PEER), ended("exception", 1.0, PEER), None, ended("exception", 1.1, PEER)]
        died, missing = loud(build(job(exits)))
        assert (died.rule, died.where.rank) == (DIED, 2)
        assert missing.caused_by == DIED

    @pytest.mark.parametrize(("place", "rank"), [(b'{"seq": 9, "op": "all_red', None), (b"", 2)])
    def test_one_of_which_the_last_calls_are_lost_may_have_been_ended_in_one(
        self, build: Any, place: bytes, rank: int | None
    ) -> None:
        exits = [ended("exception", 1.0, PEER), ended("exception", 1.0, PEER), None, ended("exception", 1.1, PEER)]
        path = build(job(exits)).path
        journal = path / "ranks/rank00002" / underway.RELATIVE
        journal.parent.mkdir()
        journal.write_bytes(place.ljust(underway.PLACE, b"\n"))
        died = loud(Capsule.open(path))[0]
        assert (died.rule, died.where.rank) == (DIED, rank)
        assert died.confidence == ("likely" if rank else "undetermined")

    def test_a_rank_that_dealt_with_an_error_and_ended_is_the_one_the_others_lost(self, build: Any) -> None:
        handled = "closed while ValueError was handled: sample 17 is not valid"
        exits = [ended("exception", 2.0, PEER), ended("exception", 2.0, PEER), ended("ok", 1.0, handled), None]
        died, missing = loud(build(job(exits)))
        assert (died.rule, died.where.rank) == (DIED, 2)
        assert "sample 17 is not valid" in died.summary
        assert missing.caused_by == DIED

    def test_ranks_that_dealt_with_an_error_and_whom_nobody_waits_for_did_not_die(self, build: Any) -> None:
        played = play(same(4))

        def fill(w: Any) -> None:
            for rank in range(4):
                w.records("collectives", played.calls[rank], rank=rank)
                remark = {"message": "closed while EarlyStop was handled: no progress"} if rank == 2 else {}
                w.record("ranks", {"steps": 2, "exit": {"kind": "ok", "t": T0 + 99.0} | remark}, rank=rank)

        assert loud(build(fill)) == []

    @pytest.mark.quiet(DIED)
    def test_one_exception_on_all_ranks_a_stopped_job_and_an_end_after_the_time_out_are_no_first_death(
        self, build: Any
    ) -> None:
        late = [{"kind": "collective_timeout", "t": T0 + 600, "timeout_s": 600.0, "rank": 0}]
        same_error = [ended("exception", float(rank), "TypeError: forward()") for rank in range(4)]
        stopped = [ended("signal", 5.0, "SIGTERM") for _ in range(4)]
        after = [ended("exception", 600.0, LATE), None, ended("exception", 650.0, "RuntimeError: aborted"), None]
        for capsule in (build(job(same_error)), build(job(stopped)), build(job(after, late))):
            assert DIED not in {each.rule for each in loud(capsule)}

    def test_a_rank_that_gloo_aborts_where_two_sizes_meet_did_not_die_first(self, build: Any) -> None:
        programs = same(4)
        programs[3][9] = C("all_reduce", line=15, shape=(99,))
        played = play(programs)

        def fill(w: Any) -> None:
            ends = [ended("signal", 1.0, "SIGABRT"), *(ended("exception", 1.0, PEER) for _ in range(3))]
            for rank in range(4):
                w.records("collectives", played.calls[rank], rank=rank)
                w.record("ranks", {"exit": ends[rank]}, rank=rank)

        (found,) = loud(build(fill))
        assert (found.rule, found.where.rank) == (MISMATCH, 3)


class TestLogs:
    @pytest.fixture
    def read(self, tmp_path: Path) -> Any:
        """``read({name: lines})``: the capsule that one job's logs become."""

        def read(logs: dict[str, list[str]]) -> Capsule:
            paths: list[Path] = []
            for name, lines in logs.items():
                paths.append(tmp_path / name)
                paths[-1].write_text("\n".join(lines) + "\n")
            return Capsule.open(import_job(paths, tmp_path / "made", attach=False).path)

        return read

    @staticmethod
    def watchdog(rank: int) -> list[str]:
        numbers = "SeqNum=21937, OpType=_ALLGATHER_BASE, NumelIn=176556032, NumelOut=706224128, Timeout(ms)=600000"
        return [
            f"[rank{rank}]:[E1130 07:10:00.1 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective "
            f"operation timeout: WorkNCCL({numbers}) ran for 600029 milliseconds before timing out.",
            f"[rank{rank}]:[E1130 07:10:00.2 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
            "Exception (either an error or timeout) detected by watchdog at work: 21937, last enqueued NCCL work: "
            "21937, last completed NCCL work: 21936.",
        ]

    @pytest.mark.recorded(MISSING)
    def test_watchdogs_of_three_ranks_and_the_state_of_the_fourth_name_the_missing_one(self, read: Any) -> None:
        """TorchSpec 126: rank 1 has nothing scheduled at number 21937."""
        of_rank_1 = (
            "[rank1]:[E1130 07:10:00.3 ProcessGroupNCCL.cpp:1834] [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a "
            "dump signal due to a collective timeout from rank 0 and we will try our best to dump the debug info. Last "
            "enqueued NCCL work: 21936, last completed NCCL work: 21936."
        )
        lines = [
            "step 1 loss 2.0",
            "step 2 loss 1.9",
            *self.watchdog(0),
            *self.watchdog(2),
            *self.watchdog(3),
            of_rank_1,
        ]
        (found,) = (each for each in loud(read({"train.log": lines})) if each.rule == MISSING)
        assert value(found, "missing_ranks") == [1]
        assert value(found, "waiting_ranks") == [0, 2, 3]
        assert "all_gather_base 21,937 of the default group" in found.summary

    @pytest.mark.recorded(MISMATCH)
    def test_fingerprints_of_two_ranks_name_both_and_accuse_none(self, read: Any) -> None:
        """ms-swift 9443: a batch of text alone on one rank leaves the vision tower without gradients."""
        error = (
            "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
            "CollectiveFingerPrint(SequenceNumber=3104, OpType=ALLREDUCE, TensorShape=[51123456], "
            "TensorDtypes=BFloat16, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda)), "
            "but Rank 1 is running collective: "
            "CollectiveFingerPrint(SequenceNumber=3104, OpType=ALLREDUCE, TensorShape=[195812480], "
            "TensorDtypes=BFloat16, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda))."
            "Collectives differ in the following aspects: \t Tensor Tensor shapes: 51123456vs 195812480"
        )
        lines = [
            "step 1 loss 2.0",
            "Traceback (most recent call last):",
            '  File "train.py", line 9, in <module>',
            error,
        ]
        capsule = read({"train.log": lines})
        (found,) = (each for each in loud(capsule) if each.rule == MISMATCH)
        assert (found.confidence, found.where.rank) == ("undetermined", None)
        assert "51123456" in found.summary
        assert "195812480" in found.summary
        assert "images" in found.next[0]
        made = reproduction(capsule)
        assert made is not None
        assert (made.kind, made.a[0].shapes, made.b[0].shapes) == ("shape", ((51123456,),), ((195812480,),))

    @pytest.mark.recorded(DIED)
    def test_out_of_memory_in_one_log_comes_before_the_time_outs_in_the_others(self, read: Any) -> None:
        out = [
            "[rank1]: Traceback (most recent call last):",
            '[rank1]:   File "train.py", line 88, in <module>',
            "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total "
            "capacity of 79.15 GiB of which 1.20 GiB is free. Of the allocated memory 74.10 GiB is allocated by "
            "PyTorch, and 2.30 GiB is reserved by PyTorch but unallocated.",
        ]
        lines = ["step 1 loss 2.0", *out, *self.watchdog(0), *self.watchdog(2), *self.watchdog(3)]
        died = next(each for each in loud(read({"train.log": lines})) if each.rule == DIED)
        assert (died.where.rank, died.kind) == (1, "divergence")
        assert set(value(died, "affected_ranks")) == {0, 2, 3}

    def test_a_monitored_barrier_names_who_did_not_come(self, build: Any) -> None:
        def fill(w: Any) -> None:
            event = {"kind": "collective_timeout", "op": "monitored_barrier", "timeout_s": 30.0, "missing": [1, 3]}
            w.record("events", event, rank=0)

        (found,) = loud(build(fill))
        assert (found.rule, found.where.rank, value(found, "missing_ranks")) == (MISSING, 1, [1, 3])

    def test_three_fingerprints_decide(self, build: Any) -> None:
        def fill(w: Any) -> None:
            for rank, other, shape, theirs in ((0, 1, [4], [9]), (2, 1, [4], [9])):
                w.record(
                    "events",
                    {"kind": "collective_mismatch", "op": "all_reduce", "shapes": [shape], "seq": 5}
                    | {"other_rank": other, "other_op": "all_reduce", "other_shapes": [theirs]},
                    rank=rank,
                )

        (found,) = loud(build(fill))
        assert (found.rule, found.where.rank, found.confidence) == (MISMATCH, 1, "confirmed")
