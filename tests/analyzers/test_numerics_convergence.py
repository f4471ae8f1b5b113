"""numerics/no-convergence: divergence, plateau and oscillation, and the ordinary runs that resemble them."""

from __future__ import annotations

import numpy as np
import pytest
from llmconsole.analyzers.runner import analyze

from tests.analyzers.conftest import rule_named
from tests.analyzers.training_runs import falling_loss, sample_records, write_scalars

RULE = "numerics/no-convergence"


def scalars(**series):
    return lambda writer: write_scalars(writer, **series)


def noise(count, sigma, seed=3):
    return np.random.default_rng(seed).normal(0, sigma, count)


@pytest.mark.fires(RULE)
def test_a_loss_that_rises_for_a_third_of_the_run_diverges(build, findings_of):
    loss = falling_loss(120)
    loss[60:] += np.linspace(0, 2.0, 60)
    (finding,) = findings_of(RULE, build(scalars(loss=loss)))
    assert (finding.title, finding.severity) == ("The loss diverges", "warning")
    assert 40 <= finding.where.step <= 75
    slope = next(entry for entry in finding.evidence if entry.name == "slope")
    assert slope.value == pytest.approx(2.0 / 59, rel=0.2)


@pytest.mark.quiet(RULE)
def test_a_step_up_to_harder_data_that_is_learned_is_quiet(build, findings_of):
    loss = falling_loss(200)
    loss[100:] = 2.5 + 1.5 * np.exp(-np.arange(100) / 30) + noise(100, 0.05)
    assert not findings_of(RULE, build(scalars(loss=loss)))


@pytest.mark.fires(RULE)
def test_a_loss_that_drops_and_then_stands_still_is_a_plateau(build, findings_of):
    """It has learned the frequencies of the tokens and nothing of their context."""
    loss = 7.0 + 3.9 * np.exp(-np.arange(300) / 15) + noise(300, 0.05)
    (finding,) = findings_of(RULE, build(scalars(loss=loss, learning_rate=[3e-4] * 300)))
    assert (finding.title, finding.severity, finding.where.step) == ("The loss stands still", "warning", 150)
    assert finding.evidence[0].value == pytest.approx(7.0, abs=0.02)
    assert next(entry for entry in finding.evidence if entry.name == "learning_rate").value == 3e-4


@pytest.mark.fires(RULE)
def test_a_plateau_without_a_known_rate_is_undetermined(build, findings_of):
    loss = 7.0 + 3.9 * np.exp(-np.arange(300) / 15) + noise(300, 0.05)
    (finding,) = findings_of(RULE, build(scalars(loss=loss)))
    assert (finding.confidence, finding.cause) == ("undetermined", None)


@pytest.mark.quiet(RULE)
@pytest.mark.parametrize(
    "series",
    [
        {"loss": falling_loss(300)},  # from 5.5 to 2.5: less than half of the start
        {"loss": 7.0 + noise(300, 0.05), "learning_rate": np.linspace(0, 3e-4, 300)},  # a warm-up
        {"loss": 7.0 + noise(300, 0.05), "learning_rate": np.geomspace(3e-4, 3e-7, 300)},  # a spent schedule
        {"loss": 1.2 - 0.0004 * np.arange(300) + noise(300, 0.15)},  # a slow fall within the noise of small batches
        {"loss": 0.001 * np.arange(300)},  # a policy gradient: no cross-entropy
        {"loss": falling_loss(40)},
    ],
    ids=["learned", "warm-up", "spent", "noise", "policy", "short"],
)
def test_flat_stretches_that_have_a_reason_are_quiet(build, findings_of, series):
    assert not findings_of(RULE, build(scalars(**series)))


@pytest.mark.fires(RULE)
def test_a_flat_fine_tuning_run_is_only_info(build, findings_of):
    (finding,) = findings_of(RULE, build(scalars(loss=1.2 + noise(400, 0.01), learning_rate=[1e-5] * 400)))
    assert finding.severity == "info"


def with_samples(loss, spread, batch=8):
    generator = np.random.default_rng(5)

    def fill(writer):
        write_scalars(writer, loss=loss)
        rows = {step: (value + generator.normal(0, spread, batch)).tolist() for step, value in enumerate(loss)}
        writer.records("samples", sample_records(rows))

    return fill


@pytest.mark.fires(RULE)
def test_swings_beyond_what_the_samples_explain_are_the_updates(build, findings_of):
    loss = 4.0 + noise(160, 0.8)
    (finding,) = findings_of(RULE, build(with_samples(loss, spread=0.4)))
    assert (finding.title, finding.confidence) == ("The loss swings without falling", "likely")
    explained = next(entry for entry in finding.evidence if entry.name == "noise that the samples explain")
    assert explained.value == pytest.approx(0.4 / np.sqrt(8), rel=0.15)
    assert next(entry for entry in finding.evidence if entry.name == "samples a step").value == 8


@pytest.mark.quiet(RULE)
def test_the_noise_of_a_small_batch_is_no_oscillation(build, findings_of):
    """A batch of two whose samples differ by 1.1: the mean scatters by 0.8."""
    loss = 4.0 + noise(160, 0.8)
    assert not findings_of(RULE, build(with_samples(loss, spread=1.1, batch=2)))
    assert not findings_of(RULE, build(scalars(loss=loss)))  # nothing says where the noise comes from


@pytest.mark.fires(RULE)
def test_a_loss_that_alternates_is_undetermined(build, findings_of):
    loss = 4.0 + 0.8 * (-1.0) ** np.arange(160) + noise(160, 0.1)
    (finding,) = findings_of(RULE, build(scalars(loss=loss)))
    assert (finding.severity, finding.confidence) == ("warning", "undetermined")


@pytest.mark.fires(RULE)
def test_a_noise_that_grew_fivefold_is_an_oscillation(build, findings_of):
    loss = np.concatenate([3.0 + noise(100, 0.08), 3.0 + noise(100, 0.5, seed=4)])
    (finding,) = findings_of(RULE, build(scalars(loss=loss)))
    assert (finding.title, finding.confidence) == ("The loss swings without falling", "likely")


def test_preference_tuning_is_not_judged(build):
    capsule = build(scalars(loss=falling_loss(120)), {"training": {"objective": "grpo"}})
    assert analyze(capsule, [rule_named(RULE)]).skipped


@pytest.mark.quiet(RULE)
@pytest.mark.parametrize("seed", range(10))
def test_healthy_curves_of_many_shapes_are_quiet(build, findings_of, seed):
    """Power laws from 10.9 with noise of 1 to 10 %, 80 to 600 points, logged every step or every ten."""
    generator = np.random.default_rng(100 + seed)
    count = int(generator.integers(80, 600))
    scale, end = generator.uniform(5, 200), generator.uniform(1.5, 4.0)
    loss = end + (10.9 - end) * (1 + np.arange(count) / scale) ** -generator.uniform(0.3, 1.0)
    loss *= 1 + generator.normal(0, generator.uniform(0.01, 0.1), count)
    every = int(generator.choice([1, 10]))
    capsule = build(lambda w: w.scalars("loss", step=[every * at for at in range(count)], value=list(loss)))
    assert not [each for each in findings_of(RULE, capsule) if each.severity != "info"]


@pytest.mark.quiet(RULE)
def test_a_loss_that_jumped_once_and_stays_did_not_swing(build, findings_of):
    loss = falling_loss(400)
    loss[300:] = 6.5 + noise(100, 0.2)
    assert not findings_of(RULE, build(scalars(loss=loss)))
