"""Calls that are on disk before they are made: whatever place holds them, they are read, or their loss is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmconsole.capsules import Capsule, CapsuleWriter
from llmconsole.capsules.recorder.journal import Journal
from llmconsole.capsules.underway import PLACE, PLACES, RELATIVE

FRAME = {"name": "step", "file": "job.py", "line": 7}


def call(seq: int, **more: Any) -> dict[str, Any]:
    return {"group": "0", "group_ranks": [0, 1], "seq": seq, "op": "all_reduce", "state": "started"} | more


def a_process_that_died(path: Path, calls: list[dict[str, Any]], known: int = 0) -> Path:
    """A rank whose stream ends at number ``known`` and whose journal took ``calls``; the file of its journal."""
    with CapsuleWriter(path, phase="training") as writer:
        writer.records("collectives", [call(seq, state="completed", order=seq - 1) for seq in range(1, known + 1)])
        journal = Journal(path / "ranks/rank00000")
        for each in calls:
            journal.begin(each)
    return path / "ranks/rank00000" / RELATIVE


def read(path: Path) -> tuple[list[int], list[str]]:
    capsule = Capsule.open(path)
    numbers = [row["seq"] for row in capsule.records("collectives")]
    return numbers, [f"{each.where.rpartition('.jsonl ')[2]}: {each.what}" for each in capsule.damage()]


class TestTheJournal:
    @pytest.mark.parametrize("made", [1, 2, PLACES - 1, PLACES, PLACES + 1, 2 * PLACES, 3 * PLACES + 5])
    def test_each_call_is_read_whichever_place_it_is_in(self, tmp_path: Path, made: int) -> None:
        path = tmp_path / "a.capsule"
        a_process_that_died(path, [call(seq) for seq in range(1, made + 1)])
        assert read(path) == (list(range(max(1, made - PLACES + 1), made + 1)), [])

    def test_the_only_call_of_a_process_that_died_is_read_after_those_of_its_stream(self, tmp_path: Path) -> None:
        path = tmp_path / "a.capsule"
        a_process_that_died(path, [call(12, step=5)], known=4)
        assert read(path) == ([1, 2, 3, 4, 12], [])
        last = Capsule.open(path).records("collectives")[-1]
        assert (last["order"], last["step"], last["state"]) == (4, 5, "started")

    def test_a_file_that_began_at_its_second_place_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "a.capsule"
        file = a_process_that_died(path, [call(1)])
        file.write_bytes(bytes(PLACE) + file.read_bytes())
        assert read(path) == ([1], [])

    @pytest.mark.parametrize("place", [0, 1, PLACES - 1])
    @pytest.mark.parametrize(
        ("torn", "why"),
        [
            (lambda held: held[:60] + bytes(PLACE - 60), "not valid JSON"),
            (lambda held: bytes(PLACE), "a hole of 4,096 NUL bytes"),
            (lambda held: held[:60] + held[70:] + b"\n" * 10, "checksum of the line does not match"),
        ],
    )
    def test_a_torn_place_is_told_and_costs_no_other(
        self, tmp_path: Path, place: int, torn: Callable[[bytes], bytes], why: str
    ) -> None:
        path = tmp_path / "a.capsule"
        file = a_process_that_died(path, [call(seq) for seq in range(1, PLACES + 1)])
        data = file.read_bytes()
        at = place * PLACE
        file.write_bytes(data[:at] + torn(data[at : at + PLACE]) + data[at + PLACE :])
        numbers, damage = read(path)
        assert numbers == [seq for seq in range(1, PLACES + 1) if seq != place + 1]
        if why.startswith("a hole") and not place:
            return  # writers of before left their first place empty
        assert [each.startswith(f"place {place + 1}: {why}") for each in damage] == [True]

    def test_a_call_of_thousands_of_ranks_fits_without_their_list(self, tmp_path: Path) -> None:
        path = tmp_path / "a.capsule"
        frames = [FRAME | {"line": line} for line in range(8)]
        a_process_that_died(path, [call(1, group_ranks=list(range(4096)), frames=frames, shapes_in=[[3]])])
        (row,) = Capsule.open(path).records("collectives")
        assert (row["op"], row["seq"], row["shapes_in"], row["frames"]) == ("all_reduce", 1, [[3]], frames)
        assert "group_ranks" not in row

    def test_of_long_frames_the_inner_ones_stay(self, tmp_path: Path) -> None:
        path = tmp_path / "a.capsule"
        frames = [{"name": "f", "file": "x" * 900, "line": line} for line in range(8)]
        a_process_that_died(path, [call(1, frames=frames)])
        (row,) = Capsule.open(path).records("collectives")
        assert (row["frames"], row["group_ranks"]) == (frames[:4], [0, 1])
