"""numerics/first-nonfinite and numerics/loss-nonfinite: where and when, and which non-finite values are lawful."""

from __future__ import annotations

import math

import numpy as np
import pytest
from llmconsole.analyzers.runner import analyze

from tests.analyzers.conftest import rule_named
from tests.analyzers.training_runs import falling_loss, falling_norm, row, sample_losses, sample_records, write_scalars

FIRST = "numerics/first-nonfinite"
LOSS = "numerics/loss-nonfinite"


def stats(*rows):
    return lambda writer: writer.stats(list(rows))


@pytest.mark.fires(FIRST)
def test_the_first_tensor_in_execution_order_is_named_with_the_last_finite_one(build, findings_of):
    capsule = build(
        stats(
            row(2, 7, "layers.3.mlp.down", 5.0, nan=3, dtype="float32"),
            row(2, 8, "norm", 5.0, nan=64, dtype="float32"),
            row(2, 6, "layers.3.mlp.up", 5.4, dtype="float32"),
            row(1, 7, "layers.3.mlp.down", 4.5, dtype="float32"),
            row(3, 1, "layers.0.attn", 5.0, nan=64, dtype="float32"),
        )
    )
    (finding,) = findings_of(FIRST, capsule)
    assert (finding.where.step, finding.where.tensor, finding.where.order) == (2, "layers.3.mlp.down", 7)
    assert finding.confidence == "likely"
    numbers = {entry.name: entry.value for entry in finding.evidence}
    assert numbers["last finite"] == "layers.3.mlp.up"
    assert numbers["largest of last finite"] == 5.4
    assert numbers["same tensor, last finite"] == 4.5
    assert numbers["non-finite elements"] == "3 NaN"


@pytest.mark.fires(FIRST)
def test_forward_comes_before_backward_and_the_step_before_the_rank(build, findings_of):
    def fill(writer):
        writer.stats([row(4, 9, "head", 2.0, role="gradient", nan=1), row(5, 0, "embed", 2.0, nan=1)], rank=0)
        writer.stats([row(4, 3, "embed", 2.0, dtype="float32", posinf=1)], rank=1)

    (finding,) = findings_of(FIRST, build(fill))
    assert (finding.where.step, finding.where.rank, finding.where.tensor) == (4, 1, "embed")
    assert finding.confidence == "undetermined"  # nothing before it is on record
    assert finding.cause is None


@pytest.mark.quiet(FIRST)
def test_minus_infinity_alone_in_masked_scores_and_logits_is_lawful(build, findings_of):
    assert not findings_of(
        FIRST,
        build(
            stats(
                row(0, 0, "attention.mask", 0.0, role="input", neginf=2016),
                row(0, 1, "attention.scores", 9.0, neginf=2016),
                row(0, 2, "head", 9.0, role="logits", neginf=500),
            )
        ),
    )


@pytest.mark.fires(FIRST)
@pytest.mark.parametrize("role", ["loss", "gradient", "parameter"])
def test_minus_infinity_is_not_lawful_elsewhere(build, findings_of, role):
    assert findings_of(FIRST, build(stats(row(0, 1, "x", 9.0, role=role, neginf=1))))


@pytest.mark.quiet(FIRST)
def test_an_infinite_norm_of_masked_logits_is_lawful_while_the_loss_is_finite(build, findings_of):
    def fill(writer):
        write_scalars(writer, loss=[2.0, 2.0])
        writer.stats([{"step": 1, "order": 3, "name": "head", "role": "logits", "dtype": "float32", "rms": math.inf}])

    assert not findings_of(FIRST, build(fill))


@pytest.mark.quiet(FIRST)
def test_gradients_of_a_step_that_the_scaler_skipped_are_lawful(build, findings_of):
    def fill(writer):
        write_scalars(writer, loss=[2.0, 2.0, 2.0], overflow=[0, 1, 0])
        writer.stats([row(1, 5, "blocks.0.down", 60_000, role="gradient", posinf=7)])

    assert not findings_of(FIRST, build(fill))


@pytest.mark.fires(FIRST)
def test_the_same_gradient_without_a_scaler_is_not(build, findings_of):
    def fill(writer):
        write_scalars(writer, loss=[2.0, 2.0, 2.0])
        writer.stats(
            [row(1, 4, "loss", 2.0, role="loss"), row(1, 5, "blocks.0.down", 60_000, role="gradient", posinf=7)]
        )

    (finding,) = findings_of(FIRST, build(fill))
    assert "backward" in finding.summary


@pytest.mark.fires(LOSS)
def test_the_onset_of_a_lost_loss_is_named_and_undetermined_without_more_evidence(build, findings_of):
    loss = falling_loss()
    loss[120:] = math.nan
    (finding,) = findings_of(LOSS, build(lambda w: write_scalars(w, loss=loss)))
    assert (finding.where.step, finding.confidence, finding.severity) == (120, "undetermined", "critical")
    assert finding.evidence[1].value == pytest.approx(loss[119])


@pytest.mark.quiet(LOSS)
def test_a_finite_loss_is_quiet(build, findings_of):
    assert not findings_of(LOSS, build(lambda w: write_scalars(w, loss=falling_loss())))


@pytest.mark.quiet(LOSS)
def test_a_loss_that_is_only_written_every_fifth_step_is_quiet(build, findings_of):
    loss = np.full(100, math.nan)
    loss[::5] = falling_loss(20)
    assert not findings_of(LOSS, build(lambda w: write_scalars(w, loss=loss)))


@pytest.mark.quiet(LOSS)
def test_steps_at_which_nothing_was_logged_are_quiet(build, findings_of):
    loss, memory = falling_loss(100), np.full(100, 2e9)
    loss[90:] = memory[90:] = math.nan
    assert not findings_of(LOSS, build(lambda w: write_scalars(w, loss=loss, memory_allocated=memory)))


@pytest.mark.fires(LOSS)
def test_a_lost_loss_among_numbers_that_go_on_is_not(build, findings_of):
    loss, memory = falling_loss(100), np.full(100, 2e9)
    loss[90:] = math.nan
    assert findings_of(LOSS, build(lambda w: write_scalars(w, loss=loss, memory_allocated=memory)))


@pytest.mark.fires(LOSS)
def test_a_step_without_supervised_tokens_is_recognised(build, findings_of):
    loss, tokens = falling_loss(50), np.full(50, 512.0)
    loss[30], tokens[30] = math.nan, 0
    (finding,) = findings_of(LOSS, build(lambda w: write_scalars(w, loss=loss, tokens=tokens)))
    assert finding.cause == "no supervised token in the step: 0 divided by 0"
    assert finding.severity == "warning"  # it came back


@pytest.mark.fires(LOSS)
def test_an_infinite_loss_of_finite_logits_is_a_logarithm_of_zero(build, findings_of):
    def fill(writer):
        write_scalars(writer, loss=[2.0, math.inf])
        writer.stats([row(1, 9, "head", 300.0, role="logits", dtype="float32")])

    (finding,) = findings_of(LOSS, build(fill))
    assert "logarithm of zero" in (finding.cause or "")


def test_a_lost_loss_follows_from_the_tensor_that_was_lost_before_it(build):
    def fill(writer):
        write_scalars(writer, loss=[2.0, 2.0, math.nan])
        writer.stats([row(2, 3, "a", 4.0, dtype="float32"), row(2, 4, "b", 4.0, dtype="float32", nan=9)])

    report = analyze(build(fill), [rule_named(FIRST), rule_named(LOSS)])
    assert {each.rule: (each.kind, each.caused_by) for each in report.findings} == {
        FIRST: ("divergence", None),
        LOSS: ("consequence", FIRST),
    }


def test_a_poison_sample_explains_the_tensors_after_it(build):
    losses = sample_losses(20)
    losses[15][3] = math.nan

    def fill(writer):
        write_scalars(writer, loss=[float(np.mean(rows)) for rows in losses.values()], grad_norm=falling_norm(20))
        writer.records("samples", sample_records(losses))
        writer.stats([row(15, 3, "a", 4.0, dtype="float32"), row(15, 4, "b", 4.0, dtype="float32", nan=9)])

    report = analyze(build(fill))
    assert report.first_divergence is not None
    assert report.first_divergence.rule == "data/poison-sample"
    causes = {each.rule: each.caused_by for each in report.findings}
    assert causes[FIRST] == causes[LOSS] == "data/poison-sample"
