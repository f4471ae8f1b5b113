"""numerics/outlier-growth: one layer away from the others, layers that fell silent, and growth that all share."""

from __future__ import annotations

import pytest
import torch
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, Recorder
from torch import nn

from tests.analyzers.conftest import rule_named
from tests.analyzers.training_runs import row

RULE = "numerics/outlier-growth"
NAMES = ("embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head")


def layers(levels, steps=12, every=10, dtype="bfloat16"):
    """Full rows of activations; ``levels[name]`` gives the largest element at a record's number."""
    at = {name: levels.get(name, lambda n: 2.0 + 0.1 * n) for name in NAMES}

    def fill(writer):
        for record in range(steps):
            for order, name in enumerate(NAMES):
                fields = {"dtype": dtype, "shape": [64, 64]}
                writer.stats([row(record * every, order, name, float(at[name](record)), **fields)])

    return fill


@pytest.mark.fires(RULE)
def test_a_layer_that_grows_fifteen_times_while_others_stand_is_named_at_its_onset(build, findings_of):
    (finding,) = findings_of(RULE, build(layers({"blocks.2": lambda n: 3.0 * 1.3**n})))
    assert (finding.severity, finding.where.tensor) == ("warning", "blocks.2")
    # Medians of three: the lowest is 3 · 1.3; 1.3ⁿ > 13 first at n = 10, step 100; the last is 3 · 1.3¹⁰.
    assert finding.where.step == 100
    assert finding.evidence[0].value == pytest.approx(1.3**9)


@pytest.mark.quiet(RULE)
@pytest.mark.parametrize(
    "levels",
    [
        {"blocks.2": lambda n: 3.0 * 1.2**n},  # × 5
        {name: lambda n: 3.0 * 1.3**n for name in NAMES},  # all of them
        {"blocks.2": lambda n: 60.0 if n == 6 else 3.0},  # one outlier that is gone
        {"blocks.2": lambda n: 900.0 + 10 * n},  # large and steady
    ],
    ids=["slow", "together", "single", "steady"],
)
def test_growth_that_is_slow_shared_or_gone_is_quiet(build, findings_of, levels):
    assert not findings_of(RULE, build(layers(levels)))


@pytest.mark.quiet(RULE)
def test_the_output_layer_grows_as_the_model_learns(build, findings_of):
    grows = lambda n: 0.5 * 1.4**n  # noqa: E731

    def fill(writer):
        layers({"head": grows})(writer)
        writer.stats([row(10 * n, 9, "logits", grows(n), role="logits", dtype="bfloat16") for n in range(12)])

    assert not findings_of(RULE, build(fill))


@pytest.mark.quiet(RULE)
def test_growth_to_the_end_of_float16_has_its_own_rule(build, findings_of):
    capsule = build(layers({"blocks.2": lambda n: 30.0 * 2.0**n}, dtype="float16"))
    assert not findings_of(RULE, capsule)
    assert findings_of("numerics/fp16-overflow", capsule)


@pytest.mark.fires(RULE)
def test_a_layer_that_falls_silent_is_named(build, findings_of):
    (finding,) = findings_of(RULE, build(layers({"blocks.1": lambda n: 2.0 if n < 7 else 0.0})))
    assert (finding.title, finding.where.step) == ("A layer has fallen silent", 70)
    assert finding.evidence[1].value == 2.0


@pytest.mark.quiet(RULE)
def test_a_branch_that_starts_at_zero_and_learns_is_quiet(build, findings_of):
    assert not findings_of(RULE, build(layers({"blocks.1": lambda n: 0.5 * n})))
    assert not findings_of(RULE, build(layers({"blocks.1": lambda n: 0.0}, steps=3)))


def test_few_or_odd_records_are_no_error(build):
    def fill(writer):
        writer.stats([row(0, 0, "a", 1.0), row(0, 0, "a", float("nan")), row(5, 1, "b", float("inf"), posinf=3)])
        writer.stats([{"step": 3, "order": 0, "name": "c", "role": "activation", "rms": 0.0}])

    assert not analyze(build(fill), [rule_named(RULE)]).errors


class Net(nn.Module):
    """Five layers of rectified units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.units = nn.ModuleList(nn.ReLU() for _ in range(5))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, unit in zip(self.layers, self.units, strict=True):
            x = unit(layer(x))
        return self.head(x)


@pytest.fixture
def trained(tmp_path):
    """``trained(spoil)``: forty real steps; ``spoil(step, model)`` is what goes wrong after each of them."""

    def train(spoil):
        torch.manual_seed(0)
        torch.set_num_threads(1)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with Recorder(tmp_path, model=model, optimizer=optimizer, statistics_every=1) as recorder:
            for step in range(40):
                x, y = torch.randn(32, 16), torch.randint(4, (32,))
                with recorder.step(batch={"x": x, "y": y}) as window:
                    loss = nn.functional.cross_entropy(model(x), y)
                    window.loss(loss)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                with torch.no_grad():
                    spoil(step, model)
        (path,) = tmp_path.glob("*.capsule")
        return analyze(Capsule.open(path), [rule_named(RULE)])

    return train


@pytest.mark.recorded(RULE)
def test_units_pushed_below_zero_are_found_dead(trained):
    def spoil(step, model):
        if step == 20:
            model.layers[2].bias.sub_(50.0)

    report = trained(spoil)
    assert not report.errors
    finding = next(each for each in report.findings if each.title == "A layer has fallen silent")
    assert (finding.where.tensor, finding.where.step) == ("units.2", 21)


@pytest.mark.recorded(RULE)
def test_a_weight_that_grows_alone_is_found_in_a_real_run(trained):
    def spoil(step, model):
        model.layers[4].weight.mul_(1.12)

    report = trained(spoil)
    assert not report.errors
    (finding,) = report.findings
    assert finding.where.tensor == "layers.4"


@pytest.mark.quiet(RULE)
def test_the_same_run_unspoiled_is_quiet(trained):
    report = trained(lambda step, model: None)
    assert not report.errors
    assert not report.findings
