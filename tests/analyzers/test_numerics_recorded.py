"""Real runs of a small byte-level GPT, recorded and analysed: each fault is the first divergence of its own run."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from llmconsole.analyzers.registry import all_rules
from llmconsole.analyzers.report import CapsuleReport
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, Recorder
from torch import nn
from torch.nn import functional

CONTEXT, BATCH, VOCABULARY = 48, 8, 256
FAMILIES = ("data", "numerics")


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(size, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, D]
        x = x + self.proj(mixed.transpose(1, 2).reshape(size, length, width))
        return x + self.down(functional.gelu(self.up(self.ln2(x))))


class Model(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def text() -> torch.Tensor:
    library = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse", "ast", "calendar", "difflib", "doctest", "inspect", "pdb", "tarfile", "typing", "zipfile")
    sources = [path for name in names if (path := library / f"{name}.py").exists()]
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Recipe:
    """What a run is made of; the defaults are a healthy one."""

    steps: int = 100
    seed: int = 0
    rate: float = 1e-3
    precision: torch.dtype | None = None
    growth: float = 1.0
    poison: int | None = None
    scaled: bool = True
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = cross_entropy
    factor: Callable[[int], float] | None = None


@pytest.fixture
def train(tmp_path: Path) -> Callable[[Recipe], CapsuleReport]:
    """Train, record, and report what the rules of both families say."""

    def train(recipe: Recipe) -> CapsuleReport:
        torch.manual_seed(recipe.seed)
        data, model = text(), Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, weight_decay=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=recipe.scaled and recipe.precision == torch.float16)
        recorder = Recorder(
            tmp_path, model=model, optimizer=optimizer, scaler=scaler if scaler.is_enabled() else None,
            manifest={"model": {"vocab_size": VOCABULARY}},
        )  # fmt: skip
        with recorder:
            lost = 0
            for step in range(recipe.steps):
                starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,)).tolist()
                rows = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
                if step == recipe.poison:
                    rows[3] = torch.randint(VOCABULARY, (CONTEXT + 1,))
                if recipe.growth != 1.0:
                    with torch.no_grad():
                        model.blocks[-1].up.weight.mul_(recipe.growth)
                if recipe.factor is not None:
                    optimizer.param_groups[0]["lr"] = recipe.rate * recipe.factor(step)
                ids, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
                batch = {"input_ids": ids, "labels": labels}
                with recorder.step(batch=batch, sample_ids=[f"offset {start}" for start in starts]) as window:
                    with torch.autocast("cpu", dtype=recipe.precision, enabled=recipe.precision is not None):
                        logits = model(ids)
                    loss = recipe.loss(logits, labels)
                    window.loss(loss)
                    optimizer.zero_grad()
                    scaler.scale(loss).backward()
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                    scaler.step(optimizer)
                    scaler.update()
                lost += not math.isfinite(float(loss.detach()))
                if lost == 2:
                    break
        (path,) = tmp_path.glob("*.capsule")
        return analyze(Capsule.open(path), [each for each in all_rules() if each.id.split("/")[0] in FAMILIES])

    return train


def alarms(report: CapsuleReport) -> dict[str, str | None]:
    assert not report.errors
    return {each.rule: each.caused_by for each in report.findings if each.severity != "info"}


@pytest.mark.recorded("data/poison-sample")
@pytest.mark.quiet("numerics/learning-rate")
def test_one_row_of_random_bytes_is_found_among_text(train):
    report = train(Recipe(steps=76, poison=75))
    assert alarms(report) == {"data/poison-sample": None}
    finding = next(each for each in report.findings if each.rule == "data/poison-sample")
    assert finding.where.step == 75


@pytest.mark.recorded("numerics/fp16-overflow")
@pytest.mark.recorded("numerics/first-nonfinite")
@pytest.mark.recorded("numerics/loss-nonfinite")
@pytest.mark.quiet("data/poison-sample")
@pytest.mark.quiet("numerics/learning-rate")
def test_activations_that_grow_under_float16_are_the_first_divergence(train):
    report = train(Recipe(growth=1.4, precision=torch.float16))
    overflow = "numerics/fp16-overflow"
    assert alarms(report) == {
        overflow: None, "numerics/first-nonfinite": overflow, "numerics/loss-nonfinite": overflow,
    }  # fmt: skip
    assert report.first_divergence is not None
    assert str(report.first_divergence.where.tensor).startswith("blocks.1.")


@pytest.mark.quiet("numerics/fp16-overflow")
def test_the_same_growth_in_bfloat16_overflows_nothing_and_is_a_growing_layer(train):
    growing = "numerics/outlier-growth"
    found = alarms(train(Recipe(steps=30, growth=1.4, precision=torch.bfloat16)))
    assert found.pop(growing, "quiet") is None
    assert set(found.items()) <= {("numerics/gradient-vanishing", growing)}  # what lies before it gets next to nothing


@pytest.mark.recorded("numerics/learning-rate")
@pytest.mark.parametrize(("rate", "precision"), [(1e-1, None), (3e-1, torch.float16)])
def test_a_rate_a_hundred_times_too_high_is_named_at_its_first_step(train, rate, precision):
    report = train(Recipe(steps=12, rate=rate, precision=precision))
    assert report.first_divergence is not None
    assert (report.first_divergence.rule, report.first_divergence.where.step) == ("numerics/learning-rate", 0)
    assert set(alarms(report).values()) <= {None, "numerics/learning-rate"}


@pytest.mark.quiet("data/poison-sample")
@pytest.mark.quiet("numerics/loss-spike")
@pytest.mark.quiet("numerics/gradient-explosion")
@pytest.mark.quiet("numerics/first-nonfinite")
@pytest.mark.parametrize(("seed", "precision"), [(0, None), (1, torch.bfloat16), (2, torch.float16)])
def test_a_healthy_run_raises_no_alarm(train, seed, precision):
    assert not alarms(train(Recipe(steps=60, seed=seed, precision=precision)))


@pytest.mark.recorded("numerics/learning-rate")
@pytest.mark.recorded("numerics/outlier-growth")
def test_a_rate_that_jumps_thirtyfold_in_mid_run_is_named_and_the_layer_it_blows_up_follows(train):
    report = train(Recipe(steps=48, factor=lambda step: 30.0 if step >= 32 else 1.0))
    assert report.first_divergence is not None
    assert (report.first_divergence.rule, report.first_divergence.where.step) == ("numerics/learning-rate", 32)
    assert set(alarms(report).values()) <= {None, "numerics/learning-rate"}


@pytest.mark.recorded("numerics/underflow")
@pytest.mark.quiet("numerics/low-precision-op")
def test_float16_without_a_loss_scale_underflows(train):
    assert alarms(train(Recipe(steps=4, precision=torch.float16, scaled=False))) == {"numerics/underflow": None}


@pytest.mark.quiet("numerics/underflow")
@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
def test_a_scaler_or_the_range_of_bfloat16_holds_the_same_gradients(train, precision):
    assert not alarms(train(Recipe(steps=4, precision=precision)))


@pytest.mark.recorded("numerics/low-precision-op")
def test_a_loss_computed_in_bfloat16_is_named(train):
    def coarse(logits, labels):
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    assert alarms(train(Recipe(steps=4, precision=torch.bfloat16, loss=coarse))) == {"numerics/low-precision-op": None}


@pytest.mark.recorded("numerics/gradients-lost")
def test_a_detached_loss_head_trains_nothing(train):
    def detached(logits, labels):
        return cross_entropy(logits, labels).detach().requires_grad_()

    report = train(Recipe(steps=12, loss=detached))
    assert report.first_divergence is not None
    assert (report.first_divergence.rule, report.first_divergence.where.step) == ("numerics/gradients-lost", 0)
    assert set(alarms(report).values()) <= {None, "numerics/gradients-lost"}


@pytest.mark.recorded("numerics/gradient-explosion")
def test_a_loss_that_is_summed_from_one_step_on_explodes_the_gradient(train):
    steps = iter(range(100))

    def summed(logits, labels):
        return cross_entropy(logits, labels) * (labels.numel() if next(steps) >= 24 else 1)

    report = train(Recipe(steps=30, loss=summed))
    finding = next(each for each in report.findings if each.rule == "numerics/gradient-explosion")
    assert (finding.severity, finding.where.step) == ("warning", 24)
