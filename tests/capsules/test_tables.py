"""Scalars and statistics come back as they were written."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llmconsole.capsules import Capsule, CapsuleWriter, EvidenceError

ONE_ROW = {
    "step": 2,
    "order": 7,
    "name": "layers.3.mlp.down",
    "role": "activation",
    "dtype": "float16",
    "shape": [8, 128, 64],
    "stride": [8192, 64, 1],
    "device": "cuda:0",
    "numel": 65536,
    "nan": 3,
    "posinf": 0,
    "neginf": 1,
    "zeros": 5,
    "subnormals": 2,
    "min": -9e3,
    "max": 65504.0,
    "absmax": 65504.0,
    "absmean": 40.0,
    "mean": 0.1,
    "std": 300.0,
    "rms": 301.0,
    "micro": 1,
    "call": 2,
}


class TestScalars:
    def test_a_series_keeps_nan_and_infinities(self, path):
        with CapsuleWriter(path) as w:
            w.scalars("loss", step=[0, 1, 2, 3], value=[10.8, float("nan"), float("inf"), -float("inf")])
        loss = Capsule.open(path).scalars("loss")
        assert loss.step.tolist() == [0, 1, 2, 3]
        assert loss.value[0] == 10.8
        assert math.isnan(loss.value[1])
        assert loss.value[2:].tolist() == [math.inf, -math.inf]
        assert loss.time is None
        assert (loss.unit, loss.rank, loss.side, len(loss)) == ("nats/token", 0, None, 4)

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(values=st.lists(st.floats(), min_size=1, max_size=40))
    def test_any_double_survives_bit_for_bit(self, tmp_path_factory, values):
        path = tmp_path_factory.mktemp("scalars") / "a.capsule"
        with CapsuleWriter(path) as w:
            w.scalars("x", step=range(len(values)), value=values)
        read = Capsule.open(path).scalars("x").value
        assert [v.hex() for v in read.tolist()] == [float(v).hex() for v in values]

    def test_numpy_and_torch_scalars_are_numbers(self, path):
        torch = pytest.importorskip("torch")
        with CapsuleWriter(path) as w:
            w.scalars("a", step=np.int64(3), value=np.float32(0.5), time=np.float64(7.0))
            w.scalars("b", step=np.arange(2), value=torch.tensor([1.0, 2.0]))
            w.scalar_row(4, {"a": np.float16(0.25), "b": torch.tensor(3.0)}, time=9.0)
        c = Capsule.open(path)
        assert c.scalars("a").value.tolist() == [0.5, 0.25]
        assert c.scalars("a").time.tolist() == [7.0, 9.0]
        assert c.scalars("b").value.tolist() == [1.0, 2.0, 3.0]
        assert c.scalars("b").step.tolist() == [0, 1, 4]

    def test_rows_written_out_of_order_are_sorted_by_step_and_otherwise_keep_their_order(self, path):
        with CapsuleWriter(path) as w:
            w.scalars("x", step=[5, 1, 5], value=[50.0, 10.0, 51.0])
            w.scalar_row(3, {"x": 30.0})
        x = Capsule.open(path).scalars("x")
        assert x.step.tolist() == [1, 3, 5, 5]
        assert x.value.tolist() == [10.0, 30.0, 50.0, 51.0]

    def test_without_a_rank_the_lowest_rank_that_has_the_series_answers(self, path):
        with CapsuleWriter(path) as w:
            w.scalars("x", step=[0], value=[1.0], rank=3)
            w.scalars("x", step=[0], value=[2.0], rank=7)
        c = Capsule.open(path)
        assert (c.scalars("x").rank, c.scalars("x").value.tolist()) == (3, [1.0])
        assert c.scalars("x", rank=7).value.tolist() == [2.0]
        assert len(c.scalars("x", rank=0)) == 0
        assert c.ranks == (0, 3, 7)

    def test_two_sides_are_two_series(self, path):
        with CapsuleWriter(path) as w:
            w.scalars("logprob", step=[0], value=[-1.0], side="training")
            w.scalars("logprob", step=[0], value=[-2.0], side="inference")
        c = Capsule.open(path)
        assert c.scalars("logprob", side="training").value.tolist() == [-1.0]
        assert c.scalars("logprob", side="inference").value.tolist() == [-2.0]
        assert {key.side for key in c.scalar_keys()} == {"training", "inference"}

    def test_a_series_written_with_and_without_its_unit_is_one(self, path):
        with CapsuleWriter(path) as w:
            w.scalar_row(0, {"x": 1.0})
            w.scalars("x", step=[1], value=[2.0], unit="m")
            w.scalar_row(2, {"x": 3.0})
        (key,) = Capsule.open(path).scalar_keys()
        assert (key.name, key.unit) == ("x", "m")
        assert Capsule.open(path).scalars("x").value.tolist() == [1.0, 2.0, 3.0]

    def test_an_absent_series_is_empty(self, path):
        CapsuleWriter(path).close()
        assert len(Capsule.open(path).scalars("loss")) == 0

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"step": [0, 1], "value": [1.0, "abc"]}, "scalars.x, row 2, value: expected a number, found 'abc'"),
            ({"step": [0, -1], "value": [1.0, 2.0]}, "scalars.x, row 2, step: found -1, expected a count"),
            ({"step": [0.5], "value": [1.0]}, "scalars.x, row 1, step: found 0.5, expected a count"),
            ({"step": [0], "value": [1.0, 2.0]}, "1 steps for 2 values"),
            ({"step": [0, 1], "value": [1.0, 2.0], "time": [1.0, 2.0, 3.0]}, "3 entries of time for 2 values"),
            ({"step": [2**63], "value": [1.0]}, "expected a count"),
            ({"step": [0], "value": [True]}, "expected a number, found True"),
        ],
    )
    def test_a_wrong_type_or_a_negative_step_is_an_error_that_says_where(self, path, arguments, message):
        with CapsuleWriter(path) as w:
            with pytest.raises(EvidenceError) as error:
                w.scalars("x", **arguments)
            assert message in str(error.value)
        assert len(Capsule.open(path).scalars("x")) == 0


class TestStatistics:
    def test_a_full_row_keeps_every_column(self, path):
        with CapsuleWriter(path) as w:
            w.stats([ONE_ROW | {"log2_histogram": {-3: 4, 15: 1}}])
        stats = Capsule.open(path).stats()
        assert len(stats) == 1
        for column in ("name", "role", "dtype", "device"):
            assert getattr(stats, column).tolist() == [ONE_ROW[column]]
        assert stats.shape == [(8, 128, 64)]
        assert stats.stride == [(8192, 64, 1)]
        numbers = set(ONE_ROW) - {"name", "role", "dtype", "device", "shape", "stride"}
        for column in numbers:
            assert getattr(stats, column).tolist() == [ONE_ROW[column]], column
        assert stats.log2_histogram == [{-3: 4, 15: 1}]
        assert stats.full.tolist() == [True]
        assert stats.nonfinite.tolist() == [True]

    def test_what_was_not_measured_is_minus_one_or_nan(self, path):
        with CapsuleWriter(path) as w:
            w.stats([{"step": 0, "name": "w", "role": "parameter", "shape": [2, 3]}])
        stats = Capsule.open(path).stats()
        assert stats.nan.tolist() == stats.micro.tolist() == stats.zeros.tolist() == [-1]
        assert np.isnan(stats.mean).all()
        assert stats.numel.tolist() == [6]  # from the shape
        assert stats.nonfinite.tolist() == [False]
        assert stats.log2_histogram == [None]

    def test_a_norm_row_gives_the_root_mean_square_and_carries_nan_and_infinity(self, path):
        rows = [
            ("a", "activation", "float16", (2, 8), 12.0, 0, 0),
            ("b", "gradient", "float32", (), float("inf"), 0, 1),
            ("c", "gradient", "float32", (3,), float("nan"), 1, 0),
        ]
        with CapsuleWriter(path) as w:
            w.norms(5, rows, order=10)
        stats = Capsule.open(path).stats()
        assert stats.rms[0] == 12.0 / 4.0  # sqrt of 16 elements
        assert stats.rms[1] == math.inf
        assert math.isnan(stats.rms[2])
        assert stats.order.tolist() == [10, 11, 12]
        assert stats.step.tolist() == [5, 5, 5]
        assert stats.nonfinite.tolist() == [False, True, True]
        assert stats.full.tolist() == [False] * 3
        assert stats.nan.tolist() == [-1] * 3
        assert stats.numel.tolist() == [16, 1, 3]
        assert stats.call.tolist() == [0, 1, 0]
        assert stats.micro.tolist() == [0, 0, 1]

    def test_three_hundred_norms_a_step_cost_five_kilobytes(self, path):
        rows = [(f"layers.{at}", "activation", "bfloat16", (8, 2048, 4096), 1.0, 0, 0) for at in range(300)]
        with CapsuleWriter(path) as w:
            for step in range(10):
                w.norms(step, rows)
        assert (path / "ranks/rank00000/stats.bin").stat().st_size == 10 * (28 + 300 * 16)

    def test_rows_are_sorted_by_step_rank_and_order_whatever_wrote_them(self, path):
        norm = ("n", "activation", "float32", (4,), 2.0, 0, 0)
        with CapsuleWriter(path) as w:
            w.norms(1, [norm, norm], rank=1)
            w.stats([ONE_ROW | {"step": 1, "order": 1}, ONE_ROW | {"step": 0, "order": 9}], rank=1)
            w.norms(1, [norm], rank=0)
        stats = Capsule.open(path).stats()
        assert list(zip(stats.step.tolist(), stats.rank.tolist(), stats.order.tolist(), strict=True)) == [
            (0, 1, 9),
            (1, 0, 0),
            (1, 1, 0),
            (1, 1, 1),
            (1, 1, 1),
        ]
        assert stats.full.tolist() == [True, False, False, False, True]
        assert stats.nan.tolist() == [3, -1, -1, -1, 3]
        assert stats.name.tolist() == ["layers.3.mlp.down", "n", "n", "n", "layers.3.mlp.down"]

    def test_filters_pick_rows_by_rank_role_name_and_step(self, path):
        with CapsuleWriter(path) as w:
            for step in range(6):
                w.norms(step, [("a", "activation", "f", (1,), 1.0, 0, 0), ("b.w", "gradient", "f", (1,), 2.0, 0, 0)])
            w.norms(3, [("a", "activation", "f", (1,), 9.0, 0, 0)], rank=1)
        c = Capsule.open(path)
        assert len(c.stats()) == 13
        assert len(c.stats(role="gradient")) == 6
        assert c.stats(name="a", rank=1).rms.tolist() == [9.0]
        assert c.stats(name="b.*", step=4).step.tolist() == [4]
        assert c.stats(role="activation", rank=0, step=range(1, 6, 2)).step.tolist() == [1, 3, 5]
        assert len(c.stats(rank=5)) == 0
        assert c.stats().select(c.stats().rms > 1.5).name.tolist() == ["b.w"] * 3 + ["b.w", "a", "b.w", "b.w"]

    def test_many_rows_need_several_blocks_and_still_one_write(self, path):
        rows = [("x", "activation", "float32", (1,), float(at), 0, 0) for at in range(70_000)]
        with CapsuleWriter(path) as w:
            w.norms(0, rows)
        stats = Capsule.open(path).stats()
        assert stats.order.tolist() == list(range(70_000))
        assert stats.rms.tolist() == [float(at) for at in range(70_000)]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"nan": -1}, "stats, record 2: field nan is -1, expected int >= 0"),
            ({"role": "output"}, "field role is 'output', expected activation or communication_in or"),
            ({"rms": "big"}, "field rms is 'big', expected float"),
            ({"shape": [2, -3]}, "field shape[1] is -3, expected int >= 0"),
            ({"numel": 2**64}, f"field numel is {2**64}, expected int <= 9223372036854775807"),
            ({"step": None}, "field step is None, expected int"),
            ({"shape": [1] * 33}, "field shape is [1, 1,"),
        ],
    )
    def test_a_faulty_row_names_record_field_value_and_expectation_and_nothing_is_written(self, path, change, message):
        with CapsuleWriter(path) as w:
            with pytest.raises(EvidenceError) as error:
                w.stats([ONE_ROW, ONE_ROW | change])
            assert message in str(error.value)
        assert len(Capsule.open(path).stats()) == 0

    def test_a_row_without_a_name_is_refused(self, path):
        with CapsuleWriter(path) as w, pytest.raises(EvidenceError, match="stats, record 1: field name is missing"):
            w.stats([{"step": 1, "role": "loss"}])

    def test_numpy_scalars_are_accepted_in_rows(self, path):
        row = {key: np.float32(value) if isinstance(value, float) else value for key, value in ONE_ROW.items()}
        with CapsuleWriter(path) as w:
            w.stats([row | {"nan": np.int64(4), "step": np.uint8(9), "log2_histogram": {np.int64(1): np.int32(2)}}])
        stats = Capsule.open(path).stats()
        assert stats.nan.tolist() == [4]
        assert stats.step.tolist() == [9]
        assert stats.log2_histogram == [{1: 2}]

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            (("a", "activation", "f", (1,), "x", 0, 0), "norms, row 1, norm: expected a number, found 'x'"),
            (("a", "activation", "f", (1,), 1.0, 40_000, 0), "norms, row 1, micro: found 40000"),
            (("a", "output", "f", (1,), 1.0, 0, 0), "field role is 'output'"),
            (("a", "activation", "f", (1,), 1.0), "expected rows of name, role, dtype, shape, norm, micro, call"),
        ],
    )
    def test_a_faulty_norm_row_is_refused(self, path, row, message):
        with CapsuleWriter(path) as w:
            with pytest.raises(EvidenceError) as error:
                w.norms(0, [row])
            assert message in str(error.value)
