"""The references of the optimizer family against torch, and by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmconsole.analyzers.reference import accumulation, adamw, adapter
from torch import nn


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(["AdamW", "Adam"]),
    shape=st.sampled_from([(3,), (4, 5), (2, 3, 2)]),
    lr=st.floats(1e-5, 0.3),
    betas=st.tuples(st.floats(0, 0.99), st.floats(0.1, 0.9999)),
    eps=st.floats(1e-10, 1e-2),
    decay=st.floats(0, 0.5),
    steps=st.integers(1, 6),
    seed=st.integers(0, 999),
)
def test_adam_and_adamw_are_those_of_torch_in_double_precision(
    kind: str, shape: Any, lr: float, betas: Any, eps: float, decay: float, steps: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    parameter = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
    optimizer = getattr(torch.optim, kind)([parameter], lr=lr, betas=betas, eps=eps, weight_decay=decay)
    w, m, v = parameter.detach().numpy().copy(), np.zeros(shape), np.zeros(shape)
    for t in range(1, steps + 1):
        parameter.grad = torch.randn(shape, generator=generator, dtype=torch.float64)
        optimizer.step()
        form = adamw.ADAMW if kind == "AdamW" else adamw.ADAM
        told = adamw.Settings(lr, betas[0], betas[1], eps, decay, t)
        stepped = adamw.step(w, parameter.grad.numpy(), m, v, told, form)
        w, m, v = stepped.parameter, stepped.exp_avg, stepped.exp_avg_sq
    state = optimizer.state[parameter]
    np.testing.assert_allclose(w, parameter.detach().numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(m, state["exp_avg"].numpy(), rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(v, state["exp_avg_sq"].numpy(), rtol=1e-9, atol=1e-15)


def test_a_first_step_worked_out_by_hand() -> None:
    """g = 2: m = 0.2, v = 0.004; corrected 2 and 4, so Δ = −0.1 · 2/2; the weight 1 decays by 0.1 · 0.5 before."""
    told = adamw.Settings(lr=0.1, beta1=0.9, beta2=0.999, eps=0.0, weight_decay=0.5, step=1)
    one, zero = np.ones(1), np.zeros(1)
    right = adamw.step(one, 2 * one, zero, zero, told)
    assert right.parameter[0] == pytest.approx(1 * 0.95 - 0.1)
    assert (right.exp_avg[0], right.exp_avg_sq[0]) == pytest.approx((0.2, 0.004))
    # L2: g = 2.5, whose sign alone counts in a first step; without the correction Δ = −0.1 · 0.2/√0.004.
    assert adamw.step(one, 2 * one, zero, zero, told, adamw.ADAM).parameter[0] == pytest.approx(0.9)
    bare = adamw.step(one, 2 * one, zero, zero, told, adamw.Form(corrected=False))
    assert bare.parameter[0] == pytest.approx(0.95 - 0.1 * 0.2 / math.sqrt(0.004))


def test_accumulated_gradients_are_those_of_the_whole_batch_by_autograd() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    inputs, targets = torch.randn(9, 4, dtype=torch.float64), torch.randint(0, 6, (9,))

    def gradient(rows: slice) -> np.ndarray:
        loss = nn.functional.cross_entropy(inputs[rows] @ weight.T, targets[rows])
        return torch.autograd.grad(loss, weight)[0].numpy()

    parts, tokens = [gradient(slice(0, 2)), gradient(slice(2, 9))], [2, 7]
    whole = gradient(slice(0, 9))
    np.testing.assert_allclose(accumulation.window_gradient(parts, tokens), whole, rtol=1e-12)
    assert not np.allclose(accumulation.window_gradient(parts, tokens, "mean-of-means"), whole, rtol=1e-3)
    # By hand: weights 2/9 and 7/9; ½ each; 1 each; and ¼ each where four micro-batches are configured.
    assert accumulation.weights([2, 7]).tolist() == pytest.approx([2 / 9, 7 / 9])
    assert accumulation.weights([2, 7], "mean-of-means").tolist() == [0.5, 0.5]
    assert accumulation.weights([2, 7], "sum-of-means").tolist() == [1, 1]
    assert accumulation.weights([2, 7], "mean-of-means", configured=4).tolist() == [0.25, 0.25]
    assert accumulation.weights([0, 0]).tolist() == [0, 0]
    with pytest.raises(ValueError, match="0 gradients for 1"):
        accumulation.window_gradient([], [1])


def test_a_merged_adapter_is_the_adapted_layer() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 7, bias=False).double(), torch.randn(3, 5).double()
    a, b = torch.randn(2, 5).double(), torch.randn(7, 2).double()
    expected = layer(x) + 3.0 * nn.functional.linear(nn.functional.linear(x, a), b)
    weight = layer.weight.detach().numpy().copy()
    ours = adapter.adapted(layer(x).detach().numpy(), x.numpy(), a.numpy(), b.numpy(), 6 / 2)
    np.testing.assert_allclose(ours, expected.detach().numpy(), rtol=1e-12)
    with torch.no_grad():
        layer.weight += 3.0 * b @ a
    np.testing.assert_allclose(adapter.merged(weight, a.numpy(), b.numpy(), 3.0), layer.weight.detach().numpy())
