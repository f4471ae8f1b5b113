"""What the optimizer holds: decayed norms, orphans, frozen parameters, the gradient chain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmconsole.analyzers.registry import all_rules
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, CapsuleWriter
from torch import nn

from tests.analyzers.sweep.tiny_run import Model, Run, plain, two_groups

Build = Callable[..., Capsule]
DECAY = "optimizer/decay-on-norm-or-bias"
OWNED = "optimizer/not-owned"
FROZEN = "optimizer/frozen-not-frozen"
CHAIN = "optimizer/gradient-chain-cut"


def loud(capsule: Capsule) -> list[str]:
    """Rules of the family with a finding at warning or above; an error inside a rule fails the test."""
    report = analyze(capsule, [each for each in all_rules() if each.id.startswith("optimizer/")])
    assert not report.errors, report.errors
    return [each.rule for each in report.findings if each.severity != "info"]


def row(name: str, shape: list[int], decay: float = 0.1, step: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "step": step, "group": 0, "name": name, "shape": shape, "dtype": "float32", "requires_grad": True,
        "weight_decay": decay, "lr": 1e-3, "has_grad": True, "grad_norm": 1.0, "in_optimizer": True, **fields,
    }  # fmt: skip


def records(build: Build, *rows: dict[str, Any], **manifest: Any) -> Capsule:
    return build(lambda writer: writer.records("param_groups", rows), manifest)


MAMBA = (
    row("layers.0.norm.weight", [64]),
    row("layers.0.mixer.A_log", [16]),
    row("layers.0.mixer.dt_bias", [16]),
    row("layers.0.attn.q.bias", [64]),
    row("layers.0.attn.q.weight", [64, 64]),
    row("embed.weight", [100, 64]),
)


class TestDecay:
    @pytest.mark.fires(DECAY)
    def test_every_vector_is_named_and_no_matrix(self, build: Build, findings_of: Any) -> None:
        """Fast-LLM 542: norms, biases, A_log and dt_bias in the decayed group, nothing spared."""
        (finding,) = findings_of(DECAY, records(build, *MAMBA))
        assert finding.evidence[0].value == [each["name"] for each in MAMBA[:4]]
        assert (finding.severity, finding.kind) == ("info", "hygiene")

    @pytest.mark.fires(DECAY)
    def test_it_is_a_warning_where_something_is_meant_to_be_spared(self, build: Build, findings_of: Any) -> None:
        for capsule in (
            records(build, *MAMBA, row("layers.1.norm.weight", [64], decay=0.0)),
            records(build, *MAMBA, config={"no_decay_params": ["bias", "norm"]}),
        ):
            (finding,) = findings_of(DECAY, capsule)
            assert (finding.severity, finding.kind) == ("warning", "divergence")

    @pytest.mark.fires(DECAY)
    @pytest.mark.recorded(DECAY)
    def test_norms_that_slip_through_a_rule_for_biases(self, tmp_path: Path) -> None:
        run = Run(tmp_path, optimizer=lambda m: torch.optim.AdamW(two_groups(m, 0.1, lambda n, p: "bias" in n), 3e-3))
        capsule = run.train(4).capsule()
        assert loud(capsule) == [DECAY]
        report = analyze(capsule)
        assert report.first_divergence.rule == DECAY
        finding = next(each for each in report.findings if each.rule == DECAY)
        assert finding.evidence[0].value == ["blocks.0.norm.weight", "blocks.1.norm.weight", "norm.weight"]

    @pytest.mark.quiet(DECAY)
    def test_two_groups_by_dimension_are_right(self, tmp_path: Path, findings_of: Any) -> None:
        assert findings_of(DECAY, Run(tmp_path).train(4).capsule()) == []


class TestOwned:
    @pytest.mark.fires(OWNED)
    @pytest.mark.recorded(OWNED)
    @pytest.mark.parametrize("named", [True, False], ids=["told", "found by its shapes"])
    def test_an_optimizer_on_the_parameters_of_an_earlier_model(self, named: bool, tmp_path: Path) -> None:
        stale = Model()
        run = Run(tmp_path, named=named, optimizer=lambda m: torch.optim.AdamW(two_groups(stale), 3e-3))

        def step(run: Run, loss: Any) -> None:
            for p in stale.parameters():
                p.grad = torch.ones_like(p)
            loss.backward()
            run.optimizer.step()
            run.model.zero_grad()

        capsule = run.train(5, step).capsule()
        assert OWNED in loud(capsule)
        report = analyze(capsule)
        assert report.first_divergence.rule == OWNED
        finding = next(each for each in report.findings if each.rule == OWNED)
        assert (finding.confidence, finding.severity) == ("confirmed", "critical")
        assert "none of the model's parameters" in finding.title

    @pytest.mark.quiet(OWNED)
    def test_tied_weights_frozen_layers_and_a_second_optimizer(self, tmp_path: Path, findings_of: Any) -> None:
        model = Model()
        model.head.weight = model.tokens.weight
        model.norm.requires_grad_(False)
        run = Run(tmp_path, model, named=False, optimizer=lambda m: torch.optim.AdamW(m.blocks.parameters(), 3e-3))
        second = torch.optim.SGD([model.tokens.weight, model.head.bias], 1e-2)

        def step(run: Run, loss: Any) -> None:
            loss.backward()
            second.step()
            run.optimizer.step()
            run.model.zero_grad()

        capsule = run.train(5, step).capsule()
        assert findings_of(OWNED, capsule) == []
        assert loud(capsule) == []
        tied = {each["name"]: each.get("shared_with") for each in capsule.records("param_groups")}
        assert tied["tokens.weight"] == ["head.weight"]

    def test_a_head_that_was_left_out_is_a_warning_or_worse(self, tmp_path: Path, findings_of: Any) -> None:
        run = Run(
            tmp_path, optimizer=lambda m: torch.optim.AdamW([*m.tokens.parameters(), *m.blocks.parameters()], 3e-3)
        )
        (finding,) = findings_of(OWNED, run.train(5).capsule())
        assert finding.confidence == "confirmed"
        assert {"head.weight", "norm.weight"} <= set(finding.evidence[0].value)

    def test_nothing_to_train_at_all(self, build: Build, findings_of: Any) -> None:
        frozen = records(build, row("a.weight", [4, 4], requires_grad=False, has_grad=False))
        (finding,) = findings_of(OWNED, frozen)
        assert finding.title == "No parameter is trainable"


class TestFrozen:
    @pytest.mark.fires(FROZEN)
    @pytest.mark.recorded(FROZEN)
    def test_a_layer_frozen_after_it_had_a_gradient_goes_on_moving(self, tmp_path: Path) -> None:
        run = Run(tmp_path)

        def step(run: Run, loss: Any) -> None:
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=False)
            run.model.blocks[0].requires_grad_(False)  # its gradients are zeros, and momentum and decay go on

        capsule = run.train(9, step).capsule()
        assert FROZEN in loud(capsule)
        finding = next(each for each in analyze(capsule).findings if each.rule == FROZEN)
        assert (finding.confidence, finding.severity) == ("confirmed", "critical")
        assert all(name.startswith("blocks.0.") for name in finding.evidence[0].value)

    @pytest.mark.quiet(FROZEN)
    def test_a_frozen_base_in_the_optimizer_stays_as_it_is(self, tmp_path: Path, findings_of: Any) -> None:
        model = Model()
        model.blocks.requires_grad_(False)
        run = Run(tmp_path, model, optimizer=lambda m: torch.optim.AdamW(m.parameters(), 3e-3))
        assert findings_of(FROZEN, run.train(5).capsule()) == []

    def test_state_that_a_frozen_layer_kept_is_a_remark(self, build: Build, findings_of: Any) -> None:
        state = {"exp_avg": {"dtype": "float32", "rms": 0.1}}
        kept = row("a.weight", [4, 4], requires_grad=False, has_grad=False, grad_norm=None, state=state)
        (finding,) = findings_of(FROZEN, records(build, {k: v for k, v in kept.items() if v is not None}))
        assert (finding.severity, finding.kind) == ("info", "hygiene")


class Branch(nn.Module):
    """A block whose feed-forward branch is detached."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.inner = block

    def forward(self, x: Any) -> Any:
        inner: Any = self.inner
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[None, :, None]
        x = x + inner.mix(inner.norm(past))
        return x + inner.down(nn.functional.gelu(inner.up(x))).detach()


class TestChain:
    @pytest.mark.fires(CHAIN)
    @pytest.mark.recorded(CHAIN)
    def test_a_detach_after_the_first_block(self, tmp_path: Path) -> None:
        capsule = Run(tmp_path, Model(cut=0), every=2).train(8).capsule()
        report = analyze(capsule)
        assert report.first_divergence.rule == CHAIN
        finding = next(each for each in report.findings if each.rule == CHAIN)
        assert finding.severity == "critical"
        assert "blocks.1" in finding.summary
        assert "tokens.weight" in finding.evidence[0].value

    @pytest.mark.fires(CHAIN)
    @pytest.mark.recorded(CHAIN)
    def test_a_detached_branch_is_a_warning_that_names_it(self, tmp_path: Path) -> None:
        model = Model()
        model.blocks[0] = Branch(model.blocks[0])
        capsule = Run(tmp_path, model, every=2).train(8).capsule()
        report = analyze(capsule)
        assert report.first_divergence.rule == CHAIN
        finding = next(each for each in report.findings if each.rule == CHAIN)
        assert {name.split(".")[3] for name in finding.evidence[0].value} == {"up", "down"}

    @pytest.mark.quiet(CHAIN)
    def test_an_idle_expert_and_a_module_that_did_not_run(self, tmp_path: Path, findings_of: Any) -> None:
        model: Any = Model()
        model.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        model.vision = nn.Linear(8, 16)
        model.norm.register_forward_hook(lambda module, inputs, output: output + model.experts[1](output))
        capsule = Run(tmp_path, model, every=2).train(8).capsule()
        assert findings_of(CHAIN, capsule) == []
        assert loud(capsule) == []

    def test_an_unused_output_at_the_end_is_a_remark(self, tmp_path: Path, findings_of: Any) -> None:
        class Pooled(Model):
            def __init__(self) -> None:
                super().__init__()
                self.pooler = nn.Linear(31, 4)

            def forward(self, ids: Any) -> Any:
                logits = super().forward(ids)
                self.pooler(logits)
                return logits

        (finding,) = findings_of(CHAIN, Run(tmp_path, Pooled(), every=2).train(8).capsule())
        assert (finding.severity, finding.kind) == ("info", "hygiene")

    @pytest.mark.fires(CHAIN)
    def test_every_second_adapter_matrix_is_zero_after_two_thousand_steps(self, build: Build, findings_of: Any) -> None:
        """ai-toolkit 1054: 192 modules, every lora_B exactly zero."""

        def fill(writer: CapsuleWriter, moved: bool) -> None:
            writer.scalars("learning_rate", step=[0, 1000, 2000], value=[1e-4] * 3)
            for step in (0, 2000):
                writer.stats(
                    {
                        "step": step, "order": index, "name": f"blocks.{index}.lora_B.weight", "role": "parameter",
                        "dtype": "float32", "shape": [8, 4], "numel": 32,
                        "rms": 0.02 if moved and step else 0.0, "absmax": 0.1 if moved and step else 0.0,
                    }
                    for index in range(192)
                )  # fmt: skip
            writer.records(
                "param_groups", [row("blocks.0.lora_A.weight", [4, 8], step=step) for step in (0, 1000, 2000)]
            )

        (finding,) = findings_of(CHAIN, build(lambda writer: fill(writer, False)))
        assert finding.severity == "critical"
        assert finding.evidence[0].value == 192
        assert findings_of(CHAIN, build(lambda writer: fill(writer, True))) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_right_run_has_no_finding_of_the_family(dtype: torch.dtype, tmp_path: Path) -> None:
    run = Run(tmp_path, dtype=dtype, optimizer=lambda m: torch.optim.AdamW(two_groups(m), lr=3e-2))
    assert loud(run.train(10, plain).capsule()) == []
