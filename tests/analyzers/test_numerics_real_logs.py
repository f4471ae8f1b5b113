"""Logs that real jobs left behind, imported as ``analyze FILE`` does: the whole report, one divergence or none.

Numbers of public reports stand beside them, written as the tools of those reports print them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from llmconsole.analyzers.report import CapsuleReport
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import import_files

REAL = Path(__file__).resolve().parents[3] / "shared" / "real"
real = pytest.mark.skipif(not REAL.is_dir(), reason="the folder of real logs is not beside this checkout")

Analyse = Callable[[Path], CapsuleReport]


@pytest.fixture
def analysed(tmp_path: Path) -> Analyse:
    """What every rule says of one raw file."""

    def analysed(path: Path) -> CapsuleReport:
        report = analyze(Capsule.open(import_files([path], tmp_path / "imported", attach=False)))
        assert not report.errors
        return report

    return analysed


def alarms(report: CapsuleReport) -> dict[str, int | None]:
    """Step of each finding at warning or above that no other explains."""
    loud = [each for each in report.findings if each.severity != "info" and each.kind == "divergence"]
    return {each.rule: each.where.step for each in loud}


def notes(report: CapsuleReport) -> set[str]:
    return {each.rule for each in report.findings if each.severity == "info" and each.rule.startswith("numerics/")}


@real
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("torchtitan/autoresearch/run62.log", {}),
        ("torchtitan/autoresearch/run68.log", {"numerics/gradients-lost": 1}),
        ("bigscience/meg_gpt2_perf_n16-1999618.out", {}),
        ("bigscience/meg_ds_3d_gpt2_perf_n16-ds-on.out", {}),
        ("bigscience/meg_ds_3d_gpt2_perf_n16-ds-off.out", {"numerics/no-convergence": 33}),
    ],
)
@pytest.mark.quiet("numerics/gradients-lost")
@pytest.mark.quiet("numerics/no-convergence")
@pytest.mark.quiet("numerics/gradient-explosion")
@pytest.mark.quiet("numerics/learning-rate")
@pytest.mark.quiet("numerics/fp16-overflow")
@pytest.mark.recorded("numerics/gradients-lost")
@pytest.mark.recorded("numerics/no-convergence")
def test_a_text_log_says_what_happened_and_nothing_else(analysed, name, found):
    assert alarms(analysed(REAL / "text_logs" / name)) == found


@real
@pytest.mark.parametrize("run", [35, 348, 350, 156, 31])
def test_a_job_that_failed_for_another_reason_gets_no_verdict_on_its_numbers(analysed, run):
    """Out of memory, allocator retries, a library that could not start, a misused interface."""
    report = analysed(REAL / "text_logs" / "torchtitan" / "autoresearch" / f"run{run}.log")
    assert not [each for each in alarms(report) if each.startswith(("numerics/", "objective/", "optimizer/"))]


@real
@pytest.mark.recorded("numerics/not-reported")
@pytest.mark.recorded("numerics/gradient-vanishing")
def test_a_norm_of_zero_and_a_scale_of_minus_one_are_not_reported(analysed):
    """The other half of the pair, with the same data, prints norms of 67 and a scale of 12."""
    pair = REAL / "text_logs" / "bigscience"
    on = analysed(pair / "meg_ds_3d_gpt2_perf_n16-ds-on.out")
    (finding,) = [each for each in on.findings if each.rule == "numerics/not-reported"]
    assert {entry.name for entry in finding.evidence} >= {"grad_norm", "loss_scale"}
    assert "numerics/gradient-vanishing" in notes(on)


@real
@pytest.mark.recorded("numerics/loss-spike")
@pytest.mark.parametrize("name", ["llm.c/main.log", "modded-nanogpt/2024-06-06_AdamW.log"])
def test_spikes_of_a_healthy_124m_run_all_passed(analysed, name):
    """Losses beyond 6 σ, each back at the next step."""
    report = analysed(REAL / "text_logs" / name)
    assert alarms(report) == {}
    assert notes(report) == {"numerics/loss-spike"}


@real
@pytest.mark.quiet("numerics/loss-spike")
@pytest.mark.quiet("numerics/loss-nonfinite")
def test_nan_in_a_metrics_file_of_megatron_means_that_nothing_was_logged(analysed):
    """2,601 records over 13,000 steps, the last 57 of them "nan" in every series."""
    report = analysed(REAL / "metrics_json" / "megatron" / "gpt3_15b_8t_release_sm.h100.json")
    assert alarms(report) == {}


@real
@pytest.mark.recorded("numerics/overfitting")
def test_six_evaluation_groups_overfit_from_the_second_epoch_on(analysed):
    report = analysed(REAL / "trainer_state" / "aigoncharov_overfit.trainer_state.json")
    assert alarms(report) == {"numerics/overfitting": 802}  # 401 steps an epoch
    (finding,) = [each for each in report.findings if each.rule == "numerics/overfitting"]
    assert "6 of 6" in finding.summary
    assert "epoch 2" in finding.summary
    assert finding.evidence[0].value == 401


@real
def test_an_event_file_of_six_steps_is_quiet_and_one_of_none_says_so(analysed):
    for path in sorted((REAL / "tensorboard").rglob("*.tfevents.*")) + sorted((REAL / "tensorboard").rglob("*.0")):
        empty = path.stat().st_size == 88
        assert alarms(analysed(path)) == ({"capsule/nothing-logged": None} if empty else {})


def deepspeed(tmp_path: Path, scales: list[int], after: list[int]) -> Path:
    """A log in which the engine overflows at each step, as its logger prints it, beside the trainer's lines."""
    path = tmp_path / "train.log"
    lines = []
    for step, (scale, lower) in enumerate(zip(scales, after, strict=True), start=377):
        stamp = f"[2023-06-07 10:0{step % 10}:00,123]"
        lines.append(
            f"{stamp} [INFO] [loss_scaler.py:188:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. "
            f"Attempted loss scale: {scale}, reducing to {lower}"
        )
        lines.append(f"{{'loss': 2.0491, 'learning_rate': 9.8e-05, 'epoch': 0.{step}}}")
    lines.append("Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.recorded("numerics/fp16-overflow")
def test_report_c6_a_scale_from_64_to_its_minimum_is_a_range_that_float16_does_not_have(analysed, tmp_path):
    """ymcui/Chinese-LLaMA-Alpaca#534: steps 377 to 382, 64 → 32 → 16 → 8 → 4 → 2, the loss still 2.0491."""
    report = analysed(deepspeed(tmp_path, [64, 32, 16, 8, 4, 2], [32, 16, 8, 4, 2, 1]))
    assert set(alarms(report)) == {"numerics/fp16-overflow"}
    (finding,) = [each for each in report.findings if each.rule == "numerics/fp16-overflow"]
    assert next(entry for entry in finding.evidence if "trajectory" in entry.name).value[:5] == [64, 32, 16, 8, 4]


def test_report_c6_every_step_skipped_at_a_scale_of_one(analysed, tmp_path):
    """deepspeedai/DeepSpeed#697: nothing left to halve, and no step of 320 taken."""
    assert set(alarms(analysed(deepspeed(tmp_path, [1] * 8, [1] * 8)))) == {"numerics/fp16-overflow"}


@pytest.mark.quiet("numerics/fp16-overflow")
def test_a_scale_search_that_ends_is_normal(analysed, tmp_path):
    scales = [2**power for power in range(32, 16, -1)]
    assert alarms(analysed(deepspeed(tmp_path, scales, [scale // 2 for scale in scales]))) == {}


def trainer_state(tmp_path: Path, rows: list[dict[str, float]]) -> Path:
    path = tmp_path / "trainer_state.json"
    state = {"epoch": 1.0, "global_step": int(rows[-1]["step"]), "max_steps": 100, "log_history": rows}
    path.write_text(json.dumps(state))
    return path


def test_the_same_trainer_that_logs_every_four_steps_shows_progress_and_is_lost(analysed, tmp_path):
    """The mean over a window with masked steps looks like a fall: 4.862, then 3.041, with a norm of NaN."""
    shared = {"epoch": 0.5, "learning_rate": 5e-5}
    rows = [
        {"step": 4, **shared, "loss": 4.862, "grad_norm": 1.2},
        {"step": 8, **shared, "loss": 3.041, "grad_norm": float("nan")},
    ]
    report = analysed(trainer_state(tmp_path, rows))
    assert report.first_divergence is not None
    assert report.first_divergence.rule == "objective/loss-hidden"
    assert report.first_divergence.where.step is not None
    assert 5 <= report.first_divergence.where.step <= 8
    assert set(alarms(report)) == {"objective/loss-hidden"}


def test_a_trainer_that_masks_nan_losses_is_not_spiking_or_converging(analysed, tmp_path):
    """With logging_steps=1 the loss reads 0.0 from the step on at which the norm is NaN (measured, 5.24.0)."""
    rows = [
        {"step": step, "epoch": step / 10, "learning_rate": 5e-5, "loss": 4.9 - 0.02 * step, "grad_norm": 1.2}
        if step < 6
        else {"step": step, "epoch": step / 10, "learning_rate": 5e-5, "loss": 0.0, "grad_norm": float("nan")}
        for step in range(1, 11)
    ]
    report = analysed(trainer_state(tmp_path, rows))
    assert report.first_divergence is not None
    assert report.first_divergence.rule == "objective/loss-hidden"
    assert report.first_divergence.where.step == 6
    assert set(alarms(report)) == {"objective/loss-hidden"}
