"""The sheet of layers says which tensor is how near to overflow, step by step, in the order of execution."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmconsole.app.layer_table import LayerTable, notes, where
from llmconsole.app.looks.layers import headroom, layers
from llmconsole.capsules import CapsuleWriter

NAN = float("nan")


def row(step: int, order: int, name: str, absmax: float, **fields: Any) -> dict[str, Any]:
    """A full row of 100 elements."""
    usual = {"role": "activation", "dtype": "float16", "shape": [10, 10], "numel": 100, "nan": 0, "posinf": 0}
    measured = {"neginf": 0, "zeros": 0, "min": -absmax, "max": absmax, "absmax": absmax, "rms": absmax / 4}
    return {"step": step, "order": order, "name": name, **usual, **measured, "micro": 0, "call": 0, **fields}


def norm(name: str, role: str, value: float, call: int = 0) -> tuple[Any, ...]:
    """A norm-only row of 16 elements: rms is a quarter of the norm."""
    return (name, role, "float16", (4, 4), value, 0, call)


@pytest.fixture
def capsule(tmp_path: Path) -> Path:
    """Full statistics at steps 0 and 10, norms at 1, 2 and 11; at step 10 the second layer overflows."""
    path = tmp_path / "run.capsule"
    with CapsuleWriter(path, title="run", phase="training", manifest={}) as writer:
        writer.stats([row(0, 0, "layers.0.mlp", 8.0), row(0, 1, "layers.1.mlp", 16.0, zeros=25)], rank=0)
        for step, size in ((1, 4.0), (2, 12.0)):
            writer.norms(
                step,
                [
                    norm("layers.0.mlp", "activation", size),
                    norm("layers.1.mlp", "activation", size),
                    norm("layers.1.mlp", "gradient", size),
                    norm("layers.0.mlp", "gradient", size),
                ],
                rank=0,
            )
        writer.stats(
            [
                row(10, 0, "layers.0.mlp", 60_000.0),
                row(10, 1, "layers.1.mlp", 65_504.0, posinf=3),
                row(10, 2, "layers.2.mlp", 2.0, nan=100),
                row(10, 3, "logits", 5.0, role="logits", neginf=50),
                row(10, 4, "layers.1.mlp", 1.0, role="gradient"),
            ],
            rank=0,
        )
        writer.norms(11, [norm("layers.0.mlp", "activation", 4.0)], rank=0)
    return path


class TestHeadroom:
    """Room is the number of doublings that are left."""

    def test_a_quarter_of_the_largest_number_leaves_two_doublings(self) -> None:
        sizes = np.array([65_504.0, 65_504 / 4, 65_504 / 16, 65_504 / 256, 8.0])
        room, level = headroom(["float16"] * 5, sizes, sizes)
        assert room[:4].tolist() == [0.0, 2.0, 4.0, 8.0]
        assert level.tolist() == [4, 3, 2, 1, 0]

    def test_both_ends_of_a_type_and_what_is_unknown_have_signs_of_their_own(self) -> None:
        sizes = np.array([2.0**-15, 0.0, 1.0, math.inf])
        _, level = headroom(["float16", "float16", "int64", "float16"], sizes, sizes)
        assert level.tolist() == [-1, -2, -3, -3]

    def test_the_same_number_is_far_from_overflow_in_bfloat16(self) -> None:
        sizes = np.array([65_504.0])
        room, level = headroom(["bfloat16"], sizes, sizes)
        assert level.tolist() == [0]
        assert 111 < room[0] < 113  # 2^128 / 2^16

    def test_without_absmax_the_rms_bounds_the_room_and_never_tells_of_underflow(self) -> None:
        room, level = headroom(["float16", "float16"], np.array([NAN, NAN]), np.array([65_504 / 4, 2.0**-20]))
        assert room[0] == 2.0
        assert level.tolist() == [3, 0]


class TestSteps:
    """Any recorded step can be reached; without one asked for, it is the one that matters."""

    def test_it_opens_where_the_first_bad_tensor_is(self, capsule: Path) -> None:
        sheet = layers(str(capsule))
        assert (sheet.step, sheet.position, sheet.steps) == (10, 3, 5)
        assert sheet.first_bad is not None
        assert (sheet.first_bad.name, sheet.first_bad.step, sheet.first_bad.kind) == ("layers.1.mlp", 10, "forward")

    def test_the_nearest_recorded_step_answers(self, capsule: Path) -> None:
        assert [layers(str(capsule), step=step).step for step in (0, 5, 7, 10_000)] == [0, 2, 10, 11]

    def test_steps_and_full_statistics_follow_each_other(self, capsule: Path) -> None:
        assert layers(str(capsule), step=2, by=1).step == 10
        assert layers(str(capsule), step=0, by=-1).step == 0
        assert layers(str(capsule), step=1, full=1).step == 10
        assert layers(str(capsule), step=2, full=-1).step == 0

    def test_a_step_with_norms_only_says_where_the_full_ones_are(self, capsule: Path) -> None:
        sheet = layers(str(capsule), step=2)
        assert not sheet.full
        assert "norms only; full statistics at step 0 and 10" in notes(sheet)
        assert where(sheet) == "forward pass  step 2 (3 of 5 recorded)"
        assert sheet.rms == [3.0, 3.0]
        assert sheet.rms_before == [1.0, 1.0]
        assert "×3.00" in LayerTable(sheet, 80).line(0).plain

    def test_what_was_not_recorded_is_an_empty_sheet(self, capsule: Path) -> None:
        assert layers(str(capsule), "updates").step is None


class TestRows:
    """Rows stand in the order of execution, bad ones are marked, lawful infinities are not."""

    def test_bad_tensors_are_marked_and_masked_logits_are_not(self, capsule: Path) -> None:
        sheet = layers(str(capsule))
        assert sheet.name == ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp", "logits"]
        assert sheet.bad == [1, 2]
        table = LayerTable(sheet, 80)
        assert table.line(0).plain.startswith("  layers.0.mlp")
        assert "██" in table.line(0).plain  # 60,000 is within a factor of two of 65,504
        assert table.line(1).plain.startswith("✗ layers.1.mlp")
        assert "✗✗" in table.line(1).plain
        assert "3 Inf" in table.line(1).plain
        assert "100 NaN" in table.line(2).plain

    def test_the_backward_sheet_is_in_autograd_order(self, capsule: Path) -> None:
        assert layers(str(capsule), "backward", step=1).name == ["layers.1.mlp", "layers.0.mlp"]

    def test_zeros_are_a_share(self, capsule: Path) -> None:
        assert layers(str(capsule), step=0).zeros == [0.0, 0.25]

    def test_every_line_has_the_width_of_the_screen_whatever_the_name(self, tmp_path: Path) -> None:
        path = tmp_path / "long.capsule"
        names = [f"model.layers.{at}.很长的名字.down_projection_of_the_expert" for at in range(500)]
        with CapsuleWriter(path, title="long", phase="training", manifest={}) as writer:
            writer.stats([row(0, at, name, 1.0) for at, name in enumerate(names)], rank=0)
        sheet = layers(str(path))
        for width in (78, 118, 198):
            table = LayerTable(sheet, width)
            lines = [table.line(at) for at in range(500)]
            assert {line.cell_len for line in lines} == {width}
            assert all(f"{at}." in line.plain for at, line in enumerate(lines))  # the layer's number stays

    def test_micro_batches_are_sheets_of_their_own(self, tmp_path: Path) -> None:
        path = tmp_path / "micro.capsule"
        with CapsuleWriter(path, title="micro", phase="training", manifest={}) as writer:
            writer.stats([row(0, micro, "layer", 1.0 + micro, micro=micro) for micro in range(3)], rank=0)
        first, last = layers(str(path)), layers(str(path), micro=2)
        assert (first.micros, first.absmax, last.absmax) == ((0, 1, 2), [1.0], [3.0])
