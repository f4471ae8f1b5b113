"""The callback on real Trainers: small models built from a config, trained on a CPU, and what all rules say of them."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule
from llmconsole.capsules.integrations.huggingface import LLMConsoleCallback
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY = 64
SERIOUS = ("warning", "critical")


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Samples of 6 to 12 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 13, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, VOCABULARY, (length,), generator=generator)} for length in lengths]


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(fill: int, value: Any) -> torch.Tensor:
        whole = torch.full((len(samples), longest), fill)
        for row, sample in zip(whole, samples, strict=True):
            row[: len(sample["input_ids"])] = value(sample["input_ids"])
        return whole

    return {
        "input_ids": padded(0, lambda ids: ids),
        "labels": padded(-100, lambda ids: ids),
        "attention_mask": padded(0, torch.ones_like),
    }


def collate_shifted(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Shifts the labels, which the model does too."""
    batch = collate(samples)
    batch["labels"] = torch.cat((batch["labels"][:, 1:], torch.full((len(samples), 1), -100)), dim=1)
    return batch


class Ignoring(Trainer):
    """Takes the number of items and does not divide by it: the Trainer then leaves out its own division, too."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        output = model(**inputs)
        return (output.loss, output) if return_outputs else output.loss


def llama() -> LlamaForCausalLM:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def gpt2() -> GPT2LMHeadModel:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))
    model.loss_type = "ForCausalLM"  # without the name this Trainer divides by one token a row more than is scored
    return model


class Job:
    """A Trainer with the callback, in a directory of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "out"
        self.callback: LLMConsoleCallback | None = None

    def train(
        self,
        model: Any = llama,
        collator: Any = collate,
        trainer: type[Trainer] = Trainer,
        resume: str | None = None,
        steps: int = 4,
        recorder: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> Capsule:
        torch.manual_seed(0)
        before = set(self.folder.glob("runs/*.capsule"))
        self.callback = LLMConsoleCallback(self.folder / "runs", **(recorder or {}))
        settings = TrainingArguments(
            str(self.output),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=steps,
            learning_rate=1e-3,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            **{"save_strategy": "no", "logging_steps": 2, **arguments},
        )
        job = trainer(
            model(),
            settings,
            train_dataset=rows(18, 1),
            eval_dataset=rows(6, 2),
            data_collator=collator,
            callbacks=[self.callback],
        )
        with contextlib.redirect_stdout(io.StringIO()):
            job.train(resume_from_checkpoint=resume)
        (path,) = set(self.folder.glob("runs/*.capsule")) - before
        return Capsule.open(path)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    torch.set_num_threads(1)
    return Job(tmp_path)


def serious(capsule: Capsule) -> list[str]:
    report = analyze(capsule)
    assert not report.errors, report.errors
    skipped = {each.rule for each in report.skipped}
    assert not skipped & {"objective/labels-not-shifted", "objective/labels-shifted-twice", "objective/reduction"}
    return [finding.rule for finding in report.findings if finding.severity in SERIOUS]


def confirmed(capsule: Capsule) -> list[str]:
    found = analyze(capsule).findings
    return [each.rule for each in found if (each.severity, each.confidence) == ("critical", "confirmed")]


def kinds(capsule: Capsule, *wanted: str) -> list[dict[str, Any]]:
    return [event for event in capsule.records("events") if event["kind"] in wanted]


class TestAHealthyRun:
    def test_is_recorded_step_by_step_and_no_rule_has_anything_serious_to_say(self, job: Job) -> None:
        saving = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
        capsule = job.train(steps=4, recorder={"every": 1, "contract": True}, **saving)
        assert serious(capsule) == []
        # Windows are optimizer steps of two micro-batches of two samples each, with the tokens that are scored.
        micros = capsule.records("microbatches")
        assert [(each["step"], each["micro"], each["window"]) for each in micros] == [
            (step, micro, 2) for step in range(4) for micro in range(2)
        ]
        assert [each["tokens"] for each in micros] == [
            int((batch.labels[:, 1:] != -100).sum()) for batch in capsule.batches() if batch.split == "train"
        ]
        sums = [sum(each["loss_sum"] for each in micros if each["step"] == step) for step in range(4)]
        tokens = [sum(each["tokens"] for each in micros if each["step"] == step) for step in range(4)]
        assert capsule.scalars("loss").value == pytest.approx(np.divide(sums, tokens), rel=1e-5)
        # What the Trainer printed is the mean of two steps of what was measured.
        logged = capsule.scalars("logged_loss")
        assert (logged.step.tolist(), logged.value.tolist()) == (
            [1, 3],
            pytest.approx(capsule.scalars("loss").value.reshape(2, 2).mean(1), abs=1e-4),
        )
        training = capsule.manifest.training
        assert (training.accumulation_steps, training.max_grad_norm, training.reduction) == (2, 1.0, "token-mean")
        assert (training.schedule.name, training.schedule.total_steps, training.precision) == ("linear", 4, "fp32")

        begin, _ = kinds(capsule, "eval_begin")  # the second is the Trainer's at the end of training
        end, last = kinds(capsule, "eval_end")
        assert (begin["training_mode"], begin["grad_enabled"], begin["step"]) == (False, False, 2)
        assert capsule.scalars("eval_loss").value == pytest.approx([end["loss"], last["loss"]], rel=1e-5)
        validation = [
            each for each in capsule.records("samples") if each["split"] == "validation" and each["step"] == 2
        ]
        assert [each["length"] for each in validation] == [len(row["input_ids"]) for row in rows(6, 2)]

        saved, _ = kinds(capsule, "checkpoint_saved")
        assert (saved["step"], saved["path"]) == (2, str(job.output / "checkpoint-3"))
        assert saved["contents"] == ["model", "optimizer", "rng", "scheduler", "step"]
        assert (job.output / "checkpoint-3" / "llmconsole-contract.json").exists()
        assert not kinds(capsule, "checkpoint_loaded")

        resumed = job.train(steps=5, resume=str(job.output / "checkpoint-3"), recorder={"every": 1})
        assert serious(resumed) == []
        (loaded,), (weights,) = kinds(resumed, "checkpoint_loaded"), kinds(resumed, "weights_loaded")
        assert (loaded["step"], loaded["path"]) == (3, str(job.output / "checkpoint-3"))
        assert loaded["loaded"] == ["model", "optimizer", "rng", "scheduler"]
        assert (weights["loaded"], weights["expected"]) == (21, 21)
        assert resumed.scalars("loss").step.tolist() == [3, 4]
        assert resumed.manifest.contract["dtype"] == "float32"
        assert resumed.manifest.identity.base_checkpoint.name == loaded["path"]

    def test_in_bfloat16_with_tied_weights_too_and_leaves_the_trainer_as_it_was(self, job: Job) -> None:
        before = Trainer.training_step
        capsule = job.train(gpt2, bf16=True, recorder={"every": 1})
        assert serious(capsule) == []
        assert capsule.manifest.training.precision == "bf16-mixed"
        assert Trainer.training_step is before


class TestAFault:
    @pytest.mark.recorded("objective/labels-shifted-twice")
    @pytest.mark.fires("objective/labels-shifted-twice")
    def test_labels_shifted_by_the_collator_and_again_by_the_model_are_named(self, job: Job) -> None:
        assert "objective/labels-shifted-twice" in confirmed(job.train(collator=collate_shifted))

    @pytest.mark.recorded("objective/reduction")
    @pytest.mark.fires("objective/reduction")
    def test_a_loss_that_ignores_the_number_of_items_is_not_divided_by_the_accumulation(self, job: Job) -> None:
        capsule = job.train(trainer=Ignoring)
        assert "objective/reduction" in confirmed(capsule)
        faults = [
            candidate.faults
            for finding in analyze(capsule).findings
            if finding.rule == "objective/reduction" and finding.counterfactual is not None
            for candidate in finding.counterfactual.candidates
            if candidate.fits
        ]
        assert ("accumulation-not-divided",) in [tuple(each) for each in faults]


def test_labels_that_the_trainer_takes_out_of_the_batch_are_seen(job: Job) -> None:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch

    class Own(Trainer):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, compute_loss_func=loss, **keywords)

    capsule = job.train(trainer=Own, steps=2, recorder={"every": 1})
    assert all(batch.labels is not None for batch in capsule.batches())
    assert {batch.label_layout for batch in capsule.batches()} == {"unshifted"}


@pytest.mark.quiet("objective/unexplained-loss")
def test_a_loss_of_the_jobs_own_that_no_fault_explains_is_a_remark(job: Job) -> None:
    class Sharpened(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
            output = model(**inputs)
            entropy = torch.distributions.Categorical(logits=output.logits).entropy().mean()
            return 0.5 * output.loss + 0.4 * entropy

    capsule = job.train(trainer=Sharpened, steps=2, recorder={"every": 1})
    assert serious(capsule) == []
    (finding,) = [each for each in analyze(capsule).findings if each.rule == "objective/unexplained-loss"]
    assert any("Sharpened.compute_loss" in each for each in finding.next)


def test_an_exception_in_training_ends_in_a_crashed_capsule(job: Job) -> None:
    class Broken(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
            if self.state.global_step == 1:
                raise RuntimeError("the data ran dry")
            return super().compute_loss(model, inputs, *arguments, **keywords)

    with pytest.raises(RuntimeError, match="ran dry"):
        job.train(trainer=Broken)
    assert job.callback is not None
    assert job.callback.recorder is not None
    path = job.callback.recorder.path
    job.callback.on_train_end(None, None, None)
    capsule = Capsule.open(path)
    assert (capsule.status, capsule.trigger.kind) == ("crashed", "exception")
