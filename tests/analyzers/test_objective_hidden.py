"""Losses that a logger made presentable: the filter of Hugging Face on the losses of a real run that turns NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llmconsole.analyzers.finding import Finding
from llmconsole.capsules import Capsule, CapsuleWriter
from torch import nn

Build = Callable[..., Capsule]
Say = Callable[[str, Capsule], list[Finding]]
HIDDEN = "objective/loss-hidden"
NAN = float("nan")


def run(steps: int, bad: int | None) -> tuple[list[float], list[float]]:
    """(loss, gradient norm) of a real model; at step ``bad`` (1-based) a weight becomes NaN."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(31, 8), nn.Linear(8, 31))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    ids = torch.randint(0, 31, (64,))
    losses, norms = [], []
    for step in range(1, steps + 1):
        if step == bad:
            with torch.no_grad():
                model[1].weight[0, 0] = NAN
        loss = F.cross_entropy(model(ids[:-1]), ids[1:])
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms


def as_logged(losses: list[float], every: int) -> list[float]:
    """What Trainer logs with its filter on: a loss that is not finite counts as the mean since the last log.

    transformers/trainer.py: ``tr_loss = tr_loss + tr_loss / (1 + global_step - globalstep_last_logged)``, where
    ``global_step`` still counts the steps before this one.
    """
    logged, total, last = [], 0.0, 0
    for done, loss in enumerate(losses):
        total += loss if math.isfinite(loss) else total / (1 + done - last)
        if (done + 1) % every == 0:
            logged.append(total / every)
            total, last = 0.0, done + 1
    return logged


def log(every: int, steps: int, bad: int | None, **more: Any) -> Callable[[CapsuleWriter], None]:
    losses, norms = run(steps, bad)

    def fill(writer: CapsuleWriter) -> None:
        at = list(range(every, steps + 1, every))
        writer.scalars("loss", step=at, value=as_logged(losses, every), rank=0)
        writer.scalars("grad_norm", step=at, value=[norms[step - 1] for step in at], rank=0)
        for name, value in more.items():
            writer.scalars(name, step=at, value=[value] * len(at), rank=0)

    return fill


@pytest.mark.fires("objective/loss-hidden")
@pytest.mark.recorded("objective/loss-hidden")
def test_a_filtered_log_of_every_step_sits_at_zero_from_the_onset_on(build: Build, findings_of: Say) -> None:
    (finding,) = findings_of(HIDDEN, build(log(every=1, steps=10, bad=6)))
    assert (finding.severity, finding.confidence, finding.where.step) == ("critical", "confirmed", 6)
    assert finding.evidence[0].value == 0.0
    assert math.isnan(finding.evidence[1].value)


@pytest.mark.fires("objective/loss-hidden")
@pytest.mark.parametrize(("bad", "finite"), [(6, 1), (7, 2)])
def test_a_filtered_log_of_every_fourth_step_falls_and_tells_the_onset(
    build: Build, findings_of: Say, bad: int, finite: int
) -> None:
    """formats.md: 4.862 at step 4, 3.041 at step 8. With one finite step of four the filter gives 1·5 / (4·2)."""
    (finding,) = findings_of(HIDDEN, build(log(every=4, steps=8, bad=bad)))
    assert finding.where.step == bad
    assert f"with {finite} of 4 steps finite" in finding.summary
    assert finding.severity == "critical"


def test_the_numbers_of_the_report_are_the_filter_with_one_finite_step_of_four(build: Build, findings_of: Say) -> None:
    def fill(writer: CapsuleWriter) -> None:
        writer.scalars("loss", step=[4, 8], value=[4.862, 3.041], rank=0)
        writer.scalars("grad_norm", step=[4, 8], value=[1.3, NAN], rank=0)

    (finding,) = findings_of(HIDDEN, build(fill))
    assert finding.where.step == 6
    assert pytest.approx(0.625, abs=5e-4) == 3.041 / 4.862


def test_the_onset_lies_before_the_zeros_where_the_norm_was_lost_before_them(build: Build, findings_of: Say) -> None:
    (finding,) = findings_of(HIDDEN, build(log(every=4, steps=16, bad=6)))
    assert (finding.confidence, finding.where.step) == ("confirmed", 6)
    assert "1 of 4 steps finite" in finding.summary


@pytest.mark.quiet("objective/loss-hidden")
@pytest.mark.parametrize("every", [1, 4])
def test_the_same_run_without_the_fault_is_quiet(build: Build, findings_of: Say, every: int) -> None:
    assert not findings_of(HIDDEN, build(log(every=every, steps=12, bad=None)))


def series(**values: list[float]) -> Callable[[CapsuleWriter], None]:
    def fill(writer: CapsuleWriter) -> None:
        for name, column in values.items():
            writer.scalars(name, step=list(range(1, len(column) + 1)), value=column, rank=0)

    return fill


def test_a_loss_that_is_no_longer_logged_is_hidden_too(build: Build, findings_of: Say) -> None:
    (finding,) = findings_of(HIDDEN, build(series(loss=[3.0, 2.5, 2.2], grad_norm=[1.0, 1.1, 0.9, NAN, NAN, NAN])))
    assert (finding.confidence, finding.where.step) == ("likely", 4)
    assert "missing" in finding.summary


def test_without_gradient_norms_the_evaluation_tells(build: Build, findings_of: Say) -> None:
    def fill(writer: CapsuleWriter) -> None:
        writer.scalars("loss", step=[10, 20, 30, 40, 50], value=[3.0, 2.0, 0.0, 0.0, 0.0], rank=0)
        writer.scalars("eval_loss", step=[20, 40], value=[2.2, NAN], rank=0)

    (finding,) = findings_of(HIDDEN, build(fill))
    assert finding.where.step == 30


QUIET = {
    "GRPO: loss 0 with finite gradients": {"loss": [0.0] * 6, "grad_norm": [0.4, 0.3, 0.5, 0.2, 0.4, 0.0]},
    "a norm that was never logged": {"loss": [3.0, 2.5, 2.0, 1.8], "grad_norm": [NAN] * 4},
    "steps that a scaler skipped": {"loss": [3.0, 2.9, 2.8, 2.7], "grad_norm": [NAN, math.inf, 1.0, 0.9]},
    "a scaler that halves at the end": {
        "loss": [3.0, 2.9, 2.8, 2.7],
        "grad_norm": [1.0, 1.0, math.inf, math.inf],
        "loss_scale": [1024.0, 1024.0, 512.0, 256.0],
    },
    "a loss that hides nothing": {"loss": [3.0, 2.9, NAN, NAN], "grad_norm": [1.0, 1.0, NAN, NAN]},
    "a loss that rises": {"loss": [3.0, 2.9, 3.2, 3.4], "grad_norm": [1.0, 1.0, 1.0, NAN]},
    "zero by zero printed decimals": {"loss": [0.1, 0.0, 0.0, 0.0], "eval_loss": [0.2, 0.1, 0.1, 0.1]},
}


@pytest.mark.quiet("objective/loss-hidden")
@pytest.mark.parametrize("case", QUIET)
def test_what_looks_like_it_is_quiet(build: Build, findings_of: Say, case: str) -> None:
    assert not findings_of(HIDDEN, build(series(**QUIET[case])))
