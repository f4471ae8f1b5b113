"""A callback for the Trainer of transformers (4.46 and later) that records its runs.

    trainer = Trainer(model, args, ..., callbacks=[LLMConsoleCallback("runs")])
    trainer.train()

A window is one optimizer step, its micro-batches are what ``training_step`` gets, before ``compute_loss`` takes the
labels out. Loss, gradients, clipping and steps are seen as in any loop; what the arguments say (accumulation, clipping,
precision, schedule) goes into the manifest, what the Trainer logs is kept as ``logged_NAME`` beside what was measured,
and evaluations and checkpoints are found where they happen, those of a resume included.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from ..recorder.checkpoints import Checkpoints
from ..recorder.recorder import Recorder
from ..recorder.replaced import Function, Replaced

log = logging.getLogger("llmconsole.recorder")

# Where data sets keep the names of samples; kept by the Trainer with ``remove_unused_columns=False`` only.
SAMPLE_IDS = ("sample_ids", "sample_id", "example_id", "uid", "id", "idx", "index")
# Numbers that the Trainer logs as means over its logging steps, while the recorder has them of each step.
_AVERAGED = ("loss", "grad_norm", "learning_rate")
_NOT_SCALARS = ("epoch", "step")


class LLMConsoleCallback(TrainerCallback):
    """Records what a Trainer does into one capsule a call of ``train``.

    A custom ``compute_loss`` or ``compute_loss_func`` is recorded like the Trainer's own. The Trainer's contract, that
    the loss is the mean over the supervised tokens of the whole accumulated batch, is written into the manifest for
    causal models; a loss that is meant to be another must say so: ``manifest={"training": {"reduction": "sum"}}``. That
    the loss is not the Trainer's own is noted: a number that no named fault explains is then a remark, no alarm.

    Args:
        directory: where capsules are kept.
        options: of ``Recorder`` (``every``, ``keep_batches``, ``manifest``, ``contract``, ``title`` …).
    """

    def __init__(self, directory: str | os.PathLike[str], **options: Any) -> None:
        self._directory = directory
        self._options = options
        self._early: Checkpoints | None = None
        self._micros = 0
        self._told = False
        self.recorder: Recorder | None = None

    # -- what the Trainer calls

    def on_init_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Watch checkpoints from here on: a resume loads them before training begins."""
        model = known.get("model")
        if isinstance(model, torch.nn.Module):
            self._early = Checkpoints(model)
            self._early.watch()

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Attach a recorder to the model and the optimizer as the Trainer has prepared them."""
        self._close()
        model, optimizer = known.get("model"), known.get("optimizer")
        options = dict(self._options)
        given = options.pop("manifest", None) or {}
        try:
            found = facts(args, state, model)
            options.setdefault("config", args.to_dict())
        except Exception as error:
            log.warning("not recording the Trainer's arguments: %s: %s", type(error).__name__, error)
            found = {}
        if os.path.basename(str(args.output_dir)) not in ("", "trainer_output"):
            options.setdefault("title", os.path.basename(str(args.output_dir)))
        options.setdefault("tokenizer", known.get("processing_class", known.get("tokenizer")))
        self.recorder = Recorder(
            self._directory,
            model=model,
            optimizer=getattr(optimizer, "optimizer", optimizer),  # accelerate wraps it
            manifest=_joined(found, given),
            checkpoints=self._early,
            **options,
        )
        self._early, self._told = None, False
        _attach(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """An optimizer step begins."""
        self._micros = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **known: Any) -> None:
        """Keep what the Trainer logs, with the step that it speaks of."""
        if self.recorder is None:
            return
        numbers: dict[str, float] = {}
        for name, value in (logs or {}).items():
            if isinstance(value, (int, float)) and name not in _NOT_SCALARS:
                numbers[f"logged_{name}" if name in _AVERAGED else str(name)] = float(value)
        if numbers:
            self.recorder.log(step=max(int(state.global_step) - 1, 0), **numbers)

    def on_evaluate(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """The Trainer has evaluated its ``eval_dataset``."""
        if self.recorder is not None:
            self.recorder.evaluated()

    def on_save(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """A checkpoint was written, whoever wrote its parts."""
        if self.recorder is not None:
            self.recorder.saved(os.path.join(args.output_dir, f"checkpoint-{state.global_step}", "trainer_state.json"))

    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Seal the capsule."""
        self._close()

    # -- micro-batches

    def micro_batch(self, trainer: Any, inputs: Any) -> AbstractContextManager[Any]:
        """The micro-batch that ``training_step`` is about to run."""
        recorder = self.recorder
        if recorder is None or not recorder.recording:
            return nullcontext()
        state = trainer.state
        cursor = {"epoch": int(state.epoch or 0), "global_step": state.global_step, "micro": self._micros}
        self._micros += 1
        if not self._told and (words := own_loss(trainer)):
            recorder.event("log", level="info", type="custom_loss", message=words)
        self._told = True
        batch = dict(inputs) if isinstance(inputs, Mapping) else inputs
        return recorder.step(batch=batch, sample_ids=sample_ids(batch), cursor=cursor, step=state.global_step)

    def _close(self) -> None:
        _detach(self)
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.close()


def facts(args: Any, state: Any, model: Any) -> dict[str, Any]:
    """The parts of the manifest that the Trainer's arguments say."""
    training: dict[str, Any] = {
        "accumulation_steps": args.gradient_accumulation_steps,
        "micro_batch": args.per_device_train_batch_size,
        "epochs": float(args.num_train_epochs) if args.max_steps <= 0 else None,
        "max_grad_norm": args.max_grad_norm or None,
        "precision": "bf16-mixed" if args.bf16 else "fp16-mixed" if args.fp16 else None,
        "activation_checkpointing": args.gradient_checkpointing or None,
        "schedule": {
            "name": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
            "warmup_steps": args.get_warmup_steps(state.max_steps),
            "total_steps": state.max_steps,
        },
        "dataloader": {"workers": args.dataloader_num_workers, "pin_memory": args.dataloader_pin_memory},
    }
    kind = type(getattr(model, "base_model", None) or model).__name__ + type(model).__name__
    if ("ForCausalLM" in kind or "LMHead" in kind) and not args.label_smoothing_factor:
        training |= {"objective": "causal-lm", "reduction": "token-mean", "ignore_index": -100}
    found: dict[str, Any] = {"training": {name: value for name, value in training.items() if value is not None}}
    if getattr(getattr(model, "config", None), "_name_or_path", ""):
        found["model"] = {"initialised": "pretrained"}
    if args.seed is not None:
        found["run"] = {"seed": args.seed}
    return found


def own_loss(trainer: Any) -> str:
    """Whose the loss is, where it is not the Trainer's own; an empty string where it is."""
    kind = type(trainer)
    if kind.compute_loss is not Trainer.compute_loss:
        return f"the loss is that of {kind.__name__}.compute_loss"
    return "the loss is that of a compute_loss_func" if getattr(trainer, "compute_loss_func", None) else ""


def sample_ids(batch: Any) -> Any:
    """Names of the samples in a batch, where it carries one for each row; None otherwise."""
    if not isinstance(batch, Mapping):
        return None
    rows = next((len(each) for each in batch.values() if isinstance(each, torch.Tensor) and each.ndim > 1), None)
    for name in SAMPLE_IDS:
        value = batch.get(name)
        listed = value.tolist() if isinstance(value, torch.Tensor) and value.ndim == 1 else value
        if isinstance(listed, (list, tuple)) and len(listed) == rows:
            return listed
    return None


def _joined(found: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    joined = dict(found)
    for name, value in given.items():
        known = joined.get(name)
        joined[name] = {**known, **value} if isinstance(known, dict) and isinstance(value, Mapping) else value
    return joined


# -- the one place of the Trainer that no callback reaches: what a micro-batch is made of

_attached: list[LLMConsoleCallback] = []
_replaced = Replaced()


def _attach(callback: LLMConsoleCallback) -> None:
    if not _attached:
        _replaced.put(Trainer, "training_step", _training_step)
    _attached.append(callback)


def _detach(callback: LLMConsoleCallback) -> None:
    if callback in _attached:
        _attached.remove(callback)
        if not _attached:
            _replaced.put_back()


def _training_step(original: Function) -> Function:
    def training_step(self: Any, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        callback = next((each for each in self.callback_handler.callbacks if each in _attached), None)
        if callback is None:
            return original(self, model, inputs, *arguments, **keywords)
        with callback.micro_batch(self, inputs):
            return original(self, model, inputs, *arguments, **keywords)

    return training_step
