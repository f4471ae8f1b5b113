"""numerics/underflow and numerics/low-precision-op: bits that are missing, and 16-bit numbers that are right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.analyzers.training_runs import write_scalars

UNDERFLOW = "numerics/underflow"
COARSE = "numerics/low-precision-op"


def gradients(shares, dtype="float16", numel=1000):
    """Full gradient rows of three tensors: ``shares`` are (zero, subnormal) shares at each step."""

    def fill(writer):
        for step, (zeros, subnormals) in enumerate(shares):
            for index in range(3):
                writer.stats([{
                    "step": step, "order": index, "name": f"layers.{index}", "role": "gradient", "dtype": dtype,
                    "shape": [numel], "numel": numel, "nan": 0, "posinf": 0, "neginf": 0,
                    "zeros": int(zeros * numel), "subnormals": int(subnormals * numel),
                    "absmax": 1e-3, "absmean": 1e-5, "rms": 2e-5, "min": -1e-3, "max": 1e-3,
                }])  # fmt: skip

    return fill


@pytest.mark.fires(UNDERFLOW)
def test_gradients_that_are_mostly_subnormal_underflow_from_the_start(build, findings_of):
    (finding,) = findings_of(UNDERFLOW, build(gradients([(0.2, 0.56)] * 3)))
    assert (finding.severity, finding.where.step) == ("warning", 0)
    assert finding.evidence[0].value == pytest.approx(0.56 / 0.8)


@pytest.mark.fires(UNDERFLOW)
def test_a_share_of_lost_elements_that_rises_is_underflow(build, findings_of):
    (finding,) = findings_of(UNDERFLOW, build(gradients([(0.1, 0.05), (0.2, 0.15), (0.4, 0.25)], dtype="float8_e5m2")))
    assert finding.where.step == 2
    assert finding.evidence[0].value == pytest.approx(0.65)
    assert finding.evidence[0].expected == "< 0.15"


@pytest.mark.quiet(UNDERFLOW)
@pytest.mark.parametrize(
    ("shares", "dtype"),
    [
        ([(0.6, 0.01)] * 3, "float16"),  # inactive units, as many at the end as at the start
        ([(0.1, 0.0), (0.6, 0.0)], "float16"),  # more of them, and nothing subnormal
        ([(0.2, 0.1)] * 3, "float16"),  # the end of a wide distribution
        ([(0.0, 0.9)] * 3, "bfloat16"),
    ],
)
def test_zeros_that_have_a_reason_and_wide_ranges_are_quiet(build, findings_of, shares, dtype):
    assert not findings_of(UNDERFLOW, build(gradients(shares, dtype)))


@pytest.mark.quiet(UNDERFLOW)
def test_scaled_gradients_are_quiet(build, findings_of):
    def fill(writer):
        gradients([(0.2, 0.56)] * 3)(writer)
        write_scalars(writer, loss_scale=[1024.0] * 3)

    assert not findings_of(UNDERFLOW, build(fill))


def loss_row(dtype, logits="bfloat16", step=0):
    shared = {"step": step, "nan": 0, "posinf": 0, "neginf": 0}
    return [
        {**shared, "order": 8, "name": "logits", "role": "logits", "dtype": logits, "shape": [8, 16, 256]},
        {**shared, "order": 9, "name": "loss", "role": "loss", "dtype": dtype, "shape": []},
    ]


@pytest.mark.fires(COARSE)
def test_a_loss_in_bfloat16_moves_in_steps(build, findings_of):
    def fill(writer):
        writer.stats(loss_row("bfloat16"))
        write_scalars(writer, loss=[2.515625])

    (finding,) = findings_of(COARSE, build(fill))
    # Between 2 and 4 a bfloat16 number has 7 fraction bits: steps of 2 / 128.
    assert finding.evidence[1].value == 2 / 128


@pytest.mark.fires(COARSE)
def test_a_batch_that_states_a_half_precision_loss_counts(build, findings_of):
    ids = np.zeros((2, 4), int)
    for logits, said in (("float16", 1), ("float32", 0)):
        capsule = build(
            lambda w, logits=logits: w.batch(step=3, input_ids=ids, loss_dtype="float16", logits_dtype=logits)
        )
        found = findings_of(COARSE, capsule)
        assert len(found) == said
        assert all(each.where.step == 3 for each in found)


@pytest.mark.quiet(COARSE)
def test_float32_logits_or_loss_are_quiet(build, findings_of):
    for loss, logits in (("float32", "bfloat16"), ("float32", "float32"), ("bfloat16", "float32")):
        assert not findings_of(COARSE, build(lambda w, loss=loss, logits=logits: w.stats(loss_row(loss, logits))))


@pytest.mark.fires(COARSE)
def test_a_kernel_that_declares_a_narrow_accumulator_is_named_once(build, findings_of):
    def fill(writer):
        for case in ("base", "extreme"):
            low = {"input": "bfloat16", "accumulator": "bfloat16", "reduction": "float32"}
            writer.record("kernel_checks", {"kernel": "fused_rms_norm", "case": case, "dtypes": low})
        wide = {"input": "bfloat16", "accumulator": "float32", "reduction": "float32"}
        writer.record("kernel_checks", {"kernel": "softmax", "case": "base", "dtypes": wide})
        writer.record("kernel_checks", {"kernel": "gather", "case": "base", "dtypes": low})

    (finding,) = findings_of(COARSE, build(fill))
    assert finding.where.tensor == "fused_rms_norm"


def norms(compute, eps=1e-6, width=256):
    """A captured normalisation of 64 rows in bfloat16, computed by torch in ``compute``'s way."""
    torch.manual_seed(0)
    x = torch.randn(64, width).bfloat16()

    def fill(writer):
        y = compute(x, eps)
        writer.tensor("norm/input", x.view(torch.int16).numpy().view(np.uint16), step=7, dtype="bfloat16")
        writer.tensor("norm/output", y.view(torch.int16).numpy().view(np.uint16), step=7, dtype="bfloat16", eps=eps)

    return fill


def in_float32(x, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).bfloat16()


def in_bfloat16(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def layer_norm(x, eps):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps)


@pytest.mark.fires(COARSE)
@pytest.mark.recorded(COARSE)
def test_a_normalisation_whose_root_is_rounded_scales_whole_rows(build, findings_of):
    (finding,) = findings_of(COARSE, build(norms(in_bfloat16)))
    assert finding.title == "A normalisation is computed in bfloat16"
    assert finding.where.step == 7


@pytest.mark.quiet(COARSE)
@pytest.mark.parametrize("compute", [in_float32, layer_norm])
@pytest.mark.parametrize("width", [64, 256, 1024])
def test_a_normalisation_rounded_once_is_quiet(build, findings_of, compute, width):
    assert not findings_of(COARSE, build(norms(compute, width=width)))


@pytest.mark.quiet(COARSE)
def test_another_epsilon_is_another_function_and_not_another_precision(build, findings_of):
    def other(x, eps):
        return in_float32(x, 0.1)

    assert not findings_of(COARSE, build(norms(other)))
