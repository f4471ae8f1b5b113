"""Reads a micro-batch once its forward has run: tokens, labels, how these are laid out, and the logits beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import batch
from .hooks import ModuleHooks
from .ring import LOGITS_BYTES, Micro
from .tape import Row, Tape
from .window import Window


class BatchReader:
    """What the recorder keeps of batches, with what it has learned of them.

    Args:
        tape: rows of the window.
        hooks: of the model.
        ignore_index: label of unsupervised positions.
    """

    def __init__(self, tape: Tape, hooks: ModuleHooks, ignore_index: int) -> None:
        self._tape = tape
        self._hooks = hooks
        self._ignore_index = ignore_index
        self._layouts: dict[str, batch.Layout] = {}  # by the labels' device

    @torch.no_grad()
    def read(self, window: Window, micro: Micro, call: dict[str, Any]) -> None:
        """Take arrays and logits from what the loop gave and from the call of the model.

        Args:
            window: that is open.
            micro: of it, at work.
            call: inputs, keywords and output of the forward, as the hooks saw it.
        """
        inputs, keywords = call.get("inputs", ()), call.get("keywords", {})
        graph = bool(call.get("graph", True))
        if graph and micro.training_mode is None:
            micro.training_mode = call.get("training")
        if micro.readings is not None and (micro.has_graph or not graph):
            return  # another forward after that of the loss
        arrays = batch.find(micro.given, inputs, keywords, self._hooks.root)
        if not micro.arrays or micro.readings is not None:
            # Loops reuse their buffers; ids and masks are small.
            micro.arrays = {name: tensor.detach().clone() for name, tensor in arrays.items()}
            micro.keys = batch.keys_of(micro.given) or ([*keywords] or None)
        ids, labels = micro.arrays.get("input_ids"), micro.arrays.get("labels")
        if ids is None:
            return
        if labels is not None:
            micro.layout, micro.odd_rows = self._layout(ids, labels)
        found = batch.readings_of(call.get("output"), ids, labels, micro.layout, self._ignore_index)
        if found is None:
            return
        logits, micro.readings = found
        micro.has_graph = graph
        if logits.nbytes + sum(each.logits_bytes for each in window.micros) <= LOGITS_BYTES:
            micro.hold_logits(logits)
        known = self._tape.seen(logits)
        about = self._hooks.describe("logits", "logits", logits)
        if known is None:
            self._tape.measure("logits", "logits", logits, 0, about)
        else:
            row = Row("logits", "logits", about, known.micro, 0, known.norm, known.counts, known.full)
            self._tape.rows.append(row)

    def _layout(self, ids: Tensor, labels: Tensor) -> batch.Layout:
        """Which token a label names. On a device it is read once and then taken to stay."""
        device = labels.device.type
        if device == "cpu" and ids.device.type == "cpu":
            return batch.label_layout(ids, labels, self._ignore_index)
        if device not in self._layouts:
            self._layouts[device] = batch.label_layout(ids, labels, self._ignore_index)
            return self._layouts[device]
        return batch.Layout(self._layouts[device].name, [])
