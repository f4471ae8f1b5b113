"""Many small tensors in one file: packed end to end, and handed out as if each had been written alone."""

from __future__ import annotations

import json
import math

import h5py
import numpy as np
import pytest
import torch
from llmconsole.capsules import Capsule, CapsuleWriter
from llmconsole.capsules.errors import EvidenceError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.capsule"


def test_tensors_of_all_shapes_and_dtypes_come_back_under_their_names(path):
    half = torch.tensor([[1.5, -2.0], [math.inf, 0.0]], dtype=torch.bfloat16)
    given = {
        "before": np.arange(6, dtype=np.float32).reshape(2, 3),
        "after": torch.arange(6.0).reshape(3, 2).t(),  # not contiguous: in the order of its rows
        "half": half,
        "flags": np.array([True, False]),
        "count": np.array(7, np.int64),
        "nothing": np.empty((0, 4), np.float32),
    }
    with CapsuleWriter(path) as w:
        w.tensors(3, [("optimizer/w", given, {"lr": 1e-3}), ("optimizer/b", {"before": np.full(2, math.nan)}, {})])
        w.tensors(4, [])
    c = Capsule.open(path)
    found = {each.name: each for each in c.tensors()}
    assert list(found) == [*(f"optimizer/w/{name}" for name in given), "optimizer/b/before"]
    for name, array in given.items():
        tensor = found[f"optimizer/w/{name}"]
        expected = np.asarray(array.float() if isinstance(array, torch.Tensor) else array)
        np.testing.assert_array_equal(tensor.array(), expected)
        assert tensor.array().shape == tensor.shape == tuple(array.shape)
        assert (tensor.step, tensor.attributes) == (3, {"lr": 1e-3})
    assert found["optimizer/w/half"].bits().tolist() == half.view(torch.int16).numpy().view(np.uint16).tolist()
    assert np.isnan(found["optimizer/b/before"].array()).all()
    assert found["optimizer/b/before"].attributes == {}
    assert c.damage() == ()


def test_arrays_of_one_dtype_are_one_dataset(path):
    with CapsuleWriter(path) as w:
        w.tensors(0, [(f"optimizer/{i}", {"before": np.full(3, i, np.float32)}, {}) for i in range(50)])
    (file,) = (path / "ranks/rank00000/arrays").iterdir()
    with h5py.File(file) as opened:
        assert [each.shape for each in opened["arrays"].values()] == [(150,)]


def test_texts_are_not_packed(path):
    with CapsuleWriter(path) as w, pytest.raises(EvidenceError, match="texts cannot be packed"):
        w.tensors(0, [("a", {"b": np.array(["x"])}, {})])


@pytest.mark.parametrize(
    "piece",
    [
        ["a/b", 0, "a0", 0, [4]],  # more than there is
        ["a/b", 0, "a0", 2, [2]],
        ["a/b", 0, "a0", 2**62, [1]],
        ["a/b", 0, "a0", -1, [1]],
        ["a/b", 0, "a0", 0, [0, 2**40, 2**40]],
        ["a/b", 0, "a9", 0, [1]],
        ["a/b", 5, "a0", 0, [1]],
        ["a/b", 0, "a0", 0, [1] * 40],
        ["a/b", 0, "a0", 0, ["x"]],
        ["a/b", 0, "a0"],
        None,
        {"name": "a/b"},
    ],
)
def test_a_piece_that_points_outside_is_left_out(path, piece):
    with CapsuleWriter(path) as w:
        w.tensors(0, [("a", {"good": np.arange(3.0)}, {})])
    index = path / "ranks/rank00000/arrays.jsonl"
    line = json.loads(index.read_text())
    line.pop("crc32", None)
    line["attributes"]["pieces"].append(piece)
    index.write_text(json.dumps(line) + "\n")
    (tensor,) = Capsule.open(path).tensors()
    assert tensor.array().tolist() == [0.0, 1.0, 2.0]
