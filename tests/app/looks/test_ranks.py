"""The grid of ranks and collectives: who waits, who differs, who never came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmconsole.app.looks.ranks import ranks
from llmconsole.app.ui.views.ranks import grid_text
from llmconsole.capsules import CapsuleWriter

SHAPE = [[8]]


def record(rank: int, seq: int, state: str = "completed", **fields: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "group": "dp",
        "group_ranks": [0, 1, 2],
        "seq": seq,
        "op": "all_reduce",
        "dtype": "float32",
        "shapes_in": SHAPE,
        "state": state,
        **fields,
    }


def write(path: Path, rows: list[dict[str, Any]], summaries: list[dict[str, Any]] | None = None) -> str:
    with CapsuleWriter(path / "r.capsule", title="r", phase="training", manifest={}) as writer:
        writer.records("collectives", rows)
        writer.records("ranks", summaries or [])
    return str(path / "r.capsule")


def cells(path: str, **window: Any) -> list[str]:
    return [each.cells for each in ranks(path, columns=40, rows=40, **window).rows]


def test_each_sign_says_how_far_a_rank_got(tmp_path: Path):
    rows = [record(rank, seq) for rank in (0, 1, 2) for seq in (0, 1)]
    rows += [record(0, 2, "started"), record(1, 2, "scheduled"), record(2, 2, op="broadcast")]
    rows += [record(0, 3, "started")]
    path = write(tmp_path, rows)
    assert cells(path) == ["··○○", "··○ ", "··✗ "]
    grid = ranks(path, columns=40, rows=40)
    assert (grid.first, grid.at, grid.row) == (2, 2, 2)
    assert grid.detail == (
        "seq 2 · differs: rank 2 · 2 waiting · all_reduce float32 [8]",
        "rank 2: did broadcast float32 [8]",
    )
    missing = ranks(path, columns=40, rows=40, at=3, row=1)
    assert missing.detail == (
        "seq 3 · missing: rank 1, 2 · 1 waiting · all_reduce float32 [8]",
        "rank 1: never came to it; its last is seq 2  all_reduce float32 [8]",
    )


def test_what_a_ring_buffer_forgot_and_a_dump_that_is_not_here_are_no_difference(tmp_path: Path):
    rows = [record(0, seq) for seq in (5, 6, 7)] + [record(1, seq) for seq in (6, 7)]
    path = write(tmp_path, rows)
    assert cells(path) == ["···", "-··", "---"]
    grid = ranks(path, columns=40, rows=40)
    assert (grid.first, grid.at) == (None, 2)


def test_shapes_may_differ_only_where_the_operation_lets_them(tmp_path: Path):
    def shaped(seq: int, op: str) -> list[dict[str, Any]]:
        return [record(rank, seq, op=op, shapes_in=[[8 + (rank == 1)]]) for rank in (0, 1, 2)]

    path = write(tmp_path, shaped(0, "all_to_all") + shaped(1, "_reduce_scatter_base") + shaped(2, "gather"))
    assert cells(path) == ["···", "·✗·", "···"]


def test_the_group_with_a_difference_comes_first_and_point_to_point_is_told(tmp_path: Path):
    rows = [record(rank, 0, group="tp") for rank in (0, 1, 2)]
    rows += [record(rank, 0, group="pp", state="started" if rank else "completed") for rank in (0, 1, 2)]
    rows += [record(0, 1, p2p=True, op="send")]
    grid = ranks(write(tmp_path, rows), columns=9, rows=9)
    assert (grid.group, grid.groups) == ("group pp", ("group tp", "group pp"))
    assert grid.note == "1 sends and receives are not in the grid"


def test_a_call_that_was_skipped_is_one_hole_and_shifts_nothing(tmp_path: Path):
    ops = ["all_reduce", "broadcast", "all_gather", "reduce", "barrier", "all_reduce"]
    rows = [record(rank, seq, op=op) for rank in (0, 2) for seq, op in enumerate(ops)]
    rows += [record(1, seq, op=op) for seq, op in enumerate(ops[:2] + ops[3:])]
    path = write(tmp_path, rows)
    assert cells(path) == ["······", "·· ···", "······"]
    grid = ranks(path, columns=40, rows=40)
    assert (grid.first, grid.row) == (2, 1)
    assert grid.detail == (
        "seq 2 · missing: rank 1 · 2 done · all_gather float32 [8]",
        "rank 1: never came to it; before it is seq 1  broadcast float32 [8]",
    )


def test_a_call_that_one_rank_adds_is_a_column_of_its_own(tmp_path: Path):
    ops = ["all_reduce", "broadcast", "all_gather", "reduce", "barrier", "all_reduce"]
    frames = [{"name": "train", "file": "/job/train.py", "line": 12}]
    rows = [record(rank, seq, op=op) for rank in (0, 2) for seq, op in enumerate(ops)]
    rows += [record(1, seq, op=op, frames=frames) for seq, op in enumerate([*ops[:2], "scatter", *ops[2:]])]
    path = write(tmp_path, rows)
    assert cells(path) == ["··-····", "··✗····", "··-····"]
    grid = ranks(path, columns=40, rows=40)
    assert (grid.first, grid.row) == (2, 1)
    assert grid.detail == (
        "a call of its own · differs: rank 1 · scatter float32 [8]",
        "rank 1: did scatter float32 [8]  /job/train.py:12 in train",
    )


def test_the_window_holds_the_cursor_in_its_middle_until_an_end_is_reached(tmp_path: Path):
    path = write(tmp_path, [record(rank, seq) for rank in (0, 1, 2) for seq in range(100)])
    lefts = [ranks(path, columns=11, rows=2, at=at, row=1).left for at in (0, 5, 50, 97, 500)]
    assert lefts == [0, 0, 45, 89, 89]
    assert [ranks(path, columns=11, rows=2, at=0, row=row).top for row in (0, 1, 2)] == [0, 0, 1]


def test_bars_are_on_the_scale_of_the_slowest_rank(tmp_path: Path):
    summaries = [
        {"rank": 0, "compute_ms": 50.0, "communication_ms": 40.0, "data_ms": 10.0},
        {"rank": 1, "compute_ms": 50.0, "exit": {"kind": "oom"}},
    ]
    path = write(tmp_path, [], summaries)
    grid = ranks(path, columns=40, rows=40)
    assert (grid.columns, grid.longest_ms, [each.exit for each in grid.rows]) == (0, 100.0, ["", "oom"])
    lines = grid_text(grid, 63).plain.split("\n")  # 63 cells leave 40 for the bar
    assert lines[2].split()[2:] == ["C" * 20 + "M" * 16 + "D" * 4, "100", "ms"]
    assert lines[3].split() == ["1", "oom", "C" * 20, "50", "ms"]


def test_calls_that_the_last_numbers_of_a_rank_cover_are_lost_records_and_not_missing(tmp_path: Path):
    rows = [record(rank, seq, op=op) for rank in (0, 1) for seq, op in enumerate(["all_reduce", "broadcast"] * 3)]
    rows += [record(2, 0), record(2, 1, op="broadcast")]
    told = {"rank": 2, "last_seq": {"dp": 4}, "last_completed": {"dp": 3}}
    path = write(tmp_path, rows, [told])
    assert cells(path) == ["······", "······", "··--○ "]
    at = lambda seq: ranks(path, columns=40, rows=40, at=seq, row=2).detail[1]  # noqa: E731
    assert at(3) == "rank 2: done, as its last number (3) says; its record is lost"
    assert at(4) == "rank 2: in it, not done"
    assert at(5) == "rank 2: never came to it; its last is seq 4, whose record is lost"


def played(path: Path, *ranks_: list[str]) -> str:
    """A job whose ranks call operations in order; the last call of each does not end."""
    common = {"group_ranks": list(range(len(ranks_)))}
    return write(
        path,
        [
            record(rank, seq, "started" if seq == len(ops) - 1 else "completed", op=op, **common)
            for rank, ops in enumerate(ranks_)
            for seq, op in enumerate(ops)
        ],
    )


def test_two_ranks_that_differ_are_marked_alike_since_nothing_tells_which_is_right(tmp_path: Path):
    path = played(tmp_path, ["all_reduce", "broadcast"], ["all_reduce", "all_gather"])
    assert cells(path) == ["·✗", "·✗"]
    head, here = ranks(path, columns=40, rows=40).detail
    words = "seq 1 · rank 0 and rank 1 differ; of two nothing tells which"
    assert head == f"{words} · broadcast float32 [8] or all_gather float32 [8]"
    assert here == "rank 0: did broadcast float32 [8]"


def test_a_call_that_one_of_two_ranks_adds_or_the_other_skips_is_marked_on_both_and_shifts_nothing(tmp_path: Path):
    usual = ["all_reduce", "broadcast", "all_gather", "reduce", "barrier", "all_reduce"]
    more = [*usual[:2], "scatter", *usual[2:]]
    for index, (rows, own) in enumerate((((usual, more), 1), ((more, usual), 0))):
        path = played(tmp_path / str(index), *rows)
        assert cells(path)[0][:6] == cells(path)[1][:6] == "··✗···"
        head, here = ranks(path, columns=40, rows=40, row=own).detail
        assert "rank 0 and rank 1 differ; of two nothing tells which · scatter float32 [8]" in head
        assert here == f"rank {own}: did scatter float32 [8]"
        assert ranks(path, columns=40, rows=40, row=1 - own).detail[1] == f"rank {1 - own}: made no such call here"


def test_sides_of_equal_size_are_marked_alike_and_a_majority_decides(tmp_path: Path):
    one, other = ["all_reduce", "broadcast"], ["all_reduce", "all_gather"]
    path = played(tmp_path / "equal", one, one, other, other)
    assert cells(path) == ["·✗"] * 4
    assert "rank 0, 1, 2, 3 differ; nothing tells which" in ranks(path, columns=40, rows=40).detail[0]
    path = played(tmp_path / "most", one, other, other)
    assert cells(path) == ["·✗", "·○", "·○"]
    assert "differs: rank 0 · 2 waiting" in ranks(path, columns=40, rows=40).detail[0]


def test_how_a_rank_ended_is_a_short_word_that_the_legend_explains(tmp_path: Path):
    ends = [{"rank": rank, "exit": {"kind": kind}} for rank, kind in enumerate(("exception", "oom", "ok"))]
    lines = grid_text(ranks(write(tmp_path / "ended", [record(0, 0)], ends), columns=9, rows=9), 80).plain.split("\n")
    assert [line[1:10].split() for line in lines[4:7]] == [["0", "err"], ["1", "oom"], ["2"]]
    assert lines[-1] == " how a rank ended: err an exception, oom out of memory"
    well = [{"rank": rank, "exit": {"kind": "ok"}} for rank in (0, 1, 2)]
    lines = grid_text(ranks(write(tmp_path / "well", [record(0, 0)], well), columns=9, rows=9), 80).plain.split("\n")
    assert "ended" not in lines[-1]
