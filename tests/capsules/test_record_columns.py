"""The records of a stream as columns say what the records say, without a dictionary for each."""

import math

import numpy as np
import pytest
from llmconsole.capsules import Capsule, CapsuleWriter
from llmconsole.capsules.columns import Distinct

SHAPES = Distinct([[[4, 2]], [[8]]], [1, 0, 1])


@pytest.fixture
def capsule(path):
    """Three records of rank 2 in columns, after one on a line of its own; two of rank 0."""
    with CapsuleWriter(path) as writer:
        writer.record("collectives", {"seq": 9, "op": "send", "peer": 1}, rank=2)
        columns = {"seq": [1, 2, 3], "op": Distinct(["all_reduce"]), "shapes_in": SHAPES, "t_created": [0.5, None, 2.0]}
        writer.columns("collectives", 3, columns | {"peer": Distinct([3, 7], [None, 1, 0])}, rank=2)
        writer.columns("collectives", 2, {"op": Distinct(["send", "all_reduce"], [0, 1])}, rank=0)
    return Capsule.open(path)


def test_numbers_come_as_arrays_with_what_stands_for_absent_ones(capsule):
    columns = capsule.columns("collectives")
    assert len(columns) == 6
    assert columns.integers("rank").tolist() == [0, 0, 2, 2, 2, 2]
    assert columns.integers("seq").tolist() == [-1, -1, 9, 1, 2, 3]
    assert columns.integers("peer", absent=-5).tolist() == [-5, -5, 1, -5, 7, 3]
    assert np.array_equal(
        columns.floats("t_created"), [math.nan, math.nan, math.nan, 0.5, math.nan, 2.0], equal_nan=True
    )
    assert np.isnan(columns.floats("timeout_s")).all()


def test_each_record_is_what_the_list_of_records_has(capsule):
    columns = capsule.columns("collectives")
    assert [columns[at] for at in range(6)] == capsule.records("collectives")
    for beyond in (-1, 6):
        with pytest.raises(IndexError):
            _ = columns[beyond]


def test_combinations_come_in_their_order_and_tell_which_record_has_which(capsule):
    found, places = capsule.columns("collectives").combinations("op", "shapes_in")
    told = [found[at] for at in places]
    assert told == [(each.get("op"), each.get("shapes_in")) for each in capsule.records("collectives")]
    assert found[-2:] == [("all_reduce", [[8]]), ("all_reduce", [[4, 2]])]  # of three records, two are alike
    assert set(capsule.columns("collectives").combinations("frames")[0]) == {(None,)}


def test_a_field_is_there_where_one_record_has_it(capsule):
    columns = capsule.columns("collectives")
    assert columns.has("peer")
    assert columns.has("shapes_in")
    assert not columns.has("frames")
    assert not capsule.columns("kernel_checks").has("kernel")
    assert capsule.has("records.collectives.peer")
    assert not capsule.has("records.collectives.frames")


def test_a_value_that_no_record_has_is_not_there(path):
    with CapsuleWriter(path) as writer:
        writer.columns("collectives", 2, {"seq": [1, 2], "peer": Distinct([4], [None, None]), "op": Distinct(["a"])})
    columns = Capsule.open(path).columns("collectives")
    assert not columns.has("peer")
    assert columns.combinations("op", "peer")[0] == [("a", None)]


def test_many_different_values_make_no_number_overflow(path):
    count = 60_000
    names = ("seq", "order", "peer", "step", "count")
    with CapsuleWriter(path) as writer:
        writer.columns("collectives", count, {name: list(range(count)) for name in names})
    found, places = Capsule.open(path).columns("collectives").combinations(*names)
    assert found == [(each,) * 5 for each in range(count)]
    assert places.tolist() == list(range(count))


def test_no_records_are_columns_of_no_length(path):
    CapsuleWriter(path).close()
    columns = Capsule.open(path).columns("collectives")
    assert len(columns) == 0
    assert columns.integers("seq").tolist() == columns.floats("t").tolist() == []
    found, places = columns.combinations("op")
    assert (found, len(places)) == ([], 0)
