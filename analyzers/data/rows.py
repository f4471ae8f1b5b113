"""Captured batches as the data rules look at them: ids, labels and masks of one shape, and which tokens are real."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import thresholds as T

if TYPE_CHECKING:
    from ...capsules import Capsule
    from ...capsules.batches import Batch

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

IGNORE_INDEX = -100
#: Objectives whose labels are the tokens of the row itself. Others may ask for anything.
NEXT_TOKEN = frozenset({"causal-lm", "sft", "pretraining", "instruction-tuning"})
#: Objectives that see the row from both sides, so that padding to the right is seen by real tokens, too.
BIDIRECTIONAL = frozenset({"masked-lm", "mlm", "classification", "embedding", "contrastive", "denoising"})
MEDIA_ROLES = (5, 6, 7)
TRAIN = (None, "train")


@dataclass(frozen=True)
class Specials:
    """Ids of the tokenizer that the data rules ask for; None where unknown."""

    bos: int | None
    eos: int | None
    pad: int | None
    stops: frozenset[int]

    @property
    def pad_says_nothing(self) -> bool:
        """Whether a padding id at the end of a row may be a token in its own right."""
        return self.pad is None or self.pad in (self.bos, self.eos) or self.pad in self.stops


def specials(capsule: Capsule) -> Specials:
    """The special ids of the manifest's tokenizer."""
    found = capsule.manifest.tokenizer
    if found is None:
        return Specials(None, None, None, frozenset())
    return Specials(found.bos_id, found.eos_id, found.pad_id, frozenset(found.stop_ids or ()))


def objective(capsule: Capsule) -> str | None:
    """The declared objective, in small letters."""
    training = capsule.manifest.training
    return training.objective.lower() if training is not None and training.objective else None


def ignore_index(capsule: Capsule) -> int:
    """The label that asks for nothing."""
    training = capsule.manifest.training
    declared = training.ignore_index if training is not None else None
    return IGNORE_INDEX if declared is None else declared


def is_overfit(capsule: Capsule) -> bool:
    """Whether one batch is repeated on purpose."""
    run = capsule.manifest.run
    return bool(run is not None and run.overfit)


@dataclass(frozen=True, eq=False)
class Rows:
    """One captured micro-batch; all arrays are [B, T].

    Attributes:
        batch: where it comes from.
        ids: token ids.
        labels: as captured; None where absent or of another shape.
        ignore: the label that asks for nothing.
        special: ids of the tokenizer.
    """

    batch: Batch
    ids: Ints
    labels: Ints | None
    ignore: int
    special: Specials

    @cached_property
    def asked(self) -> Mask | None:
        """Labels that ask for a token (and that a loss mask of the same layout leaves in); None without labels."""
        if self.labels is None:
            return None
        asked = (self.labels != self.ignore) & (self.labels >= 0)
        kept = self._same("loss_mask")
        return asked if kept is None else asked & (kept != 0)

    @cached_property
    def visible(self) -> Mask | None:
        """Tokens that attention may see: of a mask [B, T] the non-zero ones, of [B, T, T] what any query sees.

        An additive mask (0 and large negative numbers) and one of document numbers are understood, too.
        """
        mask = self.batch.attention_mask
        if mask is None or not np.size(mask):
            return None
        mask = np.asarray(mask)
        if mask.ndim == 4 and mask.shape[1] == 1:
            mask = mask[:, 0]
        seen = mask > -1 if mask.dtype.kind == "f" and not (mask > 0).any() else mask != 0
        if seen.shape == self.ids.shape:
            return seen
        length = self.ids.shape[1]
        if seen.shape != (*self.ids.shape, length):
            return None
        return np.asarray(seen.any(axis=1), bool)

    @property
    def marked(self) -> Mask | None:
        """Real tokens as a mask [B, T] has them; None without such a mask."""
        mask = self.batch.attention_mask
        return self.visible if mask is not None and mask.ndim < 3 else None

    @cached_property
    def runs(self) -> tuple[Mask, Mask]:
        """(leading, trailing) runs of the padding id that touch an end of their row."""
        none = np.zeros(self.ids.shape, bool)
        if self.special.pad is None:
            return none, none
        pads = self.ids == self.special.pad
        leading = np.logical_and.accumulate(pads, axis=1)
        trailing = np.logical_and.accumulate(pads[:, ::-1], axis=1)[:, ::-1]
        return leading, trailing

    @cached_property
    def real(self) -> Mask:
        """Tokens that are no padding: by the mask, else by role, else by the padding id at the ends of the row.

        Where the padding id is the end-of-text id, the first of a run that ends a row is the end of the text.
        """
        if self.marked is not None:
            return self.marked
        roles = self._same("roles")
        if roles is not None and (roles == 0).any():
            return roles != 0
        leading, trailing = self.runs
        if self.special.pad is not None and self.special.pad in (self.special.eos, *self.special.stops):
            trailing = trailing & np.roll(trailing, 1, axis=1)
            trailing[:, 0] = False
        return ~(leading | trailing)

    @cached_property
    def packed(self) -> bool:
        """Whether rows are said to hold several documents: document numbers, cumulative lengths, restarts."""
        if self.batch.cu_seqlens is not None and np.size(self.batch.cu_seqlens) > 2:
            return True
        segments = self._same("segment_ids")
        if segments is not None and bool(((segments[:, 1:] != segments[:, :-1]) & self.real[:, 1:]).any()):
            return True
        return self.restarts is not None and bool(self.restarts[:, 1:].any())

    @cached_property
    def restarts(self) -> Mask | None:
        """Real tokens at which the position does not go up; None without position ids."""
        positions = self.positions
        if positions is None:
            return None
        found = np.zeros(self.ids.shape, bool)
        found[:, 1:] = (positions[:, 1:] <= positions[:, :-1]) & self.real[:, 1:] & self.real[:, :-1]
        return found

    @cached_property
    def positions(self) -> Ints | None:
        """Position ids as [B, T], the first kind where there are several; None where absent or of another shape."""
        array = self.batch.position_ids
        if array is None or not np.size(array):
            return None
        array = np.asarray(array, np.int64)
        if array.ndim == 3:
            array = array[0]
        if array.ndim == 1:
            array = array[None]
        try:
            return np.broadcast_to(array, self.ids.shape)
        except ValueError:
            return None

    def _same(self, name: str) -> Ints | None:
        """An array of the batch where it has the shape of the ids."""
        array = self.batch.array(name)
        return np.asarray(array, np.int64) if array is not None and np.shape(array) == self.ids.shape else None

    def same(self, name: str) -> Ints | None:
        """Any integer array of the batch that has the shape of the ids, else None."""
        return self._same(name)

    def name(self, row: int) -> str:
        """The sample's id, else its row."""
        names = self.batch.sample_ids or ()
        return str(names[row]) if row < len(names) else f"row {row}"

    def digests(self) -> list[str]:
        """SHA-256 of each row's real tokens as little-endian int64: what the recorder calls a sample's sha256."""
        kept = self.marked
        rows = (row if kept is None else row[kept[at]] for at, row in enumerate(self.ids))
        return [hashlib.sha256(np.ascontiguousarray(row).astype("<i8").tobytes()).hexdigest() for row in rows]


def rows_of(capsule: Capsule, splits: tuple[str | None, ...] = TRAIN, most: int = T.MOST_BATCHES) -> Iterator[Rows]:
    """Captured batches with ids [B, T], in order of step; of very many an even choice.

    Args:
        capsule: the evidence.
        splits: splits to take; None stands for batches that name none.
        most: batches looked at.
    """
    chosen = [each for each in capsule.batches() if each.split in splits and "input_ids" in each.arrays]
    if len(chosen) > most:
        chosen = [chosen[at] for at in np.unique(np.linspace(0, len(chosen) - 1, most).round().astype(int))]
    special, ignore = specials(capsule), ignore_index(capsule)
    for batch in chosen:
        ids = _matrix(batch.input_ids)
        if ids is None:
            continue
        labels = _matrix(batch.labels)
        if labels is not None and labels.shape != ids.shape:
            labels = None
        yield Rows(batch, ids, labels, ignore, special)


def _matrix(array: Any) -> Ints | None:
    """Integers as [B, T]; None for nothing, for other shapes and for fractions."""
    if array is None or np.ndim(array) not in (1, 2) or np.asarray(array).dtype.kind not in "iub":
        return None
    matrix = np.atleast_2d(np.asarray(array, np.int64))
    return matrix if matrix.size else None
