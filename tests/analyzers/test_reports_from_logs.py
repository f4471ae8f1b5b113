"""Families D and E of public bug reports, as the logs that their authors had: the whole report names the cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from llmconsole.analyzers.report import CapsuleReport
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import import_files

MADE = Path(__file__).resolve().parents[1] / "capsules" / "importers" / "fixtures" / "distributed"


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., CapsuleReport]:
    """The report of logs, given as name and text."""

    def run(**logs: str) -> CapsuleReport:
        files = []
        for name, text in logs.items():
            files.append(tmp_path / f"{name}.log")
            files[-1].write_text(text)
        report = analyze(Capsule.open(import_files(files, tmp_path / "out", attach=False)))
        assert not report.errors
        return report

    return run


def first(report: CapsuleReport) -> tuple[str, int | None]:
    assert report.first_divergence is not None
    return report.first_divergence.rule, report.first_divergence.where.rank


def test_d1_a_sample_skipped_on_one_rank(read):
    """lightseekorg/TorchSpec#126: rank 1 skips a sample, and ranks 0, 2 and 3 wait in the next gathering."""
    watchdog = (
        "[rank{0}]:[E ProcessGroupNCCL.cpp:607] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL("
        "SeqNum=21937, OpType=_ALLGATHER_BASE, NumelIn=176556032, NumelOut=706224128, Timeout(ms)=600000) ran for "
        "600060 milliseconds before timing out.\n"
        "[rank{0}]:[E ProcessGroupNCCL.cpp:2271] [PG ID 0 PG GUID 0(default_pg) Rank {0}] failure detected by watchdog "
        "at work sequence id: 21937 PG status: last enqueued work: 21937, last completed work: 21936\n"
    )
    victim = (
        "[rank1]:[E ProcessGroupNCCL.cpp:1987] [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a dump signal due to a "
        "collective timeout from rank 0 and we will try our best to dump the debug info. Last enqueued NCCL "
        "work: 21936, "
        "last completed NCCL work: 21936.This is most likely caused by …\n"
    )
    steps = "".join(f"step {step} loss {2.5 - step / 100:.2f}\n" for step in range(1, 9))
    logs = {f"rank{rank}": steps + watchdog.format(rank) for rank in (0, 2, 3)}
    logs["rank1"] = f"{steps}skipped sample: 12 < min_loss_tokens 32\n{victim}"
    report = read(**logs)
    assert first(report) == ("distributed/uneven-steps", 1)
    missing = next(each for each in report.findings if each.rule == "distributed/missing-rank")
    assert (missing.where.rank, missing.caused_by) == (1, "distributed/uneven-steps")


def test_d3_a_graph_that_depends_on_the_batch(read):
    """modelscope/ms-swift#9443: two ranks reduce buckets of different sizes; the text does not say which is right."""
    tail = "TensorDtypes=BFloat16, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda))"
    report = read(
        train="[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/job/train.py", line 9, in step\n'
        "[rank1]:     loss.backward()\n"
        "[rank1]: RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: "
        f"CollectiveFingerPrint(SequenceNumber=3104, OpType=ALLREDUCE, TensorShape=[195812480], {tail}, but Rank 0 is "
        f"running collective: CollectiveFingerPrint(SequenceNumber=3104, OpType=ALLREDUCE, "
        f"TensorShape=[51123456], {tail}.\n"
    )
    assert first(report)[0] == "distributed/collective-mismatch"
    assert {"195812480", "51123456"} <= set(report.first_divergence.summary.replace("[", " ").replace("]", " ").split())


def test_e4_reserved_memory_that_fits_nothing(read):
    """rapidsai/crossfit#18: 12.12 GiB are reserved and idle, 12.00 GiB are asked for: no capacity."""
    report = read(
        train="step 1 loss 2.5\n"
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.00 GiB. GPU 0 has a total capacty "
        "of 47.54 "
        "GiB of which 11.00 GiB is free. Including non-PyTorch memory, this process has 36.53 GiB memory in use. "
        "Of the "
        "allocated memory 23.57 GiB is allocated by PyTorch, and 12.12 GiB is reserved by PyTorch but unallocated.\n"
    )
    assert first(report) == ("memory/fragmentation", 0)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("shape.DETAIL", "distributed/collective-mismatch"),
        ("dtype.DETAIL", "distributed/collective-mismatch"),
        ("op.DETAIL", "distributed/collective-mismatch"),
        ("missing.DETAIL", "distributed/missing-rank"),
    ],
)
def test_two_ranks_that_really_ran(read, name: str, rule: str):
    assert first(read(train=(MADE / f"{name}.log").read_text()))[0] == rule
