"""What analysing many dumps costs, in things that are made and looked at: seconds would depend on the machine."""

from __future__ import annotations

import pickle
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmconsole.analyzers.distributed.accounts import accounts, joined
from llmconsole.analyzers.distributed.diagnosis import diagnosis
from llmconsole.analyzers.distributed.reading import calls
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import import_job
from llmconsole.capsules.importers.flight.dump import parse
from llmconsole.capsules.importers.flight.tables import Tables
from llmconsole.capsules.importers.flight.whose import assign_ranks
from llmconsole.capsules.record_columns import Packed

from tests.analyzers.sweep import flight_faults


def test_no_rule_makes_a_dictionary_of_each_call_in_a_dump(tmp_path, monkeypatch) -> None:
    made = Packed.records

    def records(self: Packed) -> list[dict[str, Any]]:
        assert len(self) == 1, "a dictionary was made of each call"  # one is the state of a rank
        return made(self)

    monkeypatch.setattr(Packed, "records", records)
    judged: set[str] = set()
    for seed in range(4):
        incident = flight_faults.incident(seed, "missing", small=True)
        files = flight_faults.write(incident, tmp_path / str(seed))
        capsule = Capsule.open(import_job(files, tmp_path / "capsules", attach=False).path)
        report = analyze(capsule)
        assert report.errors == ()
        assert set(accounts(capsule)) == set(capsule.ranks)  # of rules that want logs beside the dumps
        assert not joined(capsule)
        judged |= {*report.quiet, *(each.rule for each in report.findings)}
    assert {"distributed/missing-rank", "distributed/straggler", "distributed/timeout-raised"} <= judged


def dump(rank: int, world: int, reached: int) -> dict[str, Any]:
    """What a rank recorded that came to so many calls of the default group, of which eight have ended."""
    entries = [
        {
            "record_id": seq, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": seq,
            "profiling_name": "nccl:all_reduce", "time_created_ns": (1_750_000_000 + seq) * 10**9,
            "input_sizes": [[64]], "input_dtypes": ["Float"], "output_sizes": [[64]], "output_dtypes": ["Float"],
            "state": "completed" if seq <= 8 else "scheduled", "timeout_ms": 600_000, "is_p2p": False,
        }
        for seq in range(1, reached + 1)
    ]  # fmt: skip
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))}}
    return {"version": "2.10", "entries": entries, "pg_config": config}


def imported(world: int, lacking: Callable[[int], int], place: Path) -> Capsule:
    """The capsule of dumps of ranks that wait in call 20, but for those that lack some calls to it."""
    place.mkdir()
    for rank in range(world):
        content = dump(rank, world, 20 - lacking(rank))
        (place / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))
    return Capsule.open(import_job(sorted(place.iterdir()), place / "out", attach=False).path)


def cost(work: Callable[[], object]) -> tuple[int, int]:
    """Calls of functions, in Python and below it, and the peak of memory, in bytes, that some work takes."""
    made = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    tracemalloc.start()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return made, peak


@pytest.mark.parametrize(
    "lacking",
    [lambda rank: int(rank == 1), lambda rank: rank % 2, lambda rank: rank % 12],
    ids=["one is missing", "half are missing", "all stand apart"],
)
def test_who_waits_for_whom_in_one_group_is_no_matter_of_ranks_squared(lacking, tmp_path) -> None:
    found: list[tuple[int, int]] = []
    for world in (96, 192):
        capsule = imported(world, lacking, tmp_path / str(world))
        known = calls(capsule)
        found.append(cost(lambda: diagnosis(capsule)))  # noqa: B023
        assert len(known.groups) == 1
        assert diagnosis(capsule).state.waits
    small, large = found
    assert large[0] <= 2.5 * small[0]
    assert large[1] <= 2.6 * small[1]


def test_members_of_a_large_group_stand_once_in_a_capsule(tmp_path) -> None:
    sizes: list[int] = []
    for world in (300, 600):
        capsule = imported(world, lambda rank: 18, tmp_path / str(world))
        sizes.append(sum(each.stat().st_size for each in capsule.path.rglob("collectives.jsonl")))
        assert [len(each.ranks) for each in calls(capsule).groups] == [world]
        told = [each["rank"] for each in capsule.records("collectives") if "group_ranks" in each]
        assert told == [0, 0]
    assert sizes[1] <= 2.2 * sizes[0]


def test_members_of_a_small_group_stand_with_each_of_them(tmp_path) -> None:
    capsule = imported(3, lambda rank: 18, tmp_path / "small")
    assert [each["group_ranks"] for each in capsule.records("collectives")] == [[0, 1, 2]] * 6


def test_whose_a_dump_is_takes_no_set_of_all_ranks_for_each() -> None:
    world, tables = 400, Tables()
    dumps = [parse(dump(rank, world, 1), f"rank{rank}", tables, pytest.fail) for rank in range(world)]
    for rank, each in enumerate(dumps):
        each.named = rank
    assert assign_ranks(dumps, tables, pytest.fail) == list(range(world))
    assert cost(lambda: assign_ranks(dumps, tables, pytest.fail))[1] <= 1000 * world  # a set of them takes 16,000
