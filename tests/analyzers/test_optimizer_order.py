"""The calls around a step, from real loops and from the events that other tools leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmconsole.analyzers.registry import all_rules
from llmconsole.analyzers.report import CapsuleReport
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, CapsuleWriter
from torch import nn

from tests.analyzers.sweep.tiny_run import Run, plain, scaled

Build = Callable[..., Capsule]
ORDER = "optimizer/order"
OVERFLOW = "optimizer/overflow-step-applied"
ZEROED = "optimizer/gradients-not-zeroed"


def family(capsule: Capsule) -> CapsuleReport:
    report = analyze(capsule, [each for each in all_rules() if each.id.startswith("optimizer/")])
    assert not report.errors, report.errors
    return report


def evidence(finding: Any) -> dict[str, Any]:
    return {row.name: row.value for row in finding.evidence}


class TestOrder:
    @pytest.mark.fires(ORDER)
    @pytest.mark.recorded(ORDER)
    def test_clipping_before_unscaling_leaves_the_limit_over_the_scale(self, tmp_path: Path) -> None:
        report = family(Run(tmp_path).train(5, scaled(clip_first=True)).capsule())
        finding = next(each for each in report.findings if each.rule == ORDER)
        assert (finding.confidence, finding.severity) == ("confirmed", "critical")
        rows = evidence(finding)
        assert rows["norm after both"] == pytest.approx(0.5 / 1024, rel=1e-4)
        assert next(row for row in finding.evidence if row.name == "norm after both").expected == pytest.approx(
            0.5, rel=1e-4
        )
        assert rows["windows"] == 5
        assert report.first_divergence.rule == ORDER
        # The step computed again says the same, as a consequence.
        (again,) = [each for each in report.findings if each.rule == "optimizer/step-mismatch"]
        assert (again.kind, again.caused_by) == ("consequence", ORDER)
        assert "clipped-before-unscale" in again.summary

    @pytest.mark.quiet(ORDER)
    def test_unscaled_clipped_stepped(self, tmp_path: Path) -> None:
        report = family(Run(tmp_path).train(5, scaled()).capsule())
        assert [each.rule for each in report.findings if each.severity != "info"] == []
        assert ORDER in report.quiet

    @pytest.mark.quiet(ORDER)
    @pytest.mark.parametrize("fused", [False, True])
    def test_the_scalers_own_unscaling_without_a_clip(self, fused: bool, tmp_path: Path) -> None:
        run = Run(tmp_path, optimizer=lambda m: torch.optim.AdamW(m.parameters(), 3e-3, fused=fused))

        def step(run: Run, loss: Any) -> None:
            run.scaler = run.scaler or torch.amp.GradScaler("cpu", init_scale=1024.0)
            run.scaler.scale(loss).backward()
            run.scaler.step(run.optimizer)
            run.scaler.update()
            run.optimizer.zero_grad()

        report = family(run.train(5, step).capsule())
        assert [each.rule for each in report.findings if each.severity != "info"] == []

    @pytest.mark.fires(ORDER)
    @pytest.mark.recorded(ORDER)
    def test_stepping_without_ever_unscaling(self, tmp_path: Path) -> None:
        def step(run: Run, loss: Any) -> None:
            run.scaler = run.scaler or torch.amp.GradScaler("cpu", init_scale=1024.0)
            run.scaler.scale(loss).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

        report = family(Run(tmp_path).train(5, step).capsule())
        named = {each.rule: each for each in report.findings}
        assert named[ORDER].severity == "critical"
        assert "gradient-not-unscaled" in named["optimizer/step-mismatch"].summary

    def test_clipping_after_the_step_is_a_warning(self, tmp_path: Path) -> None:
        def step(run: Run, loss: Any) -> None:
            loss.backward()
            run.optimizer.step()
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            run.optimizer.zero_grad()

        (finding,) = [each for each in family(Run(tmp_path).train(5, step).capsule()).findings if each.rule == ORDER]
        assert finding.severity == "warning"

    @pytest.mark.fires(ORDER)
    def test_the_numbers_of_a_report(self, build: Build, findings_of: Any) -> None:
        """Lightning 9599: clip 1.0 at scale 65,536 and a logged norm of 1.3e5: 1.5e-5 is left of 1."""

        def fill(writer: CapsuleWriter) -> None:
            writer.scalars("loss_scale", step=[0, 1], value=[65536.0, 65536.0])
            writer.scalars("grad_norm", step=[0, 1], value=[1.3e5, 1.3e5])
            for step in (0, 1):
                for kind in ("backward", "clip", "unscale", "optimizer_step"):
                    writer.record(
                        "events", {"kind": kind, "step": step, **({"max_norm": 1.0} if kind == "clip" else {})}
                    )

        (finding,) = findings_of(ORDER, build(fill))
        assert finding.confidence == "confirmed"
        assert evidence(finding)["norm after both"] == pytest.approx(1.0 / 65536, rel=1e-3)

    @pytest.mark.quiet(ORDER)
    def test_the_same_report_in_the_right_order(self, build: Build, findings_of: Any) -> None:
        def fill(writer: CapsuleWriter) -> None:
            writer.scalars("loss_scale", step=[0], value=[65536.0])
            for kind in ("backward", "unscale", "clip", "optimizer_step"):
                writer.record("events", {"kind": kind, "step": 0})

        assert findings_of(ORDER, build(fill)) == []


def overflowing(skip: bool) -> Callable[[Run, Any], None]:
    """A scale that overflows at step 3, with the scaler's own step or with one that is taken all the same."""

    def step(run: Run, loss: Any) -> None:
        run.scaler = run.scaler or torch.amp.GradScaler("cpu", init_scale=1024.0)
        run.scaler.scale(loss).backward()
        run.count = getattr(run, "count", -1) + 1
        if run.count == 3:
            run.model.head.weight.grad[0, 0] = float("inf")
        run.scaler.unscale_(run.optimizer)
        if skip:
            run.scaler.step(run.optimizer)
        else:
            run.optimizer.step()
        run.scaler.update()
        run.optimizer.zero_grad()

    return step


class TestOverflow:
    @pytest.mark.fires(OVERFLOW)
    @pytest.mark.recorded(OVERFLOW)
    def test_a_step_on_inf(self, tmp_path: Path) -> None:
        report = family(Run(tmp_path, every=2).train(5, overflowing(skip=False)).capsule())
        finding = next(each for each in report.findings if each.rule == OVERFLOW)
        assert (finding.confidence, finding.severity, finding.where.step) == ("confirmed", "critical", 3)

    @pytest.mark.quiet(OVERFLOW)
    def test_a_skipped_step(self, tmp_path: Path) -> None:
        capsule = Run(tmp_path, every=2).train(5, overflowing(skip=True)).capsule()
        report = family(capsule)
        assert [each.rule for each in report.findings if each.severity != "info"] == []
        assert 4 in {each.step for each in capsule.tensors("optimizer/*")}  # the one after is sampled

    @pytest.mark.quiet(OVERFLOW)
    def test_a_fused_optimizer_is_called_and_does_nothing(self, tmp_path: Path, findings_of: Any) -> None:
        run = Run(tmp_path, every=2, optimizer=lambda m: torch.optim.AdamW(m.parameters(), 3e-3, fused=True))

        def step(run: Run, loss: Any) -> None:
            run.scaler = run.scaler or torch.amp.GradScaler("cpu", init_scale=1024.0)
            run.scaler.scale(loss).backward()
            run.count = getattr(run, "count", -1) + 1
            if run.count == 3:
                run.model.head.weight.grad[0, 0] = float("inf")
            run.scaler.step(run.optimizer)
            run.scaler.update()
            run.optimizer.zero_grad()

        assert findings_of(OVERFLOW, run.train(5, step).capsule()) == []

    def test_flags_alone_say_nothing_of_a_step(self, build: Build, findings_of: Any) -> None:
        capsule = build(lambda writer: writer.scalars("overflow", step=[0, 1, 2], value=[0.0, 1.0, 0.0]))
        assert findings_of(OVERFLOW, capsule) == []


class TestZeroing:
    @pytest.mark.fires(ZEROED)
    @pytest.mark.recorded(ZEROED)
    def test_a_forgotten_zero_grad(self, tmp_path: Path, findings_of: Any) -> None:
        def step(run: Run, loss: Any) -> None:
            loss.backward()
            run.optimizer.step()

        (finding,) = findings_of(ZEROED, Run(tmp_path).train(5, step).capsule())
        assert (finding.severity, finding.where.step) == ("critical", 1)
        assert evidence(finding)["windows"] == 4

    @pytest.mark.quiet(ZEROED)
    def test_zeroed_in_every_way_and_accumulated(self, tmp_path: Path, findings_of: Any) -> None:
        def first(run: Run, loss: Any) -> None:
            run.optimizer.zero_grad(set_to_none=False)
            loss.backward()
            run.loss(run.batch(99)).backward()
            run.optimizer.step()

        def by_hand(run: Run, loss: Any) -> None:
            loss.backward()
            run.optimizer.step()
            for p in run.model.parameters():
                p.grad.zero_()

        for name, step in {"plain": plain, "first": first, "by hand": by_hand}.items():
            assert findings_of(ZEROED, Run(tmp_path / name).train(5, step).capsule()) == []
