"""Out-of-memory texts as containers, captured graphs, limits and snapshots print them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.memory.fitting import Change, Fitting
from llmconsole.analyzers.memory.oom import classify, failures
from llmconsole.capsules import Capsule, CapsuleWriter

CAPACITY, OTHER = "memory/capacity", "memory/other-process"
MIB = 1 << 20

Make = Callable[..., Capsule]
Findings = Callable[[str, Capsule], list[Finding]]

TEXT = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {capacity} of which {free} is free. "
    "{said}Of the allocated memory {allocated} is allocated by PyTorch, {pools}and {idle} is reserved by PyTorch but "
    "unallocated."
)


def told(build: Make, pools: str = "", **fields: str) -> Capsule:
    message = TEXT.format(pools=pools, **fields)
    return build(
        lambda writer: writer.record(
            "events", {"kind": "exception", "step": 3, "type": "torch.OutOfMemoryError", "message": message}
        )
    )


FULL = {"asked": "1.95 GiB", "capacity": "79.11 GiB", "free": "1.30 GiB", "allocated": "75.30 GiB"}


@pytest.mark.quiet(OTHER)
@pytest.mark.fires(CAPACITY)
def test_in_a_container_a_process_is_listed_under_a_number_that_it_does_not_know(build: Make, findings_of: Findings):
    """77.80 GiB of a listed process and 76.18 GiB of this one do not fit into the 77.81 GiB in use: they are one."""
    capsule = told(build, said="Process 4129 has 77.80 GiB memory in use. ", idle="901.55 MiB", **FULL)
    (failure,) = failures(capsule)
    assert (failure.others, failure.own) == ((), round(77.80 * (1 << 30)))
    assert not findings_of(OTHER, capsule)
    (finding,) = findings_of(CAPACITY, capsule)
    assert (finding.title, finding.confidence) == ("Out of memory: the device is full", "likely")


@pytest.mark.fires(OTHER)
def test_of_two_that_are_listed_the_one_with_room_for_this_process_is_this_one(build: Make, findings_of: Findings):
    said = "Process 111 has 60.00 GiB memory in use. Process 2223 has 19.13 GiB memory in use. "
    sizes = {"asked": "64.00 MiB", "capacity": "79.15 GiB", "free": "17.19 MiB", "allocated": "17.00 GiB"}
    (finding,) = findings_of(OTHER, told(build, said=said, idle="500.00 MiB", **sizes))
    assert "60.00 GiB are held by other processes" in finding.summary
    assert finding.summary.endswith("Process ids: 111.")


def test_a_listed_process_beside_which_this_one_has_room_is_another(build: Make):
    said = "Process 111 has 60.00 GiB memory in use. "
    sizes = {"asked": "2.00 GiB", "capacity": "79.15 GiB", "free": "0.50 GiB", "allocated": "17.00 GiB"}
    (failure,) = failures(told(build, said=said, idle="500.00 MiB", **sizes))
    assert [each.pid for each in failure.others] == [111]
    assert classify(failure).kind == "other process"


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ({"asked": "20.00 MiB", "free": "11.69 MiB", "allocated": "78.01 GiB", "idle": "245.76 MiB"}, "capacity"),
        ({"asked": "512.00 MiB", "free": "117.19 MiB", "allocated": "76.90 GiB", "idle": "0.95 GiB"}, "capacity"),
        ({"asked": "512.00 MiB", "free": "117.19 MiB", "allocated": "74.90 GiB", "idle": "3.10 GiB"}, "undecided"),
        ({"asked": "512.00 MiB", "free": "117.19 MiB", "allocated": "60.90 GiB", "idle": "17.10 GiB"}, "fragmentation"),
    ],
)
def test_a_device_of_which_nearly_nothing_is_left_is_full_however_it_is_cut(
    build: Make, sizes: dict[str, str], kind: str
):
    (failure,) = failures(told(build, said="", capacity="79.21 GiB", **sizes))
    assert classify(failure).kind == kind


@pytest.mark.parametrize(
    ("said", "sizes", "kind"),
    [
        ("Process 4242 has 23.20 GiB memory in use. ", {"allocated": "0 bytes", "idle": "0 bytes"}, "other process"),
        ("", {"allocated": "22.90 GiB", "idle": "300.00 MiB"}, "capacity"),
    ],
)
def test_the_last_megabytes_of_a_device_are_given_to_nobody(build: Make, said: str, sizes: dict[str, str], kind: str):
    """2 MiB were asked for and refused, with 3.06 MiB free: the device is full for all that."""
    (failure,) = failures(told(build, said=said, asked="2.00 MiB", capacity="23.69 GiB", free="3.06 MiB", **sizes))
    assert classify(failure).kind == kind


def test_unused_memory_beside_private_pools_may_be_theirs(build: Make):
    sizes = {"asked": "512.00 MiB", "capacity": "79.15 GiB", "free": "117.19 MiB", "allocated": "60.90 GiB"}
    pools = "with 15.20 GiB allocated in private pools (e.g., CUDA Graphs), "
    (failure,) = failures(told(build, pools, said="", idle="16.50 GiB", **sizes))
    assert classify(failure).between == ("fragmentation", "unused memory of private pools")
    few = "with 64.00 MiB allocated in private pools (e.g., CUDA Graphs), "
    (failure,) = failures(told(build, few, said="", idle="16.50 GiB", **sizes))
    assert classify(failure).kind == "fragmentation"


@pytest.mark.fires(CAPACITY)
def test_a_limit_of_the_jobs_own_is_no_full_device(build: Make, findings_of: Findings):
    said = "17.50 GiB allowed; "
    sizes = {"asked": "512.00 MiB", "capacity": "79.15 GiB", "free": "60.17 GiB", "allocated": "17.20 GiB"}
    (finding,) = findings_of(CAPACITY, told(build, said=said, idle="100.50 MiB", **sizes))
    assert finding.title == "Out of memory: the job's own limit is reached"
    assert "set_per_process_memory_fraction" in finding.fix[0]


@pytest.mark.parametrize(("free", "kind"), [(18 * MIB, "fragmentation"), (300 * MIB, "undecided")])
def test_a_snapshot_names_the_block_and_the_driver_was_asked_for_a_segment(build: Make, free: int, kind: str):
    """Blocks below 10 MiB take a segment of 20 MiB: 18 MiB free are too little for one of 8 MiB, 300 MiB are not."""
    numbers = {"requested": 8 * MIB, "free": free, "allocated": 464 * MIB, "reserved": 502 * MIB, "event": 7772}
    capsule = build(lambda writer: writer.record("events", {"kind": "oom", "largest_free_block": 6 * MIB, **numbers}))
    (failure,) = failures(capsule)
    assert classify(failure).kind == kind


@pytest.mark.fires(CAPACITY)
def test_the_phase_is_said(build: Make, findings_of: Findings):
    numbers = {"requested": 12 << 30, "free": 3 << 30, "allocated": 74 << 30, "reserved": 75 << 30}
    event = {"kind": "oom", "phase": "eval", "capacity": 80 << 30, **numbers}
    (finding,) = findings_of(CAPACITY, build(lambda writer: writer.record("events", event)))
    assert finding.summary.startswith("In an evaluation, 12.00 GiB were asked for")


def test_a_rank_that_nothing_tells_is_none(build: Make):
    def fill(writer: CapsuleWriter) -> None:
        writer.record("events", {"kind": "oom", "rank": 0, "told": False, "requested": MIB})
        writer.record("events", {"kind": "oom", "rank": 0, "phase": "communication", "device": 3})
        writer.record("events", {"kind": "oom", "rank": 3, "requested": MIB})

    assert sorted(str(each.rank) for each in failures(build(fill))) == ["3", "None", "None"]


def test_a_computed_peak_near_the_limit_is_said_to_fit_barely():
    limit = Fitting(100.0, 300.0, (Change("a", 80.0, True), Change("b", 95.0, True), Change("c", 120.0, False)))
    assert [each.note for each in limit.evidence[1:]] == [
        "fits",
        "fits barely, less than the model may err",
        "does not fit",
    ]
    assert limit.words.startswith("By computation, good to about 10 %, it needs 300 B")
