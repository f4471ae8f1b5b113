"""memory/capacity, and the one classification of out-of-memory failures that the family shares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.memory.oom import classify, failures, host_failures
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import import_files

from tests.analyzers.conftest import rule_named

CAPACITY = "memory/capacity"
REAL = Path(__file__).resolve().parents[3] / "shared" / "real" / "text_logs" / "torchtitan" / "autoresearch"
GIB = 1 << 30

Make = Callable[..., Capsule]
Findings = Callable[[str, Capsule], list[Finding]]

NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {capacity} "
    "of which {free} is free. {others}Of the allocated memory {allocated} is allocated by PyTorch, and {idle} is "
    "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate {asked} (GPU 5; {capacity} total capacity; {allocated} "
    "already allocated; {free} free; {reserved})"
)


def failed(build: Make, **fields: Any) -> Capsule:
    """A capsule with one failure at step 7, and curves that end there."""

    def fill(writer: Any) -> None:
        writer.scalars("loss", step=list(range(8)), value=[2.0] * 8)
        writer.record("events", {"kind": "oom", "step": 7, **fields})

    return build(fill)


def said(build: Make, message: str, kind: str = "exception") -> tuple[str, tuple[str, ...]]:
    """Classification of a message, as an exception tells of it."""
    (failure,) = failures(failed(build, kind=kind, type="RuntimeError", message=message))
    verdict = classify(failure)
    return verdict.kind, verdict.between


def sizes(asked: float, free: float, allocated: float, idle: float, capacity: float = 80.0) -> dict[str, int]:
    given = {"requested": asked, "free": free, "allocated": allocated, "reserved": allocated + idle}
    return {name: round(size * GIB) for name, size in (given | {"capacity": capacity}).items()}


# Words and numbers of public bug reports; the last column is what people found or what the arithmetic says.
@pytest.mark.parametrize(
    ("message", "kind"),
    [
        # rapidsai/crossfit 18: batches sorted from short to long
        (
            NEW.format(
                asked="12.00 GiB",
                capacity="47.54 GiB",
                free="11.00 GiB",
                others="",
                allocated="23.57 GiB",
                idle="12.12 GiB",
            ),
            "fragmentation",
        ),
        # half of the card unused in pieces; torch 1.8
        (
            OLD.format(
                asked="2.87 GiB",
                capacity="14.76 GiB",
                allocated="8.77 GiB",
                free="19.75 MiB",
                reserved="13.71 GiB reserved in total by PyTorch",
            ),
            "fragmentation",
        ),
        # tiny-cuda-nn holds 3.9 GiB beside PyTorch, and 4.84 GiB lie unused
        (
            NEW.format(
                asked="3.00 GiB",
                capacity="23.65 GiB",
                free="1.66 GiB",
                others="Including non-PyTorch memory, this process has 20.81 GiB memory in use. ",
                allocated="12.09 GiB",
                idle="4.84 GiB",
            ),
            "fragmentation",
        ),
        # one tensor larger than the device
        (
            NEW.format(
                asked="55.57 GiB",
                capacity="12.00 GiB",
                free="9.02 GiB",
                others="",
                allocated="984.52 MiB",
                idle="463.48 MiB",
            ),
            "capacity",
        ),
        (
            "MPS backend out of memory (MPS allocated: 17.68 GB, other allocations: 3.95 MB, max allowed: 18.13 "
            "GB). Tried "
            "to allocate 1024.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0",
            "capacity",
        ),
        (
            "XPU out of memory. Tried to allocate 32.00 GiB. GPU 0 has a total capacity of 11.59 GiB of which 9.01 "
            "GiB is "
            "free. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
            "unallocated.",
            "capacity",
        ),
        # 79 MiB of this process on a card of 15.75 GiB, and nothing is free
        (
            OLD.format(
                asked="20.00 MiB",
                capacity="15.75 GiB",
                allocated="79.11 MiB",
                free="3.62 MiB",
                reserved="86.00 MiB reserved in total by PyTorch",
            ),
            "other process",
        ),
        (
            NEW.format(
                asked="2.90 GiB",
                capacity="178.35 GiB",
                free="1.47 GiB",
                others="Process 369 has 100.00 GiB memory in use. Including non-PyTorch memory, this process has "
                "76.88 GiB "
                "memory in use. ",
                allocated="74.00 GiB",
                idle="1.24 GiB",
            ),
            "other process",
        ),
        # another rank's context on the device is no reason
        (
            NEW.format(
                asked="2.90 GiB",
                capacity="178.35 GiB",
                free="1.47 GiB",
                others="Process 369 has 616.00 MiB memory in use. Including non-PyTorch memory, this process has "
                "176.15 GiB "
                "memory in use. ",
                allocated="173.25 GiB",
                idle="1.24 GiB",
            ),
            "capacity",
        ),
        # the words of torch 1.2: what is cached is not in use
        (
            OLD.format(
                asked="320.00 MiB",
                capacity="7.79 GiB",
                allocated="6.64 GiB",
                free="21.00 MiB",
                reserved="150.86 MiB cached",
            ),
            "capacity",
        ),
        (
            "HIP out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 15.98 GiB of which 1.00 "
            "GiB is "
            "free. Of the allocated memory 14.00 GiB is allocated by PyTorch, and 0.50 GiB is reserved by PyTorch but "
            "unallocated.",
            "capacity",
        ),
        # the job limited itself to a fraction of the device
        (
            "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which "
            "58.00 GiB is "
            "free. Including non-PyTorch memory, this process has 21.00 GiB memory in use. 20.00 GiB allowed; Of the "
            "allocated memory 19.40 GiB is allocated by PyTorch, and 0.10 GiB is reserved by PyTorch but unallocated.",
            "capacity",
        ),
        # room on the device: a limit, or freed since
        (
            OLD.format(
                asked="2.26 GiB",
                capacity="6.00 GiB",
                allocated="781.59 MiB",
                free="3.03 GiB",
                reserved="1.24 GiB reserved in total by PyTorch",
            ),
            "undecided",
        ),
        # a card that is full leaves 2 % unused: no sign of fragmentation, and no proof against it
        (
            OLD.format(
                asked="130.00 MiB",
                capacity="7.80 GiB",
                allocated="5.91 GiB",
                free="33.56 MiB",
                reserved="6.09 GiB reserved in total by PyTorch",
            ),
            "undecided",
        ),
        # 3.4 GiB are neither free nor PyTorch's, and nothing says whose
        (
            OLD.format(
                asked="384.00 MiB",
                capacity="14.76 GiB",
                allocated="11.04 GiB",
                free="259.75 MiB",
                reserved="11.10 GiB reserved in total by PyTorch",
            ),
            "undecided",
        ),
        (
            "MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max allowed: 27.20 "
            "GiB). Tried "
            "to allocate 292.50 MiB on private pool.",
            "undecided",
        ),
        ("CUDA error: out of memory", "undecided"),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "undecided"),
    ],
)
def test_words_of_every_backend_and_age_are_classified_by_their_own_numbers(build: Make, message: str, kind: str):
    assert said(build, message)[0] == kind


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        (sizes(14, 1, 65, 12), "capacity"),
        (sizes(12.5, 1, 65, 12), "undecided"),
        (sizes(11, 1, 65, 12), "fragmentation"),
        (sizes(11, 1, 65, 12) | {"largest_free_block": 12 * GIB}, "undecided"),
        (sizes(2, 1, 75, 3), "undecided"),
        (sizes(2, 1, 75, 3) | {"largest_free_block": GIB}, "fragmentation"),
        (sizes(2, 1, 40, 12) | {"other_processes": [{"pid": 4, "bytes": 25 * GIB}]}, "other process"),
        (sizes(30, 1, 40, 12) | {"other_processes": [{"pid": 4, "bytes": 25 * GIB}]}, "undecided"),
        (sizes(50, 1, 40, 12) | {"other_processes": [{"pid": 4, "bytes": 25 * GIB}]}, "capacity"),
        (sizes(2, 1, 50, 28) | {"capacity": None}, "fragmentation"),
        (sizes(2, 1, 78, 0.5) | {"capacity": None}, "undecided"),
    ],
)
def test_exact_sizes_are_classified_by_hand_worked_arithmetic(build: Make, numbers: dict[str, Any], kind: str):
    (failure,) = failures(failed(build, **numbers))
    assert classify(failure).kind == kind


@pytest.mark.fires(CAPACITY)
def test_a_full_device_is_named_with_its_numbers(build: Make, findings_of: Findings):
    (finding,) = findings_of(CAPACITY, failed(build, **sizes(14, 1, 65, 12)))
    assert (finding.severity, finding.confidence, finding.where.step) == ("warning", "likely", 7)
    assert "both together are too little" in finding.summary
    assert {each.name: each.value for each in finding.evidence}["reserved, not allocated"] == 12 * GIB


@pytest.mark.quiet(CAPACITY)
@pytest.mark.parametrize(
    "numbers",
    [sizes(11, 1, 65, 12), sizes(2, 1, 40, 0) | {"other_processes": [{"pid": 4, "bytes": 38 * GIB}]}],
    ids=["fragmentation", "another process"],
)
def test_what_another_rule_says_is_not_said_again(build: Make, findings_of: Findings, numbers: dict[str, Any]):
    assert not findings_of(CAPACITY, failed(build, **numbers))


@pytest.mark.quiet(CAPACITY)
@pytest.mark.parametrize(
    "event",
    [
        {"kind": "oom", "type": "MemoryError", "message": ""},
        {
            "kind": "exception",
            "type": "RuntimeError",
            "message": "[enforce fail at alloc_cpu.cpp:114] data. "
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 137438953472 bytes.",
        },
        {"kind": "log", "level": "error", "message": "Memory cgroup out of memory: Killed process 7 (python)"},
    ],
)
def test_the_host_memory_is_no_device(build: Make, findings_of: Findings, event: dict[str, Any]):
    capsule = failed(build, **event)
    assert not findings_of(CAPACITY, capsule)
    assert len(host_failures(capsule)) == 1


@pytest.mark.fires(CAPACITY)
def test_a_failure_after_which_training_went_on_is_a_remark(build: Make, findings_of: Findings):
    def fill(writer: Any) -> None:
        writer.scalars("loss", step=list(range(20)), value=[2.0] * 20)
        writer.record("events", {"kind": "oom", "step": 7, **sizes(14, 1, 65, 12)})

    (finding,) = findings_of(CAPACITY, build(fill))
    assert finding.severity == "info"
    assert "Training went on" in finding.summary


@pytest.mark.fires(CAPACITY)
@pytest.mark.recorded(CAPACITY)
def test_the_real_job_of_178_gib_is_full(tmp_path: Path):
    log = REAL / "run35.log"
    if not log.is_file():
        pytest.skip("the folder of real logs is not beside this checkout")
    report = analyze(Capsule.open(import_files([log], tmp_path / "imported", attach=False)))
    out = [each for each in report.findings if each.rule.startswith("memory/")]
    (finding,) = [each for each in out if each.rule == CAPACITY]
    assert (finding.confidence, finding.where.rank) == ("likely", 0)
    assert "8 ranks failed" in finding.summary
    assert report.first_divergence is not None
    assert report.first_divergence.rule == CAPACITY


@pytest.mark.fires(CAPACITY)
@pytest.mark.parametrize(
    "fields", [{}, {"requested": 0}, {"requested": 2**62}, {"requested": 1, "free": 0}, {"message": ""}]
)
def test_out_of_memory_without_most_of_its_numbers_is_left_open(
    build: Callable[..., Capsule], fields: dict[str, object]
):
    def fill(writer):
        writer.records("events", [{"kind": "oom", "type": "E", **fields}])

    report = analyze(build(fill, {"trigger": {"kind": "imported"}}), [rule_named(CAPACITY)])
    assert not report.errors
    assert [(each.severity, each.confidence) for each in report.findings] == [("warning", "undetermined")]


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "oom", "other_processes": "many", "free": -4, "message": 7},
        {"kind": "oom", "other_processes": [None, {"pid": "x", "bytes": "y"}, {"bytes": 5}]},
        {"kind": "exception", "type": 4, "message": ["CUDA error: out of memory"]},
        {"kind": None},
    ],
)
def test_odd_events_raise_nothing(build: Make, event: dict[str, Any]):
    def fill(writer: Any) -> None:
        folder = writer.path / "ranks" / "rank00000" / "records"
        writer.record("events", {"kind": "log", "message": "first"})
        writer.flush()
        import json

        with (folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({**event, "rank": 0}) + "\n")

    report = analyze(build(fill), [rule_named(CAPACITY)])
    assert not report.errors
