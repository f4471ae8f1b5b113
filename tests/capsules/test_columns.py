"""Records written column by column are read as any other records, and damage in them is named."""

import json
import math

import pytest
from llmconsole.capsules import Capsule, CapsuleWriter
from llmconsole.capsules.columns import Distinct
from llmconsole.capsules.errors import EvidenceError

STACK = [{"name": "step", "file": "train.py", "line": 31}]


def written(path, *calls, rank=0):
    with CapsuleWriter(path) as writer:
        for stream, length, columns in calls:
            writer.columns(stream, length, columns, rank)
    return Capsule.open(path)


def forged(path, *lines):
    """A capsule whose file of columns holds these lines, without checksums."""
    capsule = written(path, ("collectives", 1, {"seq": [1]}))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "ranks/rank00000/columns/collectives.jsonl").write_text(text)
    return capsule


def test_records_come_back_with_their_fields_and_the_rank(path):
    columns = {
        "seq": [1, 2, 3],
        "op": Distinct(["all_reduce"]),
        "peer": Distinct([1, 3], [1, 0, None]),
        "frames": Distinct([[], STACK], [1, 1, 0]),
        "t_created": [1.5, None, math.nan],
        "extra": Distinct(["kept"]),
    }
    capsule = written(path, ("collectives", 3, columns), rank=4)
    first, second, third = capsule.records("collectives")
    assert first == {
        "seq": 1, "op": "all_reduce", "peer": 3, "frames": STACK, "t_created": 1.5, "extra": "kept", "rank": 4,
    }  # fmt: skip
    assert second == {"seq": 2, "op": "all_reduce", "peer": 1, "frames": STACK, "extra": "kept", "rank": 4}
    assert math.isnan(third.pop("t_created"))
    assert third == {"seq": 3, "op": "all_reduce", "frames": [], "extra": "kept", "rank": 4}
    assert first["frames"] is second["frames"]
    assert capsule.damage() == ()
    assert capsule.record_streams() == ("collectives",)
    assert capsule.has("records.collectives.frames")


def test_they_come_after_the_records_of_single_lines(path):
    with CapsuleWriter(path) as writer:
        writer.columns("collectives", 2, {"seq": [2, 3]})
        writer.record("collectives", {"seq": 1})
    assert [each["seq"] for each in Capsule.open(path).records("collectives")] == [1, 2, 3]


def test_many_records_are_divided_into_lines_within_the_limits(path):
    count = 150_000
    at = [n % 7 for n in range(count)]
    columns = {"seq": list(range(count)), "op": Distinct([f"op{n}" for n in range(7)], at)}
    capsule = written(path, ("collectives", count, columns))
    records = capsule.records("collectives")
    assert [each["seq"] for each in records] == list(range(count))
    assert all(each["op"] == f"op{each['seq'] % 7}" for each in records)
    assert len((path / "ranks/rank00000/columns/collectives.jsonl").read_bytes().splitlines()) > 2


def test_a_value_too_long_for_a_line_of_many_gets_a_line_of_its_own(path):
    long = ["x" * 5_000_000, "y" * 5_000_000, "z" * 5_000_000, "w" * 5_000_000]
    capsule = written(path, ("notes", 4, {"text": long}))
    assert [each["text"] for each in capsule.records("notes")] == long


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"seq": [1]}, "column seq has 1 values for 2 records"),
        ({"op": Distinct(["a"], [0])}, "column op has 1 values for 2 records"),
        ({"seq": [1, -2]}, "column seq: Expected `int` >= 0"),
        ({"op": Distinct([3])}, "column op: Expected `str"),
        ({"frames": Distinct([[{"line": "x"}]])}, "column frames"),
    ],
)
def test_a_writer_refuses_what_does_not_fit(path, columns, said):
    with CapsuleWriter(path) as writer, pytest.raises(EvidenceError, match="collectives: " + said.replace("(", r"\(")):
        writer.columns("collectives", 2, columns)


@pytest.mark.parametrize(
    "line",
    [
        {"columns": {"seq": [1]}},
        {"count": -1, "columns": {}},
        {"count": True, "columns": {}},
        {"count": 10**9, "columns": {"op": {"distinct": ["x"]}}},
        {"count": 1, "columns": [1]},
        {"count": 1, "columns": {"seq": 1}},
        {"count": 1, "columns": {"seq": {"distinct": 3}}},
        {"count": 2, "columns": {"seq": [1]}},
        {"count": 2, "columns": {"seq": {"distinct": [1], "at": [0]}}},
        {"count": 1, "columns": {"seq": {"distinct": [1], "at": [1]}}},
        {"count": 1, "columns": {"seq": {"distinct": [1], "at": [-1]}}},
        {"count": 1, "columns": {"seq": {"distinct": [1], "at": ["0"]}}},
        {"count": 1, "columns": {"seq": {"distinct": [1], "at": 0}}},
    ],
)
def test_a_line_that_stands_for_nothing_is_damage_and_the_others_are_read(path, line):
    capsule = forged(path, {"count": 1, "columns": {"seq": [1]}}, line, {"count": 1, "columns": {"seq": [3]}})
    assert [each.get("seq") for each in capsule.records("collectives")] == [1, 3]
    assert [each.lost for each in capsule.damage()] == ["its records"]


def test_a_value_of_a_wrong_type_is_left_out_and_reported(path):
    line = {
        "count": 3,
        "columns": {"seq": [1, "two", 3], "state": {"distinct": ["completed", "done"], "at": [0, 1, 0]}},
    }
    capsule = forged(path, line)
    assert [each.get("seq") for each in capsule.records("collectives")] == [1, None, 3]
    assert [each.get("state") for each in capsule.records("collectives")] == ["completed", None, "completed"]
    assert len(capsule.damage()) == 2


def test_no_columns_at_all_are_records_without_fields(path):
    capsule = forged(path, {"count": 2, "columns": {}}, {"count": 1, "columns": {"op": {"distinct": []}}})
    assert capsule.records("collectives") == [{"rank": 0}] * 3


def test_more_records_than_are_read_are_told(path):
    line = {"count": 65_536, "columns": {"op": {"distinct": ["x"]}}}
    capsule = forged(path, *[line] * 31)
    assert len(capsule.records("collectives")) == 65_536 * 30
    assert any("more records than are read" in each.what for each in capsule.damage())
