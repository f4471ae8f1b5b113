"""Who held the memory at its peak: the live blocks by stack, largest first, with a line of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmconsole.app.looks.stacks import stacks
from llmconsole.app.stack_table import own_frame, stacks_text
from llmconsole.capsules import CapsuleWriter

MIB = 1 << 20
TORCH = {"name": "linear", "file": "/site-packages/torch/nn/functional.py", "line": 12}


def write(path: Path, *rows: dict[str, Any]) -> str:
    with CapsuleWriter(path / "m.capsule", title="m") as writer:
        for row in rows:
            writer.record("allocations", {"action": "live", **row}, rank=row.get("rank", 0))
    return str(path / "m.capsule")


def test_the_largest_stack_comes_first_and_shares_are_of_all_of_them(tmp_path: Path):
    path = write(
        tmp_path,
        {"size": 100 * MIB, "count": 4, "category": "optimizer", "frames": [TORCH]},
        {"size": 300 * MIB, "count": 2, "category": "activation",
         "frames": [TORCH, {"name": "forward", "file": "/home/me/model.py", "line": 88}]},
    )  # fmt: skip
    found = stacks(path)
    assert found is not None
    assert (found.total, found.blocks, found.stacks) == (400 * MIB, 6, 2)
    assert [each.category for each in found.rows] == ["activation", "optimizer"]
    assert own_frame(found.rows[0]) == "forward /home/me/model.py:88"
    lines = stacks_text(found, 100, 12, 0).plain.splitlines()
    assert "live at the peak: 400 MiB in 6 blocks of 2 stacks" in lines[0]
    assert "75%" in lines[1]
    assert "forward /home/me/model.py:88" in lines[1]
    assert lines[3].strip() == "linear /site-packages/torch/nn/functional.py:12"  # frames of the chosen one


def test_the_chosen_stack_stays_in_view_and_the_lines_stay_within_the_room(tmp_path: Path):
    path = write(tmp_path, *({"size": (50 - n) * MIB, "frames": [{"name": f"f{n}"}] * 9} for n in range(40)))
    found = stacks(path)
    assert found is not None
    for rows in (4, 7, 20):
        for chosen in (0, 20, 39, 99):
            lines = stacks_text(found, 80, rows, chosen).plain.splitlines()
            assert len(lines) <= rows
            assert any(line.startswith("▸") and f"f{min(chosen, 39)}" in line for line in lines)


def test_other_actions_are_no_live_blocks_and_the_rank_that_held_most_is_shown(tmp_path: Path):
    path = write(tmp_path, {"action": "alloc", "size": 5 * MIB}, {"size": MIB}, {"rank": 3, "size": 2 * MIB})
    found = stacks(path)
    assert found is not None
    assert (found.rank, found.ranks, found.total) == (3, (0, 3), 2 * MIB)
    other = stacks(path, rank=0)
    assert other is not None
    assert other.total == MIB
    assert own_frame(other.rows[0]) == "no stack was recorded"
    (tmp_path / "none").mkdir()
    assert stacks(write(tmp_path / "none")) is None
