"""What the loss counterfactuals work on: the micro-batches of one optimizer step, ready to be scored again.

Everything is kept by *token*: ``tokens[b, j]`` is token j of row b, and a mask says for each token whether the job's
labels ask for it. So labels that name the token at their own position (unshifted, shifted by the model) and labels
that name the next one (shifted by the collator) become one thing, and a fault in shifting is an offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..reference.token_ce import Floats, Ints, Scores, logsumexp, target_logits
from ..rounding import UNIT_ROUNDOFF, Noise

if TYPE_CHECKING:
    from ...capsules import Capsule
    from ...capsules.batches import Batch

Mask = NDArray[np.bool_]

#: Objectives whose loss is the cross-entropy of the next token. Others get no verdict here.
NEXT_TOKEN_OBJECTIVES = ("causal-lm", "sft", "pretraining")
#: Share of supervised labels that must equal the tokens of a layout for the layout to be believed.
LAYOUT_AGREEMENT = 0.999
#: Windows used for one verdict; more add cost and no certainty.
MAX_WINDOWS = 6
IGNORE_INDEX = -100


@dataclass(frozen=True, eq=False)
class Micro:
    """One micro-batch.

    Attributes:
        scores: of the model, [B, T].
        tokens: [B, T + 1]; column T is the token after the row where the labels know it, else −1.
        supervised: [B, T + 1], tokens that the job's labels and masks ask for.
        padding, prompt, tool: [B, T + 1], tokens outside ``supervised`` (padding never is supervised).
        boundary: [B, T + 1], first tokens of a document that follows another in a packed row; None where not packed.
        shifted: the labels came in shifted layout.
        ignore_index: the label value that means "do not score".
    """

    scores: Scores
    tokens: Ints
    supervised: Mask
    padding: Mask
    prompt: Mask
    tool: Mask
    boundary: Mask | None
    shifted: bool
    ignore_index: int
    _rows: dict[Any, tuple[Floats, Floats]] = field(default_factory=dict[Any, Any], repr=False)
    _losses: dict[Any, Floats] = field(default_factory=dict[Any, Any], repr=False)

    @property
    def length(self) -> int:
        """T."""
        return self.tokens.shape[1] - 1

    def rows(self, shift: str, positions: str, denominator: str, noise: Noise | None) -> tuple[Floats, Floats]:
        """(loss sum, denominator) of each row [B]; a sum is NaN where the scores cannot say."""
        key = (shift, positions, denominator, noise)
        if key not in self._rows:
            targets, wanted, asked = self._aligned(shift)
            counted, targets = self._counted(positions, targets, wanted, asked)
            table = (shift, positions == "ignored-label", noise)
            if table not in self._losses:
                everywhere = np.ones_like(counted)
                self._losses[table] = self.scores.losses(targets, everywhere, noise, self.tokens[:, 1:])
            sums = np.where(counted, self._losses[table], 0.0).sum(axis=1)
            self._rows[key] = sums, self._denominator(denominator, counted, wanted, asked)
        return self._rows[key]

    def _aligned(self, shift: str) -> tuple[Ints, Ints, Ints]:
        """(target token, flat index of the token whose mask decides, flat index of the target), each [B, T]; −1 none.

        Shifts: ``1`` the next token; ``0`` the token itself; ``2`` the one after the next, within the row;
        ``2-flat`` the same over the flattened batch, so that a row's end is scored on the next row's start;
        ``2-inner`` that without each row's last position; ``2-ragged`` a flattened shift of rows already cut to T − 1.
        """
        batch, columns = self.tokens.shape
        length = columns - 1
        row = np.repeat(np.arange(batch)[:, None], length, axis=1)
        at = np.repeat(np.arange(length)[None, :], batch, axis=0)
        first = 1 if self.shifted else 0  # token named by the label at position 0
        last = length if self.shifted else length - 1
        if shift in ("2-flat", "2-inner"):
            label = row * length + at + (2 - first)
            target_row, target = label // length, label % length + first
            alive = target_row < batch
            if shift == "2-inner":
                alive &= at <= length - 2
        elif shift == "2-ragged":
            over = at == length - 2
            target_row, target = row + over, np.where(over, 1, at + 2)
            alive = (target_row < batch) & (at <= length - 2)
        else:
            target_row, target = row, at + int(shift)
            alive = target <= last
        index = np.where(alive, target_row * columns + target, -1)
        # Shifted labels scored against the input itself: the mask still sits at the label.
        decides = row * columns + at + 1 if shift == "0" and self.shifted else index
        flat = self.tokens.reshape(-1)
        return np.where(index >= 0, flat[index], -1), decides, index

    def _counted(self, positions: str, targets: Ints, decides: Ints, index: Ints) -> tuple[Mask, Ints]:
        """Which positions are scored under a set of positions, and on which token."""

        def at(mask: Mask) -> Mask:
            return np.where(decides >= 0, mask.reshape(-1)[decides], False)

        supervised = at(self.supervised)
        extra = {
            "pads": lambda: at(self.padding),
            "prompt": lambda: at(self.prompt),
            "tool": lambda: at(self.tool),
            "all": lambda: at(self.padding | self.prompt | self.tool),
        }
        if positions in extra:
            return supervised | extra[positions](), targets
        if positions == "inside-documents" and self.boundary is not None:
            return supervised & ~at(self.boundary), targets
        if positions == "ignored-label":
            return index >= 0, np.where(supervised, targets, self.ignore_index)
        return supervised, targets

    def _denominator(self, denominator: str, counted: Mask, decides: Ints, index: Ints) -> Floats:
        """Denominator of each row [B]: what is counted, or what a slip would divide by."""
        if denominator == "grid":
            scored = index >= 0
        elif denominator == "padded-grid":
            scored = np.ones_like(counted)
        elif denominator == "attended":
            scored = (index >= 0) & ~np.where(decides >= 0, self.padding.reshape(-1)[decides], False)
        else:
            scored = counted
        return scored.sum(axis=1).astype(np.float64)


@dataclass(frozen=True, eq=False)
class Window:
    """The micro-batches whose gradients made one optimizer step.

    Attributes:
        step: optimizer step.
        rank: whose number was observed.
        ranks: the micro-batches of every rank captured at this step, ``rank``'s own first.
        configured: accumulation steps as configured, where known.
        world: number of ranks.
    """

    step: int
    rank: int
    ranks: tuple[tuple[Micro, ...], ...]
    configured: int | None
    world: int

    @property
    def own(self) -> tuple[Micro, ...]:
        """The micro-batches of the observed rank."""
        return self.ranks[0]


@dataclass(frozen=True)
class Observed:
    """A number that the job reported for a window, and how exactly it is known."""

    window: Window
    value: float
    decimals: int | None
    value_roundoff: float
    input_roundoff: float


def observed_windows(capsule: Capsule) -> list[Observed]:
    """Every window whose loss can be computed again, thinned to ``MAX_WINDOWS`` spread over the run.

    A step is left out where its micro-batches are not all there, where its number is absent or not finite, or where
    labels and tokens do not match in a known layout (masked-language-model labels, say).
    """
    training = capsule.manifest.training
    objective = training.objective if training is not None else None
    if objective is not None and objective not in NEXT_TOKEN_OBJECTIVES:
        return []
    batches = [each for each in capsule.batches() if each.split in (None, "train") and each.step is not None]
    by_step = [(step, list(group)) for step, group in groupby(batches, key=lambda each: each.step)]
    found: list[Observed] = []
    for step, group in _spread(by_step, 2 * MAX_WINDOWS):
        found.extend(_observe_step(capsule, step, group))
        if len(found) >= 2 * MAX_WINDOWS:
            break
    return list(_spread(found, MAX_WINDOWS))


def _observe_step(capsule: Capsule, step: int, batches: Sequence[Batch]) -> Iterable[Observed]:
    per_rank = {rank: list(group) for rank, group in groupby(batches, key=lambda each: each.rank)}
    complete = {rank: group for rank, group in per_rank.items() if _complete(capsule, step, rank, group)}
    numbers = {rank: _reported(capsule, step, rank, group) for rank, group in complete.items()}
    if not any(number is not None for number in numbers.values()):
        return
    micros: dict[int, tuple[Micro, ...]] = {}
    for rank, group in complete.items():
        built = [_micro(capsule, batch) for batch in group]
        if all(each is not None for each in built):
            micros[rank] = tuple(each for each in built if each is not None)
    training, run = capsule.manifest.training, capsule.manifest.run
    world = (run.world_size if run is not None else None) or len(capsule.ranks)
    configured = training.accumulation_steps if training is not None else None
    for rank, own in micros.items():
        number = numbers[rank]
        if number is None:
            continue
        others = [each for other, each in micros.items() if other != rank]
        whole = len(micros) == world
        yield Observed(
            window=Window(step, rank, (own, *others) if whole else (own,), configured, world),
            value=number[0],
            decimals=number[1],
            value_roundoff=_roundoff(complete[rank][0].loss_dtype, complete[rank][0].logits_dtype),
            input_roundoff=max(_input_roundoff(batch) for batch in complete[rank]),
        )


def _complete(capsule: Capsule, step: int, rank: int, batches: Sequence[Batch]) -> bool:
    """Whether every micro-batch of the window was captured, as far as the evidence tells."""
    if len({batch.micro for batch in batches}) < len(batches):
        return False
    recorded = {
        record.get("micro") for record in capsule.records("microbatches", rank=rank) if record.get("step") == step
    }
    if recorded:
        return len(recorded) == len(batches)
    training = capsule.manifest.training
    configured = (training.accumulation_steps if training is not None else None) or 1
    # One batch of a longer window: the number may be the batch's or the window's, so nothing can be said.
    return len(batches) == configured or len(batches) > 1


def _reported(capsule: Capsule, step: int, rank: int, batches: Sequence[Batch]) -> tuple[float, int | None] | None:
    """(value, decimals) of the loss of the whole window, or None."""
    if len(batches) == 1 and batches[0].reported_loss is not None:
        number = (float(batches[0].reported_loss), batches[0].reported_decimals)
        return number if np.isfinite(number[0]) else None
    series = capsule.scalars("loss", rank=rank)
    at = np.flatnonzero(np.asarray(series.step) == step)
    if len(at) != 1 or not np.isfinite(series.value[at[0]]):
        return None
    return float(series.value[at[0]]), printed_decimals(np.asarray(series.value))


def printed_decimals(values: Floats, most: int = 6) -> int | None:
    """Decimals of a series that was printed and read back; None where the values have more than ``most``."""
    finite = [repr(float(value)) for value in values if np.isfinite(value)]
    if not finite or any("e" in text for text in finite):
        return None
    decimals = max(len(text.partition(".")[2].rstrip("0")) for text in finite)
    return decimals if decimals <= most else None


def _micro(capsule: Capsule, batch: Batch) -> Micro | None:
    """The batch by token, or None where its labels are not next-token labels of its own inputs."""
    ids, labels = batch.input_ids, batch.labels
    if ids is None or labels is None or ids.shape != labels.shape or ids.ndim != 2 or ids.shape[1] < 2:
        return None
    tokens, labels = np.asarray(ids, dtype=np.int64), np.asarray(labels, dtype=np.int64)
    scores = _scores(batch, tokens)
    if scores is None:
        return None
    training, tokenizer = capsule.manifest.training, capsule.manifest.tokenizer
    declared = training.ignore_index if training is not None else None
    ignore = IGNORE_INDEX if declared is None else declared
    asked = (labels != ignore) & (labels >= 0)
    shifted = _is_shifted(tokens, labels, asked, batch.label_layout)
    if shifted is None:
        return None
    padding = _padding(batch, tokens, tokenizer.pad_id if tokenizer is not None else None)
    roles = batch.roles
    if batch.loss_mask is not None:
        asked &= np.asarray(batch.loss_mask) != 0
    column = np.zeros((len(tokens), 1), dtype=bool)
    following = np.where(asked[:, -1:] & shifted, labels[:, -1:], -1)
    supervised = np.hstack((column, asked)) if shifted else np.hstack((asked, column))
    padding = np.hstack((padding, column))
    supervised &= ~padding
    outside = ~supervised & ~padding
    outside[:, -1] = False
    segments = batch.segment_ids
    boundary = None
    if segments is not None:
        boundary = np.hstack((column, np.asarray(segments)[:, 1:] != np.asarray(segments)[:, :-1], column))
    return Micro(
        scores=scores,
        tokens=np.hstack((tokens, following)),
        supervised=supervised,
        padding=padding,
        prompt=outside & np.hstack((np.isin(roles, (1, 2)), column)) if roles is not None else outside,
        tool=outside & np.hstack((np.asarray(roles) == 4, column)) if roles is not None else np.zeros_like(outside),
        boundary=boundary,
        shifted=shifted,
        ignore_index=ignore,
    )


def _is_shifted(tokens: Ints, labels: Ints, asked: Mask, declared: str | None) -> bool | None:
    """The layout that the data show, the declared one where both or neither can be seen; None for no known layout."""
    own = asked
    following = asked[:, :-1]
    if not own.any():
        return None
    unshifted = bool((labels == tokens)[own].mean() >= LAYOUT_AGREEMENT)
    agreement = (labels[:, :-1] == tokens[:, 1:])[following]
    shifted = bool(agreement.size and agreement.mean() >= LAYOUT_AGREEMENT)
    if unshifted and shifted:
        return declared == "shifted"
    return shifted if unshifted or shifted else None


def _padding(batch: Batch, tokens: Ints, pad_id: int | None) -> Mask:
    """Padding tokens [B, T]: role 0, or masked tokens that are all the same one.

    A mask may hide real tokens for other reasons; those stay what the labels say they are.
    """
    padding = np.zeros(tokens.shape, dtype=bool)
    if batch.roles is not None:
        padding |= np.asarray(batch.roles) == 0
    mask = batch.attention_mask
    if mask is not None and mask.ndim == 2:
        hidden = np.asarray(mask) == 0
        if hidden.any():
            values, counts = np.unique(tokens[hidden], return_counts=True)
            pad = pad_id if pad_id is not None else int(values[counts.argmax()])
            padding |= hidden & (tokens == pad)
    return padding


def _scores(batch: Batch, tokens: Ints) -> Scores | None:
    # float[B, T] that the job kept; where the scores do not reach (the token after a row) they may still tell.
    known = np.asarray(batch.token_loss, dtype=np.float64) if batch.token_loss is not None else None
    logits = batch.logits
    if logits is not None:
        logits = np.asarray(logits)
        return Scores(logsumexp(logits), tokens, target_logits(logits, tokens), logits, known)
    total, following = batch.logsumexp, batch.target_logits
    if total is None or following is None:
        return None
    return Scores(
        np.asarray(total, dtype=np.float64), tokens, np.asarray(following, dtype=np.float64), known_loss=known
    )


def _roundoff(*dtypes: str | None) -> float:
    """Unit roundoff of the first dtype that is known; of float32 where none is."""
    for dtype in dtypes:
        if dtype in UNIT_ROUNDOFF:
            return UNIT_ROUNDOFF[dtype]
    return UNIT_ROUNDOFF["float32"]


def _input_roundoff(batch: Batch) -> float:
    """Of the dtype in which the scores were used; of the stored dtype where storing them lost something."""
    used = _roundoff(batch.loss_dtype, batch.logits_dtype)
    job = batch.logits_dtype
    for name in ("logits", "logsumexp", "target_logits"):
        info = batch.arrays.get(name)
        if info is not None and info.dtype in UNIT_ROUNDOFF and info.dtype != job:
            used = max(used, UNIT_ROUNDOFF[info.dtype])
    return used


def _spread(items: Sequence[Any], most: int) -> Sequence[Any]:
    """At most ``most`` items, evenly spread, first and last kept."""
    if len(items) <= most:
        return items
    return [items[index] for index in np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))]
