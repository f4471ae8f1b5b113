"""Every slip of a loss function in a real loop under the recorder, in float32 and bfloat16, declared and not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.registry import all_rules
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, Recorder
from torch import Tensor, nn

VOCABULARY, LENGTH, ROWS, IGNORE = 29, 14, 3, -100
HOW = pytest.mark.parametrize(
    ("dtype", "declared"),
    [
        pytest.param(torch.float32, True, id="float32 declared"),
        pytest.param(torch.bfloat16, False, id="bfloat16 undeclared"),
    ],
)
RULES = [each for each in all_rules() if each.id.startswith("objective/")]


@dataclass
class Batch:
    """Rows of prompt, answer and padding, two packed documents in each; ``tokens``: targets of the whole window."""

    ids: Tensor
    labels: Tensor
    mask: Tensor
    segments: Tensor
    window: int = 1
    configured: int = 1
    tokens: int = 0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 12), nn.Linear(12, VOCABULARY)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, attention_mask: Tensor | None = None, **more: Tensor
    ) -> Tensor:
        return self.head(torch.tanh(self.embed(input_ids)))


def batch_of(generator: torch.Generator, micro: int, packed: bool, padded: bool) -> Batch:
    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels, mask, segments = ids.clone(), torch.ones_like(ids), torch.zeros_like(ids)
    labels[:, : 2 + 3 * micro] = IGNORE  # later micro-batches have shorter answers
    if packed:
        labels = ids.clone()
        for row, start in enumerate((5, 7, 9)):
            segments[row, start:] = 1
            labels[row, start] = IGNORE
    for row, padding in enumerate((0, 3, 1)):
        if padding and padded:
            ids[row, -padding:], labels[row, -padding:], mask[row, -padding:] = 0, IGNORE, 0
    return Batch(ids, labels, mask, segments)


def ce(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    flat = logits.float().reshape(-1, VOCABULARY)
    return F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORE, reduction=reduction)


Loss = Callable[[Tensor, Batch], Tensor]


def right(logits: Tensor, batch: Batch) -> Tensor:
    return ce(logits[:, :-1], batch.labels[:, 1:], "sum") / batch.tokens


def labelled(make: Callable[[Batch], Tensor]) -> Loss:
    return lambda logits, batch: ce(logits[:, :-1], make(batch)[:, 1:])


@dataclass(frozen=True)
class Slip:
    rule: str
    loss: Loss
    window: int = 1
    configured: int | None = None
    packed: bool = False
    padded: bool = True


SLIPS = {
    "labels unshifted": Slip("labels-not-shifted", lambda logits, b: ce(logits, b.labels)),
    "shifted twice": Slip("labels-shifted-twice", lambda logits, b: ce(logits[:, :-2], b.labels[:, 2:])),
    "pads counted": Slip("pad-in-loss", labelled(lambda b: torch.where(b.mask == 0, b.ids, b.labels))),
    "prompt counted": Slip("prompt-in-loss", labelled(lambda b: torch.where(b.mask == 1, b.ids, b.labels))),
    "sum for mean": Slip("reduction", lambda logits, b: ce(logits[:, :-1], b.labels[:, 1:], "sum")),
    "mean of means": Slip("reduction", lambda logits, b: ce(logits[:, :-1], b.labels[:, 1:]) / b.window, window=3),
    "missing 1/accumulation": Slip("reduction", lambda logits, b: ce(logits[:, :-1], b.labels[:, 1:]), window=3),
    "short last window": Slip(
        "reduction", lambda logits, b: ce(logits[:, :-1], b.labels[:, 1:]) / b.configured, window=2, configured=4
    ),
    "boundary counted": Slip(
        "document-boundary-in-loss", labelled(lambda b: torch.where(b.mask == 1, b.ids, b.labels)), packed=True
    ),
}


def recorded(where: Path, slip: Slip, dtype: torch.dtype, declared: bool) -> Capsule:
    """Two optimizer windows; the recorder sees batch, model, optimizer and the loss that backward starts from."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    configured = slip.configured or slip.window
    training: dict[str, Any] = {"accumulation_steps": configured}
    if declared:
        training |= {"objective": "sft", "reduction": "token-mean"}
    generator = torch.Generator().manual_seed(5)
    with Recorder(where, model=model, optimizer=optimizer, every=1, manifest={"training": training}) as recorder:
        for _ in range(2):
            batches = [batch_of(generator, at, slip.packed, slip.padded) for at in range(slip.window)]
            tokens = sum(int((each.labels[:, 1:] != IGNORE).sum()) for each in batches)
            for at, batch in enumerate(batches):
                batch.window, batch.configured, batch.tokens = slip.window, configured, tokens
                fields = {"input_ids": batch.ids, "labels": batch.labels, "attention_mask": batch.mask}
                if slip.packed:
                    fields["segment_ids"] = batch.segments
                with recorder.step(batch=fields) as step:
                    loss = slip.loss(model(**fields), batch)
                    step.loss(loss)
                    loss.backward()
                    if at == slip.window - 1:
                        optimizer.step()
                        optimizer.zero_grad()
    return Capsule.open(next(where.glob("*.capsule")))


def said(capsule: Capsule) -> list[Finding]:
    report = analyze(capsule, RULES)
    assert not report.errors, report.errors
    return [each for each in report.findings if each.severity != "info"]


@pytest.mark.fires("objective/document-boundary-in-loss")
@pytest.mark.recorded("objective/document-boundary-in-loss")
@pytest.mark.recorded("objective/reduction")
@HOW
@pytest.mark.parametrize("name", SLIPS)
def test_the_slip_is_named_alone(tmp_path: Path, name: str, declared: bool, dtype: torch.dtype) -> None:
    slip = SLIPS[name]
    capsule = recorded(tmp_path, slip, dtype, declared)
    found = said(capsule)
    if not declared and slip.rule == "reduction":
        # Nobody said which reduction is meant: nothing is wrong for certain.
        assert all(each.rule == "objective/reduction" and each.confidence == "likely" for each in found)
        return
    assert [each.rule for each in found] == [f"objective/{slip.rule}"]
    assert found[0].severity == "critical"
    assert found[0].confidence == "confirmed"


@pytest.mark.quiet("objective/document-boundary-in-loss")
@pytest.mark.quiet("objective/labels-not-shifted")
@HOW
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("packed", [True, False])
def test_the_right_loss_is_quiet(tmp_path: Path, window: int, packed: bool, declared: bool, dtype: torch.dtype) -> None:
    assert not said(recorded(tmp_path, Slip("", right, window=window, packed=packed), dtype, declared))
