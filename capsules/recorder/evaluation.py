"""Evaluation passes: found where the model runs without a graph or in evaluation mode, or told by the loop.

A forward outside a micro-batch belongs to a pass where gradients are off, the model is in evaluation mode, or the loop
said so; a forward inside one does where it has both. Passes end with the next micro-batch. Whether the model drops out
activations, whether a graph is kept and whether random numbers were drawn is written as it was at the first forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..writer import CapsuleWriter
from . import batch as batches
from .hooks import ModuleHooks
from .output import read_rows, sample_records
from .ring import Micro, RandomState, evidence
from .tape import gather

# Batches of a pass whose tokens are looked at, whose arrays are written, and losses added up one by one.
MOST_READ, MOST_KEPT, MOST_LOSSES = 32, 2, 4096

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

Attempt = Callable[[str, Callable[[], None]], None]


@dataclass
class Pass:
    """One evaluation under way."""

    number: int  # of the pass in this recording, from 0
    step: int
    name: str | None
    begun: dict[str, Any] | None = None  # the event, once the first forward was seen
    count: int = 0
    supervised: bool = False
    micros: list[Micro] = field(default_factory=list[Micro])
    losses: list[Tensor] = field(default_factory=list[Tensor])
    given: Any = None
    sample_ids: list[str] | None = None

    @property
    def looked_at(self) -> bool:
        """Whether tokens are read: of the first passes, and then of ever fewer, since most see the same samples."""
        return self.number < 8 or self.number & (self.number - 1) == 0

    def batch(self, batch: Any, sample_ids: Any = None) -> None:
        """What the loader gave for the next forward, where the model is not called with all of it (labels, say)."""
        self.given = batch
        self.sample_ids = None if sample_ids is None else [str(each) for each in sample_ids]


class Evaluations:
    """The evaluation passes of one recorder.

    Args:
        hooks: of the model.
        writer: of the capsule.
        ignore_index: label of unsupervised positions.
        where: tells the step of a pass, and whether a window is open.
        attempt: runs a part of the recording and disables it where it raises.
    """

    def __init__(
        self,
        hooks: ModuleHooks,
        writer: CapsuleWriter,
        ignore_index: int,
        where: Callable[[], tuple[int, bool]],
        attempt: Attempt,
    ) -> None:
        self._root = hooks.root
        self._dropouts = [each for each in hooks.root.modules() if isinstance(each, nn.Dropout) and each.p]
        self._norms = [each for each in hooks.root.modules() if isinstance(each, _BATCH_NORMS)]
        self._writer = writer
        self._ignore_index = ignore_index
        self._where = where
        self._attempt = attempt
        self._told = False
        self._mode = (False, False)
        self._random: RandomState | None = None  # before the first forward of a pass
        self._passes = 0
        self.open: Pass | None = None
        self.logged: set[str] = set()  # names that the loop itself logs
        hooks.outside = self

    def begin(self, name: str | None) -> Pass:
        """The loop says that an evaluation begins; an open pass ends."""
        self.end()
        self._told = True
        return self._new(name)

    def _new(self, name: str | None) -> Pass:
        self.open = Pass(self._passes, self._where()[0], name)
        self._passes += 1
        return self.open

    # -- what the hooks tell

    def before(self, module: nn.Module) -> bool:
        """Whether the forward that begins belongs to a pass."""
        # Of the parts only those that drop out activations count: a frozen encoder in evaluation mode is normal.
        training = module.training or any(each.training for each in self._dropouts)
        mode = (training, torch.is_grad_enabled())
        if not self._told and mode[0] and mode[1]:
            return False
        if self.open is not None and self.open.begun is not None and not self._told and mode != self._mode:
            self.end()
        self._mode = mode
        if self.open is None or self.open.begun is None:
            self._random = None
            self._attempt("random state of evaluations", lambda: setattr(self, "_random", RandomState.capture()))
        return True

    def after(self, inputs: tuple[Any, ...], keywords: Mapping[str, Any], output: Any) -> None:
        """The forward returned; never raises."""
        self._attempt("evaluation", lambda: self._after(inputs, keywords, output))

    @torch.no_grad()
    def _after(self, inputs: tuple[Any, ...], keywords: Mapping[str, Any], output: Any) -> None:
        current = self.open or self._new(None)
        current.count += 1
        given, current.given = current.given, None
        names, current.sample_ids = current.sample_ids, None
        read = current.count <= MOST_READ and current.looked_at
        found = batches.find(given, inputs, keywords, self._root) if read else {}
        loss = batches.loss_in(output)
        supervised = "labels" in found or loss is not None
        current.supervised |= supervised
        if loss is not None and len(current.losses) < MOST_LOSSES:
            current.losses.append(loss.detach().clone())
        if current.begun is None:
            self._begins(current, supervised)
        if found and (supervised or self._told):
            micro = Micro(current.count - 1, sample_ids=names)
            micro.arrays = {name: tensor.detach().clone() for name, tensor in found.items()}
            micro.keys = batches.keys_of(given) or ([*keywords] or None)
            ids, labels = micro.arrays["input_ids"], micro.arrays.get("labels")
            if labels is not None:
                layout = batches.label_layout(ids, labels, self._ignore_index)
                micro.layout, micro.odd_rows = layout.name, layout.odd
            readings = batches.readings_of(output, ids, labels, micro.layout, self._ignore_index)
            micro.readings = None if readings is None else readings[1]
            read_rows(micro)
            if loss is not None:
                micro.loss_dtype = str(loss.dtype).removeprefix("torch.")
                micro.backward_losses = [loss.detach().clone()]
            current.micros.append(micro)

    def _begins(self, current: Pass, supervised: bool) -> None:
        nested = self._where()[1]
        event = {"kind": "eval_begin", "step": current.step, "t": time.time(), "pass": current.number}
        event |= {
            "training_mode": self._mode[0],
            "grad_enabled": self._mode[1],
            "told": self._told,
            "supervised": supervised,
        }
        if any(each.training for each in self._norms):
            event["batch_statistics"] = True
        before, self._random = self._random, None
        if before is not None:
            event["random_drawn"] = before.moved()
        event |= {"name": current.name} if current.name else {}
        event |= {"nested": True} if nested else {}
        current.begun = event
        self._writer.record("events", event)

    # -- the end of a pass

    def end(self, split: str | None = None) -> None:
        """Write what the open pass showed; does nothing without one.

        Args:
            split: the data it ran on, where the caller knows; a pass that was only found may as well look at training
                data, and its samples then belong to no split.
        """
        current, told = self.open, self._told
        self.open, self._told = None, False
        if current is not None and current.begun is not None:
            self._attempt("evaluation", lambda: self._write(current, split or ("validation" if told else None)))
        self.logged.clear()

    def _write(self, current: Pass, split: str | None) -> None:
        token_losses = [micro.readings.token_loss for micro in current.micros if micro.readings is not None]
        rows: list[Tensor] = []
        for micro in current.micros:
            if micro.readings is not None:
                rows += micro.readings.per_row() or ()
        read = iter(gather([*current.losses, *rows]))
        losses = [next(read)[0] for _ in current.losses]
        samples: list[dict[str, Any]] = []
        total, tokens = 0.0, 0
        for micro in current.micros:
            if micro.readings is not None and micro.readings.token_loss is not None:
                micro.sample_loss, micro.sample_tokens = next(read), next(read)
                pairs = zip(micro.sample_loss, micro.sample_tokens, strict=True)
                total += sum(loss * count for loss, count in pairs if count > 0)
                tokens += int(sum(micro.sample_tokens))
            samples += sample_records(micro, current.step, split or "evaluation")
        end: dict[str, Any] = {"kind": "eval_end", "step": current.step, "t": time.time(), "pass": current.number}
        end["batches"] = current.count
        end |= {"name": current.name} if current.name else {}
        value = sum(losses) / len(losses) if losses else None
        if value is None and tokens and len(token_losses) == current.count:
            value = total / tokens
        if value is not None:
            end["loss"] = value
            name = "eval_loss" if current.name in (None, "eval", "val", "validation") else f"eval_loss/{current.name}"
            if name not in self.logged:
                self._writer.scalar_row(current.step, {name: value}, end["t"])
        if samples:
            self._writer.records("samples", samples)
        self._writer.record("events", end)
        for micro in current.micros[:MOST_KEPT]:
            if micro.backward_losses:
                micro.reported = float(micro.backward_losses[0])
            about: dict[str, Any] = {
                "evaluation": current.name or ("told" if split else "found"),
                "pass": current.number,
            }
            self._writer.batch(step=current.step, split="validation", micro=micro.index, **evidence(micro), **about)
