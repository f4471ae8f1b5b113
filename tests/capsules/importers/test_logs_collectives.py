"""Watchdog lines of every generation, Gloo's timeouts, fingerprints, DDP's lists and torchrun's summary as records."""

from __future__ import annotations

import calendar
import os
from pathlib import Path

import pytest
from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import import_files

from .conftest import Imports

MADE = Path(__file__).parent / "fixtures" / "distributed"


def events(capsule, kind: str) -> list[dict]:
    return [dict(each) for each in capsule.records("events") if each["kind"] == kind]


def only(found: list[dict], **expected) -> None:
    (event,) = found
    assert {name: event.get(name) for name in expected} == expected


class TestWatchdog:
    def test_two_lines_of_one_rank_are_one_timeout_and_two_log_events(self, imported: Imports):
        capsule = imported(
            "[rank3]:[E ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL("
            "SeqNum=21937, OpType=_ALLGATHER_BASE, NumelIn=176556032, NumelOut=706224128, Timeout(ms)=600000) ran for "
            "600060 milliseconds before timing out.\n"
            "[rank3]:[E ProcessGroupNCCL.cpp:2271] [PG ID 0 PG GUID 0(default_pg) Rank 3]  failure detected by "
            "watchdog at work sequence id: 21937 PG status: last enqueued work: 21939, last completed work: 21936\n"
        )
        only(
            events(capsule, "collective_timeout"),
            rank=3,
            group="0",
            seq=21937,
            op="_all_gather_base",
            numel_in=176556032,
            numel_out=706224128,
            timeout_s=600.0,
            ran_s=600.06,
            last_enqueued=21939,
            last_completed=21936,
        )
        assert [each["logger"] for each in events(capsule, "log")] == ["nccl", "nccl"]

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            (
                "[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL("
                "SeqNum=469508, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802212 milliseconds before timing out.",
                {"rank": 1, "seq": 469508, "op": "all_reduce", "timeout_s": 1800.0, "numel_in": None},
            ),
            (
                "[E ProcessGroupNCCL.cpp:566] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL("
                "OpType=BROADCAST, TensorShape=[1024, 10], Timeout(ms)=5000) ran for 5100 milliseconds before …",
                {"rank": 2, "seq": None, "op": "broadcast", "shapes": [[1024, 10]], "ran_s": 5.1},
            ),
            (
                "[rank6]:[E626 06:24:44.9 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 6] Exception "
                "(either an error or timeout) detected by watchdog at work: 808, last enqueued NCCL work: 811, last "
                "completed NCCL work: 807.",
                {"rank": 6, "seq": 808, "group": "0", "last_enqueued": 811, "last_completed": 807},
            ),
            (
                "[PG 0 Rank 7] Timeout at NCCL work: 456, last enqueued NCCL work: 456, last completed NCCL work: 455.",
                {"rank": 7, "seq": 456, "group": "0", "last_enqueued": 456, "last_completed": 455},
            ),
            (
                "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 9] Process group watchdog thread terminated with "
                "exception: [Rank 9] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, "
                "OpType=REDUCE_SCATTER, NumelIn=8, NumelOut=2, Timeout(ms)=600000) ran for 600029 milliseconds …",
                {"rank": 9, "seq": 12, "op": "reduce_scatter", "numel_in": 8, "numel_out": 2},
            ),
        ],
        ids=["2.0", "1.9", "2.5", "2.3", "what"],
    )
    def test_every_generation_of_the_text(self, imported: Imports, line: str, expected: dict):
        only(events(imported(line + "\n"), "collective_timeout"), **expected)

    def test_a_number_within_a_group_is_no_rank_of_the_job_where_the_prefix_names_that(self, imported: Imports):
        capsule = imported(
            "[rank13]:[E ProcessGroupNCCL.cpp:2271] [PG ID 2 PG GUID 5(EXPERT_MODEL_PARALLEL_GROUP) Rank 1]  failure "
            "detected by watchdog at work sequence id: 7 PG status: last enqueued work: 9, last completed work: 6\n"
            "[rank13]:[E ProcessGroupNCCL.cpp:670] Stack trace of the failed collective: \n"
            "#0 all_to_all_single from /opt/torch/distributed/distributed_c10d.py:4279\n"
            "#1 wrapper from /opt/torch/distributed/c10d_logger.py:83\n"
            "#2 dispatch from /job/moe.py:77\n"
            "iter 10: loss 3.1400, time 15.50ms, mfu 3.21%\n"
        )
        (found,) = events(capsule, "collective_timeout")
        assert (found["rank"], found["group"], found["op"]) == (13, "5", "all_to_all_single")
        assert found["frames"][2] == {"name": "dispatch", "file": "/job/moe.py", "line": 77}

    def test_what_a_victim_says_of_itself_is_a_status_and_no_timeout(self, imported: Imports):
        capsule = imported(
            "[rank1]:[E ProcessGroupNCCL.cpp:1987] [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a dump signal due "
            "to a collective timeout from  rank 2 and we will try our best to dump the debug info. Last enqueued NCCL "
            "work: 21936, last completed NCCL work: 21936.This is most likely caused by incorrect usages …\n"
        )
        assert not events(capsule, "collective_timeout")
        status = {"rank": 1, "group": "0", "last_enqueued": 21936, "last_completed": 21936, "other_rank": 2}
        only(events(capsule, "collective_status"), **status)

    def test_greetings_of_the_library_and_frames_of_c_are_no_errors(self, imported: Imports):
        capsule = imported(
            "[rank0]:[I ProcessGroupNCCL.cpp:835] [Rank 0] ProcessGroupNCCL initialized with options: size: 8\n"
            "frame #2: c10d::ProcessGroupNCCL::watchdogHandler() + 0x233 (0x7f in libtorch_cuda.so)\n"
            "iter 10: loss 3.1400, time 15.50ms, mfu 3.21%\n"
        )
        assert not capsule.records("events")

    def test_the_year_is_that_of_the_file(self, tmp_path: Path):
        path = tmp_path / "a.log"
        line = (
            "[rank0]:[E1231 23:59:58.5 ProcessGroupNCCL.cpp:1] [Rank 0] Watchdog caught collective operation timeout: "
        )
        path.write_text(line + "WorkNCCL(SeqNum=1, OpType=SEND, NumelIn=1, NumelOut=1, Timeout(ms)=1) ran for 2 …\n")
        modified = calendar.timegm((2026, 1, 1, 0, 0, 10))
        os.utime(path, (modified, modified))
        capsule = Capsule.open(import_files([path], tmp_path / "out", attach=False))
        assert events(capsule, "collective_timeout")[0]["t"] == pytest.approx(modified - 11.5)

    def test_one_log_a_rank_names_the_rank(self, tmp_path: Path):
        said = (
            "[E ProcessGroupNCCL.cpp:1] [PG 4 (tp) Rank 0] Timeout at NCCL work: 3, last enqueued NCCL work: 4, last "
        )
        for rank in (2, 3):
            (tmp_path / f"train_rank{rank}.log").write_text(f"{said}completed NCCL work: {rank}.\n")
        capsule = Capsule.open(import_files(sorted(tmp_path.glob("*.log")), tmp_path / "out", attach=False))
        found = {each["rank"]: each["last_completed"] for each in events(capsule, "collective_timeout")}
        assert found == {2: 2, 3: 3}


class TestGloo:
    """Logs of real runs, made as the README beside them says."""

    def test_a_fingerprint_names_both_sides_and_the_call_site(self, imported: Imports):
        capsule = imported(MADE / "shape.DETAIL.log")
        found = {each["rank"]: each for each in events(capsule, "collective_mismatch")}
        assert sorted(found) == [0, 1]
        first = found[1]
        assert (first["op"], first["seq"], first["shapes"], first["dtype"]) == ("all_reduce", 1, [[4]], "float32")
        assert (first["other_rank"], first["other_shapes"]) == (0, [[8]])
        assert {"name": "<module>", "file": "job.py"}.items() <= first["frames"][-1].items()

    def test_other_dtype_and_other_operation(self, imported: Imports):
        dtypes = {
            each["rank"]: each["dtype"] for each in events(imported(MADE / "dtype.DETAIL.log"), "collective_mismatch")
        }
        assert dtypes == {0: "float32", 1: "float64"}
        ops = {each["rank"]: each["op"] for each in events(imported(MADE / "op.DETAIL.log"), "collective_mismatch")}
        assert ops == {0: "all_reduce", 1: "broadcast"}

    def test_a_barrier_names_who_is_missing_and_the_call_that_waited(self, imported: Imports):
        capsule = imported(MADE / "missing.DETAIL.log")
        only(events(capsule, "collective_timeout"), rank=0, missing=[1], other_rank=1, timeout_s=3.0, op="all_reduce")

    def test_a_transport_that_waited_names_the_call(self, imported: Imports):
        only(events(imported(MADE / "missing.OFF.log"), "collective_timeout"), rank=0, op="all_reduce", timeout_s=3.0)
        only(events(imported(MADE / "recv.OFF.log"), "collective_timeout"), rank=0, op="recv", timeout_s=3.0)

    def test_parameters_without_a_gradient_are_listed(self, imported: Imports):
        found = events(imported(MADE / "ddp_unused.INFO.log"), "unused_parameters")
        assert {each["rank"]: each["missing"] for each in found} == {
            0: ["b.bias", "b.weight"],
            1: ["b.bias", "b.weight"],
        }

    def test_an_exception_keeps_its_stack_and_no_line_of_the_launcher(self, imported: Imports):
        capsule = imported(MADE / "recv.OFF.log")
        first = events(capsule, "exception")[0]
        assert first["message"].endswith("Timed out waiting 3000ms for recv operation to complete")
        assert (first["frames"][0]["name"], first["frames"][-1]["file"]) == ("recv", "job.py")

    def test_the_launchers_summary_says_how_each_rank_ended(self, imported: Imports):
        ranks = {each["rank"]: each["exit"] for each in imported(MADE / "dead.OFF.log").records("ranks")}
        at = float(calendar.timegm((2026, 11, 30, 7, 26, 23)))
        assert ranks[1] == {"kind": "exception", "message": "exit code 3", "t": at}
        assert ranks[0] == {"kind": "signal", "message": "exit code -15 (SIGTERM)", "t": at}


class TestFingerprints:
    def test_what_older_versions_print(self, imported: Imports):
        capsule = imported(
            "RuntimeError: Detected mismatch between collectives on ranks. Rank 2 is running inconsistent collective: "
            "CollectiveFingerPrint(OpType=BROADCAST, TensorShape=[34112], TensorDtypes=Float, TensorDeviceTypes=x)\n"
            "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
            "CollectiveFingerPrint(OpType=ALLREDUCE, TensorShape=[20, 10], TensorDtypes=BFloat16), but Rank 1 is "
            "running collective: REDUCE.\n"
        )
        second, first = events(capsule, "collective_mismatch")
        assert (first["rank"], first["op"], first["shapes"]) == (2, "broadcast", [[34112]])
        assert (second["rank"], second["dtype"], second["other_rank"]) == (0, "bfloat16", 1)
        assert second["other_op"] == "reduce"

    def test_report_d3_names_the_bucket_sizes(self, imported: Imports):
        """modelscope/ms-swift#9443: a batch of text alone leaves the vision tower out, so buckets differ."""
        tail = "TensorDtypes=BFloat16, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda))"
        capsule = imported(
            "[rank1]: Traceback (most recent call last):\n"
            '[rank1]:   File "/job/train.py", line 9, in step\n'
            "[rank1]:     loss.backward()\n"
            "[rank1]: RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: "
            f"CollectiveFingerPrint(SequenceNumber=3104, OpType=ALLREDUCE, TensorShape=[195812480], {tail}, but Rank 0 "
            f"is running collective: CollectiveFingerPrint(SequenceNumber=3104, OpType=ALLREDUCE, "
            f"TensorShape=[51123456], "
            f"{tail}.Collectives differ in the following aspects:   Tensor Tensor shapes: 195812480vs 51123456\n"
        )
        expected = {"rank": 1, "seq": 3104, "shapes": [[195812480]], "other_shapes": [[51123456]], "other_rank": 0}
        only(events(capsule, "collective_mismatch"), op="all_reduce", dtype="bfloat16", **expected)


class TestSkips:
    def test_report_d1_counts_what_a_rank_left_out_and_why(self, tmp_path: Path):
        """lightseekorg/TorchSpec#126: one rank skips a sample, and calls one collective less."""
        for rank in range(4):
            more = "skipped sample: 12 < min_loss_tokens 32\n" * (rank == 1)
            (tmp_path / f"rank{rank}.log").write_text(f"step 1 loss 2.5\n{more}step 2 loss 2.25\n")
        capsule = Capsule.open(import_files(sorted(tmp_path.glob("*.log")), tmp_path / "out", attach=False))
        (rank,) = capsule.records("ranks")
        assert (rank["rank"], rank["samples_skipped"], rank["skip_reason"]) == (1, 1, "12 < min_loss_tokens 32")
        only(events(capsule, "log"), step=1, logger="data", samples_skipped=1)

    @pytest.mark.parametrize(
        ("line", "count"),
        [
            ("Skipping batch 17: no supervised token", 1),
            ("WARNING dropped 3 samples longer than 4096", 3),
            ("data: skipping long sample id=a17 (9001 tokens)", 1),
            ("Discarding micro-batch because loss is nan", 1),
            ("Skipping the first 120 batches", None),
            ("Will skip the first 0 epochs then the first 12 batches in the first epoch; skipping batches", None),
            ("skipped samples: 3 |", None),
            ("Skipping step, attempted loss scale 65536", None),
            ("dropped batch size to 4", None),
            ("skipped 0 samples", 0),
        ],
    )
    def test_words_that_are_a_skip_and_words_that_are_none(self, imported: Imports, line: str, count: int | None):
        ranks = imported(f"step 1 loss 2.5\n{line}\nstep 2 loss 2.5\n").records("ranks")
        assert [each["samples_skipped"] for each in ranks] == ([] if count is None else [count])


class TestMegatronsWatchers:
    REPORT = (
        " 0: INFO:megatron.core.utils:[2024-03-14 23:07:56] | MnRtt/Rnk: 3453.08ms/8 | MxRtt/Rnk: 3468.20ms/0 | "
        "MnPwr/Rnk: 601796W/8 | MxPwr/Rnk: 683801W/18 | MnTmp/Rnk: 52C/0 | MxTmp/Rnk: 65C/21 | MnUtl/Rnk: 97%/8 | "
        "MxUtl/Rnk: 100%/6 | MnClk/Rnk: 1950MHz/28 | MxClk/Rnk: 1980MHz/0 | MnDRtt/Rnk: 14.27ms/23 | "
        "MxDRtt/Rnk: 34.65ms/3 | MnEtpt/Rnk: 296.02TF/0 | MxEtpt/Rnk: 297.32TF/8\n"
        "^^^^ Bottom 2 Ranks with lowest  Etpt(TF): 296.02TF/0, 296.10TF/5,\n"
    )

    def test_the_straggler_report_gives_the_ranks_at_both_ends_their_points(self, imported: Imports):
        capsule = imported(self.REPORT)
        assert capsule.scalars("round_trip_time", rank=0).value.tolist() == pytest.approx([3.4682])
        assert capsule.scalars("round_trip_time", rank=8).value.tolist() == pytest.approx([3.45308])
        assert capsule.scalars("data_time", rank=3).value.tolist() == pytest.approx([0.03465])
        assert capsule.scalars("gpu_power", rank=18).value.tolist() == pytest.approx([683.801])
        assert capsule.scalars("gpu_utilization", rank=8).value.tolist() == pytest.approx([0.97])
        assert capsule.scalars("estimated_throughput", rank=5).value.tolist() == pytest.approx([296.10])
        only(events(capsule, "log"), logger="straggler", level="info")
        (event,) = events(capsule, "log")
        assert event["extremes"]["round_trip_time"]["most"] == {"rank": 0, "value": pytest.approx(3.4682)}

    def test_a_result_computed_again_and_the_tracker_file(self, imported: Imports):
        capsule = imported(
            "Unexpected result nan on rank 5 at iteration #1001 invocation #1 (message='found NaN in local "
            "forward loss "
            "calculation')\n"
            "Second rerun: unexpected result is not reproducible on a different GPU, therefore was likely incorrect. "
            "Possible persistent error!\n"
        )
        first, second = events(capsule, "log")
        assert (first["rank"], first["step"], first["result"]) == (5, 1001, "nan")
        assert first["reason"] == "found NaN in local forward loss calculation"
        assert (second["logger"], second["rank"], second["step"]) == ("rerun", 5, 1001)
        assert second["verdict"] == "persistent"
        tracked = imported(
            "ts=2026-08-22T15:22:22 node=gpu-17 device=3 jobID=991 rank=11 iteration=1001 "
            "status=first_rerun_reproducible "
            "result=nan message='found NaN'\n",
            name="tracker",
        )
        only(
            events(tracked, "log"), rank=11, step=1001, status="first_rerun_reproducible", device=3, reason="found NaN"
        )
        assert tracked.records("ranks")[0]["host"] == "gpu-17"
