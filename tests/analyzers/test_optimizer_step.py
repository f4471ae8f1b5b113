"""The optimizer step computed again: random steps by torch, and real recorded runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmconsole.analyzers.optimizer.precision import half_gap
from llmconsole.analyzers.optimizer.step_faults import to_bfloat16
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, CapsuleWriter
from torch import nn

from tests.analyzers.sweep.optimizer_steps import FAULTS, UNKNOWN, Job
from tests.analyzers.sweep.tiny_run import Run, WrongAdamW, plain, scaled, two_groups

RULE = "optimizer/step-mismatch"
Build = Callable[..., Capsule]


def reasons(rule: str, capsule: Capsule) -> str:
    """Why a rule did not judge."""
    from llmconsole.analyzers.registry import all_rules

    report = analyze(capsule, [each for each in all_rules() if each.id == rule])
    assert not report.errors, report.errors
    return " ".join(part for each in report.skipped for part in each.missing)


class TestRandomSteps:
    @pytest.mark.fires(RULE)
    @pytest.mark.parametrize("fault", FAULTS)
    def test_each_fault_is_named_and_confirmed(self, fault: str, build: Build, findings_of: Any) -> None:
        (finding,) = findings_of(RULE, build(Job(FAULTS.index(fault), fault).write))
        assert (finding.confidence, finding.severity) == ("confirmed", "critical")
        assert any(fault in members for members in finding.counterfactual.classes)

    @pytest.mark.quiet(RULE)
    @pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_right_steps_are_quiet(self, dtype: torch.dtype, fused: bool, build: Build, findings_of: Any) -> None:
        for seed in range(1):
            assert findings_of(RULE, build(Job(seed, None, dtype, fused).write)) == []

    @pytest.mark.parametrize("fault", [each for each in UNKNOWN if each != "gradient-centred"])
    def test_a_cause_outside_the_catalogue_is_undetermined(self, fault: str, build: Build, findings_of: Any) -> None:
        (finding,) = findings_of(RULE, build(Job(5, fault).write))
        assert (finding.confidence, finding.cause, finding.severity) == ("undetermined", None, "warning")

    def test_a_gradient_that_the_optimizer_changed_first_is_not_judged(self, build: Build) -> None:
        assert "hooks" in reasons(RULE, build(Job(5, "gradient-centred").write))


def step_capsule(build: Build, attributes: dict[str, Any], manifest: Any = None, **arrays: Any) -> Capsule:
    """One captured step of a real torch.optim.AdamW (t = 1), with these attributes and arrays instead of its own."""
    generator = torch.Generator().manual_seed(3)
    w = nn.Parameter(torch.randn(40, generator=generator))
    before = w.detach().clone()
    optimizer = torch.optim.AdamW([w], lr=1e-2, weight_decay=0.1)
    w.grad = torch.randn(40, generator=generator)
    optimizer.step()
    state = optimizer.state[w]
    found = {
        "before": before, "gradient": w.grad, "exp_avg": torch.zeros(40), "exp_avg_sq": torch.zeros(40),
        "after": w.detach(), "exp_avg_after": state["exp_avg"], "exp_avg_sq_after": state["exp_avg_sq"],
    } | arrays  # fmt: skip
    known = {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1, "state_step_before": 0} | attributes
    known = {name: value for name, value in known.items() if value is not None}

    def fill(writer: CapsuleWriter) -> None:
        for name, array in found.items():
            if array is not None:
                writer.tensor(f"optimizer/w/{name}", array, step=0, rank=0, **known)

    return build(fill, manifest)


class TestWhatIsNotJudged:
    @pytest.mark.parametrize(
        ("attributes", "word"),
        [
            ({"optimizer": "Lion"}, "Lion"),
            ({"optimizer": "Muon"}, "Muon"),
            ({"optimizer": "NAdam"}, "NAdam"),
            ({"optimizer": "Adafactor"}, "Adafactor"),
            ({"optimizer": "AdamW8bit"}, "AdamW8bit"),
            ({"optimizer": "AdamW", "amsgrad": True}, "amsgrad"),
            ({"optimizer": "AdamW", "maximize": True}, "maximize"),
            ({"optimizer": "AdamW", "closure": True}, "closure"),
            ({"optimizer": "AdamW", "betas": None}, "betas"),
            ({"optimizer": "AdamW", "betas": ["a", "b"]}, "betas"),
        ],
    )
    def test_other_optimizers_and_missing_settings_have_a_reason(
        self, attributes: dict[str, Any], word: str, build: Build
    ) -> None:
        assert word in reasons(RULE, step_capsule(build, attributes))

    @pytest.mark.parametrize(
        "attributes",
        [
            {"betas": [1.0, 2.0]},
            {"lr": float("nan")},
            {"eps": -1.0},
            {"state_step_before": -7},
            {"grad_scale": 0.0, "gradient_state": "scaled", "max_norm": -1.0, "total_norm": float("inf")},
            {"lr": "fast", "weight_decay": [1], "optimizer": 3, "module": None, "clips": "many"},
            {"grad_scale": 1e300, "gradient_state": "odd", "clip_coefficient": 1e-300},
        ],
    )
    def test_odd_settings_are_no_error_in_any_rule(self, attributes: dict[str, Any], build: Build) -> None:
        from llmconsole.analyzers.registry import all_rules

        def fill(writer: CapsuleWriter) -> None:
            odd = {"step": 0, "name": "w", "shape": [], "weight_decay": float("inf"), "lr": float("nan"), "state": {}}
            writer.records("param_groups", [odd, odd | {"step": 2**62, "state_step": 0}, {"step": 1, "name": ""}])
            writer.records("events", [{"kind": kind, "step": 5} for kind in ("clip", "unscale", "checkpoint_loaded")])
            writer.records("recompute", [{"module": "m"}, {"step": 1}])
            writer.scalars("update_norm", step=[3, 1, 1], value=[float("nan"), float("inf"), -1.0])
            writer.scalars("param_norm", step=[3, 1, 1], value=[0.0, float("nan"), 1.0])
            for name in ("before", "gradient", "exp_avg", "exp_avg_sq", "after"):
                writer.tensor(f"optimizer/w/{name}", torch.randn(7), step=0, rank=0, **attributes)
                writer.tensor(f"adapter/w/{name}", torch.randn(2, 3), step=0, rank=0)
            writer.tensor("adapter/w/output", torch.zeros(0), step=0, rank=0, scaling=1.0)

        report = analyze(build(fill), [each for each in all_rules() if each.id.startswith("optimizer/")])
        assert not report.errors, report.errors

    def test_odd_arrays_are_no_error(self, build: Build) -> None:
        nan = torch.full((40,), float("nan"))
        assert reasons(RULE, step_capsule(build, {"optimizer": "AdamW"}, after=nan))
        assert reasons(RULE, step_capsule(build, {"optimizer": "AdamW"}, before=None, gradient=None))
        assert not reasons(RULE, step_capsule(build, {"optimizer": "AdamW"}, after=torch.zeros(3, 4)))


class TestWhatIsDeclared:
    def test_an_undeclared_form_of_decay_is_no_fault(self, build: Build, findings_of: Any) -> None:
        assert findings_of(RULE, step_capsule(build, {})) == []

    @pytest.mark.quiet(RULE)
    def test_adam_with_l2_is_right_where_adam_was_asked_for(self, tmp_path: Path, findings_of: Any) -> None:
        run = Run(tmp_path, optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=3e-3, weight_decay=0.1))
        assert findings_of(RULE, run.train(5).capsule()) == []

    @pytest.mark.fires(RULE)
    @pytest.mark.recorded(RULE)
    def test_adam_with_l2_where_adamw_was_declared(self, tmp_path: Path, findings_of: Any) -> None:
        run = Run(
            tmp_path,
            optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=3e-3, weight_decay=0.1),
            manifest={"training": {"optimizer": {"name": "AdamW", "decoupled": True}}},
        )
        (finding,) = findings_of(RULE, run.train(5).capsule())
        assert finding.confidence == "confirmed"
        assert finding.counterfactual.classes == (("l2-for-decoupled",),)

    def test_a_manifest_that_speaks_of_another_optimizer_is_no_fault(self, tmp_path: Path, findings_of: Any) -> None:
        run = Run(tmp_path, named=False, optimizer=lambda m: torch.optim.AdamW(m.blocks.parameters(), lr=3e-3))
        second = torch.optim.Adam(
            [*run.model.tokens.parameters(), *run.model.head.parameters()], 3e-3, weight_decay=0.1
        )

        def step(run: Run, loss: Any) -> None:
            loss.backward()
            run.optimizer.step()
            second.step()
            run.model.zero_grad()

        assert findings_of(RULE, run.train(5, step).capsule()) == []


class TestRecordedRuns:
    @pytest.mark.fires(RULE)
    @pytest.mark.recorded(RULE)
    def test_an_adamw_that_someone_wrote_with_l2_decay(self, tmp_path: Path, findings_of: Any) -> None:
        run = Run(tmp_path, optimizer=lambda m: WrongAdamW(m.parameters(), 3e-3))
        (finding,) = findings_of(RULE, run.train(5).capsule())
        assert finding.confidence == "confirmed"
        assert finding.counterfactual.classes == (("l2-for-decoupled",),)
        assert finding.fix

    @pytest.mark.quiet(RULE)
    def test_the_same_one_written_right(self, tmp_path: Path, findings_of: Any) -> None:
        run = Run(tmp_path, optimizer=lambda m: WrongAdamW(m.parameters(), 3e-3, right=True))
        assert findings_of(RULE, run.train(5).capsule()) == []

    @pytest.mark.quiet(RULE)
    @pytest.mark.parametrize(
        "options",
        [{"fused": True}, {"foreach": False, "lr": torch.tensor(3e-3)}],
        ids=["fused", "for-loop with the rate in a tensor"],
    )
    def test_every_implementation_of_torch_is_right(self, options: Any, tmp_path: Path, findings_of: Any) -> None:
        run = Run(tmp_path, optimizer=lambda m: torch.optim.AdamW(two_groups(m), **({"lr": 3e-3} | options)))
        assert findings_of(RULE, run.train(5, scaled()).capsule()) == []

    @pytest.mark.quiet(RULE)
    def test_warm_up_from_zero_with_a_schedule_stepped_before_or_after(self, tmp_path: Path, findings_of: Any) -> None:
        for before in (True, False):
            run = Run(tmp_path / str(before), every=2)
            schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda t: min(1.0, t / 4))

            def step(run: Run, loss: Any, before: bool = before, schedule: Any = schedule) -> None:
                loss.backward()
                if before:
                    schedule.step()
                run.optimizer.step()
                if not before:
                    schedule.step()
                run.optimizer.zero_grad()

            assert findings_of(RULE, run.train(5, step).capsule()) == []

    @pytest.mark.quiet(RULE)
    def test_gradients_changed_by_a_hook_of_the_optimizer(self, tmp_path: Path) -> None:
        run = Run(tmp_path)

        def halve(optimizer: Any, arguments: Any, keywords: Any) -> None:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.mul_(torch.rand_like(p.grad))

        run.optimizer.register_step_pre_hook(halve)
        assert "hooks" in reasons(RULE, run.train(5).capsule())

    @pytest.mark.quiet(RULE)
    def test_clipping_by_value_accumulation_and_zeros_left_in_place(self, tmp_path: Path, findings_of: Any) -> None:
        run = Run(tmp_path)

        def step(run: Run, loss: Any) -> None:
            (loss / 2).backward()
            (run.loss(run.batch(77)) / 2).backward()
            nn.utils.clip_grad_value_(run.model.parameters(), 1e-3)
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=False)

        assert findings_of(RULE, run.train(5, step).capsule()) == []

    @pytest.mark.fires(RULE)
    @pytest.mark.recorded(RULE)
    def test_a_scaler_that_is_updated_before_the_gradients_are_unscaled(self, tmp_path: Path, findings_of: Any) -> None:
        run = Run(tmp_path, every=1)
        run.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

        def step(run: Run, loss: Any) -> None:
            run.scaler.scale(loss).backward()
            run.scaler.update(32.0)
            run.scaler.step(run.optimizer)
            run.optimizer.zero_grad()

        (finding,) = findings_of(RULE, run.train(2, step).capsule())
        assert finding.confidence == "confirmed"
        assert "unscaled-with-new-scale" in finding.summary

    @pytest.mark.quiet(RULE)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_the_plain_loop_in_both_precisions(self, dtype: torch.dtype, tmp_path: Path, findings_of: Any) -> None:
        assert findings_of(RULE, Run(tmp_path, dtype=dtype).train(5, plain).capsule()) == []


def test_rounding_to_bfloat16_and_the_gaps_between_its_numbers_are_those_of_torch() -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(size=500) * 10.0 ** generator.uniform(-6, 3, 500)
    expected = torch.tensor(values, dtype=torch.float32).to(torch.bfloat16)
    np.testing.assert_array_equal(to_bfloat16(values), expected.double().numpy())
    for dtype in ("bfloat16", "float16"):
        kind = getattr(torch, dtype)
        held = torch.cat([expected[:100].float().clamp(-9, 9), torch.tensor([1.0, -2.0, 0.5, 0.0])]).to(kind)
        for direction in (1.0, -1.0):
            gap = half_gap(held.double().numpy(), np.full(len(held), direction), dtype)
            gap = torch.tensor(gap)
            assert torch.equal((held.double() + 0.98 * direction * gap).to(kind), held)
            assert not torch.eq((held.double() + 1.02 * direction * gap).to(kind), held).any()
