"""From a capsule to the windows whose loss can be computed again, and the numbers that the job reported for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from ..reference.token_ce import Floats, Ints, Scores, logsumexp, target_logits
from ..rounding import UNIT_ROUNDOFF
from .loss_case import Mask, Micro, RecordedSums, Window

if TYPE_CHECKING:
    from ...capsules import Capsule
    from ...capsules.batches import Batch

#: Objectives whose loss is the cross-entropy of the next token. Others get no verdict here.
NEXT_TOKEN_OBJECTIVES = ("causal-lm", "sft", "pretraining")
#: Share of supervised labels that must equal the tokens of a layout for the layout to be believed.
LAYOUT_AGREEMENT = 0.999
#: Windows used for one verdict; more add cost and no certainty.
MAX_WINDOWS = 6
IGNORE_INDEX = -100


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
    batches = [each for each in capsule.batches() if each.split in (None, "train")]
    by_step = [(step, list(group)) for step, group in groupby(batches, key=lambda each: each.step)]
    chosen = _spread(by_step, 2 * MAX_WINDOWS)
    expected = _recorded_micros(capsule, {step for step, _ in chosen})
    stepped = _stepped(capsule)
    loose = [each.reported_loss for each in batches if each.reported_loss is not None]
    decimals = printed_decimals(np.asarray(loose, dtype=np.float64))
    found: list[Observed] = []
    for step, group in chosen:
        if stepped and step not in stepped and len(group) < ((training.accumulation_steps if training else None) or 1):
            continue  # the micro-batches left over at the end of a run, for which nobody stepped
        found.extend(_observe_step(capsule, step, group, expected, decimals))
        if len(found) >= 2 * MAX_WINDOWS:
            break
    return list(_spread(found, MAX_WINDOWS))


def _stepped(capsule: Capsule) -> set[int]:
    """Steps in which the optimizer was asked to step, where such events are on record at all."""
    events = capsule.records("events")
    return {each["step"] for each in events if str(each.get("kind")).startswith("optimizer_step") and "step" in each}


def _recorded_micros(capsule: Capsule, steps: set[int]) -> dict[tuple[int, int], set[int]]:
    """The micro-batches that were recorded to exist, by (step, rank)."""
    micros: dict[tuple[int, int], set[int]] = {}
    for record in capsule.records("microbatches"):
        if record.get("step") in steps:
            micros.setdefault((record["step"], record["rank"]), set()).add(record.get("micro") or 0)
    return micros


def _observe_step(
    capsule: Capsule,
    step: int,
    batches: Sequence[Batch],
    expected: Mapping[tuple[int, int], set[int]],
    decimals: int | None,
) -> Iterable[Observed]:
    """One observation a rank of this step; ``decimals`` stands in where a batch does not say how it was printed."""
    per_rank = {rank: list(group) for rank, group in groupby(batches, key=lambda each: each.rank)}
    complete = {
        rank: group for rank, group in per_rank.items() if _complete(capsule, group, expected.get((step, rank)))
    }
    numbers = {rank: _reported(capsule, step, rank, group, decimals) for rank, group in complete.items()}
    if not any(number is not None for number in numbers.values()):
        return
    micros: dict[int, tuple[Micro, ...]] = {}
    for rank, group in complete.items():
        built = [micro_of(capsule, batch) for batch in group]
        if all(each is not None for each in built):
            micros[rank] = tuple(each for each in built if each is not None)
    training, world = capsule.manifest.training, _world(capsule)
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
            value_roundoff=_sum_roundoff(complete[rank][0], sum(int(each.supervised.sum()) for each in own)),
            input_roundoff=max(_input_roundoff(batch) for batch in complete[rank]),
        )


def recorded_windows(capsule: Capsule) -> list[Observed]:
    """Windows of several micro-batches known by the recorded loss sums and token counts alone."""
    series = capsule.scalars("loss")
    if len(series) == 0:
        return []
    rank = series.rank or 0
    numbers = dict(zip(series.step.tolist(), series.value.tolist(), strict=True))
    windows: dict[int, list[RecordedSums]] = {}
    configured: dict[int, int] = {}
    for record in capsule.records("microbatches", rank=rank):
        step, tokens, total, mean = (record.get(name) for name in ("step", "tokens", "loss_sum", "loss_mean"))
        if step is None or not tokens or (total is None and mean is None):
            continue
        windows.setdefault(step, []).append(RecordedSums(mean * tokens if total is None else total, tokens))
        configured[step] = record.get("window") or len(windows[step])
    world, stepped = _world(capsule), _stepped(capsule)
    decimals = printed_decimals(np.asarray(series.value))
    found = [
        Observed(Window(step, rank, (tuple(sums),), configured[step], world), numbers[step], decimals, u, u)
        for u in (UNIT_ROUNDOFF["float32"],)
        for step, sums in sorted(windows.items())
        if len(sums) > 1
        and (not stepped or step in stepped or len(sums) >= configured[step])
        and np.isfinite(numbers.get(step, np.nan))
        and np.isfinite([e.loss_sum for e in sums]).all()
    ]
    return list(_spread(found, MAX_WINDOWS))


def _world(capsule: Capsule) -> int:
    run = capsule.manifest.run
    return (run.world_size if run is not None else None) or len(capsule.ranks)


def _complete(capsule: Capsule, batches: Sequence[Batch], expected: set[int] | None) -> bool:
    """Whether every micro-batch of the window was captured, as far as the evidence tells."""
    if len({batch.micro for batch in batches}) < len(batches):
        return False
    if expected is not None:
        return len(expected) == len(batches)
    training = capsule.manifest.training
    configured = (training.accumulation_steps if training is not None else None) or 1
    # One batch of a longer window: the number may be the batch's or the window's, so nothing can be said.
    return len(batches) == configured or len(batches) > 1


def _reported(
    capsule: Capsule, step: int, rank: int, batches: Sequence[Batch], decimals: int | None
) -> tuple[float, int | None] | None:
    """(value, decimals) of the loss of the whole window, or None."""
    if len(batches) == 1 and batches[0].reported_loss is not None:
        printed = batches[0].reported_decimals
        number = (float(batches[0].reported_loss), decimals if printed is None else printed)
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


def micro_of(capsule: Capsule, batch: Batch) -> Micro | None:
    """The batch by token, or None where its labels are not next-token labels of its own inputs."""
    ids, labels = batch.input_ids, batch.labels
    if ids is None or labels is None or ids.shape != labels.shape or ids.ndim != 2 or ids.shape[1] < 2:
        return None
    tokens, labels = np.asarray(ids, dtype=np.int64), np.asarray(labels, dtype=np.int64)
    training, tokenizer = capsule.manifest.training, capsule.manifest.tokenizer
    declared = training.ignore_index if training is not None else None
    ignore = IGNORE_INDEX if declared is None else declared
    asked = (labels != ignore) & (labels >= 0)
    shifted = is_shifted(tokens, labels, asked, batch.label_layout)
    if shifted is None:
        return None
    unmasked = batch.loss_mask is None and batch.attention_mask is None and batch.roles is None
    if shifted and unmasked and _looks_padded(tokens, labels, asked):
        return None  # whether the job counts the padding is written in a mask that was not captured
    captured, tokens = tokens, _with_last_labels(tokens, labels, asked) if shifted else tokens
    scores = _scores(batch, tokens, captured)
    if scores is None:
        return None
    asked_token = np.hstack((np.zeros_like(asked[:, :1]), asked[:, :-1])) if shifted else asked
    padding = _padding(batch, tokens, tokenizer.pad_id if tokenizer is not None else None, asked_token)
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


def is_shifted(tokens: Ints, labels: Ints, asked: Mask, declared: str | None) -> bool | None:
    """The layout that the data show, the declared one where both or neither can be seen; None for no known layout."""
    own = asked
    following = asked[:, :-1]
    if not own.any():
        return None
    unshifted = bool((labels == tokens)[own].mean() >= LAYOUT_AGREEMENT)
    # Cut from longer rows and padded, the last label of a row is a token that its inputs do not hold.
    following = following & ~_before_end(tokens)
    agreement = (labels[:, :-1] == tokens[:, 1:])[following]
    shifted = bool(agreement.size and agreement.mean() >= LAYOUT_AGREEMENT)
    if unshifted and shifted:
        return declared == "shifted"
    return shifted if unshifted or shifted else None


def _before_end(tokens: Ints) -> Mask:
    """[B, T − 1]: the position before the run of equal tokens that ends each row (its padding, or its last token)."""
    ends = np.logical_and.accumulate((tokens == tokens[:, -1:])[:, ::-1], axis=1)[:, ::-1]
    return ends[:, 1:] & ~ends[:, :-1]


def _looks_padded(tokens: Ints, labels: Ints, asked: Mask) -> bool:
    """Whether half of the rows or more end in a run of one and the same token that their labels ask for, too."""
    ends = np.logical_and.accumulate((tokens == tokens[:, -1:])[:, ::-1], axis=1)[:, ::-1]
    run = (ends & asked & (labels == tokens[:, -1:])).sum(axis=1)
    last, counts = np.unique(tokens[run >= 2, -1], return_counts=True)
    return bool(len(last)) and int(counts.max()) * 2 >= len(tokens)


def _with_last_labels(tokens: Ints, labels: Ints, asked: Mask) -> Ints:
    """``tokens`` of rows whose labels are shifted, with the last label in the place of the padding that follows it."""
    missing = _before_end(tokens) & asked[:, :-1] & (labels[:, :-1] != tokens[:, 1:])
    whole = tokens.copy()
    whole[:, 1:][missing] = labels[:, :-1][missing]
    return whole


def _padding(batch: Batch, tokens: Ints, pad_id: int | None, asked: Mask) -> Mask:
    """Padding tokens [B, T]: role 0, or masked tokens that are all the same one.

    A mask may hide real tokens for other reasons; those stay what the labels say they are. Without mask and roles,
    the end of a row that repeats the padding token and that no label asks for.
    """
    padding = np.zeros(tokens.shape, dtype=bool)
    if batch.roles is not None:
        padding |= np.asarray(batch.roles) == 0
    mask = batch.attention_mask
    if mask is None and batch.roles is None and pad_id is not None:
        alike = (tokens == pad_id) & ~asked
        padding |= np.logical_and.accumulate(alike[:, ::-1], axis=1)[:, ::-1]
    if mask is not None and mask.ndim == 2:
        hidden = np.asarray(mask) == 0
        if hidden.any():
            values, counts = np.unique(tokens[hidden], return_counts=True)
            pad = pad_id if pad_id is not None else int(values[counts.argmax()])
            padding |= hidden & (tokens == pad)
    return padding


def _scores(batch: Batch, tokens: Ints, captured: Ints) -> Scores | None:
    # float[B, T] that the job kept; where the scores do not reach (the token after a row) they may still tell.
    known = np.asarray(batch.token_loss, dtype=np.float64) if batch.token_loss is not None else None
    logits = batch.logits
    if logits is not None:
        logits = np.asarray(logits)
        return Scores(logsumexp(logits), tokens, target_logits(logits, tokens), logits, known)
    total, following = batch.logsumexp, batch.target_logits
    if total is None or following is None:
        return None
    kept = np.array(following, dtype=np.float64)
    # Kept logits are those of the captured tokens; where another token stands in their place nothing is known.
    for flat in np.flatnonzero((tokens != captured).ravel()):
        for offset in range(min(3, flat + 1)):
            kept.reshape(-1, kept.shape[-1])[flat - offset, offset] = np.nan
    return Scores(np.asarray(total, dtype=np.float64), tokens, kept, known_loss=known)


def _roundoff(*dtypes: str | None) -> float:
    """Unit roundoff of the first dtype that is known; of float32 where none is."""
    for dtype in dtypes:
        if dtype in UNIT_ROUNDOFF:
            return UNIT_ROUNDOFF[dtype]
    return UNIT_ROUNDOFF["float32"]


def _sum_roundoff(batch: Batch, tokens: int) -> float:
    """Of a loss that is a sum of ``tokens`` terms, added one after another at worst.

    Each addition rounds the partial sum: relative to the whole u · √tokens / 3, about twice what we allow a standard
    deviation. Sums of low-precision terms are accumulated in float32.
    """
    own = _roundoff(batch.loss_dtype, batch.logits_dtype)
    return float(np.hypot(own, min(own, UNIT_ROUNDOFF["float32"]) * np.sqrt(tokens) / 6.0))


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
