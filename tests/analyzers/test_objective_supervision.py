"""Batches without a supervised token, and scores that are not numbers, from real steps of a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from llmconsole.analyzers.finding import Finding
from llmconsole.capsules import Capsule, CapsuleWriter, Recorder
from torch import Tensor, nn

Build = Callable[..., Capsule]
Say = Callable[[str, Capsule], list[Finding]]
VOCABULARY, IGNORE = 19, -100
MASKED, NONFINITE = "objective/all-masked", "objective/logits-nonfinite"


class Tiny(nn.Module):
    """Embedding and output; returns logits [B, T, V]. ``dead``: the output of this token is NaN."""

    def __init__(self, dead: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)
        self.dead = dead

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        logits = self.head(torch.tanh(self.embed(input_ids)))
        if self.dead is not None:  # a row of attention without a key
            logits = torch.where((input_ids == self.dead)[..., None], torch.full_like(logits, float("nan")), logits)
        return logits


def trained(
    where: Path,
    collate: Callable[[int, Tensor], dict[str, Tensor]],
    *,
    dtype: torch.dtype = torch.float32,
    dead: int | None = None,
    manifest: dict[str, Any] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Capsule:
    """Four real steps under the recorder; the loss is the usual mean over labels that are not ignored."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Tiny(dead).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    declared = manifest or {"training": {"objective": "sft", "reduction": "token-mean"}}

    def mean(logits: Tensor, labels: Tensor) -> Tensor:
        flat = logits[:, :-1].reshape(-1, VOCABULARY).float()
        return F.cross_entropy(flat, labels[:, 1:].reshape(-1), ignore_index=IGNORE)

    with Recorder(where, model=model, optimizer=optimizer, every=1, manifest=declared) as recorder:
        for step in range(4):
            batch = collate(step, torch.randint(1, VOCABULARY, (3, 10)))
            with recorder.step(batch=batch) as at:
                value = (loss or mean)(model(**batch), batch["labels"])
                at.loss(value)
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
    return Capsule.open(next(where.glob("*.capsule")))


def answers(step: int, ids: Tensor) -> dict[str, Tensor]:
    """Prompt of five tokens, answer of five."""
    labels = ids.clone()
    labels[:, :5] = IGNORE
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def truncated_at(bad: int) -> Callable[[int, Tensor], dict[str, Tensor]]:
    """From step ``bad`` on the answers were cut off."""

    def collate(step: int, ids: Tensor) -> dict[str, Tensor]:
        batch = answers(step, ids)
        return batch | {"labels": torch.full_like(ids, IGNORE)} if step >= bad else batch

    return collate


@pytest.mark.fires("objective/all-masked")
@pytest.mark.recorded("objective/all-masked")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("declared", [True, False])
def test_a_batch_without_labels_is_zero_by_zero(
    tmp_path: Path, findings_of: Say, dtype: torch.dtype, declared: bool
) -> None:
    manifest = None if declared else {"training": {"micro_batch": 3}}
    (finding,) = findings_of(MASKED, trained(tmp_path, truncated_at(2), dtype=dtype, manifest=manifest))
    assert (finding.severity, finding.confidence, finding.where.step) == ("critical", "confirmed", 2)
    assert finding.evidence[0].value == 0
    assert np.isnan(finding.evidence[2].value)


@pytest.mark.fires("objective/all-masked")
def test_a_run_without_any_supervised_token_is_critical_even_where_the_loss_is_guarded(
    tmp_path: Path, findings_of: Say
) -> None:
    def guarded(logits: Tensor, labels: Tensor) -> Tensor:
        return (logits * 0.0).sum()

    (finding,) = findings_of(MASKED, trained(tmp_path, truncated_at(0), loss=guarded))
    assert (finding.severity, finding.confidence, finding.where.step) == ("critical", "confirmed", 0)
    assert finding.title.startswith("No token is supervised")


@pytest.mark.quiet("objective/all-masked")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_with_labels_and_rows_of_padding_are_quiet(
    tmp_path: Path, findings_of: Say, dtype: torch.dtype
) -> None:
    def collate(step: int, ids: Tensor) -> dict[str, Tensor]:
        batch = answers(step, ids)
        for name, value in (("input_ids", 0), ("labels", IGNORE), ("attention_mask", 0)):
            batch[name][2] = value  # fills up the batch
        return batch

    assert not findings_of(MASKED, trained(tmp_path, collate, dtype=dtype))


@pytest.mark.parametrize(("rows", "severity"), [(1, "info"), (2, "warning")])
def test_single_rows_without_labels_are_a_remark_and_more_where_they_are_many(
    tmp_path: Path, findings_of: Say, rows: int, severity: str
) -> None:
    def collate(step: int, ids: Tensor) -> dict[str, Tensor]:
        batch = answers(step, ids)
        batch["labels"][:rows] = IGNORE
        return batch

    (finding,) = findings_of(MASKED, trained(tmp_path, collate))
    assert finding.severity == severity
    assert finding.evidence[1].value == pytest.approx(rows / 3)


def test_an_empty_micro_batch_of_a_window_that_divides_once_is_a_remark(build: Build, findings_of: Say) -> None:
    def fill(writer: CapsuleWriter) -> None:
        writer.scalars("loss", step=[0], value=[2.5], rank=0)
        for micro, tokens in enumerate((12, 0)):
            writer.record("microbatches", {"step": 0, "micro": micro, "tokens": tokens})

    (finding,) = findings_of(MASKED, build(fill))
    assert (finding.severity, finding.confidence) == ("info", "likely")


def test_a_batch_that_empties_after_the_loss_was_lost_is_not_its_cause(build: Build, findings_of: Say) -> None:
    def fill(writer: CapsuleWriter) -> None:
        writer.scalars("loss", step=[0, 1, 2], value=[2.5, float("nan"), float("nan")], rank=0)
        for step, tokens in enumerate((12, 12, 0)):
            writer.record("microbatches", {"step": step, "micro": 0, "tokens": tokens})

    (finding,) = findings_of(MASKED, build(fill))
    assert (finding.severity, finding.confidence) == ("warning", "likely")


def left_padded(step: int, ids: Tensor) -> dict[str, Tensor]:
    batch = answers(step, ids)
    batch["input_ids"][0, :3] = 0
    batch["attention_mask"][0, :3] = 0
    return batch


@pytest.mark.fires("objective/logits-nonfinite")
@pytest.mark.recorded("objective/logits-nonfinite")
def test_nan_behind_the_mask_is_a_warning_and_says_where(tmp_path: Path, findings_of: Say) -> None:
    """unsloth#9848 in small: a left-padded row whose first queries see no key."""
    (finding,) = findings_of(NONFINITE, trained(tmp_path, left_padded, dead=0))
    assert (finding.severity, finding.confidence, finding.where.sample) == ("warning", "confirmed", "row 0")
    assert finding.evidence[0].value == 0
    assert finding.evidence[1].value == 3
    assert finding.evidence[2].value == 0


def test_nan_where_it_counts_is_critical(tmp_path: Path, findings_of: Say) -> None:
    def collate(step: int, ids: Tensor) -> dict[str, Tensor]:
        ids[1, 6] = 0
        return answers(step, ids)

    (finding,) = findings_of(NONFINITE, trained(tmp_path, collate, dead=0))
    assert (finding.severity, finding.where.step, finding.where.sample) == ("critical", 0, "row 1")
    assert finding.evidence[0].value == 6


@pytest.mark.quiet("objective/logits-nonfinite")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_scores_are_quiet(tmp_path: Path, findings_of: Say, dtype: torch.dtype) -> None:
    assert not findings_of(NONFINITE, trained(tmp_path, left_padded, dtype=dtype))


@pytest.mark.quiet("objective/logits-nonfinite")
@pytest.mark.parametrize("asked", [False, True])
def test_a_token_that_the_output_rules_out_matters_only_where_a_label_asks_for_it(
    build: Build, findings_of: Say, asked: bool
) -> None:
    ids = np.arange(1, 9).reshape(1, 8)
    logits = np.zeros((1, 8, VOCABULARY), np.float32)
    logits[..., 5 if asked else 18] = -np.inf

    def fill(writer: CapsuleWriter) -> None:
        loss = float("inf") if asked else 2.9
        writer.batch(step=0, rank=0, input_ids=ids, labels=ids, logits=logits, reported_loss=loss)

    found = findings_of(NONFINITE, build(fill))
    assert bool(found) is asked
    if asked:
        assert found[0].cause == "the label is a token that the output rules out"
        assert found[0].evidence[0].value == 3  # token 5 stands at position 4 and is predicted at 3
