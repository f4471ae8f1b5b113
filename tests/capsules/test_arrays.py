"""Batches, tensors and generator states come back bit for bit, and only in the shapes the format names."""

import math
import random

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from llmconsole.capsules import Capsule, CapsuleWriter, EvidenceError

torch = pytest.importorskip("torch")

IDS = np.arange(12).reshape(3, 4)
DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")


def round_trip(path, array, **keywords):
    with CapsuleWriter(path) as w:
        w.tensor("group/name", array, step=0, **keywords)
    (tensor,) = Capsule.open(path).tensors()
    return tensor


class TestTensors:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        array=st.sampled_from([*DTYPES, "bool"]).flatmap(
            lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
        )
    )
    def test_any_array_survives_bit_for_bit(self, tmp_path_factory, array):
        tensor = round_trip(tmp_path_factory.mktemp("tensor") / "a.capsule", array)
        assert tensor.array().tobytes() == array.tobytes()
        assert tensor.array().dtype == array.dtype
        assert tensor.array().shape == array.shape == tensor.shape
        assert tensor.dtype == array.dtype.name

    def test_bfloat16_is_kept_as_bits_and_read_as_the_float32_it_stands_for(self, path):
        given_ = torch.tensor([1.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 3.0e38]).to(torch.bfloat16)
        tensor = round_trip(path, given_)
        assert tensor.dtype == "bfloat16"
        assert tensor.bits().dtype == np.uint16
        assert tensor.bits().tolist() == (given_.view(torch.int16).to(torch.int32) & 0xFFFF).tolist()
        np.testing.assert_array_equal(tensor.array(), given_.float().numpy())
        assert tensor.array().dtype == np.float32

    @pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float8_e8m0fnu", "float16", "bool"])
    @pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1,)])
    def test_arrays_without_dimensions_or_elements_keep_their_shape(self, path, dtype, shape):
        tensor = round_trip(path, torch.ones(shape, dtype=getattr(torch, dtype)))
        assert isinstance(tensor.array(), np.ndarray)
        assert tensor.array().shape == tensor.bits().shape == shape
        assert (tensor.array() == 1).all()

    @pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
    def test_every_code_of_a_float8_means_what_torch_says(self, path, name):
        codes = np.arange(256, dtype=np.uint8)
        tensor = round_trip(path, codes, dtype=name)
        assert tensor.bits().tolist() == codes.tolist()
        expected = torch.from_numpy(codes).view(getattr(torch, name)).float().numpy()
        np.testing.assert_array_equal(tensor.array(), expected)
        assert np.signbit(tensor.array()[0x80]) == np.signbit(expected[0x80])

    def test_every_code_of_the_scale_format_is_a_power_of_two(self, path):
        tensor = round_trip(path, np.arange(256, dtype=np.uint8), dtype="float8_e8m0fnu")
        assert tensor.array()[127] == 1.0
        assert tensor.array()[130] == 8.0
        assert tensor.array()[126] == 0.5
        assert math.isnan(tensor.array()[255])

    def test_a_torch_tensor_brings_its_stride_device_and_dtype_along(self, path):
        given_ = torch.arange(12, dtype=torch.float16).reshape(3, 4).t().requires_grad_()
        tensor = round_trip(path, given_, order=4, causal=True, q_offset=32, lr=1e-3, betas=(0.9, math.nan))
        assert (tensor.shape, tensor.stride, tensor.device, tensor.dtype) == ((4, 3), (1, 4), "cpu", "float16")
        assert (tensor.step, tensor.order, tensor.rank, tensor.name) == (0, 4, 0, "group/name")
        np.testing.assert_array_equal(tensor.array(), given_.detach().numpy())
        assert tensor.attributes["causal"] is True
        assert tensor.attributes["q_offset"] == 32
        assert tensor.attributes["betas"][0] == 0.9
        assert math.isnan(tensor.attributes["betas"][1])

    def test_stride_and_device_can_be_given(self, path):
        tensor = round_trip(path, np.zeros((2, 3), np.uint16), dtype="bfloat16", stride=(6, 2), device="cuda:1")
        assert (tensor.stride, tensor.device) == ((6, 2), "cuda:1")
        assert tensor.attributes == {}

    def test_names_can_be_stored_too(self, path):
        tensor = round_trip(path, np.array([["doc-1", "größe"], ["", "文"]]))
        assert tensor.array().tolist() == [["doc-1", "größe"], ["", "文"]]

    def test_patterns_pick_tensors_in_the_order_written(self, path):
        with CapsuleWriter(path) as w:
            for name in ("attention/k", "attention/q", "norm/input"):
                w.tensor(name, [1.0], step=1)
            w.tensor("attention/q", [2.0], step=1, rank=1)
        c = Capsule.open(path)
        assert [each.name for each in c.tensors("attention/*")] == ["attention/k", "attention/q", "attention/q"]
        assert [each.array().tolist() for each in c.tensors("attention/q", rank=1)] == [[2.0]]
        assert c.tensors("decode/*") == []

    def test_a_large_array_is_stored_in_several_checked_chunks(self, path):
        array = np.random.default_rng(0).standard_normal((3, 700, 1000)).astype(np.float32)
        tensor = round_trip(path, array)
        np.testing.assert_array_equal(tensor.array(), array)
        (file,) = (path / "ranks/rank00000/arrays").iterdir()
        with h5py.File(file) as opened:
            assert opened["arrays/data"].fletcher32
            assert math.prod(opened["arrays/data"].chunks) * 4 <= 4 << 20

    @pytest.mark.parametrize("name", ["", "/abs", "a//b", "a/../b", "a/.", "new\nline", "x" * 2000])
    def test_a_name_that_is_no_path_of_words_is_refused(self, path, name):
        with CapsuleWriter(path) as w, pytest.raises(EvidenceError, match="is not of the form group/name"):
            w.tensor(name, [1.0], step=0)

    @pytest.mark.parametrize(
        ("array", "dtype", "message"),
        [
            (np.zeros(2, np.complex64), None, "dtype complex64 cannot be stored"),
            (np.zeros(2, np.float32), "bfloat16", "expects raw bits as uint16, found float32"),
            (np.zeros(2, np.float32), "float16", "dtype float16 was given for an array of float32"),
            ([[1.0], [1.0, 2.0]], None, "expected an array of numbers"),
            ([object()], None, "dtype object cannot be stored"),
            (torch.zeros(2, dtype=torch.complex64), None, "dtype complex64 cannot be stored"),
            (torch.zeros(2, 2).to_sparse(), None, "tensor a/b: a tensor of torch.float32 cannot be stored"),
            (torch.zeros(2, device="meta"), None, "tensor a/b: a tensor of torch.float32 cannot be stored"),
        ],
    )
    def test_what_cannot_be_stored_is_refused(self, path, array, dtype, message):
        with CapsuleWriter(path) as w, pytest.raises(EvidenceError, match=message):
            w.tensor("a/b", array, step=0, dtype=dtype)


class TestBatches:
    def test_a_batch_keeps_arrays_and_attributes(self, path):
        logits = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        target = np.full((3, 4, 3), np.nan, np.float32)
        with CapsuleWriter(path) as w:
            w.batch(
                step=2,
                split="train",
                micro=1,
                reported_loss=np.float32(4.81),
                reported_decimals=2,
                label_layout="shifted",
                sample_ids=["a", 17, "c"],
                keys=["input_ids", "label"],
                loss_dtype=torch.float32,
                logits_dtype="bfloat16",
                input_ids=torch.from_numpy(IDS),
                labels=IDS - 100,
                attention_mask=np.ones((3, 4), bool),
                target_logits=target,
                logits=logits,
                extra=np.arange(3),
                note="free",
            )
        (batch,) = Capsule.open(path).batches()
        assert (batch.step, batch.rank, batch.micro, batch.split) == (2, 0, 1, "train")
        assert batch.reported_loss == float(np.float32(4.81))
        assert batch.reported_decimals == 2
        assert batch.label_layout == "shifted"
        assert batch.sample_ids == ["a", "17", "c"]
        assert batch.keys == ["input_ids", "label"]
        assert (batch.loss_dtype, batch.logits_dtype) == ("float32", "bfloat16")
        assert batch.attributes == {"note": "free"}
        np.testing.assert_array_equal(batch.input_ids, IDS)
        np.testing.assert_array_equal(batch.labels, IDS - 100)
        np.testing.assert_array_equal(batch.attention_mask, np.ones((3, 4), bool))
        np.testing.assert_array_equal(batch.target_logits, target)
        np.testing.assert_array_equal(batch.logits, logits.float().numpy())
        np.testing.assert_array_equal(batch.array("extra"), np.arange(3))
        assert batch.position_ids is None
        assert batch.token_loss is None
        assert batch.arrays["logits"].dtype == "bfloat16"
        assert batch.arrays["input_ids"].shape == (3, 4)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_reported_loss_that_is_not_finite_stays_a_number(self, path, value):
        with CapsuleWriter(path) as w:
            w.batch(step=0, reported_loss=value)
        (batch,) = Capsule.open(path).batches()
        assert isinstance(batch.reported_loss, float)
        np.testing.assert_equal(batch.reported_loss, value)

    def test_batches_are_sorted_by_step_rank_and_micro(self, path):
        with CapsuleWriter(path) as w:
            for step, rank, micro in [(3, 0, 1), (3, 0, 0), (2, 1, 0), (2, 0, 0)]:
                w.batch(step=step, rank=rank, micro=micro, input_ids=IDS)
        c = Capsule.open(path)
        found = [(each.step, each.rank, each.micro) for each in c.batches()]
        assert found == [(2, 0, 0), (2, 1, 0), (3, 0, 0), (3, 0, 1)]
        assert [each.micro for each in c.batches(step=3)] == [0, 1]
        assert [each.step for each in c.batches(rank=1)] == [2]

    @pytest.mark.parametrize(
        "arrays",
        [
            {"attention_mask": np.ones((3, 4, 4), np.int8)},
            {"position_ids": np.arange(4)},
            {"position_ids": np.zeros((3, 3, 4), int)},
            {"cu_seqlens": np.array([0, 5, 12])},
            {"roles": np.full((3, 4), 7)},
            {"token_loss": np.zeros((3, 4))},
            {"logsumexp": torch.zeros(3, 4)},
        ],
    )
    def test_the_shapes_of_the_format_are_accepted(self, path, arrays):
        with CapsuleWriter(path) as w:
            w.batch(step=0, input_ids=IDS, **arrays)
        (batch,) = Capsule.open(path).batches()
        ((name, given_),) = arrays.items()
        np.testing.assert_array_equal(getattr(batch, name), np.asarray(given_))

    @pytest.mark.parametrize(
        ("evidence", "message"),
        [
            ({"input_ids": np.zeros((3, 4))}, "batch.input_ids: found float64, expected integers"),
            ({"input_ids": np.arange(4)}, "batch.input_ids: shape [4], expected [B, T]"),
            ({"input_ids": IDS, "labels": IDS[:, :3]}, "batch.labels: shape [3, 3], but T is 4 in input_ids"),
            (
                {"input_ids": IDS, "logits": np.zeros((2, 4, 7))},
                "batch.logits: shape [2, 4, 7], but B is 3 in input_ids",
            ),
            ({"target_logits": np.zeros((3, 4, 2))}, "batch.target_logits: shape [3, 4, 2], but 3 is 3 in the format"),
            ({"token_loss": IDS}, "batch.token_loss: found int64, expected floats"),
            ({"roles": IDS}, "batch.roles: found 0 to 11, expected 0 to 7"),
            ({"input_ids": IDS, "sample_ids": ["a"]}, "batch.sample_ids: 1 ids for 3 rows of input_ids"),
            ({"sample_ids": "a"}, "batch: field sample_ids is 'a', expected array"),
            ({"split": "test"}, "batch: field split is 'test', expected train or validation"),
            ({"label_layout": "left"}, "batch: field label_layout is 'left', expected shifted or unshifted"),
            ({"reported_loss": "4.8"}, "batch: field reported_loss is '4.8', expected float"),
            ({"reported_decimals": -1}, "batch: field reported_decimals is -1, expected int >= 0"),
            ({"step": -1}, "batch.step: found -1, expected a count"),
            ({"odd name": np.zeros(3)}, "array key 'odd name' is not made of letters"),
        ],
    )
    def test_a_wrong_array_or_attribute_is_named_with_what_was_expected(self, path, evidence, message):
        with CapsuleWriter(path) as w:
            with pytest.raises(EvidenceError) as error:
                w.batch(**({"step": 0} | evidence))
            assert message in str(error.value)
        assert Capsule.open(path).batches() == []


class TestGeneratorStates:
    def test_every_generator_goes_on_where_it_stood(self, path):
        generators = (random.Random(5), np.random.RandomState(5), np.random.default_rng(5))
        python, numpy, modern = generators
        torch_ = torch.Generator().manual_seed(5)
        for _ in range(3):
            python.random(), numpy.standard_normal(), modern.random(), torch.rand(1, generator=torch_)
        with CapsuleWriter(path) as w:
            w.rng(
                step=2,
                rank=1,
                torch=torch_.get_state(),
                numpy=numpy.get_state(),
                python=python.getstate(),
                cuda=[b"\x00\xff", torch_.get_state()],
                modern=modern.bit_generator.state,
            )
        expected = python.random(), numpy.standard_normal(), modern.random(), torch.rand(1, generator=torch_).item()
        c = Capsule.open(path)
        state = c.rng(2, rank=1)
        python.setstate(state["python"])
        numpy.set_state(state["numpy"])
        modern.bit_generator.state = state["modern"]
        torch_.set_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
        again = python.random(), numpy.standard_normal(), modern.random(), torch.rand(1, generator=torch_).item()
        assert again == expected
        assert state["cuda"][0] == b"\x00\xff"
        assert c.rng(2, rank=0) is None
        assert c.rng(3, rank=1) is None
        assert c.rng_steps() == (2,)
        assert c.has("rng")


def test_two_threads_write_arrays_at_once(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    def write(turn: int) -> int:
        with CapsuleWriter(tmp_path / f"{turn}.capsule") as w:
            for step in range(20):
                w.batch(step=step, input_ids=np.full((4, 100), turn))
        return len(Capsule.open(tmp_path / f"{turn}.capsule").batches())

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(write, range(4))) == [20] * 4
