"""numerics/learning-rate: large updates before a symptom, and symptoms that have another cause."""

from __future__ import annotations

import math

import numpy as np
import pytest
from llmconsole.analyzers.runner import analyze

from tests.analyzers.training_runs import (
    falling_loss,
    falling_norm,
    row,
    sample_losses,
    sample_records,
    write_scalars,
)

RULE = "numerics/learning-rate"


def run(steps=60, *, ratio=0.02, rate=1e-3, **series):
    """A healthy run whose updates are ``ratio`` of the weights at first and fall from there."""
    ratios = ratio / np.sqrt(1 + np.arange(steps))
    series = {
        "loss": falling_loss(steps),
        "grad_norm": falling_norm(steps),
        "learning_rate": np.full(steps, rate),
        "update_norm": 30.0 * ratios,
        "param_norm": np.full(steps, 30.0),
    } | series
    return lambda writer: write_scalars(writer, **series)


def broken(steps=60, at=3, level=14.0):
    loss = falling_loss(steps)
    loss[at:] = level
    return loss


@pytest.mark.fires(RULE)
def test_a_step_that_replaced_the_weights_before_the_loss_rose_is_named(build, findings_of):
    (finding,) = findings_of(RULE, build(run(ratio=0.7, rate=3e-2, loss=broken())))
    assert (finding.severity, finding.confidence, finding.where.step) == ("critical", "likely", 0)
    numbers = {entry.name: entry for entry in finding.evidence}
    assert numbers["update_norm / param_norm"].value == pytest.approx(0.7)
    assert numbers["update_norm / param_norm"].expected == "< 0.1"
    assert numbers["learning_rate"].value == 3e-2
    assert numbers["loss-rise"].value == 14.0
    assert numbers["warm-up"].value == "none"


@pytest.mark.quiet(RULE)
def test_adams_first_steps_of_five_percent_are_lawful(build, findings_of):
    assert not findings_of(RULE, build(run(ratio=0.05)))


@pytest.mark.quiet(RULE)
def test_a_brisk_rate_under_which_the_loss_falls_is_quiet(build, findings_of):
    assert not findings_of(RULE, build(run(ratio=0.3, rate=1e-2)))


@pytest.mark.fires(RULE)
def test_a_step_that_replaced_the_weights_and_broke_nothing_is_info(build, findings_of):
    (finding,) = findings_of(RULE, build(run(ratio=0.7, rate=3e-2, loss=falling_loss(60, noise=0.0))))
    assert finding.severity == "info"


@pytest.mark.quiet(RULE)
def test_a_loss_that_rises_under_ordinary_updates_has_another_cause(build, findings_of):
    assert not findings_of(RULE, build(run(ratio=0.02, loss=broken(at=40))))


@pytest.mark.quiet(RULE)
def test_an_update_made_large_by_its_gradient_is_not_the_rates_doing(build, findings_of):
    norm, update = falling_norm(60), 0.3 / np.sqrt(1 + np.arange(60))
    norm[40], update[40] = 60.0, 9.0  # 30 % of the weights, along a gradient 50 times the usual
    assert not findings_of(RULE, build(run(grad_norm=norm, update_norm=update, loss=broken(at=41))))


@pytest.mark.quiet(RULE)
def test_a_growing_activation_under_ordinary_updates_is_not_the_rates_doing(build, findings_of):
    loss = falling_loss(60)
    loss[50:] = math.nan

    def fill(writer):
        run(loss=loss)(writer)
        writer.stats([row(step, 4, "down", 65_000 * 1.2 ** (step - 50)) for step in range(30, 50)])
        writer.stats([row(50, 4, "down", 65_000, posinf=3)])

    capsule = build(fill)
    assert not findings_of(RULE, capsule)
    first = analyze(capsule).first_divergence
    assert first is not None
    assert first.rule == "numerics/fp16-overflow"


@pytest.mark.fires(RULE)
def test_a_missing_warm_up_is_a_warning_where_the_first_steps_are_merely_brisk(build, findings_of):
    (finding,) = findings_of(RULE, build(run(ratio=0.08, rate=3e-3, loss=broken(at=6))))
    assert (finding.severity, finding.where.step) == ("warning", 0)
    assert finding.title == "No warm-up for this learning rate"


@pytest.mark.quiet(RULE)
def test_with_a_warm_up_the_same_steps_are_not_blamed(build, findings_of):
    rate = np.minimum(1.0, (1 + np.arange(60)) / 30) * 3e-3
    assert not findings_of(RULE, build(run(ratio=0.08, learning_rate=rate, loss=broken(at=6))))


@pytest.mark.quiet(RULE)
def test_a_bad_sample_in_the_first_steps_is_not_a_missing_warm_up(build, findings_of):
    losses = sample_losses(60)
    losses[12][2] = 60.0

    def fill(writer):
        run(ratio=0.3, loss=[float(np.mean(rows)) for rows in losses.values()], rate=3e-3)(writer)
        writer.records("samples", sample_records(losses))

    assert not [each for each in findings_of(RULE, build(fill)) if each.severity != "info"]


@pytest.mark.fires(RULE)
def test_a_rate_that_jumps_by_a_hundred_is_named_at_the_jump(build, findings_of):
    rate, loss = np.full(60, 1e-3), broken(at=42)
    rate[40:] = 1e-1
    (finding,) = findings_of(RULE, build(run(learning_rate=rate, loss=loss)))
    assert (finding.title, finding.where.step) == ("The learning rate jumped", 40)
    assert finding.evidence[1].value == pytest.approx(100)


@pytest.mark.quiet(RULE)
def test_a_warm_restart_and_a_climbing_warm_up_are_no_jumps(build, findings_of):
    restart = np.concatenate([np.geomspace(1e-3, 1e-5, 30), np.geomspace(1e-3, 1e-5, 30)])
    climb = np.concatenate([np.geomspace(1e-7, 1e-3, 8), np.full(52, 1e-3)])
    for rate in (restart, climb):
        assert not findings_of(RULE, build(run(learning_rate=rate)))


@pytest.mark.fires(RULE)
def test_zero_from_the_start_is_a_warning(build, findings_of):
    still = {"learning_rate": np.zeros(60), "update_norm": np.zeros(60), "loss": np.full(60, 5.5)}
    (finding,) = findings_of(RULE, build(run(**still)))
    assert (finding.severity, finding.where.step) == ("warning", 0)
    assert finding.title == "The learning rate is zero"


@pytest.mark.fires(RULE)
def test_a_schedule_that_ended_before_the_run_is_a_warning(build, findings_of):
    rate = np.concatenate([np.linspace(1e-3, 0, 30), np.zeros(30)])
    update = np.where(rate > 0, 0.3, 0.0)
    loss = np.concatenate([falling_loss(30), np.full(30, 2.9)])
    (finding,) = findings_of(RULE, build(run(learning_rate=rate, update_norm=update, loss=loss)))
    assert (finding.where.step, "ended" in finding.summary) == (29, True)


@pytest.mark.quiet(RULE)
def test_zero_in_the_first_step_at_the_end_or_while_a_scaler_searches_is_lawful(build, findings_of):
    first = np.full(60, 1e-3)
    first[0] = 0
    decay = np.linspace(1e-3, 0, 60)
    assert not findings_of(RULE, build(run(learning_rate=first)))
    assert not findings_of(RULE, build(run(learning_rate=decay)))
    # As in Megatron's search from 2^32: the scheduler stands still while every step is skipped.
    searching = np.concatenate([np.zeros(16), np.full(44, 1e-3)])
    overflow = np.concatenate([np.ones(16), np.zeros(44)])
    assert not findings_of(RULE, build(run(learning_rate=searching, overflow=overflow, loss=np.full(60, 11.0))))


@pytest.mark.quiet(RULE)
def test_a_rate_logged_as_zero_while_the_model_learns_is_a_matter_of_logging(build, findings_of):
    assert not findings_of(RULE, build(run(learning_rate=np.zeros(60))))


def schedule(name, warmup, total):
    return {"training": {"schedule": {"name": name, "warmup_steps": warmup, "total_steps": total}}}


@pytest.mark.fires(RULE)
@pytest.mark.parametrize(
    ("manifest", "change"),
    # From step 0 to 59: linear 59/100; cosine (1 − cos 0.59π)/2; within a warm-up of 100, 59/100.
    [
        (schedule("linear", 0, 100), 0.59),
        (schedule("cosine", 0, 100), 0.5 * (1 - math.cos(0.59 * math.pi))),
        (schedule("constant_with_warmup", 100, None), 0.59),
    ],
)
def test_a_scheduler_that_stands_still_is_compared_with_its_schedule(build, findings_of, manifest, change):
    (finding,) = findings_of(RULE, build(run(), manifest))
    assert finding.title == "The learning rate does not follow its schedule"
    assert next(e for e in finding.evidence if e.name == "scheduled change").value == pytest.approx(change)


@pytest.mark.quiet(RULE)
@pytest.mark.parametrize(
    "manifest",
    [
        schedule("constant", 0, 100),
        schedule("cosine", 0, 10_000),
        schedule("warmup-stable-decay", 0, 100),
        schedule("cosine_with_restarts", 0, 100),
    ],
)
def test_a_schedule_that_is_flat_here_may_stand_still(build, findings_of, manifest):
    assert not findings_of(RULE, build(run(), manifest))


def test_everything_after_a_rate_that_is_too_high_is_its_consequence(build):
    loss, norm = broken(at=3, level=14.0), falling_norm(60)
    norm[30:] = 500.0
    loss[40:] = math.nan

    def fill(writer):
        run(ratio=0.7, rate=3e-2, loss=loss, grad_norm=norm)(writer)
        writer.stats([row(step, 4, "down", level) for step, level in zip((20, 30, 39), (9e3, 2e4, 4e4), strict=True)])
        writer.stats([row(40, 3, "up", 9.0), row(40, 4, "down", 6.5e4, posinf=3)])

    report = analyze(build(fill))
    assert report.first_divergence is not None
    assert (report.first_divergence.rule, report.first_divergence.where.step) == (RULE, 0)
    later = {each.rule for each in report.findings if each.caused_by == RULE}
    assert later >= {
        "numerics/fp16-overflow",
        "numerics/first-nonfinite",
        "numerics/loss-nonfinite",
        "numerics/gradient-explosion",
    }


@pytest.mark.fires(RULE)
def test_a_schedule_that_moves_on_at_skipped_steps_is_info(build, findings_of):
    overflow = np.zeros(60)
    overflow[5:25] = 1
    (finding,) = findings_of(RULE, build(run(learning_rate=np.linspace(1e-3, 4e-4, 60), overflow=overflow)))
    assert (finding.severity, finding.where.step) == ("info", 5)
    assert finding.evidence[0].value == 20


@pytest.mark.quiet(RULE)
def test_a_schedule_that_waits_for_the_optimizer_is_right(build, findings_of):
    overflow = np.zeros(60)
    overflow[5:25] = 1
    rate = np.concatenate([np.linspace(1e-3, 9e-4, 6), np.full(20, 9e-4), np.linspace(8.8e-4, 4e-4, 34)])
    assert not findings_of(RULE, build(run(learning_rate=rate, overflow=overflow)))
