"""Logs that real jobs left behind: benign spikes, NaN that means "not logged", a wasteful but normal scale search."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.analyzers.training_runs import write_scalars

REAL = Path(__file__).resolve().parents[3] / "shared" / "real"
pytestmark = pytest.mark.skipif(not REAL.is_dir(), reason="the folder of real logs is not beside this checkout")


@pytest.mark.quiet("numerics/gradient-explosion")
def test_spikes_of_a_healthy_124m_run_all_passed(build, findings_of):
    """19,560 steps with fifteen losses beyond 6 σ, each back at the next step."""
    text = (REAL / "text_logs" / "llm.c" / "main.log").read_text()
    rows = re.findall(r"s:\d+ trl:(\S+) lr:(\S+) norm:(\S+)", text)
    loss, rate, norm = ([float(row[column]) for row in rows] for column in range(3))
    assert len(loss) == 19_560
    capsule = build(lambda writer: write_scalars(writer, loss=loss, learning_rate=rate, grad_norm=norm))
    assert {each.severity for each in findings_of("numerics/loss-spike", capsule)} <= {"info"}
    for rule in ("numerics/gradient-explosion", "numerics/learning-rate", "numerics/loss-nonfinite"):
        assert not findings_of(rule, capsule)


@pytest.mark.quiet("numerics/loss-spike")
@pytest.mark.quiet("numerics/loss-nonfinite")
def test_nan_in_a_metrics_file_of_megatron_means_that_nothing_was_logged(build, findings_of):
    """The last 57 of 2,601 records are NaN in the loss and in the memory alike."""
    metrics = json.loads((REAL / "metrics_json" / "megatron" / "gpt3_15b_8t_release_sm.h100.json").read_text())

    def fill(writer):
        for name, metric in (("loss", "lm loss"), ("memory_allocated", "mem-allocated-bytes")):
            values = {int(step): float(value) for step, value in metrics[metric]["values"].items()}
            writer.scalars(name, step=list(values), value=list(values.values()))

    capsule = build(fill)
    assert not findings_of("numerics/loss-nonfinite", capsule)
    assert not [each for each in findings_of("numerics/loss-spike", capsule) if each.severity != "info"]


@pytest.mark.quiet("numerics/fp16-overflow")
@pytest.mark.quiet("numerics/learning-rate")
def test_a_scale_search_from_two_to_the_32_is_normal(build, findings_of):
    """Its rate stays at 0 because each step is skipped."""
    text = (REAL / "text_logs" / "bigscience" / "meg_gpt2_perf_n16-1999618.out").read_text()
    rows = re.findall(r"iteration\s+\d+/.*?learning rate: (\S+) .*?loss scale: (\S+)", text)
    rate, scale = ([float(row[column]) for row in rows] for column in range(2))
    assert scale[:2] == [2.0**32, 2.0**31]
    capsule = build(lambda writer: write_scalars(writer, learning_rate=rate, loss_scale=scale))
    assert not findings_of("numerics/fp16-overflow", capsule)
    assert not findings_of("numerics/learning-rate", capsule)
