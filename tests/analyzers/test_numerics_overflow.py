"""numerics/fp16-overflow: growth into 65,504, and the many lawful ways to be there."""

from __future__ import annotations

import math

import pytest
from llmconsole.analyzers.runner import analyze

from tests.analyzers.conftest import rule_named
from tests.analyzers.training_runs import row, write_scalars

RULE = "numerics/fp16-overflow"
GROWTH = [9_000, 14_000, 21_000, 41_200, 63_900]


def stats(*rows):
    return lambda writer: writer.stats(list(rows))


def growing(name="blocks.2.down", **fields):
    return [row(step, 4, name, level, **fields) for step, level in enumerate(GROWTH)]


@pytest.mark.fires(RULE)
def test_growth_into_infinity_is_shown_as_a_trajectory(build, findings_of):
    overflow = row(5, 4, "blocks.2.down", 65_000, posinf=2)
    (finding,) = findings_of(RULE, build(stats(*growing(), overflow, row(5, 5, "ln", 3.0, nan=64, dtype="float32"))))
    assert (finding.severity, finding.where.step, finding.where.tensor) == ("critical", 5, "blocks.2.down")
    trajectory = next(entry for entry in finding.evidence if entry.name == "largest element over the steps")
    assert trajectory.value == GROWTH
    assert "41,200 → 63,900 → overflow" in finding.summary


@pytest.mark.fires(RULE)
def test_a_negative_overflow_is_no_mask(build, findings_of):
    """−Inf alone, as a mask leaves it, but beside elements of 65,000 of either sign."""
    (finding,) = findings_of(RULE, build(stats(*growing(), row(5, 4, "blocks.2.down", 65_000, neginf=270))))
    assert (finding.where.step, finding.where.tensor) == (5, "blocks.2.down")


@pytest.mark.quiet(RULE)
def test_a_mask_added_twice_leaves_minus_infinity_beside_its_constant(build, findings_of):
    doubled = row(1, 4, "scores", 65_504.0, min=-65_504.0, max=20.0, neginf=2016)
    assert not findings_of(RULE, build(stats(row(0, 4, "scores", 20.0), doubled)))


@pytest.mark.fires(RULE)
def test_a_finite_tensor_that_grew_to_within_a_factor_of_two_is_a_warning(build, findings_of):
    (finding,) = findings_of(RULE, build(stats(*growing()[:4])))
    assert finding.severity == "warning"
    assert finding.evidence[0].value == 41_200
    assert finding.evidence[0].expected == "< 32,752"


@pytest.mark.quiet(RULE)
def test_a_tensor_that_grew_to_less_is_quiet(build, findings_of):
    assert not findings_of(RULE, build(stats(*growing()[:3])))


@pytest.mark.quiet(RULE)
def test_activations_that_are_large_but_stable_are_quiet(build, findings_of):
    levels = [40_000, 44_000, 39_000, 43_000, 45_000]
    assert not findings_of(RULE, build(stats(*(row(step, 4, "a", level) for step, level in enumerate(levels)))))


@pytest.mark.quiet(RULE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_types_may_hold_large_values(build, findings_of, dtype):
    assert not findings_of(RULE, build(stats(*growing(dtype=dtype), row(5, 4, "blocks.2.down", 9e4, dtype=dtype))))


@pytest.mark.quiet(RULE)
def test_a_mask_constant_that_appears_with_the_first_padding_is_quiet(build, findings_of):
    plain = [row(step, 4, "scores", level) for step, level in enumerate([20.0, 22.0, 25.0])]
    filled = row(3, 4, "scores", 65_504.0, min=-65_504.0, max=24.0)
    assert not findings_of(RULE, build(stats(*plain, filled)))


@pytest.mark.quiet(RULE)
def test_masked_scores_of_minus_infinity_are_quiet(build, findings_of):
    assert not findings_of(RULE, build(stats(row(0, 4, "scores", 20.0), row(1, 4, "scores", 21.0, neginf=2016))))


@pytest.mark.quiet(RULE)
def test_infinity_that_came_from_upstream_is_not_this_types_fault(build, findings_of):
    assert not findings_of(
        RULE,
        build(
            stats(
                *growing()[:3],
                row(3, 2, "embed", 4.0, dtype="float32", nan=10),
                row(3, 4, "blocks.2.down", 60_000, posinf=40, nan=10),
            )
        ),
    )


@pytest.mark.quiet(RULE)
def test_a_division_by_zero_in_float16_is_no_overflow(build, findings_of):
    assert not findings_of(RULE, build(stats(row(0, 4, "scale", 3.0), row(1, 4, "scale", 3.0, posinf=1))))


@pytest.mark.quiet(RULE)
def test_not_a_number_out_of_small_values_is_no_overflow(build, findings_of):
    assert not findings_of(RULE, build(stats(row(0, 4, "probs", 1.0), row(1, 4, "probs", 1.0, nan=64))))


@pytest.mark.fires(RULE)
def test_an_overflow_of_an_unhooked_operation_is_laid_on_the_tensor_before_it(build, findings_of):
    (finding,) = findings_of(RULE, build(stats(*growing(), row(4, 5, "ln", 3.0, nan=64, dtype="float32"))))
    assert (finding.where.step, finding.where.tensor) == (4, "blocks.2.down")


@pytest.mark.fires(RULE)
def test_norms_alone_show_the_growth_as_root_mean_square(build, findings_of):
    norms = [
        {"step": step, "order": 4, "name": "a", "role": "activation", "dtype": "float16", "shape": [4096], "rms": rms}
        for step, rms in enumerate([900.0, 2_500.0, 7_000.0, 19_000.0])
    ]
    closer = {**norms[0], "step": 4, "rms": 25_000.0, "nan": 0, "posinf": 5, "neginf": 0, "numel": 4096}
    (finding,) = findings_of(RULE, build(stats(*norms, {**closer, "absmax": 65_000.0, "min": -6e4, "max": 6.5e4})))
    # The record of the overflow itself says that the largest element is 65,000 / 25,000 = 2.6 × the root mean square.
    trajectory = next(entry for entry in finding.evidence if "over the steps" in entry.name)
    assert trajectory.value == pytest.approx([2_340, 6_500, 18_200, 49_400])
    assert "estimated" in trajectory.note


@pytest.mark.quiet(RULE)
def test_a_norm_that_only_bounds_the_largest_element_proves_nothing(build, findings_of):
    # ‖x‖ = 500 · √1,000,000 = 500,000 is above the range, but the root mean square of 500 is not.
    norms = [
        {
            "step": step,
            "order": 4,
            "name": "a",
            "role": "activation",
            "dtype": "float16",
            "shape": [1000, 1000],
            "rms": r,
        }
        for step, r in enumerate([300.0, 350.0, 420.0, 500.0])
    ]
    assert not findings_of(RULE, build(stats(*norms)))


@pytest.mark.quiet(RULE)
def test_gradients_that_a_scaler_handles_are_quiet(build, findings_of):
    def fill(writer):
        write_scalars(writer, loss=[2.0] * 6, loss_scale=[65536.0] * 5 + [32768.0], overflow=[0, 0, 0, 0, 0, 1])
        writer.stats([*growing(role="gradient"), row(5, 4, "blocks.2.down", 65_000, role="gradient", posinf=3)])

    assert not findings_of(RULE, build(fill))


@pytest.mark.fires(RULE)
def test_the_same_gradients_without_a_scaler_overflow(build, findings_of):
    def fill(writer):
        write_scalars(writer, loss=[2.0] * 6)
        writer.stats([*growing(role="gradient"), row(5, 4, "blocks.2.down", 65_000, role="gradient", posinf=3)])

    assert findings_of(RULE, build(fill))[0].where.step == 5


@pytest.mark.fires(RULE)
def test_a_scale_that_halves_to_its_floor_is_a_run_that_cannot_step(build, findings_of):
    # As in DeepSpeed logs of weights made for bfloat16: an overflow a step, then "already at minimum".
    scale = [64.0] * 10 + [32.0, 16.0, 8.0, 4.0, 2.0, 1.0]
    (finding,) = findings_of(RULE, build(lambda w: write_scalars(w, loss=[2.05] * 16, loss_scale=scale)))
    assert finding.where.step == 9
    assert next(e for e in finding.evidence if e.name == "halvings in a row").value == 6


@pytest.mark.quiet(RULE)
@pytest.mark.parametrize(
    "scale",
    [
        [2.0**power for power in range(32, 15, -1)] + [2.0**16] * 30,  # found its scale
        [2.0**power for power in range(32, 20, -1)],  # cut while searching
        [2.0**16, 2.0**15, 2.0**15, 2.0**16, 2.0**15],  # grows again
        [1.0] * 20,  # no scaling
        [-1.0] * 20,  # not reported
    ],
)
def test_a_scale_search_is_quiet(build, findings_of, scale):
    assert not findings_of(RULE, build(lambda w: write_scalars(w, loss=[9.0] * len(scale), loss_scale=scale)))


@pytest.mark.quiet(RULE)
def test_a_scale_that_falls_because_the_loss_is_lost_says_nothing_about_range(build, findings_of):
    scale = [64.0, 64.0, 32.0, 16.0, 8.0, 4.0, 2.0, 1.0]
    loss = [2.0, 2.0] + [math.nan] * 6
    assert not findings_of(RULE, build(lambda w: write_scalars(w, loss=loss, loss_scale=scale)))


def test_the_first_non_finite_tensor_follows_from_the_overflow_at_the_same_place(build):
    capsule = build(stats(*growing(), row(5, 3, "up", 9.0), row(5, 4, "blocks.2.down", 65_000, posinf=2)))
    report = analyze(capsule, [rule_named(RULE), rule_named("numerics/first-nonfinite")])
    assert report.first_divergence is not None
    assert report.first_divergence.rule == RULE
    assert {each.rule: each.caused_by for each in report.findings} == {RULE: None, "numerics/first-nonfinite": RULE}


def unscaled_by_hand(between_layers):
    """A head whose gradient overflowed under a loss scale of 2²² and was divided by it again before anybody looked."""
    yield row(0, 20, "head", between_layers, role="gradient")
    yield row(0, 21, "head.weight", 65_504 / 2**22, role="gradient", posinf=365, neginf=338)
    yield row(0, 22, "ln", 0.9 * between_layers, role="gradient")


@pytest.mark.fires(RULE)
def test_a_gradient_that_overflowed_under_a_fixed_scale_is_told_by_the_gradients_between_the_layers(build, findings_of):
    (finding,) = findings_of(RULE, build(stats(*unscaled_by_hand(10_896))))
    assert (finding.severity, finding.where.tensor) == ("critical", "head.weight")


@pytest.mark.quiet(RULE)
def test_infinity_among_gradients_that_are_small_everywhere_is_a_division(build, findings_of):
    assert not findings_of(RULE, build(stats(*unscaled_by_hand(3.0))))


@pytest.mark.quiet(RULE)
@pytest.mark.parametrize(("first", "said"), [(32, "settles at 6.554e+04"), (17, None)])
def test_a_search_that_begins_far_too_high_is_a_remark(build, findings_of, first, said):
    scale = [2.0**power for power in range(first, 16, -1)] + [2.0**16] * 30
    skipped = [1.0] * (first - 16) + [0.0] * 30
    capsule = build(lambda w: write_scalars(w, loss_scale=scale, overflow=skipped, step_time=[2.0] * len(scale)))
    findings = findings_of(RULE, capsule)
    assert [(each.severity, each.kind) for each in findings] == ([("info", "hygiene")] if said else [])
    assert all(said in each.summary and "32 s" in each.summary for each in findings)
