"""Precision, what a resume brings back, adapters, recomputation, and the size of updates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmconsole.analyzers.registry import all_rules
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, CapsuleWriter
from torch import nn

from tests.analyzers.sweep.tiny_run import Model, Run, plain, scaled, two_groups

Build = Callable[..., Capsule]
MASTER = "optimizer/no-master-weights"
STATE = "optimizer/state-dtype"
RESTORED = "optimizer/state-not-restored"
MERGED = "optimizer/adapter-merged-twice"
RECOMPUTE = "optimizer/recompute-rng"
RATIO = "optimizer/update-ratio"


def loud(capsule: Capsule) -> list[str]:
    report = analyze(capsule, [each for each in all_rules() if each.id.startswith("optimizer/")])
    assert not report.errors, report.errors
    return [each.rule for each in report.findings if each.severity != "info"]


def row(name: str = "w", dtype: str = "bfloat16", step: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "step": step, "group": 0, "name": name, "shape": [768], "dtype": dtype, "requires_grad": True, "lr": 6e-4,
        "has_grad": True, "grad_norm": 0.5, "in_optimizer": True, "weight_absmedian": 0.5, **fields,
    }  # fmt: skip


def records(build: Build, *rows: dict[str, Any], **manifest: Any) -> Capsule:
    return build(lambda writer: writer.records("param_groups", rows), manifest)


class Masters(torch.optim.AdamW):
    """AdamW on float32 copies of bfloat16 weights, as mixed-precision optimizers do it."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.held = list(model.parameters())
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.held]
        super().__init__(self.masters, lr=lr)

    def step(self, closure: Any = None) -> None:
        for master, p in zip(self.masters, self.held, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        super().step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.held, strict=True):
                p.copy_(master)


class TestMasterWeights:
    @pytest.mark.fires(MASTER)
    @pytest.mark.recorded(MASTER)
    def test_small_updates_of_bfloat16_weights_round_away(self, tmp_path: Path) -> None:
        run = Run(tmp_path, dtype=torch.bfloat16, optimizer=lambda m: torch.optim.AdamW(two_groups(m, 0.0), lr=1e-5))
        capsule = run.train(8).capsule()
        assert loud(capsule) == [MASTER]
        (finding,) = [each for each in analyze(capsule).findings if each.rule == MASTER]
        assert finding.confidence == "confirmed"
        assert finding.evidence[0].value > 0.5

    @pytest.mark.quiet(MASTER)
    def test_large_updates_and_float32_weights_and_masters(self, tmp_path: Path, findings_of: Any) -> None:
        large = Run(
            tmp_path / "large", dtype=torch.bfloat16, optimizer=lambda m: torch.optim.AdamW(m.parameters(), 3e-2)
        )
        single = Run(tmp_path / "float32", optimizer=lambda m: torch.optim.AdamW(m.parameters(), 1e-5))
        masters = Run(tmp_path / "masters", dtype=torch.bfloat16, optimizer=lambda m: Masters(m, 1e-3))
        for run in (large, single, masters):
            capsule = run.train(6).capsule()
            report = analyze(capsule, [each for each in all_rules() if each.id == MASTER])
            assert not report.errors
            assert not report.findings

    @pytest.mark.fires(MASTER)
    def test_the_numbers_of_a_report(self, build: Build, findings_of: Any) -> None:
        """ml-by-hand 85: learning rate 6e-4, |w| about 0.5, 0 of 768 weights moved; with masters 603 of 768."""
        (finding,) = findings_of(MASTER, records(build, row(moved_fraction=0.0)))
        assert (finding.severity, finding.confidence) == ("critical", "likely")
        rows = {each.name: each for each in finding.evidence}
        assert (rows["learning_rate"].value, rows["learning_rate"].expected) == (6e-4, "≥ 0.00195")

    @pytest.mark.quiet(MASTER)
    @pytest.mark.parametrize(
        "fields",
        [
            {"moved_fraction": 603 / 768},
            {"moved_fraction": 0.0, "master_dtype": "float32"},
            {"moved_fraction": 1.0, "dtype": "float32"},
            {"moved_fraction": 0.0, "lr": 0.0},
            {"moved_fraction": 0.0, "grad_norm": 0.0},
            {"moved_fraction": 0.0, "shape": [4], "weight_absmedian": 1.0},
            {"moved_fraction": 0.0, "requires_grad": False},
        ],
    )
    def test_its_twins(self, fields: dict[str, Any], build: Build, findings_of: Any) -> None:
        assert findings_of(MASTER, records(build, row(**fields))) == []


class TestStateDtype:
    def state(self, dtype: str, step: int = 0, **fields: Any) -> dict[str, Any]:
        held = {"exp_avg": {"dtype": dtype, "rms": 0.1}, "exp_avg_sq": {"dtype": dtype, "rms": 0.01}}
        return row(dtype="float32", step=step, state=held, **fields)

    @pytest.mark.fires(STATE)
    def test_a_second_moment_in_float16_and_a_change_of_type(self, build: Build, findings_of: Any) -> None:
        (finding,) = findings_of(STATE, records(build, self.state("float16")))
        assert finding.severity == "warning"
        (finding,) = findings_of(STATE, records(build, self.state("float32"), self.state("bfloat16", step=50)))
        assert (finding.severity, finding.where.step) == ("warning", 50)

    @pytest.mark.fires(STATE)
    @pytest.mark.recorded(STATE)
    def test_moments_of_bfloat16_weights_are_a_remark(self, tmp_path: Path, findings_of: Any) -> None:
        run = Run(tmp_path, dtype=torch.bfloat16, optimizer=lambda m: torch.optim.AdamW(m.parameters(), 3e-2))
        (finding,) = findings_of(STATE, run.train(5).capsule())
        assert (finding.severity, finding.kind) == ("info", "hygiene")

    @pytest.mark.quiet(STATE)
    def test_float32_state_and_eight_bits(self, build: Build, findings_of: Any) -> None:
        eight = row(dtype="bfloat16", state={"state1": {"dtype": "uint8", "rms": 3.0}})
        assert findings_of(STATE, records(build, self.state("float32"), eight)) == []


class TestResume:
    @pytest.mark.fires(RESTORED)
    @pytest.mark.recorded(RESTORED)
    def test_weights_that_were_loaded_without_the_optimizer(self, tmp_path: Path) -> None:
        first = Run(tmp_path / "first").train(20, numbered=True)
        first.recorder.close()
        second = Run(tmp_path / "second", Model())
        second.model.load_state_dict(first.model.state_dict())
        capsule = second.train(range(20, 26), numbered=True).capsule()
        (finding,) = [each for each in analyze(capsule).findings if each.rule == RESTORED]
        assert (finding.confidence, finding.severity) == ("confirmed", "critical")
        assert (finding.evidence[0].value, finding.evidence[0].expected) == (1, 21)
        assert analyze(capsule).first_divergence.rule == RESTORED

    @pytest.mark.quiet(RESTORED)
    def test_the_same_resume_with_its_state_and_a_run_from_the_start(self, tmp_path: Path, findings_of: Any) -> None:
        first = Run(tmp_path / "first").train(20, numbered=True)
        assert findings_of(RESTORED, first.capsule()) == []
        second = Run(tmp_path / "second", Model())
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        assert findings_of(RESTORED, second.train(range(20, 26), numbered=True).capsule()) == []

    @pytest.mark.fires(RESTORED)
    def test_a_load_in_the_middle_of_a_record(self, build: Build, findings_of: Any) -> None:
        def fill(writer: CapsuleWriter, after: int, rate: float) -> None:
            for step in range(98, 104):
                writer.record("events", {"kind": "step_begin", "step": step})
            writer.record("events", {"kind": "checkpoint_loaded", "step": 101, "loaded": ["model"]})
            writer.scalars("learning_rate", step=list(range(98, 104)), value=[1e-3] * 3 + [rate] * 3)
            writer.records("param_groups", [row(step=99, state_step=100), row(step=101, state_step=after)])

        (finding,) = findings_of(RESTORED, build(lambda writer: fill(writer, 1, 1e-3)))
        assert (finding.confidence, finding.where.step) == ("confirmed", 101)
        assert findings_of(RESTORED, build(lambda writer: fill(writer, 102, 1e-3))) == []
        (finding,) = findings_of(RESTORED, build(lambda writer: fill(writer, 102, 1e-5)))
        assert "learning rate" in finding.title
        assert finding.severity == "warning"


class LoRA(nn.Module):
    """A layer with a low-rank adapter, trained for a few steps."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(12, 10)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, 12) / 4), nn.Parameter(torch.zeros(10, 4))
        self.scaling = 2.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scaling * (x @ self.a.T) @ self.b.T

    def train_a_little(self) -> LoRA:
        optimizer, x = torch.optim.AdamW([self.a, self.b], lr=3e-2), torch.randn(32, 12)
        for _ in range(12):
            (self(x) - torch.sin(x[:, :10])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return self

    @torch.no_grad()
    def capture(self, writer: CapsuleWriter, times: int) -> None:
        """The output of the layer with its adapter merged ``times`` times, as float32 weights have it."""
        x = torch.randn(20, 12)
        base = self.base(x)
        for _ in range(times):
            self.base.weight += self.scaling * self.b @ self.a
        parts = {"input": x, "base_output": base, "a": self.a, "b": self.b, "output": self.base(x)}
        for name, array in parts.items():
            writer.tensor(f"adapter/q_proj/{name}", array, step=0, rank=0, scaling=self.scaling)


class TestAdapters:
    @pytest.mark.fires(MERGED)
    @pytest.mark.recorded(MERGED)
    def test_merged_twice_and_not_at_all(self, build: Build, findings_of: Any) -> None:
        for times, fault in ((2, "merged-twice"), (0, "not-applied")):
            capsule = build(lambda writer, times=times: LoRA(times).train_a_little().capture(writer, times))
            (finding,) = findings_of(MERGED, capsule)
            assert (finding.confidence, finding.severity) == ("confirmed", "critical")
            assert finding.counterfactual.classes == ((fault,),)

    @pytest.mark.quiet(MERGED)
    def test_merged_once(self, build: Build, findings_of: Any) -> None:
        assert findings_of(MERGED, build(lambda writer: LoRA(5).train_a_little().capture(writer, 1))) == []

    def test_an_adapter_that_is_zero_cannot_be_judged(self, build: Build) -> None:
        capsule = build(lambda writer: LoRA(5).capture(writer, 2))
        report = analyze(capsule, [each for each in all_rules() if each.id == MERGED])
        assert "not zero" in report.skipped[0].missing[0]


class TestRecompute:
    def capsule(self, build: Build, forward: str, again: str, difference: float | None) -> Capsule:
        fields = {"forward_rng_sha256": forward, "recompute_rng_sha256": again, "max_abs_difference": difference}
        record = {"step": 2, "module": "blocks.0"} | {k: v for k, v in fields.items() if v is not None}
        return build(lambda writer: writer.record("recompute", record))

    @pytest.mark.fires(RECOMPUTE)
    @pytest.mark.recorded(RECOMPUTE)
    def test_dropout_under_a_checkpoint_that_does_not_keep_the_random_state(
        self, build: Build, findings_of: Any
    ) -> None:
        """What torch itself draws: a checkpoint with preserve_rng_state=False around a dropout."""
        seen: list[tuple[bytes, torch.Tensor]] = []

        def block(x: torch.Tensor) -> torch.Tensor:
            before = torch.get_rng_state().numpy().tobytes()
            y = nn.functional.dropout(x, 0.5)
            seen.append((before, y.detach()))
            return y * x

        torch.manual_seed(0)
        x = torch.randn(64, requires_grad=True)
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
        (one, first), (two, second) = seen
        difference = float((first - second).abs().max())
        (finding,) = findings_of(RECOMPUTE, self.capsule(build, one.hex()[-64:], two.hex()[-64:] + "0", difference))
        assert (finding.confidence, finding.severity) == ("confirmed", "critical")

    @pytest.mark.quiet(RECOMPUTE)
    @pytest.mark.parametrize(("again", "difference"), [("a", 0.0), ("b", 0.0), ("a", 1e-5), ("b", 1e-6)])
    def test_the_same_state_or_a_module_that_draws_nothing(
        self, again: str, difference: float, build: Build, findings_of: Any
    ) -> None:
        assert findings_of(RECOMPUTE, self.capsule(build, "a", again, difference)) == []

    def test_a_difference_that_nobody_measured_is_a_warning(self, build: Build, findings_of: Any) -> None:
        (finding,) = findings_of(RECOMPUTE, self.capsule(build, "a", "b", None))
        assert finding.severity == "warning"


class TestUpdateRatio:
    def series(self, build: Build, ratio: float, rate: list[float], skipped: tuple[int, ...] = ()) -> Capsule:
        def fill(writer: CapsuleWriter) -> None:
            steps = list(range(len(rate)))
            writer.scalars("param_norm", step=steps, value=[10.0] * len(rate))
            writer.scalars("update_norm", step=steps, value=[10.0 * ratio] * len(rate))
            writer.scalars("grad_norm", step=steps, value=[1.0] * len(rate))
            writer.scalars("learning_rate", step=steps, value=rate)
            for step in skipped:
                writer.record("events", {"kind": "optimizer_step_skipped", "step": step})

        return build(fill)

    @pytest.mark.fires(RATIO)
    def test_out_of_bounds_on_both_sides(self, build: Build, findings_of: Any) -> None:
        for ratio, word in ((1e-9, "hardly"), (20.0, "replaces"), (0.0, "hardly")):
            (finding,) = findings_of(RATIO, self.series(build, ratio, [1e-3] * 4))
            assert finding.severity == "critical"
            assert word in finding.title

    @pytest.mark.fires(RATIO)
    @pytest.mark.recorded(RATIO)
    def test_a_limit_over_the_scale_hardly_moves_the_weights(self, tmp_path: Path, findings_of: Any) -> None:
        """SGD has no scaling of its own: what clipping at 0.5 / 1024 leaves is all the update there is."""
        run = Run(tmp_path, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-4))
        (finding,) = findings_of(RATIO, run.train(4, scaled(clip_first=True)).capsule())
        assert finding.severity == "critical"

    @pytest.mark.quiet(RATIO)
    def test_usual_sizes_zero_rates_warm_up_and_skipped_steps(
        self, build: Build, findings_of: Any, tmp_path: Path
    ) -> None:
        assert findings_of(RATIO, self.series(build, 1e-3, [1e-3] * 4)) == []
        assert findings_of(RATIO, self.series(build, 0.0, [0.0] * 4)) == []
        warm = self.series(build, 1e-9, [1e-9, 2e-9, 3e-9, 1e-3], skipped=(3,))
        assert [each.severity for each in findings_of(RATIO, warm)] in ([], ["info"])
        assert findings_of(RATIO, Run(tmp_path).train(5, plain).capsule()) == []
