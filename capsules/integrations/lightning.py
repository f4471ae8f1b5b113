"""A callback for the Trainer of Lightning 2 that records its runs.

    trainer = lightning.Trainer(..., callbacks=[LLMConsoleCallback("runs")])
    trainer.fit(module, loader)

A window is one optimizer step, a micro-batch is one batch of the training loader. Recorded is the module that holds all
the parameters: the model inside a LightningModule that wraps one, else the LightningModule. Lightning divides each
loss by the accumulation, so what is optimised is the mean of the means of the batches; a job that means something else
says so: ``manifest={"training": {"reduction": "token-mean"}}``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING or find_spec("lightning") is not None:
    from lightning.pytorch.callbacks import Callback
else:  # the package's older name
    from pytorch_lightning.callbacks import Callback

from ..recorder.checkpoints import Checkpoints
from ..recorder.describe import merged
from ..recorder.recorder import Recorder
from ..recorder.step import Step


class LLMConsoleCallback(Callback):
    """Records what a Trainer does into one capsule a call of ``fit``.

    Args:
        directory: where capsules are kept.
        options: of ``Recorder`` (``every``, ``keep_batches``, ``manifest``, ``tokenizer``, ``contract`` …).
    """

    def __init__(self, directory: str | os.PathLike[str], **options: Any) -> None:
        super().__init__()
        self._directory = directory
        self._options = options
        self._early: Checkpoints | None = None
        self._step: Step | None = None
        self.recorder: Recorder | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Watch checkpoints from here on: a resume loads them before training begins."""
        if stage == "fit":
            self._early = Checkpoints(core(pl_module))
            self._early.watch()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach a recorder to the model and the optimizers as Lightning has prepared them."""
        self._close()
        options = dict(self._options)
        found = {"training": facts(trainer)}
        options["manifest"] = merged(found, dict(options.get("manifest") or {}))
        options.setdefault("config", dict(getattr(pl_module, "hparams", None) or {}))
        options.setdefault("checkpoints", self._early)
        self.recorder = Recorder(self._directory, model=core(pl_module), optimizer=list(trainer.optimizers), **options)
        self._early = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A micro-batch begins."""
        if self.recorder is not None:
            cursor = {"epoch": trainer.current_epoch, "batch": batch_idx}
            self._step = self.recorder.step(batch=batch, cursor=cursor, step=trainer.global_step)
            self._step.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A micro-batch has ended, and with it maybe an optimizer step."""
        self._leave(None)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """A pass over the validation loaders has ended."""
        if self.recorder is None or trainer.sanity_checking:
            return
        metrics: Mapping[str, Any] = trainer.callback_metrics
        numbers = {str(name): value for name, value in metrics.items() if getattr(value, "numel", lambda: 1)() == 1}
        if "val_loss" in numbers:
            numbers["eval_loss"] = numbers["val_loss"]
        self.recorder.log(step=max(trainer.global_step - 1, 0), **numbers)
        self.recorder.evaluated()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Keep the window in which it was raised, and end."""
        self._leave(exception)
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.__exit__(type(exception), exception, exception.__traceback__)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Seal the capsule."""
        self._close()

    def _leave(self, error: BaseException | None) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None if error is None else type(error), error, None)

    def _close(self) -> None:
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.close()


def core(module: nn.Module) -> nn.Module:
    """The one module inside ``module`` that holds all its parameters, where there is one; else ``module``."""
    own = {id(parameter) for parameter in module.parameters()}
    for child in module.children():
        if own and {id(parameter) for parameter in child.parameters()} == own:
            return child
    return module


def facts(trainer: Any) -> dict[str, Any]:
    """The manifest's ``training`` as far as Lightning's Trainer says it."""
    precision = str(trainer.precision)
    kinds = {"bf16-mixed": "bf16-mixed", "16-mixed": "fp16-mixed", "bf16-true": "bf16-pure", "32-true": "fp32"}
    found: dict[str, Any] = {
        "accumulation_steps": trainer.accumulate_grad_batches,
        "max_grad_norm": trainer.gradient_clip_val,
        "precision": kinds.get(precision),
        "epochs": float(trainer.max_epochs) if (trainer.max_epochs or -1) > 0 else None,
    }
    if (trainer.max_steps or -1) > 0:
        found["schedule"] = {"total_steps": trainer.max_steps}
    return {name: value for name, value in found.items() if value is not None}
