"""One captured micro-batch by token: what the model saw, what it was asked for, and what each token cost it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ...analyzers.objective.loss_batch import IGNORE_INDEX, is_shifted, micro_of
from ...analyzers.objective.loss_case import Micro
from ...analyzers.objective.loss_faults import BY_NAME, LossSpec
from ..text import visible
from .capsules import opened
from .sheets import BatchSheet, TokenRow, WorstToken

if TYPE_CHECKING:
    from ...capsules import Capsule
    from ...capsules.batches import Batch

Array = np.ndarray[Any, Any]
Say = Callable[[int], str]

#: Tokens of a sample sent at most.
MOST_TOKENS = 2_000
#: Standard deviations above the mean of the supervised losses from which a token stands out.
LOUD_SIGMAS = 3.0
_BYTES = 256
_BYTE_SIGNS = {0x20: "␣", 0x0A: "⏎", 0x09: "⇥"}


def batch(
    path: str,
    step: float | None = None,
    by: int = 0,
    top: int = 0,
    left: int = 0,
    samples: int = 3,
    tokens: int = 80,
    worst: int | None = None,
    fit: int = 16,
    faults: Sequence[str] = (),
    position: int | None = None,
) -> BatchSheet:
    """A window of one captured batch.

    Args:
        path: the capsule.
        step: the captured step nearest to it; without it the trigger's, else the last captured.
        by: captured batches to go from there (micro-batches and ranks of a step count one by one).
        top: first sample of the window.
        left: first token of the window.
        samples: samples in the window.
        tokens: tokens of each.
        worst: move the window to the supervised token of this place by loss, 0 being the worst.
        fit: tokens on screen, so that this token has as many on either side.
        faults: names of the loss catalogue; what they score is laid beside what is asked for.
        position: the batch by its place among all; goes before ``step``.
    """
    capsule = opened(path)
    captured = [each for each in capsule.batches() if "input_ids" in each.arrays]
    if not captured:
        return BatchSheet(step=None)
    if position is None:
        trigger = capsule.trigger.step if capsule.trigger else None
        if step is not None and step <= 0 < min(each.step for each in captured):
            step = None  # step 0 stands for what was wrong before anything was captured
        wanted = step if step is not None else trigger if trigger is not None else captured[-1].step
        position = min(range(len(captured)), key=lambda at: abs(captured[at].step - wanted))
    position = min(max(position + by, 0), len(captured) - 1)
    chosen = captured[position]
    table = _table(capsule, chosen)
    if table is None:
        return BatchSheet(step=chosen.step, position=position, batches=len(captured))
    found = table.worst(worst) if worst is not None else None
    rows, columns = table.tokens.shape
    if found is not None:
        top, left = found.row, min(found.token - fit // 2, columns - fit)
    top, left = min(max(top, 0), rows - 1), min(max(left, 0), columns - 1)
    stop = min(columns, left + min(tokens, MOST_TOKENS))
    return BatchSheet(
        step=chosen.step,
        rank=chosen.rank,
        micro=chosen.micro,
        position=position,
        batches=len(captured),
        split=chosen.split or "",
        reported=chosen.reported_loss,
        layout=table.layout,
        rows=rows,
        tokens=columns,
        top=top,
        left=left,
        loss_from=table.loss_from,
        bytes=table.bytes,
        mask_note=table.mask_note,
        roles=np.unique(table.role).tolist() if table.role is not None else [],
        mean=table.mean,
        loud=table.loud,
        fault=table.fault_words(faults),
        worst=found,
        samples=tuple(table.row(row, left, stop, faults) for row in range(top, min(rows, top + max(1, samples)))),
    )


@dataclass(eq=False)
class _Table:
    """A batch with everything moved to the token it belongs to; arrays are [B, columns]."""

    batch: Batch
    tokens: Array
    say: Say
    bytes: bool
    layout: str
    label: Array | None  # −1 none
    mask: Array | None
    role: Array | None
    loss: Array | None
    loss_from: str
    asked: Array
    padding: Array
    micro: Micro | None

    @cached_property
    def mask_note(self) -> str:
        """A mask that tells nothing new is told in words."""
        real = self.tokens >= 0
        if self.mask is None:
            return ""
        if bool((self.mask[real] != 0).all()):
            return "mask 1 everywhere"
        if self.role is not None and bool(((self.mask != 0) == (self.role != 0))[real].all()):
            return "mask 0 at padding only"
        return ""

    @property
    def _paid(self) -> Array:
        return self.loss[self.asked] if self.loss is not None else np.empty(0)

    @property
    def mean(self) -> float:
        """Mean loss of the supervised tokens."""
        paid = self._paid
        return float(paid.mean()) if paid.size else float("nan")

    @property
    def loud(self) -> float:
        """Loss from which a token stands out."""
        paid = self._paid[np.isfinite(self._paid)]
        return float(paid.mean() + LOUD_SIGMAS * paid.std()) if paid.size else float("inf")

    def worst(self, place: int) -> WorstToken | None:
        """The supervised token of this place by loss; what is not finite is worst of all."""
        if self.loss is None or not self.asked.any():
            return None
        size = np.where(self.asked, np.where(np.isfinite(self.loss), self.loss, np.inf), -np.inf)
        order = np.argsort(-size, axis=None, kind="stable")[: int(self.asked.sum())]
        flat = int(order[place % len(order)])
        row, token = divmod(flat, self.tokens.shape[1])
        text = self.say(int(self.tokens[row, token]))
        return WorstToken(place=place % len(order), row=row, token=token, text=text, loss=float(self.loss[row, token]))

    def row(self, row: int, left: int, stop: int, faults: Sequence[str]) -> TokenRow:
        """Tokens ``left`` to ``stop`` of one sample."""
        window = slice(left, stop)
        ids, asked = self.batch.sample_ids, self.asked[row]
        paid = self.loss[row][asked] if self.loss is not None else np.empty(0)
        return TokenRow(
            row=row,
            id=ids[row] if ids is not None else f"row {row}",
            length=int((~self.padding[row] & (self.tokens[row] >= 0)).sum()),
            supervised=int(asked.sum()),
            mean=float(paid.mean()) if paid.size else float("nan"),
            token=self._words(self.tokens[row, window]),
            label=self._words(self.label[row, window]) if self.label is not None else [],
            mask=self.mask[row, window].tolist() if self.mask is not None and not self.mask_note else [],
            role=self.role[row, window].tolist() if self.role is not None else [],
            loss=self.loss[row, window].tolist() if self.loss is not None else [],
            asked=asked[window].tolist(),
            **self._fault_row(row, window, faults),
        )

    def _words(self, ids: Array) -> list[str]:
        return [self.say(each) if each >= 0 else "" for each in ids.tolist()]

    # -- the fault

    def _fault_row(self, row: int, window: slice, faults: Sequence[str]) -> dict[str, Any]:
        spec = spec_of(faults)
        if spec is None or self.micro is None:
            return {}
        counted, targets, losses = self.micro.scored(spec.shift, spec.positions)
        healthy, own, _ = self.micro.scored()
        divided = self.micro.divided_by(spec.shift, spec.positions, spec.denominator)
        differs = counted & (~healthy | (targets != own))
        added = np.where(counted & ~healthy, 1, np.where(divided & ~counted & ~healthy, 2, 0))
        columns = self.tokens.shape[1]
        words = self._words(_after(np.where(differs, targets, -1), columns, -1)[row, window])
        return {
            "fault": words,
            "fault_loss": _after(np.where(counted, losses, -np.inf), columns, -np.inf)[row, window].tolist(),
            "added": _after(added, columns, 0)[row, window].tolist(),
        }

    def fault_words(self, faults: Sequence[str]) -> str:
        """What the fault does to the count, in one line."""
        spec = spec_of(faults)
        if not faults:
            return ""
        name = " + ".join(faults)
        if spec is None:
            return f"{name} is no fault of the loss: nothing to show on tokens"
        if self.micro is None:
            return f"{name}: the batch lacks logits or logsumexp and target_logits to show it on tokens"
        counted, targets, losses = self.micro.scored(spec.shift, spec.positions)
        healthy, own, _ = self.micro.scored()
        extra, moved = counted & ~healthy, counted & healthy & (targets != own)
        divided = self.micro.divided_by(spec.shift, spec.positions, spec.denominator) & ~counted & ~healthy
        words: list[str] = []
        if moved.any():
            words.append(f"{int(moved.sum()):,} positions are scored on another token (→)")
        if extra.any():
            words.append(
                f"{int(extra.sum()):,} positions (+) are scored beside the {int(healthy.sum()):,} asked for, "
                f"at {np.nanmean(losses[extra]):.3g} nats each"
            )
        if divided.any():
            words.append(f"{int(divided.sum()):,} positions (÷) count in the denominator only")
        return f"{name}: {'; '.join(words) or 'it changes how the loss is reduced, not which tokens count'}"


def spec_of(faults: Sequence[str]) -> LossSpec | None:
    """The specification under these faults of the loss catalogue, or None where one is not of it."""
    spec = LossSpec()
    for name in faults:
        if name not in BY_NAME:
            return None
        spec = BY_NAME[name].fault.edit(spec)
    return spec


@lru_cache(maxsize=4)
def _table(capsule: Capsule, batch: Batch) -> _Table | None:
    """The batch by token; None where its token ids cannot be read."""
    ids = batch.input_ids
    if ids is None or ids.ndim != 2:
        return None
    tokens, micro = np.asarray(ids, np.int64), micro_of(capsule, batch)
    training = capsule.manifest.training
    declared = training.ignore_index if training is not None else None
    ignore = IGNORE_INDEX if declared is None else declared
    labels = np.asarray(batch.labels, np.int64) if batch.labels is not None else None
    wanted = (labels != ignore) & (labels >= 0) if labels is not None else np.zeros(tokens.shape, bool)
    if batch.loss_mask is not None and batch.loss_mask.shape == wanted.shape:
        wanted &= np.asarray(batch.loss_mask) != 0
    if micro is not None:
        shifted = micro.shifted
    else:
        shifted = is_shifted(tokens, labels, wanted, batch.label_layout) if labels is not None else False
    rows, length = tokens.shape
    columns = length + 1 if shifted else length
    asked = micro.supervised[:, :columns].copy() if micro else _moved(wanted, columns, False, shifted)
    if shifted is not None and labels is not None:
        asked[:, 0] = False  # nothing predicts the first token of a row
    loss, loss_from = _losses(batch, micro, shifted)
    known = shifted is not None
    label = np.where(wanted, labels, -1) if labels is not None else None
    say, is_bytes = _vocabulary(capsule)
    mask = batch.attention_mask
    return _Table(
        batch=batch,
        tokens=micro.tokens[:, :columns] if micro else _wide(tokens, columns, -1),
        say=say,
        bytes=is_bytes,
        layout="" if labels is None or not known else "shifted" if shifted else "unshifted",
        label=None if label is None else _moved(label, columns, -1, shifted),
        mask=_wide(np.asarray(mask, np.int64), columns, 0) if mask is not None and mask.ndim == 2 else None,
        role=_wide(np.asarray(batch.roles, np.int64), columns, 0) if batch.roles is not None else None,
        loss=None if loss is None else _after(loss, columns, np.nan) if known else _wide(loss, columns, np.nan),
        loss_from=loss_from,
        asked=asked,
        padding=micro.padding[:, :columns] if micro else np.zeros((rows, columns), bool),
        micro=micro,
    )


def _losses(batch: Batch, micro: Micro | None, shifted: bool | None) -> tuple[Array | None, str]:
    """Loss at each predicting position [B, T], and where it comes from."""
    if batch.token_loss is not None:
        return np.asarray(batch.token_loss, np.float64), "token_loss"
    if micro is not None:
        return micro.scored()[2], "logits" if batch.logits is not None else "logsumexp − target logit"
    if shifted is not None and batch.logsumexp is not None and batch.target_logits is not None:
        following = np.asarray(batch.target_logits, np.float64)[..., 1]
        return np.asarray(batch.logsumexp, np.float64) - following, "logsumexp − target logit"
    return None, ""


def _after(values: Array, columns: int, fill: Any) -> Array:
    """What stands at the predicting position moved to the token that it predicts."""
    first = np.full((len(values), 1), fill, values.dtype)
    return np.hstack((first, values))[:, :columns]


def _moved(labels: Array, columns: int, fill: Any, shifted: bool | None) -> Array:
    """Labels moved to the token that they name."""
    return _after(labels, columns, fill) if shifted else _wide(labels, columns, fill)


def _wide(values: Array, columns: int, fill: Any) -> Array:
    """The same with ``columns`` columns."""
    more = columns - values.shape[1]
    return np.hstack((values, np.full((len(values), more), fill, values.dtype))) if more > 0 else values


def _vocabulary(capsule: Capsule) -> tuple[Say, bool]:
    """How a token id is written: by name where it is special, as a character where tokens are bytes, as a number."""
    tokenizer, model = capsule.manifest.tokenizer, capsule.manifest.model
    special = {number: visible(name) for name, number in ((tokenizer.special_ids if tokenizer else None) or {}).items()}
    sizes = {part.vocab_size for part in (tokenizer, model) if part is not None and part.vocab_size is not None}
    is_bytes = sizes == {_BYTES}

    def say(number: int) -> str:
        if number in special:
            return special[number]
        if is_bytes and 0 <= number < _BYTES:
            return _BYTE_SIGNS.get(number) or (chr(number) if 0x20 < number < 0x7F else f"\\x{number:02x}")
        return str(number)

    return say, is_bytes
