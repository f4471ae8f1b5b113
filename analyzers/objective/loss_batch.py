"""From a captured batch to a micro-batch that can be scored again: layout of labels, padding, prompt, documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..reference.token_ce import Ints, Scores, logsumexp, logsumexp_rounding, target_logits
from .loss_case import Mask, Micro

if TYPE_CHECKING:
    from ...capsules import Capsule
    from ...capsules.batches import Batch

#: Objectives whose loss is the cross-entropy of the next token. Others get no verdict here.
NEXT_TOKEN_OBJECTIVES = ("causal-lm", "sft", "pretraining")
#: Those of them in which every token is a target, so that inputs say what the labels are where none were captured.
EVERY_TOKEN_OBJECTIVES = ("causal-lm", "pretraining")
#: Share of supervised labels that must equal the tokens of a layout for the layout to be believed.
LAYOUT_AGREEMENT = 0.999
IGNORE_INDEX = -100


def micro_of(capsule: Capsule, batch: Batch) -> Micro | None:
    """The batch by token, or None where its labels are not next-token labels of its own inputs."""
    ids, labels = batch.input_ids, batch.labels
    if ids is None or ids.ndim != 2 or ids.shape[1] < 2:
        return None
    tokens = np.asarray(ids, dtype=np.int64)
    assumed = labels is None
    ignore = ignore_index(capsule)
    labels = _labels_of_the_model(capsule, batch, tokens) if labels is None else np.asarray(labels, dtype=np.int64)
    if labels is None or labels.shape != tokens.shape:
        return None
    tokenizer = capsule.manifest.tokenizer
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
        if not np.isin(batch.loss_mask, (0, 1)).all():
            return None  # weights, not a mask: the loss is another one
        asked &= np.asarray(batch.loss_mask) != 0
    column = np.zeros((len(tokens), 1), dtype=bool)
    following = np.where(asked[:, -1:] & shifted, labels[:, -1:], -1)
    supervised = np.hstack((column, asked)) if shifted else np.hstack((asked, column))
    padding = np.hstack((padding, column))
    supervised &= ~padding
    outside = ~supervised & ~padding
    outside[:, -1] = False
    starts = document_starts(batch, padding[:, :-1])
    boundary = np.hstack((starts, column)) if starts is not None else None
    prompt = outside & np.hstack((np.isin(roles, (1, 2)), column)) if roles is not None else outside
    if boundary is not None and not (prompt & ~boundary).any():
        prompt = np.zeros_like(outside)  # all that the labels leave out are first tokens of documents
    return Micro(
        scores=scores,
        tokens=np.hstack((tokens, following)),
        supervised=supervised,
        padding=padding,
        prompt=prompt,
        tool=outside & np.hstack((np.asarray(roles) == 4, column)) if roles is not None else np.zeros_like(outside),
        boundary=boundary,
        shifted=shifted,
        ignore_index=ignore,
        assumed=assumed,
    )


def ignore_index(capsule: Capsule) -> int:
    """The label that means "do not score": the manifest's, else −100."""
    training = capsule.manifest.training
    declared = training.ignore_index if training is not None else None
    return IGNORE_INDEX if declared is None else declared


def attended(mask: NDArray[Any]) -> Mask:
    """Which tokens a mask lets through.

    A mask of numbers keeps what is above 0. An additive one (0 for what is kept, a large negative number or −∞ for
    what is not) keeps what is above −1.
    """
    values = np.asarray(mask)
    if np.issubdtype(values.dtype, np.floating) and values.size and np.nanmin(values) < 0:
        return values > -1.0
    return values > 0


def document_starts(batch: Batch, padding: Mask) -> Mask | None:
    """First tokens of documents that follow another one in their row [B, T]; None where no packing is on record.

    Args:
        batch: known by segment ids, else by cumulative lengths (over the flattened batch), else by positions that
            start again at 0, else by a square mask that keeps a token from the one before it.
        padding: [B, T]; what follows padding starts no document after another.
    """
    starts = np.zeros(padding.shape, dtype=bool)
    segments, lengths, positions = batch.segment_ids, batch.cu_seqlens, batch.position_ids
    if segments is not None and segments.shape == padding.shape:
        starts[:, 1:] = np.asarray(segments)[:, 1:] != np.asarray(segments)[:, :-1]
    elif lengths is not None and lengths.ndim == 1:
        at = np.asarray(lengths, dtype=np.int64)
        starts.reshape(-1)[at[(at > 0) & (at < starts.size)]] = True
        starts[:, 0] = False
    elif positions is not None and positions.shape == padding.shape:
        at = np.asarray(positions)
        starts[:, 1:] = (at[:, 1:] == 0) & (at[:, :-1] != 0)
    elif batch.attention_mask is not None and batch.attention_mask.ndim == 3:
        starts[:, 1:] = ~attended(batch.attention_mask).diagonal(-1, axis1=1, axis2=2) & ~padding[:, 1:]
    else:
        return None
    starts[:, 1:] &= ~padding[:, :-1]
    return starts if segments is not None or starts.any() else None


def _labels_of_the_model(capsule: Capsule, batch: Batch, tokens: Ints) -> Ints | None:
    """The labels of a model that makes them from its own inputs [B, T], where the objective leaves no choice.

    None where it does (only responses count, nobody said what the objective is), or where padding cannot be told.
    """
    training, tokenizer = capsule.manifest.training, capsule.manifest.tokenizer
    if training is None or training.objective not in EVERY_TOKEN_OBJECTIVES or training.loss_masking == "response":
        return None
    everything = np.ones(tokens.shape, dtype=bool)
    if batch.attention_mask is None and batch.roles is None and _looks_padded(tokens, tokens, everything):
        return None
    padding = _padding(batch, tokens, tokenizer.pad_id if tokenizer is not None else None, ~everything)
    return np.where(padding, ignore_index(capsule), tokens)


def is_shifted(tokens: Ints, labels: Ints, asked: Mask, declared: str | None) -> bool | None:
    """The layout that the data show, the declared one where both or neither can be seen; None for no known layout."""
    own = asked
    following = asked[:, :-1]
    if not own.any():
        return None if declared is None else declared == "shifted"
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
    if mask is not None:
        allowed = attended(mask)
        # A token that a square mask keeps even from itself is padding.
        hidden = ~(allowed if mask.ndim == 2 else allowed.diagonal(axis1=1, axis2=2))
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
        narrowed = batch.logits_dtype is not None and batch.arrays["logits"].dtype != batch.logits_dtype
        rounding = logsumexp_rounding(logits) if narrowed else None
        return Scores(logsumexp(logits), tokens, target_logits(logits, tokens), logits, known, rounding)
    total, following = batch.logsumexp, batch.target_logits
    if total is None or following is None:
        return None
    kept = np.array(following, dtype=np.float64)
    # Kept logits are those of the captured tokens; where another token stands in their place nothing is known.
    for flat in np.flatnonzero((tokens != captured).ravel()):
        for offset in range(min(3, flat + 1)):
            kept.reshape(-1, kept.shape[-1])[flat - offset, offset] = np.nan
    return Scores(np.asarray(total, dtype=np.float64), tokens, kept, known_loss=known)
