"""Logs of many ranks with what clusters print around and between their lines: who ended first, and who did not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from llmconsole.analyzers.report import CapsuleReport
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import import_files

DIED, MISSING, FAILED = "distributed/rank-died-first", "distributed/missing-rank", "runtime/job-failed"
DEAD = Path(__file__).resolve().parents[1] / "capsules" / "importers" / "fixtures" / "distributed" / "dead.OFF.log"
STEPS = "".join(f"step {step} loss {2.5 - step / 100:.2f}\n" for step in range(1, 9))
RAISED = (
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 88, in main',
    "    batch = next(rows)",
    '  File "/job/data.py", line 17, in __next__',
    "    return self.rows[at]",
    "KeyError: 'text'",
)

Read = Callable[[str], CapsuleReport]
Lines = dict[int, list[str]]


def watchdog(rank: int, seq: int = 456) -> list[str]:
    who = f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    work = f"WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, NumelIn=100, NumelOut=100, Timeout(ms)=600000)"
    return [
        f"[E1130 07:26:23.4 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"{work} ran for 600021 milliseconds before timing out.",
        f"[E1130 07:26:23.5 ProcessGroupNCCL.cpp:2271] {who} failure detected by watchdog at work sequence id: {seq} "
        f"PG status: last enqueued work: {seq}, last completed work: {seq - 1}",
    ]


def summary(*ends: tuple[int, int, str, str]) -> str:
    """torchrun's, of (rank, exit code, signal, time)."""
    blocks = [
        f"  time      : 2026-11-30_07:{time}\n  host      : n0\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: {3000 + rank}) {f' ({signal})' if signal else ''}\n  error_file: <N/A>\n"
        for rank, code, signal, time in ends
    ]
    return "".join(blocks)


def first(report: CapsuleReport) -> tuple[str, int | None] | None:
    found = report.first_divergence
    return None if found is None else (found.rule, found.where.rank)


def loud(report: CapsuleReport) -> set[tuple[str, int | None]]:
    """Findings that are sure of a cause."""
    return {
        (each.rule, each.where.rank)
        for each in report.findings
        if each.kind == "divergence" and each.confidence != "undetermined" and each.severity != "info"
    }


PREFIXES = {
    "torchrun": lambda rank: f"[rank{rank}]: ",
    "container runtime": lambda rank: f"2026-11-30T07:26:23.414000123Z stderr F [rank{rank}]: ",
    "kubectl": lambda rank: f"[pod/train-worker-{rank // 2}/pytorch] [rank{rank}]: ",
    "kubectl with times": lambda rank: f"2026-11-30T07:26:23.414000123Z [rank{rank}]: ",
    "srun": lambda rank: f"{rank}: ",
    "srun of agents": lambda rank: f"{rank // 2}: [rank{rank}]: ",
    "ray": lambda rank: f"\x1b[36m(RayTrainWorker pid={4000 + rank}, ip=10.0.0.{rank})\x1b[0m ",
}


@pytest.mark.recorded(DIED)
@pytest.mark.parametrize("name", PREFIXES)
def test_the_rank_that_raised_is_named_whatever_stands_before_its_lines(read: Read, name: str):
    lines: Lines = {rank: watchdog(rank) for rank in (0, 1, 3)} | {2: list(RAISED)}
    told = [f"Setting up process group for: env:// [rank={rank}, world_size=4]" for rank in range(4)]
    before = PREFIXES[name]
    text = "".join(f"{before(rank)}{line}\n" for rank, line in enumerate(told)) + STEPS
    report = read(text + "".join(f"{before(rank)}{line}\n" for rank in (2, 0, 1, 3) for line in lines[rank]))
    assert first(report) == (DIED, 2)
    assert loud(report) == {(DIED, 2)}
    assert report.first_divergence is not None
    assert "data.py:17" in report.first_divergence.summary


#: What a container, a machine or a logger puts before every line of a log, whoever printed it.
COMMON = {
    "docker compose": "trainer-1  | ",
    "journald": "Nov 30 07:26:23 node07 python3[41000]: ",
    "a logger": "2026-11-30 07:26:23,414 - INFO - ",
    "a named logger": "2026-11-30 07:26:23,414 - job.pipe - INFO - ",
    "a time": "[2026-11-30 07:26:23] ",
}


@pytest.mark.fires(DIED)
@pytest.mark.parametrize("before", COMMON.values(), ids=COMMON)
@pytest.mark.parametrize("blank", ["", " "], ids=["torchrun", "torch"])
def test_what_stands_before_every_line_is_no_part_of_any(read: Read, before: str, blank: str):
    own = "[default{0}]:" if not blank else "[rank{0}]: "
    lines = [*STEPS.splitlines(), *(own.format(2) + line for line in RAISED)]
    lines += [own.format(rank) + line for rank in (0, 1, 3) for line in watchdog(rank)]
    report = read("".join(f"{before}{line}\n" for line in lines))
    if before in (COMMON["docker compose"], COMMON["journald"]) and not blank:
        assert not loud(report)  # the number of a process on one machine, of which there may be several
        return
    assert first(report) == (DIED, 2)
    assert report.first_divergence is not None
    assert "data.py:17" in report.first_divergence.summary


@pytest.mark.fires(DIED)
def test_srun_pads_the_numbers_of_a_wide_job(read: Read):
    lines = [f" 0: {line}" for line in STEPS.splitlines()] + [f" 2: {line}" for line in RAISED]
    lines += [f"{rank:2}: {line}" for rank in (0, 1, *range(3, 12)) for line in watchdog(rank)]
    assert first(read("".join(f"{line}\n" for line in lines))) == (DIED, 2)


def test_without_a_prefix_the_launchers_summary_tells_whose_exception_it_is(read: Read):
    bare = STEPS + "\n".join([*RAISED, *(line for rank in (0, 1, 3) for line in watchdog(rank))]) + "\n"
    ends = [(2, 1, "", "16:20"), *((rank, -6, "SIGABRT", "26:25") for rank in (0, 1, 3))]
    assert first(read(bare + summary(*ends))) == (DIED, 2)
    assert not loud(read(bare))  # any of four ranks printed it: none is accused


@pytest.mark.parametrize(
    "line",
    [
        "[Mon Nov 30 07:20:11 2026] NVRM: Xid (PCI:0000:3b:00): 79, pid=77, name=python, GPU has fallen off the bus.",
        "srun: error: node12: task 5: Segmentation fault (core dumped)",
        "n0:120:134 [1] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion with error 12, vendor err 129",
    ],
)
def test_a_line_of_the_host_is_no_end_of_rank_0(read: Read, line: str):
    hung = [each for rank in (0, 1, 2, 3, 4, 6, 7) for each in watchdog(rank)]
    report = read(STEPS + line + "\n" + "\n".join(hung) + "\n")
    assert not loud(report)
    assert {each.where.rank for each in report.findings if each.rule in (DIED, FAILED)} <= {None}


def test_a_fault_of_a_device_is_its_process_where_the_summary_names_both(read: Read):
    xid = "NVRM: Xid (PCI:0000:3b:00): 79, pid=3003, name=python, GPU has fallen off the bus."
    hung = [each for rank in (0, 1, 2) for each in watchdog(rank)]
    ends = [(3, -9, "SIGKILL", "16:20"), *((rank, -6, "SIGABRT", "26:25") for rank in (0, 1, 2))]
    assert first(read(STEPS + xid + "\n" + "\n".join(hung) + "\n" + summary(*ends))) == (DIED, 3)


LAUNCHED = (
    "Traceback (most recent call last):\n"
    '  File "/opt/bin/torchrun", line 8, in <module>\n'
    "    sys.exit(main())\n"
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
)


def test_files_of_one_rank_each_beside_the_launchers(tmp_path: Path):
    """The launcher's own error is no rank's, and a watchdog aborts its process in a file of its own."""
    ends = [(2, 1, "", "16:20"), *((rank, -6, "SIGABRT", "26:25") for rank in (0, 1))]
    texts = {"launcher": LAUNCHED + summary(*ends)} | {f"rank{rank}": STEPS for rank in range(3)}
    for rank in (0, 1):
        texts[f"rank{rank}"] += "\n".join(watchdog(rank)) + "\n"
    texts["rank2"] += "\n".join(RAISED) + "\n"
    files = [tmp_path / f"{name}.log" for name in texts]
    for path in files:
        path.write_text(texts[path.stem])
    assert first(analyze(Capsule.open(import_files(files, tmp_path / "made", attach=False)))) == (DIED, 2)


def test_an_error_in_a_file_that_names_no_rank_accuses_none_of_several(tmp_path: Path):
    texts = {f"stderr_{rank}": "".join(f"[rank{rank}]:{line}\n" for line in watchdog(rank)) for rank in (0, 1)}
    texts["stderr_2"] = "\n".join(RAISED) + "\n"
    files = [tmp_path / f"{name}.log" for name in texts]
    for path in files:
        path.write_text(texts[path.stem])
    assert not loud(analyze(Capsule.open(import_files(files, tmp_path / "made", attach=False))))


@pytest.mark.fires(MISSING)
def test_the_watchdog_of_one_rank_alone_accuses_nobody_and_is_said(read: Read):
    report = read(STEPS + "".join(f"[rank0]:{line}\n" for line in watchdog(0)))
    assert first(report) == (MISSING, None)
    assert report.first_divergence is not None
    assert "of no other rank there is evidence" in report.first_divergence.summary


@pytest.mark.fires(FAILED)
@pytest.mark.recorded(FAILED)
@pytest.mark.parametrize(
    ("ends", "rank"),
    [
        ([(1, 3, "", "26:25"), (0, -15, "SIGTERM", "26:25"), (2, -15, "SIGTERM", "26:25")], 1),
        ([(2, -11, "SIGSEGV", "26:25"), (0, -15, "SIGTERM", "26:25")], 2),
        ([(2, -9, "SIGKILL", "26:20"), (0, -9, "SIGKILL", "26:25")], 2),
        ([(2, 1, "", "26:25"), (0, 1, "", "26:25")], None),
    ],
)
def test_a_rank_that_ended_without_a_word_is_named_by_its_exit(read: Read, ends: list, rank: int | None):
    assert first(read(STEPS + summary(*ends))) == (FAILED, rank)


@pytest.mark.fires(FAILED)
def test_a_real_job_of_which_one_rank_exits_with_code_3(read: Read):
    assert first(read(DEAD.read_text())) == (FAILED, 1)


@pytest.mark.fires(FAILED)
def test_a_process_whose_heartbeat_stopped_is_named(read: Read):
    who = "[PG ID 0 PG GUID 0(default_pg) Rank 4]"
    text = f"[rank4]:[E1130 07:26:23.4 ProcessGroupNCCL.cpp:1450] {who} Heartbeat monitor timed out! Process will be\n"
    assert first(read(STEPS + text)) == (FAILED, 4)


@pytest.mark.quiet(FAILED)
@pytest.mark.quiet(MISSING)
@pytest.mark.parametrize(
    "text",
    [
        summary(*((rank, -15, "SIGTERM", "26:25") for rank in range(4))),
        "slurmstepd: error: *** JOB 8 ON n1 CANCELLED AT 2026-11-30T07:26:23 DUE TO PREEMPTION ***\n"
        "srun: error: n1: tasks 0-3: Killed\n" + summary(*((rank, -9, "SIGKILL", "26:25") for rank in range(4))),
        "see 'Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, "
        "NumelOut=1, Timeout(ms)=600000) ran for 600021 milliseconds before timing out.' in the handbook\n",
        'on "CUDA out of memory. Tried to allocate 20.00 MiB" lower the batch\n',
        "hint: 'Heartbeat monitor timed out' means that the interpreter is held\n",
        "[W1130 07:00:00.1 ProcessGroupNCCL.cpp:1496] Warning: destroy_process_group() was not called\n",
    ],
    ids=["stopped", "preempted", "watchdog explained", "memory explained", "heartbeat explained", "warning"],
)
def test_what_a_scheduler_ends_or_a_text_explains_is_no_fault(read: Read, text: str):
    report = read(STEPS + text + STEPS.replace("step ", "step 1"))
    assert first(report) is None
    assert first(read(STEPS + text)) is None


CANCELLED = "slurmstepd: error: *** JOB 8 ON n1 CANCELLED AT 2026-11-30T07:26:23{} ***\n"


@pytest.mark.fires(FAILED)
@pytest.mark.parametrize(
    ("why", "severity"), [("", "info"), (" DUE TO TIME LIMIT", "info"), (" DUE TO NODE FAILURE, SEE LOG", "warning")]
)
def test_a_machine_that_fails_is_a_fault_and_a_limit_is_none(read: Read, why: str, severity: str):
    (found,) = (each for each in read(STEPS + CANCELLED.format(why)).findings if each.rule == FAILED)
    assert (found.title, found.severity) == ("The scheduler ended the job", severity)


@pytest.mark.quiet(FAILED)
def test_a_communicator_that_goes_with_a_cancelled_job_is_no_error_of_its_own(read: Read):
    lost = "[rank1]: Traceback (most recent call last):\n[rank1]: {}\n"
    gone = lost.format("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.")
    assert first(read(STEPS + CANCELLED.format("") + gone)) is None
    assert first(read(STEPS + lost.format("ValueError: bad row") + CANCELLED.format("") + gone)) == (FAILED, 1)


@pytest.mark.quiet(FAILED)
def test_a_process_that_its_watchdog_aborts_says_so_and_is_no_further_fault(read: Read):
    aborted = "Fatal Python error: Aborted\n\nThread 0x00007f2 (most recent call first):\n"
    waits = "".join(f"[rank{rank}]:{line}\n" for rank in (0, 1, 3) for line in watchdog(rank))
    assert not any(each.rule == FAILED for each in read(STEPS + waits + aborted).findings)
    assert any(each.rule == FAILED for each in read(STEPS + aborted).findings)
