"""A training set learned by heart, and one batch that is not: real runs of a tiny model."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llmconsole.analyzers.finding import Finding
from llmconsole.capsules import Capsule, CapsuleWriter, Recorder
from torch import Tensor, nn

Build = Callable[..., Capsule]
Say = Callable[[str, Capsule], list[Finding]]
MEMORISED, FLOOR = "objective/memorised", "objective/single-batch-floor"


class Reader(nn.Module):
    """Predicts the next of 17 tokens from all before it: a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(17, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 17)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.head(self.cell(self.embed(input_ids))[0])


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, 17), labels[:, 1:].reshape(-1), ignore_index=-100)


def overfitted(where: Path, ids: Tensor, labels: Tensor, steps: int = 60, **run: Any) -> Capsule:
    """One batch, over and over, under the recorder."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    batch = {"input_ids": ids, "labels": labels}
    manifest = {"training": {"objective": "sft", "reduction": "token-mean"}, "run": run}
    with Recorder(where, model=model, optimizer=optimizer, every=40, manifest=manifest) as recorder:
        for _ in range(steps):
            with recorder.step(batch=batch) as step:
                loss = loss_of(model(**batch), labels)
                step.loss(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return Capsule.open(next(where.glob("*.capsule")))


def rows() -> Tensor:
    return torch.randint(0, 17, (4, 8), generator=torch.Generator().manual_seed(3))


def contradicting() -> tuple[Tensor, Tensor]:
    """Two pairs of rows with one question and two answers each, only the answer counts: the floor is ln 2."""
    ids = rows()
    ids[1, :7], ids[3, :7] = ids[0, :7], ids[2, :7]
    ids[:, 7] = torch.tensor([1, 2, 3, 4])
    labels = torch.full_like(ids, -100)
    labels[:, 7] = ids[:, 7]
    return ids, labels


@pytest.mark.fires("objective/single-batch-floor")
@pytest.mark.recorded("objective/single-batch-floor")
@pytest.mark.parametrize("run", [{"overfit": True}, {}], ids=["declared", "known by its digest"])
def test_labels_that_contradict_each_other_leave_the_entropy_of_the_answers(
    tmp_path: Path, findings_of: Say, run: dict[str, Any]
) -> None:
    (finding,) = findings_of(FLOOR, overfitted(tmp_path, *contradicting(), **run))
    assert (finding.severity, finding.confidence) == ("warning", "likely")
    assert finding.cause is not None
    assert "different labels" in finding.cause
    assert finding.evidence[0].value == pytest.approx(math.log(2), abs=0.02)
    labels = next(each for each in finding.evidence if each.name == "labels")
    assert labels.value == pytest.approx(math.log(2))
    order = [each.name for each in finding.evidence[1:]]
    assert order == ["labels", "loss", "preprocessing", "gradient_chain", "capacity"]


@pytest.mark.quiet("objective/single-batch-floor")
def test_a_batch_that_is_learned_is_quiet(tmp_path: Path, findings_of: Say) -> None:
    ids = rows()
    assert not findings_of(FLOOR, overfitted(tmp_path, ids, ids, overfit=True))


def curve_of(values: list[float], **manifest: Any) -> tuple[Callable[[CapsuleWriter], None], dict[str, Any]]:
    return lambda writer: writer.scalars("loss", step=list(range(len(values))), value=values, rank=0), manifest


@pytest.mark.quiet("objective/single-batch-floor")
@pytest.mark.parametrize(
    ("values", "fires"),
    [
        ([3.0 * 0.99**step for step in range(100)], False),  # still falling
        ([3.0] * 20 + [0.7] * 80, True),
        ([3.0] * 10 + [0.7] * 30, False),  # too short to judge
        ([3.0] * 20 + [0.01] * 80, False),
    ],
)
def test_only_a_plateau_above_the_floor_speaks(
    build: Build, findings_of: Say, values: list[float], fires: bool
) -> None:
    found = findings_of(FLOOR, build(*curve_of(values, run={"overfit": True})))
    assert bool(found) is fires
    if fires:
        assert (found[0].confidence, found[0].cause) == ("undetermined", None)


@cache
def memorising(samples: int, epochs: int) -> tuple[list[float], list[float]]:
    """(training, held-out) loss a step of a model that sees ``samples`` random rows again and again."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    data = torch.randint(0, 17, (samples + 16, 8))
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    losses, held = [], []
    for _ in range(epochs):
        loss = loss_of(model(data[:samples]), data[:samples])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            held.append(float(loss_of(model(data[samples:]), data[samples:])))
    return losses, held


def written(losses: list[float], held: list[float] | None) -> Callable[[CapsuleWriter], None]:
    def fill(writer: CapsuleWriter) -> None:
        writer.scalars("loss", step=list(range(len(losses))), value=losses, rank=0)
        if held is not None:
            writer.scalars("eval_loss", step=list(range(len(held))), value=held, rank=0)

    return fill


def training(**more: Any) -> dict[str, Any]:
    return {"training": {"objective": "sft", "epochs": 80, "dataset_samples": 8, **more}}


@pytest.mark.fires("objective/memorised")
@pytest.mark.recorded("objective/memorised")
@pytest.mark.parametrize("evaluated", [True, False])
def test_few_samples_seen_often_are_recited(build: Build, findings_of: Say, evaluated: bool) -> None:
    losses, held = memorising(samples=8, epochs=80)
    assert losses[-1] < 0.1 < 3 < held[-1]
    (finding,) = findings_of(MEMORISED, build(written(losses, held if evaluated else None), training()))
    assert (finding.severity, finding.confidence) == ("warning", "likely")
    assert finding.evidence[1].value == 80


@pytest.mark.fires("objective/memorised")
def test_answers_that_all_open_alike_are_evidence(build: Build, findings_of: Say) -> None:
    """debug-cases.md: 0.03 after 10 epochs over 400 samples; every answer opens with the same words."""

    def fill(writer: CapsuleWriter) -> None:
        writer.scalars("loss", step=list(range(40)), value=[2.0 * 0.9**step for step in range(40)], rank=0)
        for number in range(8):
            writer.record("generations", {"id": str(number), "output": f"As a helpful assistant I say {number}"})

    (finding,) = findings_of(MEMORISED, build(fill, training(epochs=10, dataset_samples=400)))
    rows = {each.name: each.value for each in finding.evidence}
    assert rows["alike_openings"] == 1.0


QUIET: dict[str, dict[str, Any]] = {
    "one pass": {"epochs": 1},
    "many samples": {"dataset_samples": 2_000_000},
    "a reward": {"objective": "grpo"},
}


@pytest.mark.quiet("objective/memorised")
@pytest.mark.parametrize("case", QUIET)
def test_a_low_loss_for_another_reason_is_quiet(build: Build, findings_of: Say, case: str) -> None:
    losses, _ = memorising(samples=8, epochs=80)
    assert not findings_of(MEMORISED, build(written(losses, None), training(**QUIET[case])))


@pytest.mark.quiet("objective/memorised")
def test_an_easy_task_whose_evaluation_is_as_low_is_quiet(build: Build, findings_of: Say) -> None:
    losses = [2.0 * 0.9**step for step in range(60)]
    assert not findings_of(MEMORISED, build(written(losses, [each + 0.02 for each in losses]), training()))


@pytest.mark.quiet("objective/memorised")
def test_a_run_that_overfits_on_purpose_is_quiet(build: Build, findings_of: Say) -> None:
    losses, _ = memorising(samples=8, epochs=80)
    assert not findings_of(MEMORISED, build(written(losses, None), {**training(), "run": {"overfit": True}}))
