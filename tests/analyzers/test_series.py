"""Curves: resumes, placeholders, noise and slopes, against values worked out by hand or by another formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
from llmconsole.analyzers.series import (
    Curve,
    align,
    carried,
    curve,
    noise,
    periodic,
    placeholder,
    reported,
    resolution,
    resumes,
    segments,
    theil_sen,
    trailing,
)


def written(steps, values):
    return lambda writer: writer.scalars("loss", step=list(steps), value=list(values))


def test_a_resume_replaces_the_steps_it_repeats_and_both_stretches_stay_known(build):
    capsule = build(written([0, 10, 20, 30, 20, 30, 40], [5, 4, 3, 9, 3.1, 2.9, 2.8]))
    assert curve(capsule, "loss").value.tolist() == [5, 4, 3.1, 2.9, 2.8]
    assert [each.step.tolist() for each in segments(capsule, "loss")] == [[0, 10, 20, 30], [20, 30, 40]]
    assert segments(capsule, "loss")[0].value.tolist() == [5, 4, 3, 9]
    assert resumes(capsule) == (20,)


def test_a_loaded_checkpoint_is_a_resume_without_steps_going_back(build):
    def fill(writer):
        written(range(10), range(10))(writer)
        writer.record("events", {"step": 6, "kind": "checkpoint_loaded"})
        writer.record("events", {"step": 0, "kind": "checkpoint_loaded"})  # the start of the run itself

    assert resumes(build(fill)) == (6,)


def test_ranks_that_write_one_file_in_turns_are_no_resumes(build):
    steps = [step + late for step in range(0, 40, 2) for late in (1, 0)]
    capsule = build(written(steps, [1.0] * 40))
    assert len(segments(capsule, "loss")) == 1
    assert resumes(capsule) == ()


def test_a_step_written_twice_in_a_row_is_one_point_and_no_resume(build):
    capsule = build(written([0, 1, 1, 2], [4, 3, 2, 1]))
    assert curve(capsule, "loss").value.tolist() == [4, 2, 1]
    assert len(segments(capsule, "loss")) == 1


@pytest.mark.parametrize(
    ("values", "found"),
    [([0.0] * 5, 0.0), ([-1.0] * 3, -1.0), ([0.0, 0.0], None), ([0.0, 0.0, 0.1], None), ([1.0] * 5, None), ([], None)],
)
def test_only_a_constant_zero_or_minus_one_is_a_placeholder(build, values, found):
    made = Curve(np.arange(len(values)), np.array(values, float))
    assert placeholder(made) == found
    if values:
        assert len(reported(build(written(range(len(values)), values)), "loss")) == (
            0 if found is not None else len(values)
        )


def test_the_last_printed_decimal_is_known():
    assert resolution(np.array([2.5, 3.25, 4.0])) == 0.01
    assert resolution(np.array([2.0, 3.0])) == 1.0
    assert resolution(np.array([math.pi])) == 1e-9


def test_noise_is_measured_around_the_trend():
    generator = np.random.default_rng(0)
    values = np.linspace(10, 2, 4000) + generator.normal(0, 0.2, 4000)
    assert noise(values) == pytest.approx(0.2, rel=0.05)
    assert noise(np.full(10, 2.5)) == pytest.approx(0.1 / math.sqrt(12))  # a constant is known to its last decimal


def test_the_slope_interval_covers_the_truth_as_often_as_it_says():
    """Normal noise on a line of slope −0.01, 200 draws: the 95 % interval misses in 3 to 8 %."""
    generator = np.random.default_rng(1)
    step = np.arange(40)
    misses = 0
    for _ in range(200):
        slope = theil_sen(Curve(step, -0.01 * step + generator.normal(0, 0.3, 40)))
        misses += not slope.low <= -0.01 <= slope.high
    assert 0.01 * 200 <= misses <= 0.1 * 200


def test_the_slope_of_an_exact_line_is_exact_and_a_long_curve_is_reduced():
    step = np.arange(100_000) * 3
    slope = theil_sen(Curve(step, 7.0 - 0.5 * step))
    assert (slope.value, slope.low, slope.high) == pytest.approx((-0.5, -0.5, -0.5))
    assert theil_sen(Curve(np.arange(9), np.zeros(9))) is None


def test_two_curves_meet_at_common_steps_or_carry_the_last_value():
    left, right = Curve(np.array([0, 5, 10]), np.array([1.0, 2, 3])), Curve(np.array([5, 7, 10]), np.array([4.0, 5, 6]))
    step, a, b = align(left, right)
    assert (step.tolist(), a.tolist(), b.tolist()) == ([5, 10], [2, 3], [4, 6])
    assert carried(right, np.array([4, 5, 6, 99])).tolist()[1:] == [4, 4, 6]
    assert math.isnan(carried(right, np.array([4]))[0])


def test_before_after_and_between_count_points_and_steps():
    made = Curve(np.array([0, 10, 20, 30]), np.array([1.0, 2, 3, 4]))
    assert made.before(20, 1).value.tolist() == [2]
    assert made.after(10).value.tolist() == [3, 4]
    assert made.between(10, 20).value.tolist() == [2, 3]
    assert (made.interval, made.at(10)) == (10, 2)
    assert math.isnan(made.at(11))


def test_a_window_ends_before_its_value():
    assert trailing(np.array([1.0, 2, 3, 9]), 2, np.mean).tolist()[1:] == [1, 1.5, 2.5]


@pytest.mark.parametrize(
    ("steps", "start", "expected"),
    [([100, 200, 300], 0, True), ([100, 201], 0, True), ([100, 150, 300], 0, False), ([50], 0, False),
     ([3, 6, 9], 0, False), ([401, 802, 1203], 0, True)],
)  # fmt: skip
def test_ticks_of_an_epoch_have_one_period(steps, start, expected):
    assert periodic(steps, start, 20) is expected
