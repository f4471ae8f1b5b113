"""Statistics against their definitions in float64."""

from __future__ import annotations

import math

import pytest
import torch
from llmconsole.capsules.recorder import statistics
from torch import Tensor


def defined(tensor: Tensor) -> dict[str, float]:
    x = tensor.double().flatten()
    tiny = torch.finfo(tensor.dtype).tiny
    finite = x[torch.isfinite(x)]
    return {
        "nan": int(torch.isnan(x).sum()),
        "posinf": int((x == math.inf).sum()),
        "neginf": int((x == -math.inf).sum()),
        "zeros": int((x == 0).sum()),
        "subnormals": int(((x != 0) & (x.abs() < tiny)).sum()),
        "min": finite.min().item(),
        "max": finite.max().item(),
        "absmax": finite.abs().max().item(),
        "absmean": finite.abs().mean().item(),
        "mean": finite.mean().item(),
        "std": finite.std(correction=0).item(),
        "rms": finite.square().mean().sqrt().item(),
    }


def awkward(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(70_001, generator=generator, dtype=torch.float64).to(dtype)  # more than one piece, and a rest
    x[:3], x[3:5], x[5] = math.nan, math.inf, -math.inf
    x[6:16] = 0.0
    x[16:20] = torch.finfo(dtype).smallest_normal / 2
    return x


def cases() -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    plain = torch.randn(33, 40, generator=generator)
    return [
        ("plain", plain),
        ("transposed", plain.t()),
        ("every other column", plain[:, ::2]),
        ("one element", torch.tensor(3.5)),
        ("weights near one", 1 + 1e-4 * plain),
        ("squares beyond float32", plain * 1e25),
        ("constant", torch.full((1000,), 0.1)),
        *(
            (f"awkward {dtype}", awkward(dtype))
            for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
        ),
    ]


@pytest.mark.parametrize(("name", "tensor"), cases(), ids=[name for name, _ in cases()])
class TestFullStatistics:
    def test_on_a_cpu_are_those_of_the_definition(self, name: str, tensor: Tensor) -> None:
        assert statistics.full(tensor) == pytest.approx(defined(tensor), rel=2e-6, abs=1e-7)

    def test_from_device_operations_are_the_same_numbers(self, name: str, tensor: Tensor) -> None:
        flat = tensor.reshape(-1)
        found = statistics.unpack(statistics._full_on_device(flat).tolist())
        assert found == pytest.approx(defined(tensor), rel=1e-6, abs=1e-9)


def test_a_tensor_without_a_finite_element_has_counts_and_no_moments() -> None:
    found = statistics.full(torch.tensor([math.nan, math.inf]))
    assert (found["nan"], found["posinf"], found["zeros"]) == (1, 1, 0)
    assert all(math.isnan(found[name]) for name in ("min", "max", "mean", "std", "rms"))


def test_the_norm_of_a_half_precision_tensor_does_not_overflow() -> None:
    x = torch.full((1000,), 60_000.0, dtype=torch.float16)  # its norm, 1.9e6, is no float16
    assert statistics.norm(x).item() == pytest.approx(60_000 * math.sqrt(1000), rel=1e-3)


@pytest.mark.parametrize(("name", "tensor"), cases(), ids=[name for name, _ in cases()])
def test_a_norm_at_hand_is_the_norm_or_calls_for_a_closer_look(name: str, tensor: Tensor) -> None:
    found, wanted = statistics.norm_at_hand(tensor), tensor.double().norm().item()
    if name == "squares beyond float32":  # finite, but whoever sees this looks at every element
        wanted = found if found == pytest.approx(wanted) else math.inf
    assert found == pytest.approx(wanted, rel=1e-5, nan_ok=True)


def test_pieces_on_a_device_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "DEVICE_PIECE", 100)
    x = awkward(torch.float32)[:1050]
    assert statistics.unpack(statistics._full_on_device(x).tolist()) == pytest.approx(defined(x), rel=1e-6)
