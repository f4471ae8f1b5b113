"""Turns a finished window into evidence and writes it: a few appends a step, arrays only when there is a reason."""

from __future__ import annotations

import hashlib
import math
import time
from typing import Any

from torch import Tensor

from ..writer import CapsuleWriter
from . import statistics
from .batch import targets_of
from .ring import Micro, Ring, digests, evidence
from .tape import Row
from .window import Window, root_sum_square

# More samples than this in one window are not listed one by one.
MOST_SAMPLES = 4096


class Output:
    """Writes the windows of one rank.

    Args:
        writer: of the capsule.
        rank: this process.
        ignore_index: label of unsupervised positions.
        accumulation: configured micro-batches a window, where known.
    """

    def __init__(self, writer: CapsuleWriter, rank: int, ignore_index: int, accumulation: int | None) -> None:
        self.writer = writer
        self.rank = rank
        self.tokens_seen = 0
        self._ignore_index = ignore_index
        self._accumulation = accumulation
        self._learning_rate: float | None = None

    def scalars(self, window: Window, values: dict[str, float]) -> None:
        """One row each of the standard series and of what the user logged (which has the last word on a name)."""
        logged = {str(name): float(value) for name, value in window.logged.items()}
        self.writer.scalar_row(window.step, values | logged, time.time())

    def statistics(self, step: int, rows: list[Row], first: int = 0) -> None:
        """Rows of one window in order: norms in one write, full rows in another, where both occur in turns of each."""
        at = 0
        while at < len(rows):
            full = rows[at].full is not None
            end = at
            while end < len(rows) and (rows[end].full is not None) == full:
                end += 1
            if full:
                self.writer.stats([_full_row(step, first + at + i, row) for i, row in enumerate(rows[at:end])])
            else:
                self.writer.norms(step, [_norm_row(row) for row in rows[at:end]], order=first + at)
            at = end

    def records(self, window: Window, tokens: list[int | None]) -> None:
        """Events, samples and micro-batches of a window."""
        begins = [self._step_begin(window, micro) for micro in window.micros]
        rate = window.learning_rate
        if isinstance(rate, float):
            # A schedule moves a little at every step; only a jump is an event.
            if self._learning_rate and rate and not 0.8 < rate / self._learning_rate < 1.25:
                window.event("learning_rate_changed", before=self._learning_rate, after=rate)
            self._learning_rate = rate
        ordered = sorted([*begins, *window.events], key=lambda event: event["t"])
        self.writer.records("events", ordered)
        samples = [sample for micro in window.micros for sample in sample_records(micro, window.step, "train")]
        if samples:
            self.writer.records("samples", samples[:MOST_SAMPLES])
        microbatches = [
            self._microbatch(window.step, micro, count) for micro, count in zip(window.micros, tokens, strict=True)
        ]
        self.writer.records("microbatches", microbatches)
        if window.recomputed:
            self.writer.records("recompute", window.recomputed)

    def ring(self, ring: Ring) -> None:
        """Every batch of the ring that is not on disk yet, with the random state it began in."""
        for entry in ring.unwritten():
            for micro in entry.micros:
                found = evidence(micro)
                if found:
                    self.writer.batch(step=entry.step, split="train", micro=micro.index, **found)
                state = micro.random
                if state is not None:
                    states: dict[str, Any] = {"torch": state.torch, "python": state.python, "numpy": state.numpy}
                    states |= {"cuda": state.cuda} if state.cuda else {}
                    self.writer.rng(step=entry.step, micro=micro.index, **states)

    def supervised(self, micro: Micro) -> Tensor | int | None:
        """How many tokens the loss of a micro-batch covers, on the labels' device; None without labels."""
        labels = micro.arrays.get("labels")
        if labels is None or labels.ndim != 2:
            return None
        counted = targets_of(labels, micro.layout or "shifted", self._ignore_index) != self._ignore_index
        mask = micro.arrays.get("loss_mask")
        if mask is not None and mask.shape == counted.shape:
            counted = counted & (mask != 0)
        return int(counted.sum()) if statistics.at_hand(labels) else counted.sum()

    def _step_begin(self, window: Window, micro: Micro) -> dict[str, Any]:
        begin: dict[str, Any] = {"kind": "step_begin", "step": window.step, "micro": micro.index, "t": micro.began}
        if micro.row_digests:
            begin["batch_sha256"] = hashlib.sha256("\n".join(micro.row_digests).encode()).hexdigest()
        if micro.cursor is not None:
            begin["data_cursor"] = micro.cursor
        if micro.training_mode is not None:
            begin["training_mode"] = micro.training_mode
        return begin

    def _microbatch(self, step: int, micro: Micro, tokens: int | None) -> dict[str, Any]:
        record: dict[str, Any] = {"step": step, "micro": micro.index}
        if tokens is not None:
            record["tokens"] = tokens
        if self._accumulation is not None:
            record["window"] = self._accumulation
        if micro.odd_rows:
            record["odd_rows"] = micro.odd_rows
        if micro.sample_loss is not None and micro.sample_tokens:
            pairs = zip(micro.sample_loss, micro.sample_tokens, strict=True)
            record["loss_sum"] = sum(loss * count for loss, count in pairs if count > 0)
            if sum(micro.sample_tokens) > 0:
                record["loss_mean"] = record["loss_sum"] / sum(micro.sample_tokens)
        elif micro.told is not None:
            record["loss_mean"] = micro.told
            if tokens is not None:
                record["loss_sum"] = micro.told * tokens
        return record


def sample_records(micro: Micro, step: int, split: str) -> list[dict[str, Any]]:
    """Records of the rows of a micro-batch whose losses have been read."""
    found: list[dict[str, Any]] = []
    for index, (digest, length) in enumerate(zip(micro.row_digests, micro.row_lengths, strict=True)):
        sample: dict[str, Any] = {"step": step, "sha256": digest, "split": split, "length": length}
        if micro.sample_ids is not None and index < len(micro.sample_ids):
            sample["id"] = micro.sample_ids[index]
        # NaN is evidence where the row had tokens to predict, and nothing where it had none.
        if micro.sample_loss is not None and micro.sample_tokens and micro.sample_tokens[index] > 0:
            sample |= {"loss": micro.sample_loss[index], "loss_tokens": int(micro.sample_tokens[index])}
        found.append(sample)
    return found


def read_rows(micro: Micro) -> None:
    """Take digests and lengths of the rows (copies ids from a device)."""
    ids = micro.arrays.get("input_ids")
    if ids is not None and ids.ndim == 2 and ids.shape[0] <= MOST_SAMPLES:
        mask = micro.arrays.get("attention_mask")
        micro.row_digests, micro.row_lengths = digests(ids.cpu(), None if mask is None else mask.cpu())


def read_samples(window: Window) -> None:
    """Ask for the mean loss of each sample, and take digests and lengths of the rows."""
    for micro in window.micros:
        rows = None if micro.readings is None else micro.readings.per_row()
        if rows is not None:
            window.waiting.append((rows[0], lambda v, m=micro: setattr(m, "sample_loss", v)))
            window.waiting.append((rows[1], lambda v, m=micro: setattr(m, "sample_tokens", v)))
        read_rows(micro)


def standard_scalars(window: Window, tokens: list[int | None]) -> dict[str, float]:
    """The standard series of a window that has been read: see each name in the format's table of scalars."""
    values: dict[str, float] = {}
    reported = [micro.reported for micro in window.micros if micro.reported is not None]
    told = [micro.told for micro in window.micros if micro.told is not None]
    if reported:
        values["loss"] = math.fsum(reported) if all(map(math.isfinite, reported)) else sum(reported)
    elif told:
        values["loss"] = sum(told) / len(told)
    scale = window.numbers.get("loss_scale")
    own = root_sum_square([float(row.norm) for row in window.gradients.values()])
    if own is not None and not window.sharded:
        own /= scale or 1.0
        norm = values["grad_norm"] = window.numbers.get("grad_norm", own)
        if window.max_norm is not None:
            # The formula of clip_grad_norm_: gradients times max_norm / (norm + 1e-6) where that is below 1.
            values["grad_norm_clipped"] = norm * min(1.0, window.max_norm / (norm + 1e-6)) if norm == norm else norm
    elif own is not None:
        values["grad_norm_shard"] = own / (scale or 1.0)
    local = root_sum_square(window.local_values)
    if local is not None and own is not None and not window.sharded:
        values |= {"grad_norm_local": local / (scale or 1.0), "grad_norm_reduced": own}
    if window.update_values:
        values["param_norm"] = root_sum_square(window.parameter_values) or 0.0
        values["update_norm"] = root_sum_square(window.update_values) or 0.0
    if scale is not None:
        values |= {"loss_scale": scale, "overflow": float(window.overflowed)}
    if isinstance(window.learning_rate, float):
        values["learning_rate"] = window.learning_rate
    known = [count for count in tokens if count is not None]
    if known:
        values["tokens"] = float(sum(known))
    return values


def _norm_row(row: Row) -> tuple[str, str, str, tuple[int, ...], float, int, int]:
    about = row.about
    return (row.name, row.role, about["dtype"], about["shape"], float(row.norm), row.micro, row.call)


def _full_row(step: int, order: int, row: Row) -> dict[str, Any]:
    numbers: Any = row.full
    counts = {name: int(numbers[name]) for name in statistics.COUNTS}
    about = {name: value for name, value in row.about.items() if name != "like"}
    placed = {"step": step, "order": order, "name": row.name, "role": row.role, "micro": row.micro, "call": row.call}
    return placed | about | numbers | counts
