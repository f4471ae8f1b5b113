"""Gradients that are lost or vanish, and norms that were never measured."""

from __future__ import annotations

import numpy as np
import pytest
from llmconsole.analyzers.runner import analyze

from tests.analyzers.conftest import rule_named
from tests.analyzers.training_runs import falling_loss, falling_norm, write_scalars

LOST = "numerics/gradients-lost"
VANISHING = "numerics/gradient-vanishing"
UNREPORTED = "numerics/not-reported"


def scalars(**series):
    return lambda writer: write_scalars(writer, **series)


def points(steps, **series):
    """Series at given steps, as a log with an interval has them."""
    return lambda writer: [writer.scalars(name, step=steps, value=values) for name, values in series.items()]


@pytest.mark.fires(LOST)
def test_a_norm_of_zero_with_a_flat_loss_from_the_start_is_critical(build, findings_of):
    noise = np.random.default_rng(0).normal(0, 0.01, 40)
    (finding,) = findings_of(LOST, build(scalars(loss=10.8 + noise, grad_norm=np.zeros(40))))
    assert (finding.severity, finding.confidence, finding.where.step) == ("critical", "likely", 0)
    assert finding.evidence[0].note == "40 points in a row"


@pytest.mark.fires(LOST)
def test_two_points_ten_steps_apart_are_a_warning(build, findings_of):
    """The numbers of a 14 B run on eight devices: 12.51039 and 12.52511 with a norm of 0.0000 at both."""
    (finding,) = findings_of(LOST, build(points([1, 10], loss=[12.51039, 12.52511], grad_norm=[0.0, 0.0])))
    assert (finding.severity, finding.where.step) == ("warning", 1)


@pytest.mark.fires(LOST)
def test_a_norm_that_falls_to_zero_in_mid_run_is_named_at_that_step(build, findings_of):
    norm, loss = falling_norm(120), falling_loss(120)
    norm[80:], loss[80:] = 0.0, loss[79]
    (finding,) = findings_of(LOST, build(scalars(loss=loss, grad_norm=norm)))
    assert (finding.severity, finding.where.step) == ("critical", 80)


@pytest.mark.quiet(LOST)
@pytest.mark.fires(VANISHING)
def test_zero_while_the_loss_falls_is_an_empty_metric(build, findings_of):
    capsule = build(scalars(loss=falling_loss(60), grad_norm=np.zeros(60)))
    assert not findings_of(LOST, capsule)
    (finding,) = findings_of(VANISHING, capsule)
    assert (finding.severity, finding.kind) == ("info", "hygiene")


@pytest.mark.quiet(LOST)
def test_zero_while_the_weights_move_is_an_empty_metric_even_where_the_loss_is_flat(build, findings_of):
    still = {"loss": np.full(60, 2.5), "grad_norm": np.zeros(60), "update_norm": np.full(60, 0.01)}
    assert not findings_of(LOST, build(scalars(**still)))


@pytest.mark.quiet(LOST)
@pytest.mark.parametrize(
    "series",
    [
        {"loss": [10.8] * 4, "grad_norm": [0.0, 0.0, 3.0, 2.0]},  # two neighbours are a hiccup
        {"loss": [0.0] * 40, "grad_norm": [0.0] * 40},  # nothing to learn, or nothing to learn from
        {"loss": [10.8] * 40, "grad_norm": [0.0] * 40, "overflow": [1.0] * 40},  # every step skipped by a scaler
        {"loss": [8.0] + [1e-4] * 39, "grad_norm": [1.0] + [0.0] * 39},  # memorised
    ],
    ids=["two", "masked", "skipped", "memorised"],
)
def test_zeros_that_have_a_reason_are_quiet(build, findings_of, series):
    assert not findings_of(LOST, build(scalars(**series)))


@pytest.mark.fires(LOST)
@pytest.mark.parametrize(
    ("start", "more"),
    [(9000, {}), (0, {"loss_scale": [-1.0] * 30}), (0, {"learning_rate": [1e-7 * (1 + s) for s in range(30)]})],
    ids=["a record from the middle", "other placeholders", "a warm-up"],
)
def test_what_may_be_an_empty_column_is_undetermined(build, findings_of, start, more):
    count = 4 if "learning_rate" in more else 30
    steps = list(range(start, start + count))
    series = {"loss": [2.5] * count, "grad_norm": [0.0] * count} | {name: each[:count] for name, each in more.items()}
    (finding,) = findings_of(LOST, build(points(steps, **series)))
    assert (finding.severity, finding.confidence, finding.cause) == ("warning", "undetermined", None)


@pytest.mark.fires(UNREPORTED)
def test_constants_that_were_never_wired_are_listed(build, findings_of):
    """As in a Megatron–DeepSpeed log: the engine has norm and scale, the printing loop has not."""
    made = {
        "loss": falling_loss(49),
        "grad_norm": np.zeros(49),
        "loss_scale": np.full(49, -1.0),
        "overflow": np.zeros(49),
        "my_metric": np.full(49, -1.0),
        "empty": np.full(49, np.nan),
    }
    (finding,) = findings_of(UNREPORTED, build(scalars(**made)))
    assert finding.severity == "info"
    assert {entry.name for entry in finding.evidence} == {"grad_norm", "loss_scale", "my_metric", "empty"}


@pytest.mark.quiet(UNREPORTED)
def test_measured_zeros_and_lost_gradients_are_not_placeholders(build, findings_of):
    counters = {"overflow": np.zeros(40), "alloc_retries": np.zeros(40)}
    assert not findings_of(UNREPORTED, build(scalars(loss=falling_loss(40), **counters)))
    assert not findings_of(UNREPORTED, build(scalars(loss=[10.8] * 40, grad_norm=[0.0] * 40)))
    assert not findings_of(UNREPORTED, build(scalars(loss=[2.5, 2.4], grad_norm=[0.0, 0.0])))


@pytest.mark.fires(VANISHING)
def test_a_norm_below_adams_reach_is_a_warning(build, findings_of):
    norm = np.geomspace(1.0, 1e-12, 60)
    (finding,) = findings_of(VANISHING, build(scalars(loss=np.full(60, 6.9), grad_norm=norm)))
    # 10^(−12·k/59) < 1e-7 from k = 35 on.
    assert (finding.severity, finding.where.step) == ("warning", 35)


def gradients(levels, steps=5, names=4):
    """Full rows of the gradients of ``names`` matrices; ``levels[name]`` is the mean magnitude at each step."""

    def fill(writer):
        for step in range(steps):
            for index in range(names):
                level = levels[index][step] if isinstance(levels[index], list) else levels[index]
                shared = {"step": step, "dtype": "float32", "shape": [8, 8], "numel": 64, "nan": 0, "posinf": 0}
                size = {"absmax": 3 * level, "absmean": level, "rms": 1.2 * level, "min": -level, "max": level}
                name = f"layers.{index}.weight"
                writer.stats([{**shared, **size, "order": index, "name": name, "role": "gradient", "neginf": 0}])
                writer.stats([{**shared, "order": 9 + index, "name": name, "role": "parameter", "rms": 0.02}])

    return fill


@pytest.mark.fires(VANISHING)
def test_a_layer_without_gradient_beside_others_is_named(build, findings_of):
    (finding,) = findings_of(VANISHING, build(gradients([2e-9, 1e-4, 2e-4, 3e-4])))
    assert (finding.where.tensor, finding.where.step) == ("layers.0.weight", 0)
    assert finding.evidence[0].value == pytest.approx(2e-9)


@pytest.mark.fires(VANISHING)
def test_all_layers_without_gradient_are_a_warning(build, findings_of):
    (finding,) = findings_of(VANISHING, build(gradients([2e-9] * 4)))
    assert "as has every other" in finding.summary


@pytest.mark.quiet(VANISHING)
@pytest.mark.parametrize(
    "levels",
    [
        [[1e-9, 4e-9, 2e-8, 4e-8, 9e-8], 1e-4, 1e-4, 1e-4],  # an adapter's first factor on its way up
        [[2e-9, 2e-9, 1e-4, 1e-4, 1e-4], 1e-4, 1e-4, 1e-4],  # small at the start alone
        [5e-8, 8e-8, 2e-7, 3e-7],  # a large model: all are small, none stands out
        [0.0, 1e-4, 1e-4, 1e-4],  # no tokens for this expert
    ],
    ids=["grows", "starts", "large model", "idle"],
)
def test_small_gradients_that_have_a_reason_are_quiet(build, findings_of, levels):
    assert not findings_of(VANISHING, build(gradients(levels)))


@pytest.mark.quiet(VANISHING)
def test_small_elements_of_a_healthy_norm_and_activations_are_quiet(build, findings_of):
    def fill(writer):
        gradients([5e-8] * 4)(writer)
        write_scalars(writer, grad_norm=[0.2] * 5, loss=falling_loss(5))

    assert not findings_of(VANISHING, build(fill))
    assert not findings_of(VANISHING, build(scalars(loss=falling_loss(60), grad_norm=falling_norm(60))))


@pytest.mark.quiet(VANISHING)
def test_a_memorised_set_has_rightly_no_gradient(build, findings_of):
    loss = 5.0 * np.exp(-np.arange(60) / 4)
    assert not findings_of(VANISHING, build(scalars(loss=loss, grad_norm=np.geomspace(1, 1e-12, 60))))


@pytest.mark.parametrize("rule_id", [LOST, VANISHING, UNREPORTED])
def test_odd_evidence_is_no_error(build, rule_id):
    """NaN holes, one point, decreasing and repeated steps, events without a step."""

    def fill(writer):
        writer.scalars("loss", step=[5, 5, 3, 4], value=[np.nan, 2.0, np.inf, -1.0])
        writer.scalars("grad_norm", step=[7], value=[0.0])
        writer.record("events", {"kind": "grad_norm"})
        writer.record("param_groups", {"name": "a", "has_grad": False})

    assert not analyze(build(fill), [rule_named(rule_id)]).errors
