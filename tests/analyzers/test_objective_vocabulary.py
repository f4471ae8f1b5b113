"""Sizes of vocabulary, embedding and output, and tables that should be one."""

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
SIZES, TYING = "objective/vocabulary-mismatch", "objective/tying-broken"


class Model(nn.Module):
    """Embedding of ``rows`` tokens and a head of ``columns``, one table where ``tied``."""

    def __init__(self, rows: int, columns: int, tied: bool) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(rows, 8), nn.Linear(8, columns, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm_head(torch.tanh(self.wte(input_ids)))


def recorded(where: Path, rows: int = 24, columns: int = 24, tied: bool = True, **manifest: Any) -> Capsule:
    """Two real steps."""
    torch.manual_seed(0)
    model = Model(rows, columns, tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Recorder(where, model=model, optimizer=optimizer, every=1, manifest=manifest) as recorder:
        for _ in range(2):
            ids = torch.randint(0, min(20, columns), (2, 9))
            with recorder.step(batch=ids) as step:
                logits = model(ids)
                loss = F.cross_entropy(logits[:, :-1].reshape(-1, columns), ids[:, 1:].reshape(-1))
                step.loss(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return Capsule.open(next(where.glob("*.capsule")))


@pytest.mark.fires("objective/vocabulary-mismatch")
@pytest.mark.recorded("objective/vocabulary-mismatch")
def test_a_tokenizer_larger_than_the_embedding_is_a_warning_while_no_such_id_is_used(
    tmp_path: Path, findings_of: Say
) -> None:
    (finding,) = findings_of(SIZES, recorded(tmp_path, tokenizer={"vocab_size": 27}))
    assert (finding.severity, finding.confidence) == ("warning", "likely")
    assert [(each.name, each.value) for each in finding.evidence[:2]] == [("tokenizer", 27), ("embedding rows", 24)]


def test_an_id_without_a_row_in_a_batch_makes_it_certain(build: Build, findings_of: Say) -> None:
    def fill(writer: CapsuleWriter) -> None:
        writer.batch(step=0, rank=0, input_ids=np.array([[1, 2, 100]]))

    manifest = {"tokenizer": {"vocab_size": 103}, "model": {"embedding_rows": 100}}
    (finding,) = findings_of(SIZES, build(fill, manifest))
    assert (finding.severity, finding.confidence) == ("critical", "confirmed")


@pytest.mark.fires("objective/vocabulary-mismatch")
@pytest.mark.parametrize("tied", [True, False])
def test_an_output_of_another_size_than_the_embedding(build: Build, findings_of: Say, tied: bool) -> None:
    def fill(writer: CapsuleWriter) -> None:
        logits = np.zeros((1, 3, 90), np.float32)
        writer.batch(step=0, rank=0, input_ids=np.array([[1, 2, 3]]), logits=logits)

    (finding,) = findings_of(SIZES, build(fill, {"model": {"embedding_rows": 100, "tied_embeddings": tied}}))
    assert (finding.severity, finding.confidence) == (("critical", "confirmed") if tied else ("warning", "likely"))


@pytest.mark.quiet("objective/vocabulary-mismatch")
@pytest.mark.parametrize("more", [{"tokenizer": {"vocab_size": 24}}, {"tokenizer": {"vocab_size": 20}}])
def test_equal_sizes_and_a_padded_embedding_are_quiet(tmp_path: Path, findings_of: Say, more: dict[str, Any]) -> None:
    assert not findings_of(SIZES, recorded(tmp_path, **more))


@pytest.mark.quiet("objective/vocabulary-mismatch")
def test_a_shard_of_the_table_is_no_smaller_table(build: Build, findings_of: Say) -> None:
    def fill(writer: CapsuleWriter) -> None:
        logits = np.zeros((1, 3, 50), np.float32)
        writer.batch(step=0, rank=0, input_ids=np.array([[1, 2, 3]]), logits=logits)

    manifest = {
        "tokenizer": {"vocab_size": 100},
        "model": {"embedding_rows": 100},
        "training": {"tensor_parallel": 2},
    }
    assert not findings_of(SIZES, build(fill, manifest))


@pytest.mark.parametrize(("norm", "fires"), [(0.001, True), (0.9, False)])
def test_special_tokens_whose_rows_were_never_trained(build: Build, findings_of: Say, norm: float, fires: bool) -> None:
    def fill(writer: CapsuleWriter) -> None:
        norms = np.ones(100)
        norms[98:] = norm
        writer.tensor("embedding/row_norm", norms, step=0, rank=0)
        writer.batch(step=0, rank=0, input_ids=np.array([[1, 98, 3]]))

    special = {"vocab_size": 100, "special_ids": {"<|im_start|>": 98, "<|unused|>": 99}}
    found = findings_of(SIZES, build(fill, {"tokenizer": special, "model": {"initialised": "pretrained"}}))
    assert bool(found) is fires
    if fires:
        assert found[0].evidence[1].value == [98]  # 99 does not occur


@pytest.mark.fires("objective/tying-broken")
@pytest.mark.recorded("objective/tying-broken")
def test_tables_that_are_declared_one_and_were_trained_as_two(tmp_path: Path, findings_of: Say) -> None:
    (finding,) = findings_of(TYING, recorded(tmp_path, tied=False, model={"tied_embeddings": True}))
    assert finding.confidence in ("confirmed", "likely")
    assert finding.severity in ("critical", "warning")


@pytest.mark.quiet("objective/tying-broken")
@pytest.mark.parametrize(("tied", "declared"), [(True, True), (False, False)])
def test_one_table_and_two_that_are_meant_are_quiet(
    tmp_path: Path, findings_of: Say, tied: bool, declared: bool
) -> None:
    capsule = recorded(tmp_path, tied=tied, model={"tied_embeddings": declared})
    assert not findings_of(TYING, capsule)


@pytest.mark.parametrize(("second", "fires"), [("a" * 64, False), ("b" * 64, True)])
def test_checksums_of_two_pipeline_stages_must_agree(build: Build, findings_of: Say, second: str, fires: bool) -> None:
    def fill(writer: CapsuleWriter) -> None:
        writer.record("checksums", {"step": 3, "name": "model.embed_tokens.weight", "sha256": "a" * 64}, rank=0)
        writer.record("checksums", {"step": 3, "name": "lm_head.weight", "sha256": second}, rank=1)

    found = findings_of(TYING, build(fill, {"model": {"tied_embeddings": True}}))
    assert [(each.severity, each.confidence, each.where.step) for each in found] == (
        [("critical", "confirmed", 3)] if fires else []
    )
