"""Models of a real library whose loss is not that of the next token, or is divided in a way of its own: no alarm."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from llmconsole.analyzers.report import ALARMS, CapsuleReport
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, Recorder
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

V, LENGTH = 64, 12


def trained(directory: Path, model: nn.Module, batches: list[dict[str, Tensor]]) -> CapsuleReport:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    manifest = {"model": {"initialised": "random"}}
    with Recorder(directory, model=model, optimizer=optimizer, every=3, manifest=manifest) as recorder:
        for batch in batches:
            with recorder.step(batch=batch):
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    assert recorder.path is not None
    report = analyze(Capsule.open(recorder.path))
    assert not report.errors
    return report


def rows(seed: int) -> Tensor:
    return torch.randint(4, V, (4, LENGTH), generator=torch.Generator().manual_seed(seed))


def copies() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """An encoder-decoder whose labels are what its encoder reads, as in denoising."""
    config = transformers.T5Config(
        vocab_size=V, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    batches = [{"input_ids": rows(at), "labels": rows(at)} for at in range(9)]
    return transformers.T5ForConditionalGeneration(config), batches


def bert(kind: Any, **settings: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, **settings,
    )  # fmt: skip
    return kind(config)


def masked() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """The bias of attention keys has no gradient but rounding: a softmax cancels it."""
    batches: list[dict[str, Tensor]] = []
    for at in range(9):
        ids = rows(at)
        hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(at)) < 0.3
        batches.append({"input_ids": ids.masked_fill(hidden, 3), "labels": ids.masked_fill(~hidden, -100)})
    return bert(transformers.BertForMaskedLM), batches


def classes() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """The first loss is ln 3, whatever the vocabulary is."""
    batches = [{"input_ids": rows(at), "labels": rows(at)[:, 1] % 3} for at in range(9)]
    return bert(transformers.BertForSequenceClassification, num_labels=3), batches


@pytest.mark.quiet(
    "objective/labels-not-shifted", "objective/initial-loss", "numerics/gradient-vanishing", "numerics/outlier-growth"
)  # fmt: skip
@pytest.mark.parametrize("make", [copies, masked, classes])
def test_other_objectives_raise_no_alarm(make: Any, tmp_path: Path):
    torch.manual_seed(3)
    report = trained(tmp_path, *make())
    assert {each.rule: each.summary for each in report.findings if each.severity in ALARMS} == {}


@pytest.mark.recorded("objective/reduction")
def test_a_trainer_that_counts_first_labels_gets_a_remark(tmp_path: Path):
    from llmconsole.capsules.integrations.huggingface import LLMConsoleCallback

    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=V, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    )
    data = [{"input_ids": row, "labels": row} for at in range(10) for row in rows(at)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=9, report_to=[], disable_tqdm=True, save_strategy="no",
        use_cpu=True, per_device_train_batch_size=4, learning_rate=3e-3,
    )  # fmt: skip
    callback = LLMConsoleCallback(str(tmp_path / "runs"), every=3)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback])
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    report = analyze(Capsule.open(next((tmp_path / "runs").rglob("*.capsule"))))
    assert {each.rule: each.summary for each in report.findings if each.severity in ALARMS} == {}
    said = [each for each in report.findings if each.rule == "objective/reduction"]
    assert all("first-label-in-denominator" in each.summary and each.severity == "info" for each in said)
