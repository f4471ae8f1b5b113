"""The callback in a real Lightning Trainer: a small model built from a config, trained on a CPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule
from llmconsole.capsules.integrations.lightning import LLMConsoleCallback
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 64


class Job(lightning.LightningModule):
    def __init__(self, fail: bool = False) -> None:
        super().__init__()
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
        self.fail = fail

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.fail and index == 3:
            raise RuntimeError("the data ran dry")
        return self.model(**batch).loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader(count: int, seed: int) -> torch.utils.data.DataLoader[Any]:
    rows = torch.randint(0, VOCABULARY, (count, 10), generator=torch.Generator().manual_seed(seed))
    samples = [{"input_ids": row, "labels": row.clone()} for row in rows]
    return torch.utils.data.DataLoader(samples, batch_size=2)  # type: ignore[arg-type]


def fit(folder: Path, module: Job, resume: str | None = None, epochs: int = 1) -> Capsule:
    torch.manual_seed(0)
    before = set(folder.glob("runs/*.capsule"))
    trainer = lightning.Trainer(
        default_root_dir=folder,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LLMConsoleCallback(folder / "runs", every=1), ModelCheckpoint(folder / "saved", filename="last")],
    )
    try:
        trainer.fit(module, loader(8, 1), loader(4, 2), ckpt_path=resume)
    finally:
        (path,) = set(folder.glob("runs/*.capsule")) - before
    return Capsule.open(path)


@pytest.fixture(autouse=True)
def quiet() -> None:
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.mark.filterwarnings("ignore")
def test_a_run_is_recorded_step_by_step_resumed_and_no_rule_finds_anything(tmp_path: Path) -> None:
    capsule = fit(tmp_path, Job())
    report = analyze(capsule)
    assert not report.errors
    assert [each.rule for each in report.findings if each.severity in ("warning", "critical")] == []
    micros = [(each["step"], each["micro"], each["tokens"]) for each in capsule.records("microbatches")]
    assert micros == [(0, 0, 18), (0, 1, 18), (1, 0, 18), (1, 1, 18)]
    sums = [each["loss_mean"] for each in capsule.records("microbatches")]
    assert capsule.scalars("loss").value == pytest.approx([sum(sums[:2]) / 2, sum(sums[2:]) / 2], rel=1e-5)
    assert len(capsule.scalars("grad_norm")) == 2
    (begin,) = [event for event in capsule.records("events") if event["kind"] == "eval_begin"]
    assert (begin["training_mode"], begin["grad_enabled"]) == (False, False)
    assert capsule.scalars("eval_loss").value == pytest.approx(capsule.scalars("val_loss").value)

    (saved,) = (tmp_path / "saved").glob("*.ckpt")
    resumed = fit(tmp_path, Job(), resume=str(saved), epochs=2)
    assert resumed.scalars("loss").step.tolist() == [2, 3]
    (loaded,) = [event for event in resumed.records("events") if event["kind"] == "checkpoint_loaded"]
    assert (loaded["step"], set(loaded["loaded"]) >= {"model", "optimizer"}) == (2, True)
    assert loaded["path"] == str(saved)
    assert [each.rule for each in analyze(resumed).findings if each.severity in ("warning", "critical")] == []


@pytest.mark.filterwarnings("ignore")
def test_an_exception_ends_in_a_crashed_capsule(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ran dry"):
        fit(tmp_path, Job(fail=True))
    (path,) = tmp_path.glob("runs/*.capsule")
    capsule = Capsule.open(path)
    assert (capsule.status, capsule.trigger.kind, capsule.trigger.step) == ("crashed", "exception", 1)


@pytest.mark.filterwarnings("ignore")
def test_an_exception_out_of_the_loader_ends_in_a_crashed_capsule(tmp_path: Path) -> None:
    class Samples(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from loader(4, 1).dataset
            raise OSError("the share is gone")

    samples = torch.utils.data.DataLoader(Samples(), batch_size=2)
    trainer = lightning.Trainer(
        default_root_dir=tmp_path, max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[LLMConsoleCallback(tmp_path / "runs")],
    )  # fmt: skip
    with pytest.raises(OSError, match="share"):
        trainer.fit(Job(), samples)
    (path,) = tmp_path.glob("runs/*.capsule")
    capsule = Capsule.open(path)
    assert (capsule.status, capsule.trigger.message) == ("crashed", "OSError: the share is gone")
