"""numerics/overfitting: rises of the validation loss that last, and those that do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, Recorder
from torch.nn import functional

from tests.analyzers.conftest import rule_named
from tests.analyzers.test_numerics_recorded import BATCH, CONTEXT, Model, text

RULE = "numerics/overfitting"


def run(train=None, **evaluations):
    """A training loss over 3,000 steps, and evaluations at every 100 of them."""
    train = np.linspace(2.0, 0.2, 300) if train is None else train

    def fill(writer):
        writer.scalars("loss", step=list(range(0, 10 * len(train), 10)), value=list(train))
        for name, values in evaluations.items():
            writer.scalars(name, step=[100 * (1 + index) for index in range(len(values))], value=list(values))

    return fill


@pytest.mark.fires(RULE)
def test_the_first_step_is_the_evaluation_after_the_best(build, findings_of):
    (finding,) = findings_of(RULE, build(run(eval_loss=[1.9, 1.5, 1.45, 1.52, 1.6, 1.75, 1.9])))
    assert (finding.severity, finding.where.step) == ("warning", 400)
    assert finding.evidence[0].value == 300  # best checkpoint


@pytest.mark.fires(RULE)
def test_three_epochs_of_fine_tuning_suffice(build, findings_of):
    (finding,) = findings_of(RULE, build(run(eval_loss=[1.00, 1.15, 1.40])))
    assert finding.where.step == 200


@pytest.mark.fires(RULE)
def test_of_equal_best_evaluations_the_last_counts(build, findings_of):
    """Two decimals make many of them equal."""
    (finding,) = findings_of(RULE, build(run(eval_loss=[0.9, 0.7, 0.7, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95])))
    assert finding.where.step == 500


@pytest.mark.fires(RULE)
def test_groups_are_one_finding_at_the_earliest(build, findings_of):
    rising, later = [1.5, 1.6, 1.7, 1.9, 2.2, 2.5], [1.5, 1.4, 1.3, 1.5, 1.8, 2.1]
    falling = [1.5, 1.4, 1.3, 1.2, 1.1, 1.0]
    made = {"eval_code_loss": later, "eval_chat_loss": rising, "lm loss validation": falling}
    (finding,) = findings_of(RULE, build(run(**made)))
    assert finding.where.step == 200
    assert "2 of 3 evaluation groups" in finding.summary
    assert [entry.name for entry in finding.evidence[1:3]] == ["eval_code_loss", "eval_chat_loss"]


@pytest.mark.quiet(RULE)
@pytest.mark.parametrize(
    "values",
    [
        [1.9, 1.5, 1.45, 1.44, 1.46, 1.45, 1.455],  # a level
        [1.9, 1.5, 1.45, 1.6, 1.5, 1.44, 1.43],  # a bump
        [1.9, 1.5, 1.45, 1.44, 1.43, 1.42, 1.6],  # one last evaluation
        [1.5, 1.9, 1.45, 1.85, 1.5, 1.95, 1.6, 1.9],  # scatter
        [1.5, 1.6],
        [1.9, 1.5, float("nan"), 1.45, 1.44, 1.43],
    ],
    ids=["level", "bump", "last", "scatter", "two", "hole"],
)
def test_what_does_not_last_is_quiet(build, findings_of, values):
    assert not findings_of(RULE, build(run(eval_loss=values)))


@pytest.mark.quiet(RULE)
def test_training_and_validation_that_rise_together_diverge(build, findings_of):
    train = np.concatenate([np.linspace(2.0, 1.2, 150), np.linspace(1.2, 2.6, 150)])
    assert not findings_of(RULE, build(run(train, eval_loss=[1.9, 1.5, 1.45, 1.52, 1.6, 1.75, 1.9])))


def test_without_an_evaluation_nothing_is_judged(build):
    report = analyze(build(run()), [rule_named(RULE)])
    assert "evaluation loss" in report.skipped[0].missing[0]


def test_names_that_only_hold_the_letters_are_no_evaluations(build):
    for name in ("interval_loss", "latest_loss", "eval_accuracy"):
        assert analyze(build(run(**{name: [1.0, 1.15, 1.4]})), [rule_named(RULE)]).skipped


@pytest.mark.recorded(RULE)
def test_two_hundred_bytes_are_learned_by_heart(tmp_path):
    """A real run on 200 bytes with an evaluation on other text every ten steps."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data, model = text(), Model()
    few, held_out = data[:200], torch.stack([data[at : at + CONTEXT + 1] for at in range(100_000, 108_000, 1000)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss_of(rows):
        return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    with Recorder(tmp_path, model=model, optimizer=optimizer) as recorder:
        for step in range(70):
            starts = torch.randint(len(few) - CONTEXT - 1, (BATCH,)).tolist()
            rows = torch.stack([few[start : start + CONTEXT + 1] for start in starts])
            with recorder.step(batch={"input_ids": rows[:, :-1], "labels": rows[:, 1:]}) as window:
                loss_of(rows).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step % 10 == 0:
                    with torch.no_grad():
                        window.log(eval_loss=float(loss_of(held_out)))
    (path,) = tmp_path.glob("*.capsule")
    report = analyze(Capsule.open(path), [rule_named(RULE)])
    (finding,) = report.findings
    assert finding.where.step in (20, 30, 40)
