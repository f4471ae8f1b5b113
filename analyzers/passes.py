"""Evaluation passes as rules read them: under which weights and in which mode they ran, and the rows they looked at."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from .rounding import UNIT_ROUNDOFF

if TYPE_CHECKING:
    from ..capsules import Capsule
    from ..capsules.batches import Batch

#: Batches of validation that are read; the first ones of the recording.
MOST_BATCHES = 128
#: Root mean square of logits where none were captured.
USUAL_LOGITS = 16.0
#: Matrix units of a GPU round float32 to this, unless that is switched off.
TF32_ROUNDOFF = 2.0**-11
#: Events after which the weights are others.
_WEIGHTS_CHANGE = ("optimizer_step", "checkpoint_loaded", "weights_loaded", "weights_updated")


@dataclass(frozen=True)
class Pass:
    """One evaluation pass; what its event did not say is None.

    ``normalised`` is true where a norm took its statistics from the batch. ``weights`` counts the changes of the
    weights on record before it: passes with equal counts ran on equal weights. ``told`` is False where the recorder
    found the pass by itself, and then its purpose is not known.
    """

    step: int | None
    rank: int
    number: int | None
    name: str | None
    training: bool | None
    grad: bool | None
    random: bool | None
    normalised: bool
    told: bool | None
    supervised: bool | None
    nested: bool
    first: bool
    weights: int


_PASSES: WeakKeyDictionary[Capsule, tuple[Pass, ...]] = WeakKeyDictionary()


def passes(capsule: Capsule) -> tuple[Pass, ...]:
    """The evaluation passes that the events tell of, in their order, rank after rank."""
    if capsule not in _PASSES:
        _PASSES[capsule] = tuple(_passes(capsule))
    return _PASSES[capsule]


def _passes(capsule: Capsule) -> list[Pass]:
    found: list[Pass] = []
    ranks: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in capsule.records("events"):
        ranks[int(event.get("rank") or 0)].append(event)
    for rank, events in ranks.items():
        if all(isinstance(event.get("t"), int | float) for event in events):
            events = sorted(events, key=lambda event: event["t"])  # a pass is written before the window around it
        weights, trained = 0, False
        for event in events:
            kind, number = event.get("kind"), event.get("pass")
            weights += kind in _WEIGHTS_CHANGE
            trained |= kind == "step_begin"
            if kind == "eval_begin":
                found.append(
                    Pass(
                        step=event.get("step"),
                        rank=rank,
                        number=number if isinstance(number, int) else None,
                        name=str(event["name"]) if event.get("name") else None,
                        training=event.get("training_mode"),
                        grad=event.get("grad_enabled"),
                        random=event.get("random_drawn"),
                        normalised=bool(event.get("batch_statistics")),
                        told=event.get("told"),
                        supervised=event.get("supervised"),
                        nested=bool(event.get("nested")),
                        first=not trained,
                        weights=weights,
                    )
                )
    return found


@dataclass(frozen=True)
class Row:
    """One sample as it went through one evaluation batch.

    Attributes:
        key: equal for equal tokens under equal weights in an evaluation of one name.
        left, width: padding before its tokens, and length of the batch's rows.
        beside: digest of what else was in the batch.
        losses: nats at each token that predicts the next one of the row, NaN where it was not asked for.
        scale: root mean square of the logits that the losses were made of.
        ran: the pass, where it is known.
        found: the recorder came upon the batch by itself, and nobody said that it is held out.
    """

    sample: str
    key: tuple[Any, ...]
    step: int
    rank: int
    tokens: int
    left: int
    width: int
    beside: str
    losses: NDArray[np.float64]
    scale: float
    ran: Pass | None
    found: bool

    @property
    def mean(self) -> float:
        """Its loss in nats a token."""
        return float(np.nanmean(self.losses)) if np.isfinite(self.losses).any() else math.nan

    def same_place(self, other: Row) -> bool:
        """Whether it is padded alike in both batches."""
        return (self.left, self.width) == (other.left, other.width)


def evaluated_rows(capsule: Capsule) -> list[Row]:
    """The rows of the captured evaluation batches that have losses of their own."""
    known = {(each.rank, each.number): each for each in passes(capsule)}
    tokenizer = capsule.manifest.tokenizer
    pad = None if tokenizer is None else tokenizer.pad_id
    chosen = [each for each in capsule.batches() if each.split == "validation"][:MOST_BATCHES]
    return [row for batch in chosen for row in _rows(batch, pad, known)]


def _rows(batch: Batch, pad: int | None, known: dict[tuple[int, int | None], Pass]) -> Iterator[Row]:
    losses = _token_losses(batch)
    if losses is None:
        return
    ids = _matrix(batch.input_ids, losses.shape)
    mask = _matrix(batch.attention_mask, losses.shape)
    kept = np.isfinite(losses) if mask is None and ids is None else np.ones(losses.shape, np.bool_)
    if mask is not None:
        kept = mask > 0
    if ids is not None:
        pad = _padding(ids, losses) if pad is None and mask is None else pad
        if pad is not None:
            kept &= ~_ends(ids == pad)
    number = batch.attributes.get("pass")
    ran = known.get((batch.rank, number)) if isinstance(number, int) else None
    name = ran.name if ran is not None else batch.attributes.get("evaluation")
    weights = None if ran is None else ran.weights
    names = batch.sample_ids or ()
    scales = _scales(batch, losses.shape)
    content: list[str | None] = []
    for row in range(len(losses)):
        if ids is not None:
            content.append(hashlib.sha256(np.ascontiguousarray(ids[row][kept[row]], "<i8").tobytes()).hexdigest())
        else:
            content.append(f"{names[row]} of {kept[row].sum()}" if row < len(names) else None)
    for row, text in enumerate(content):
        at = np.flatnonzero(kept[row])
        if text is None or len(at) < 2:
            continue
        own = losses[row, at[:-1]]
        if not np.isfinite(own).any():
            continue
        others = "\n".join(sorted(each or "" for index, each in enumerate(content) if index != row))
        yield Row(
            sample=str(names[row]) if row < len(names) else f"row {row}",
            key=(batch.step, batch.rank, weights, str(name), text),
            step=batch.step,
            rank=batch.rank,
            tokens=len(at),
            left=int(at[0]),
            width=losses.shape[1],
            beside=hashlib.sha256(others.encode("utf-8", "replace")).hexdigest(),
            losses=own,
            scale=float(scales[row]),
            ran=ran,
            found=batch.attributes.get("evaluation") == "found",
        )


def _padding(ids: NDArray[Any], losses: NDArray[np.float64]) -> int | None:
    """The id that fills rows at their ends and is asked for nowhere there, where nobody named one."""
    found: set[int] = set()
    for row, asked in zip(ids, np.isfinite(losses), strict=True):
        for tokens, wanted in ((row, asked), (row[::-1], asked[::-1])):
            run = int(np.argmin(np.append(tokens == tokens[0], False)))
            if run >= 2 and not wanted[: run - 1].any():  # the padding before a text predicts its first token
                found.add(int(tokens[0]))
    return found.pop() if len(found) == 1 else None


def _ends(same: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Runs of True at the beginnings and the ends of rows, [B, T]."""
    before = np.logical_and.accumulate(same, axis=1)
    return before | np.logical_and.accumulate(same[:, ::-1], axis=1)[:, ::-1]


def _matrix(array: Any, shape: tuple[int, ...]) -> NDArray[Any] | None:
    return np.asarray(array) if array is not None and np.shape(array) == shape else None


def _token_losses(batch: Batch) -> NDArray[np.float64] | None:
    """Nats [B, T] at the predicting positions: captured, or from the logits for the next token of the row."""
    if batch.token_loss is not None and np.ndim(batch.token_loss) == 2:
        return np.asarray(batch.token_loss, np.float64)
    found: NDArray[np.float64] | None = None
    if batch.logsumexp is not None and batch.target_logits is not None:
        found = np.asarray(batch.logsumexp, np.float64) - np.asarray(batch.target_logits, np.float64)[..., 1]
    elif batch.logits is not None and batch.input_ids is not None:
        logits, ids = np.asarray(batch.logits, np.float64), np.asarray(batch.input_ids)
        if ids.size and logits.shape[:2] == ids.shape and 0 <= ids.min() <= ids.max() < logits.shape[2]:
            top = logits.max(axis=2)
            lse = top + np.log(np.exp(logits - top[..., None]).sum(axis=2))
            following = np.roll(ids, -1, axis=1)
            found = lse - np.take_along_axis(logits, following[..., None], axis=2)[..., 0]
    if found is None or found.ndim != 2 or not found.size:
        return None
    found = found.copy()
    found[:, -1] = np.nan
    return found


def _scales(batch: Batch, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Root mean square of the captured logits of each row."""
    lse = _matrix(batch.logsumexp, shape)
    if lse is None:
        return np.full(shape[0], USUAL_LOGITS)
    square = np.where(np.isfinite(lse), np.asarray(lse, np.float64), 0.0) ** 2
    return np.maximum(1.0, np.sqrt(square.mean(axis=1)))


def root_mean_square(left: Row, right: Row) -> float:
    """How far the losses of one sample are apart in two batches, over the tokens that both asked for; NaN for none."""
    if len(left.losses) != len(right.losses):
        return math.nan
    apart = left.losses - right.losses
    apart = apart[np.isfinite(apart)]
    return float(np.sqrt(np.mean(apart**2))) if apart.size else math.nan


def compute_roundoff(capsule: Capsule) -> float:
    """Unit roundoff of the coarsest dtype in which the model computes, as far as is known; bfloat16's where nothing is.

    float32 on a GPU counts as TF32 unless the environment says that it is off.
    """
    manifest = capsule.manifest
    words = {str(each.logits_dtype) for each in capsule.batches()[:MOST_BATCHES] if each.logits_dtype}
    if manifest.model is not None and manifest.model.dtype:
        words.add(manifest.model.dtype)
    if manifest.training is not None and manifest.training.precision:
        words.add(manifest.training.precision)
    words |= {str(each) for each in set(capsule.stats(role="activation").dtype.tolist())}
    found = [_roundoff(word) for word in words]
    roundoff = max((each for each in found if each is not None), default=UNIT_ROUNDOFF["bfloat16"])
    environment = manifest.environment
    flags = None if environment is None else environment.deterministic
    on_gpu = environment is not None and bool(environment.gpu)
    if on_gpu and not (isinstance(flags, dict) and flags.get("tf32") is False):
        roundoff = max(roundoff, TF32_ROUNDOFF)
    return roundoff


def _roundoff(word: str) -> float | None:
    lowered = word.lower()
    for names, dtype in ((("bf16", "bfloat16"), "bfloat16"), (("fp16", "float16", "half"), "float16")):
        if any(name in lowered for name in names):
            return UNIT_ROUNDOFF[dtype]
    if "fp8" in lowered or "float8" in lowered:
        return 2.0**-4
    return UNIT_ROUNDOFF["float32"] if any(name in lowered for name in ("fp32", "float32", "float64")) else None
