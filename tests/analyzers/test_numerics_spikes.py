"""numerics/loss-spike and numerics/gradient-explosion: what passes and what does not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.analyzers.training_runs import (
    STEPS,
    falling_loss,
    falling_norm,
    sample_losses,
    sample_records,
    write_scalars,
)

SPIKE = "numerics/loss-spike"
EXPLOSION = "numerics/gradient-explosion"


def alarms(findings):
    return [finding for finding in findings if finding.severity != "info"]


def scalars(**series):
    return lambda writer: write_scalars(writer, **series)


@pytest.mark.fires(SPIKE)
def test_a_loss_that_jumps_and_stays_is_a_warning_at_its_onset(build, findings_of):
    loss = falling_loss(240)
    loss[150:] += 3.0
    (finding,) = findings_of(SPIKE, build(scalars(loss=loss, grad_norm=falling_norm(240))))
    assert (finding.severity, finding.where.step) == ("warning", 150)
    assert finding.confidence == "undetermined"  # nothing at hand says why
    assert finding.evidence[0].value == pytest.approx(loss[150])
    window = loss[22:150]
    assert finding.evidence[0].expected == f"≤ {window.mean() + 6 * window.std():.4g}"


@pytest.mark.fires(SPIKE)
def test_a_spike_that_recovers_within_thirty_steps_is_info(build, findings_of):
    loss = falling_loss(240)
    loss[150:153] += 3.0
    (finding,) = findings_of(SPIKE, build(scalars(loss=loss)))
    assert (finding.severity, finding.where.step) == ("info", 150)
    assert next(e for e in finding.evidence if e.name == "back at step").value == 153


def harder(after, falls=True):
    """Rows of four letters, and from step 150 on a loss of 5.5; ``after``: letters of that batch and of a later one."""
    loss = falling_loss(240, noise=0.02)
    loss[150:] = 2.5 + 3.0 * (np.exp(-np.arange(90) / 40) if falls else 1.0)

    def fill(writer):
        write_scalars(writer, loss=loss)
        generator = np.random.default_rng(4)
        for step, letters in ((147, 4), (148, 4), (149, 4), (150, after[0]), (239, after[1])):
            writer.batch(step=step, input_ids=97 + generator.integers(0, letters, (8, 48)))

    return fill


@pytest.mark.quiet(SPIKE)
def test_harder_rows_from_one_step_on_are_no_broken_run(build, findings_of):
    (finding,) = findings_of(SPIKE, build(harder(after=(26, 26))))
    assert (finding.severity, finding.cause) == ("info", "the data changed at this step")
    # 22 of 26 letters are new: the distance of the frequencies is 22 / 26.
    assert finding.evidence[-1].value == pytest.approx(22 / 26, abs=0.05)


@pytest.mark.fires(SPIKE)
@pytest.mark.parametrize(
    ("after", "falls", "cause"),
    [((26, 4), True, None), ((4, 4), True, None), ((26, 26), False, "the data changed at this step")],
    ids=["one odd batch", "the same rows", "harder rows that are not learned"],
)
def test_a_jump_is_excused_only_by_other_data_that_is_learned(build, findings_of, after, falls, cause):
    (finding,) = findings_of(SPIKE, build(harder(after, falls)))
    assert (finding.severity, finding.cause) == ("warning", cause)


@pytest.mark.quiet(SPIKE)
@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_start_is_quiet(build, findings_of, seed):
    loss = falling_loss(200, seed=seed, noise=0.3)
    assert not findings_of(SPIKE, build(scalars(loss=loss, grad_norm=falling_norm(200, seed))))


@pytest.mark.quiet(SPIKE)
def test_a_constant_loss_has_no_spread_and_no_spikes(build, findings_of):
    assert not findings_of(SPIKE, build(scalars(loss=[2.5] * 100 + [2.5001] * 60)))


@pytest.mark.quiet(SPIKE)
def test_jumps_of_a_memorised_loss_are_nothing(build, findings_of):
    loss = 5.0 * np.exp(-np.arange(200) / 12)
    loss[150] = loss[160] = 0.02  # a thousand times its neighbours
    assert not findings_of(SPIKE, build(scalars(loss=loss, grad_norm=falling_norm(200))))


@pytest.mark.quiet(SPIKE)
def test_ticks_once_an_epoch_are_quiet(build, findings_of):
    loss = falling_loss(400, noise=0.02)
    for epoch in range(60, 400, 60):
        loss[epoch : epoch + 2] += 1.5
    assert not findings_of(SPIKE, build(scalars(loss=loss)))


@pytest.mark.quiet(SPIKE)
def test_a_resumed_run_has_no_past_to_spike_from(build, findings_of):
    def fill(writer):
        writer.scalars("loss", step=list(range(5000, 5030)), value=[2.5] * 20 + [2.7] * 10)

    assert not findings_of(SPIKE, build(fill))


@pytest.mark.fires(SPIKE)
def test_a_small_window_needs_the_gradient_norm_to_agree(build, findings_of):
    loss, norm = falling_loss(30), falling_norm(30)
    loss[28:] = 9.0
    assert not findings_of(SPIKE, build(scalars(loss=loss, grad_norm=norm)))
    norm[28] = 40.0
    (finding,) = findings_of(SPIKE, build(scalars(loss=loss, grad_norm=norm)))
    assert "2 × the median of the previous 20" in finding.summary


@pytest.mark.fires(SPIKE)
def test_ten_times_the_maximum_of_the_first_hundred_is_a_spike_whatever_the_noise(build, findings_of):
    loss = falling_loss(130)
    loss[110:] = 70.0
    loss[60] = 5.4
    assert findings_of(SPIKE, build(scalars(loss=loss)))[0].where.step == 110


@pytest.mark.fires(SPIKE)
def test_a_record_that_ends_inside_a_large_spike_warns(build, findings_of):
    loss = np.append(falling_loss(200), 9.0)
    (finding,) = findings_of(SPIKE, build(scalars(loss=loss)))
    assert finding.severity == "warning"
    assert "where the record ends" in finding.summary


def cause_of(findings):
    (finding,) = alarms(findings)
    assert finding.confidence == "likely"
    return finding.cause


def diverged(**more):
    loss = falling_loss(200)
    loss[150:] += 3.0
    return scalars(loss=loss, **more)


@pytest.mark.fires(SPIKE)
def test_a_bad_sample_is_told_from_a_hard_batch_by_the_others(build, findings_of):
    for high, word in ((1, "one bad sample: s150.0"), (8, "every sample of the step is high")):
        losses = sample_losses(200)
        losses[150] = [loss + 6.0 if row < high else loss for row, loss in enumerate(losses[150])]

        def fill(writer, losses=losses):
            diverged()(writer)
            writer.records("samples", sample_records(losses))

        assert word in cause_of(findings_of(SPIKE, build(fill)))


@pytest.mark.fires(SPIKE)
def test_an_overflow_of_the_step_is_a_cause(build, findings_of):
    overflow = np.zeros(200)
    overflow[150] = 1
    assert cause_of(findings_of(SPIKE, build(diverged(overflow=overflow)))) == "the step overflowed"


@pytest.mark.fires(SPIKE)
def test_norms_that_differ_by_the_number_of_ranks_are_a_cause(build, findings_of):
    capsule = build(
        diverged(grad_norm_local=np.full(200, 1.0), grad_norm_reduced=np.full(200, 8.02)), {"run": {"world_size": 8}}
    )
    assert cause_of(findings_of(SPIKE, capsule)) == "the gradient was scaled by the number of ranks"


@pytest.mark.fires(SPIKE)
def test_a_change_of_mixture_right_before_is_a_cause(build, findings_of):
    def fill(writer):
        diverged()(writer)
        writer.record("events", {"step": 20, "kind": "mixture_changed"})
        writer.record("events", {"step": 149, "kind": "mixture_changed"})

    assert cause_of(findings_of(SPIKE, build(fill))) == "it follows mixture changed at step 149"


@pytest.mark.fires(EXPLOSION)
def test_ten_times_the_first_hundred_and_staying_is_an_explosion(build, findings_of):
    norm = falling_norm()
    norm[130:] = 10.5 * norm[:100].max()
    (finding,) = findings_of(EXPLOSION, build(scalars(loss=falling_loss(), grad_norm=norm)))
    assert (finding.severity, finding.where.step) == ("warning", 130)
    assert finding.evidence[0].expected == f"≤ {10 * norm[:100].max():.4g}"


@pytest.mark.quiet(EXPLOSION)
def test_nine_times_the_first_hundred_is_not(build, findings_of):
    norm = falling_norm()
    norm[130:] = 9 * norm[:100].max()
    assert not findings_of(EXPLOSION, build(scalars(loss=falling_loss(), grad_norm=norm)))


@pytest.mark.fires(EXPLOSION)
def test_more_than_a_hundred_with_a_rising_loss_is_an_explosion(build, findings_of):
    norm, loss = falling_norm() * 5, falling_loss()
    norm[130:] = 120.0
    assert not findings_of(EXPLOSION, build(scalars(loss=loss, grad_norm=norm)))
    loss[130:] += 2.0
    assert findings_of(EXPLOSION, build(scalars(loss=loss, grad_norm=norm)))[0].where.step == 130


@pytest.mark.quiet(EXPLOSION)
def test_large_first_gradients_and_summed_losses_are_quiet(build, findings_of):
    large = falling_norm() * 5000
    assert not findings_of(EXPLOSION, build(scalars(loss=falling_loss() * 4000, grad_norm=large)))
    assert not findings_of(
        EXPLOSION, build(scalars(loss=falling_loss(12), grad_norm=[90, 3, 2, 40, 2, 2, 1, 1, 30, 1]))
    )


@pytest.mark.quiet(EXPLOSION)
def test_a_step_that_the_scaler_skipped_is_quiet(build, findings_of):
    norm, overflow = falling_norm(), np.zeros(STEPS)
    norm[100], overflow[100] = math.inf, 1
    assert not findings_of(EXPLOSION, build(scalars(loss=falling_loss(), grad_norm=norm, overflow=overflow)))


@pytest.mark.fires(EXPLOSION)
def test_the_same_infinity_without_a_scaler_is_not(build, findings_of):
    norm = falling_norm()
    norm[100] = math.inf
    assert findings_of(EXPLOSION, build(scalars(loss=falling_loss(), grad_norm=norm)))[0].where.step == 100


@pytest.mark.fires(EXPLOSION)
def test_one_large_gradient_after_which_all_is_ordinary_is_info(build, findings_of):
    norm = falling_norm()
    norm[120] = 200.0
    (finding,) = findings_of(EXPLOSION, build(scalars(loss=falling_loss(), grad_norm=norm)))
    assert (finding.severity, finding.where.step) == ("info", 120)


@pytest.mark.fires(SPIKE)
@pytest.mark.parametrize(
    ("tokens", "word"),
    [([10.0] * 16, "one hard sample: s150.0"), ([2.0] * 14 + [60.0] * 2, "one bad sample: s150.0")],
    ids=["high throughout", "two tokens"],
)
def test_a_hard_sample_is_high_at_most_of_its_tokens_and_a_bad_one_at_a_few(build, findings_of, tokens, word):
    losses = sample_losses(200)
    losses[150][0] = float(np.mean(tokens))

    def fill(writer):
        diverged()(writer)
        writer.records("samples", sample_records(losses))
        rows = np.full((8, 16), 2.5)
        rows[0] = tokens
        writer.batch(step=150, input_ids=np.zeros((8, 16), int), token_loss=rows)

    assert word in cause_of(findings_of(SPIKE, build(fill)))


@pytest.mark.fires(SPIKE)
def test_a_resume_right_before_is_a_cause(build, findings_of):
    loss = falling_loss(200)
    loss[150:] += 3.0

    def fill(writer):
        steps = [*range(165), *range(150, 200)]
        writer.scalars("loss", step=steps, value=[*falling_loss(165, seed=9), *loss[150:]])

    assert cause_of(findings_of(SPIKE, build(fill))) == "it follows the resume at step 150"


@pytest.mark.quiet(SPIKE)
def test_a_spike_that_a_resume_undid_is_info(build, findings_of):
    def fill(writer):
        first = falling_loss(200)
        first[190:] += 4.0
        writer.scalars("loss", step=[*range(200), *range(180, 260)], value=[*first, *falling_loss(260, seed=9)[180:]])

    (finding,) = findings_of(SPIKE, build(fill))
    assert (finding.severity, finding.title, finding.where.step) == ("info", "A loss spike that a resume undid", 190)


@pytest.mark.fires(SPIKE)
@pytest.mark.parametrize(("points", "severity"), [(3, "info"), (12, "warning")])
def test_in_a_sparse_log_five_points_are_left_to_recover(build, findings_of, points, severity):
    """A loss every hundred steps: a spike of twelve points lasted 1,200 steps."""
    loss = falling_loss(240)
    loss[150 : 150 + points] += 3.0
    capsule = build(lambda w: w.scalars("loss", step=[100 * at for at in range(240)], value=list(loss)))
    (finding,) = findings_of(SPIKE, capsule)
    assert (finding.severity, finding.where.step) == (severity, 15_000)


@pytest.mark.quiet(EXPLOSION)
@pytest.mark.parametrize(("lost", "quiet"), [(150, True), (151, False)])
def test_the_gradient_of_a_loss_that_is_no_number_is_no_explosion(build, findings_of, lost, quiet):
    loss, norm = falling_loss(200), falling_norm(200)
    loss[lost:] = norm[150:] = math.nan
    assert (not findings_of(EXPLOSION, build(scalars(loss=loss, grad_norm=norm)))) is quiet


@pytest.mark.fires(EXPLOSION)
def test_an_explosion_stands_where_the_rise_began(build, findings_of):
    loss, norm = falling_loss(300), falling_norm(300)
    loss[200:] += 0.1 * np.arange(100)
    norm[200:] *= 3.0 + np.arange(100)
    (finding,) = findings_of(EXPLOSION, build(scalars(loss=loss, grad_norm=norm)))
    assert finding.where.step == 200
    assert "rises from step 200 on and is" in finding.summary


@pytest.mark.quiet(EXPLOSION)
def test_norms_that_are_finite_again_belong_to_steps_that_somebody_skipped(build, findings_of):
    norm = falling_norm(200)
    norm[[3, 5, 120]] = math.inf
    (finding,) = findings_of(EXPLOSION, build(scalars(loss=falling_loss(200), grad_norm=norm)))
    assert (finding.severity, finding.where.step) == ("info", 3)


@pytest.mark.quiet(SPIKE)
def test_a_record_that_ends_in_a_spike_no_larger_than_those_that_passed_is_info(build, findings_of):
    loss, norm = falling_loss(200), falling_norm(200)
    for at, factor in ((90, 2.5), (140, 2.6), (199, 2.1)):
        loss[at] *= factor
        norm[at] *= 4
    assert not alarms(findings_of(SPIKE, build(scalars(loss=loss, grad_norm=norm))))
