"""data/poison-sample: one sample among others, and everything that resembles one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.analyzers.training_runs import row, sample_losses, sample_records, write_scalars

RULE = "data/poison-sample"
BYTES = {"model": {"vocab_size": 256}}  # a uniform guess costs ln 256 = 5.545 nats


def run(losses, **fields):
    """A run whose loss is the mean of its samples."""

    def fill(writer):
        write_scalars(writer, loss=[float(np.mean(rows)) for rows in losses.values()])
        writer.records("samples", sample_records(losses, **fields))

    return fill


def captured(losses, step, row, tokens):
    """The same run with the batch of one step on record: text-like rows, and ``tokens`` in one of them."""

    def fill(writer):
        run(losses)(writer)
        ids = np.random.default_rng(5).integers(97, 123, (8, 64))
        ids[row] = tokens
        writer.batch(step=step, input_ids=ids)

    return fill


@pytest.mark.quiet(RULE)
def test_hard_text_little_beyond_what_the_window_has_seen_is_only_noted(build, findings_of):
    losses = sample_losses(100)
    losses[70][2] = 5.9  # the window has seen hard text before
    losses[80][3] = 6.9
    (finding,) = findings_of(RULE, build(captured(losses, 80, 3, np.arange(64) * 4), BYTES))
    assert finding.severity == "info"


@pytest.mark.fires(RULE)
def test_random_bytes_among_text_are_named(build, findings_of):
    losses = sample_losses(100)
    losses[80][3] = 8.1
    (finding,) = findings_of(RULE, build(captured(losses, 80, 3, np.arange(64) * 4), BYTES))
    assert (finding.severity, finding.confidence) == ("critical", "likely")
    assert (finding.where.step, finding.where.sample) == (80, "s80.3")
    numbers = {entry.name: entry.value for entry in finding.evidence}
    assert numbers["sample loss"] == 8.1
    assert numbers["loss of the others"] == pytest.approx(np.median(losses[80][:3] + losses[80][4:]))
    assert numbers["uniform guess"] == pytest.approx(math.log(256))
    assert numbers["length"] == 64
    assert numbers["z"] > 6


@pytest.mark.parametrize("tokens", [np.full(64, 45), None], ids=["a line of dashes", "tokens not on record"])
def test_what_may_be_mere_repetition_is_only_noted(build, findings_of, tokens):
    losses = sample_losses(100)
    losses[80][3] = 8.1
    fill = run(losses) if tokens is None else captured(losses, 80, 3, tokens)
    (finding,) = findings_of(RULE, build(fill, BYTES))
    assert (finding.severity, finding.title) == ("info", "A sample unlike the others")


@pytest.mark.fires(RULE)
def test_a_sample_longer_than_a_line_has_no_such_excuse(build, findings_of):
    losses = sample_losses(100)
    losses[80][3] = 8.1
    records = sample_records(losses, length=128)
    (finding,) = findings_of(RULE, build(lambda writer: writer.records("samples", records), BYTES))
    assert finding.severity == "critical"


@pytest.mark.fires(RULE)
def test_harm_right_after_it_needs_no_tokens(build, findings_of):
    losses = sample_losses(100)
    losses[80][3] = 8.1
    for step in range(82, 100):
        losses[step] = [loss + 6 for loss in losses[step]]
    (finding,) = findings_of(RULE, build(run(losses), BYTES))
    assert (finding.severity, finding.kind, finding.where.step) == ("critical", "divergence", 80)


@pytest.mark.fires(RULE)
def test_harm_long_after_it_is_not_its_doing(build, findings_of):
    losses = sample_losses(140)
    losses[80][3] = 8.1
    for step in range(120, 140):
        losses[step] = [loss + 6 for loss in losses[step]]
    (finding,) = findings_of(RULE, build(captured(losses, 80, 3, np.arange(64) * 4), BYTES))
    assert (finding.severity, finding.kind) == ("warning", "hygiene")


@pytest.mark.quiet(RULE)
def test_hard_text_below_a_uniform_guess_is_not_poison(build, findings_of):
    losses = sample_losses(100)
    losses[80][3] = 5.4
    assert not findings_of(RULE, build(run(losses), BYTES))


@pytest.mark.quiet(RULE)
def test_a_heavy_tail_that_recurs_is_not_poison(build, findings_of):
    losses = sample_losses(100)
    for step in range(20, 100, 10):
        losses[step][step // 10 % 8] = 7.9
    losses[95][3] = 8.1
    # The first of them is new to the window and stands alone; the run knows the kind from then on.
    for step in range(8, 20):
        losses[step][0] = 7.9
    assert not findings_of(RULE, build(run(losses), BYTES))


@pytest.mark.quiet(RULE)
def test_several_samples_high_at_once_are_the_models_doing(build, findings_of):
    losses = sample_losses(100)
    losses[80] = [8.1, 7.9, 8.3, 2.4, 2.6, 7.7, 8.0, 8.2]
    assert not findings_of(RULE, build(run(losses), BYTES))


@pytest.mark.quiet(RULE)
def test_a_sample_after_the_run_diverged_proves_nothing(build, findings_of):
    losses = sample_losses(100)
    for step in range(60, 100):
        losses[step] = [loss + 6 for loss in losses[step]]
    losses[90][3] = 30.0
    assert not findings_of(RULE, build(run(losses), BYTES))


@pytest.mark.fires(RULE)
def test_one_sample_that_alone_is_not_finite_is_named(build, findings_of):
    losses = sample_losses(30)
    losses[12][5] = math.nan
    (finding,) = findings_of(RULE, build(run(losses), BYTES))
    assert (finding.where.step, finding.where.sample) == (12, "s12.5")
    assert "every other sample of the step is finite" in finding.summary


@pytest.mark.quiet(RULE)
def test_every_sample_not_finite_is_not_poison(build, findings_of):
    losses = sample_losses(30)
    losses[12] = [math.nan] * 8
    assert not findings_of(RULE, build(run(losses), BYTES))


@pytest.mark.quiet(RULE)
def test_the_row_that_a_growing_float16_activation_reaches_first_is_innocent(build, findings_of):
    losses = sample_losses(6)
    losses[5][2] = math.nan

    def fill(writer):
        run(losses)(writer)
        levels = [12_000, 18_000, 27_000, 41_200, 63_900]
        writer.stats([row(step, 4, "blocks.2.down", level) for step, level in enumerate(levels)])
        writer.stats([row(5, 4, "blocks.2.down", 65_000, posinf=2), row(5, 5, "ln", 3.0, nan=64, dtype="float32")])

    assert not findings_of(RULE, build(fill, BYTES))


@pytest.mark.fires(RULE)
def test_the_row_that_overflows_out_of_nothing_is_not(build, findings_of):
    losses = sample_losses(6)
    losses[5][2] = math.nan

    def fill(writer):
        run(losses)(writer)
        writer.stats([row(step, 4, "blocks.2.down", 20.0) for step in range(5)])
        writer.stats([row(5, 4, "blocks.2.down", 65_000, posinf=2)])

    assert findings_of(RULE, build(fill, BYTES))[0].where.sample == "s5.2"


@pytest.mark.fires(RULE)
def test_more_than_half_of_a_steps_loss_is_too_much_for_one_sample(build, findings_of):
    # The others sum to about 7 × 2.5 = 17.5, so 40 nats are 70 % of the step; no vocabulary is known.
    losses = sample_losses(100)
    losses[80][3] = 40.0
    (finding,) = findings_of(RULE, build(run(losses)))
    share = next(entry for entry in finding.evidence if entry.name == "share of the step's loss")
    assert finding.severity == "critical"
    assert share.value == pytest.approx(40.0 / sum(losses[80]))
    assert share.expected == "≤ 0.5"


@pytest.mark.quiet(RULE)
def test_a_memorised_set_has_shares_of_nothing(build, findings_of):
    losses = {step: [0.001] * 8 for step in range(100)} | {step: [5.0] * 8 for step in range(10)}
    losses[80][3] = 0.05  # 88 % of the step
    assert not findings_of(RULE, build(run(dict(sorted(losses.items())))))


@pytest.mark.fires(RULE)
@pytest.mark.parametrize(("loss", "severity"), [(8.1, "info"), (12.5, "warning")])
def test_far_beyond_anything_seen_is_a_warning_from_twenty_sigma_on(build, findings_of, loss, severity):
    """Around 2.5 with a spread of 0.4: 8.1 is 14 σ out and 12.5 is 25 σ; no guess over a vocabulary is known."""
    losses = sample_losses(100)
    losses[80][3] = loss
    (finding,) = findings_of(RULE, build(captured(losses, 80, 3, np.arange(64) * 4)))
    assert finding.severity == severity


@pytest.mark.quiet(RULE)
def test_a_short_sample_may_scatter_more(build, findings_of):
    losses = sample_losses(100)
    records = sample_records(losses)
    # Four tokens instead of 64: four times the spread of 0.4 nats, so 5 nats above the others are 3 σ.
    records = [{**each, "loss": 7.5, "length": 4} if each["id"] == "s80.3" else each for each in records]
    assert not findings_of(RULE, build(lambda writer: writer.records("samples", records), BYTES))


@pytest.mark.parametrize(("tokens", "named"), [(3, False), (15, False), (16, True), (64, True)])
def test_the_loss_of_a_short_answer_is_one_or_two_surprising_tokens(build, findings_of, tokens, named):
    """Rows of 64 tokens of which the labels of one ask for a few: 25 nats above the rest, whatever its length says."""
    losses = sample_losses(100)
    losses[80][3] = 28.0
    records = [{**each, "loss_tokens": 64} for each in sample_records(losses)]
    records = [{**each, "loss_tokens": tokens} if each["id"] == "s80.3" else each for each in records]
    assert bool(findings_of(RULE, build(lambda writer: writer.records("samples", records), BYTES))) is named


@pytest.mark.parametrize(("tokens", "named"), [(16, False), (64, True)])
def test_few_supervised_tokens_scatter_like_a_short_sample(build, findings_of, tokens, named):
    losses = sample_losses(100)
    records = [{**each, "loss_tokens": 64} for each in sample_records(losses)]
    # 4.3 nats above the others are 11 σ of 0.4 nats over 64 tokens; over 16 the spread is twice that.
    records = [{**each, "loss": 6.8, "loss_tokens": tokens} if each["id"] == "s80.3" else each for each in records]
    assert bool(findings_of(RULE, build(lambda writer: writer.records("samples", records), BYTES))) is named


@pytest.mark.quiet(RULE)
def test_a_batch_of_one_that_stays_high_is_the_model(build, findings_of):
    losses = sample_losses(120, batch=1)
    for step in range(100, 120):
        losses[step] = [8.0]
    assert not findings_of(RULE, build(run(losses), BYTES))


@pytest.mark.fires(RULE)
def test_a_batch_of_one_is_compared_with_what_follows(build, findings_of):
    losses = sample_losses(120, batch=1)
    losses[100] = [8.1]
    (finding,) = findings_of(RULE, build(run(losses), BYTES))
    assert finding.where.sample == "s100.0"


@pytest.mark.fires(RULE)
def test_without_records_the_token_losses_of_a_captured_batch_are_asked(build, findings_of):
    token_loss = np.full((4, 8), 2.0)
    token_loss[1] = np.inf
    (finding,) = findings_of(
        RULE, build(lambda w: w.batch(step=7, token_loss=token_loss, sample_ids=["a", "b", "c", "d"]))
    )
    assert (finding.where.step, finding.where.sample) == (7, "b")
