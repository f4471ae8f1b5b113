"""runtime/job-failed and memory/allocator-thrash, on logs as programs write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import import_files

from tests.analyzers.conftest import rule_named

FAILED, THRASH = "runtime/job-failed", "memory/allocator-thrash"
REAL = Path(__file__).resolve().parents[3] / "shared" / "real" / "text_logs" / "torchtitan" / "autoresearch"

Read = Callable[[str | Path, str], list[Finding]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """What one rule says of a log, given as text or as a file."""

    def read(log: str | Path, rule: str) -> list[Finding]:
        if isinstance(log, str):
            (tmp_path / "job.log").write_text(log)
            log = tmp_path / "job.log"
        elif not log.is_file():
            pytest.skip("the folder of real logs is not beside this checkout")
        report = analyze(Capsule.open(import_files([log], tmp_path / "imported", attach=False)), [rule_named(rule)])
        assert not report.errors
        return list(report.findings)

    return read


def step(number: int, tps: str = "7,000", retries: int = 0) -> str:
    warned = f"[titan] - root - WARNING - {retries} CUDA memory allocation retries.\n" if retries else ""
    return (
        f"{warned}[titan] - root - INFO - step: {number:2}  loss: 5.1  memory: 70.0GiB(97.4%)  tps: {tps}  mfu: N/A\n"
    )


def trace(error: str, prefix: str = "") -> str:
    lines = ("Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "    main()", error)
    return "".join(f"{prefix}{line}\n" for line in lines)


OUT = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked} GiB. GPU 0 has a total capacity of "
    "79.10 GiB of which 1.00 GiB is free. Of the allocated memory 65.00 GiB is allocated by PyTorch, and 12.00 "
    "GiB is reserved by PyTorch but unallocated."
)


@pytest.mark.fires(FAILED)
@pytest.mark.recorded(FAILED)
def test_the_exception_that_ended_a_log_is_said_and_left_open(read: Read):
    launched = trace("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:")
    text = step(1) + step(2) + trace("RuntimeError: shape mismatch", "[rank3]: ") + launched
    (finding,) = read(text, FAILED)
    assert (finding.severity, finding.confidence, finding.cause) == ("warning", "undetermined", None)
    assert (finding.where.step, finding.where.rank) == (2, 3)
    assert "RuntimeError: shape mismatch" in finding.summary


@pytest.mark.fires(FAILED)
def test_an_error_in_a_file_of_its_own_stands_at_no_step(tmp_path: Path):
    (tmp_path / "job.out").write_text(step(1) + step(2))
    (tmp_path / "job.err").write_text(trace("RuntimeError: CUDA error: an illegal memory access was encountered"))
    files = [tmp_path / "job.err", tmp_path / "job.out"]
    capsule = Capsule.open(import_files(files, tmp_path / "imported", attach=False))
    (finding,) = analyze(capsule, [rule_named(FAILED)]).findings
    assert finding.where.step is None
    assert finding.summary.endswith("(its file has no step before it; the last: 2).")


@pytest.mark.quiet(FAILED)
@pytest.mark.parametrize(
    "text",
    [
        step(1) + trace("ConnectionError: wandb is not reachable") + step(2) + step(3),
        step(1)
        + "Exception ignored in: <function Pool.__del__ at 0x7f>\n"
        + trace("AttributeError: no attribute 'close'"),
        step(1) + "--- Logging error ---\n" + trace("BlockingIOError: [Errno 11] write could not complete"),
        step(1) + trace("KeyboardInterrupt"),
    ],
    ids=["training went on", "clean-up", "logging", "keyboard"],
)
def test_what_did_not_end_the_job_is_quiet(read: Read, text: str):
    assert not read(text, FAILED)


EXIT = "=====\n  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: 91)\n"
RAISED = trace("ValueError: bad row", "[rank1]: ")


def ranks_in_turn(first: int, last: int, ranks: tuple[int, ...] = (0, 1)) -> str:
    return "".join(f"[rank{rank}]: {step(number)}" for number in range(first, last + 1) for rank in ranks)


@pytest.mark.fires(FAILED)
@pytest.mark.parametrize(
    "text",
    [
        step(1) + step(2) + RAISED + step(3) + step(4),
        ranks_in_turn(1, 4) + RAISED + ranks_in_turn(3, 6, (0,)),
        step(1) + step(2) + trace("ValueError: bad row") + step(3) + EXIT,
    ],
    ids=["what nobody caught is behind its rank", "others print on", "the launcher says that its rank ended"],
)
def test_steps_that_others_printed_behind_an_error_are_no_sign_that_it_was_dealt_with(read: Read, text: str):
    (finding,) = read(text, FAILED)
    assert (finding.where.step, finding.where.rank) == (4 if "[rank0]" in text else 2, 1)
    assert "ValueError: bad row" in finding.summary


@pytest.mark.quiet(FAILED)
@pytest.mark.parametrize(
    "text",
    [
        ranks_in_turn(1, 4) + RAISED + ranks_in_turn(5, 6),
        ranks_in_turn(1, 4, (0,)) + RAISED + ranks_in_turn(5, 9, (0,)),
    ],
    ids=["its rank prints on", "a rank that never reports steps, behind a prefix that all lines have"],
)
def test_an_error_whose_rank_goes_on_or_may_go_on_is_quiet(read: Read, text: str):
    assert not read(text, FAILED)


@pytest.mark.quiet(FAILED)
def test_a_device_out_of_memory_and_what_follows_it_are_said_by_the_rules_of_memory(read: Read):
    text = step(1) + trace(OUT.format(asked="14.00"))
    for follows in ("", trace("torch.distributed.DistBackendError: NCCL error", "[rank3]: ")):
        assert not read(text + follows, FAILED)
        (finding,) = read(text + follows, "memory/capacity")
        assert (finding.where.step, finding.confidence) == (1, "likely")


@pytest.mark.fires(FAILED)
def test_an_error_before_it_is_the_reason(read: Read):
    text = step(1) + trace("RuntimeError: shape mismatch") + trace(OUT.format(asked="14.00"), "[rank1]: ")
    (finding,) = read(text, FAILED)
    assert "shape mismatch" in finding.summary


@pytest.mark.fires(FAILED)
@pytest.mark.parametrize(
    "line",
    [
        "[1234.5] Out of memory: Killed process 4711 (python) total-vm:901234kB, anon-rss:801234kB",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0 cgroup. Some processes may have been killed",
    ],
)
def test_the_host_ran_out_of_memory_which_is_no_device_memory(read: Read, line: str):
    (finding,) = read(step(1) + step(2) + line + "\n", FAILED)
    assert (finding.title, finding.confidence) == ("The host's memory ran out", "undetermined")
    assert not read(step(1) + step(2) + line + "\n", "memory/capacity")


@pytest.mark.fires(THRASH)
@pytest.mark.recorded(THRASH)
def test_retries_at_every_step_and_a_throughput_that_falls(read: Read):
    text = step(1, "400") + "".join(step(n, "8,000", n) for n in range(2, 9)) + step(9, "600", 10)
    (finding,) = read(text, THRASH)
    assert (finding.severity, finding.where.step) == ("warning", 2)
    assert finding.evidence[1].value == 600.0
    assert read(text.replace(" 600 ", " 7,900 "), THRASH)[0].severity == "info"


@pytest.mark.quiet(THRASH)
def test_a_retry_at_the_start_and_a_drop_without_retries_are_quiet(read: Read):
    assert not read(
        step(1, "400", 1) + step(2, retries=2) + "".join(step(n) for n in range(3, 9)) + step(9, "60"), THRASH
    )


@pytest.mark.fires(FAILED)
@pytest.mark.parametrize(
    ("run", "rule", "words"),
    [
        ("run35", "memory/capacity", "173.25 GiB of 178.35 GiB"),
        ("run156", FAILED, "NCCL_ALGO was set to Tree"),
        ("run31", FAILED, "'mxfp8_cublas' is not a valid MXFP8TrainingRecipe"),
        ("run348", THRASH, "560 at step 10, 7% of the best"),
    ],
)
def test_real_jobs_that_failed(read: Read, run: str, rule: str, words: str):
    (finding,) = read(REAL / f"{run}.log", rule)
    assert words in finding.summary


@pytest.mark.quiet(FAILED)
@pytest.mark.quiet(THRASH)
def test_real_jobs_that_did_not(read: Read):
    for run in ("run62", "run350"):
        assert not read(REAL / f"{run}.log", FAILED) + read(REAL / f"{run}.log", THRASH)
    assert not read(REAL / "run35.log", FAILED)
