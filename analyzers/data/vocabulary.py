"""Token ids against the table that they index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..finding import Evidence, Finding, Where
from ..registry import rule

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Ignored by every common loss.
IGNORE_INDEX = -100
#: Ignored by loops in the manner of nanoGPT; taken as lawful while the manifest says nothing.
USUAL_IGNORE_INDEX = -1
#: Roles of positions whose id only stands for features of another kind (image, audio, video).
MEDIA_ROLES = (5, 6, 7)


@rule(
    "data/token-out-of-vocabulary",
    stage="data",
    needs=(
        "batches.input_ids|batches.labels",
        "manifest.model.embedding_rows|manifest.model.vocab_size|manifest.tokenizer.vocab_size|batches.logits",
    ),
)
def token_out_of_vocabulary(capsule: Capsule) -> Iterator[Finding]:
    """A token id points outside the vocabulary.

    What it checks:
        Every id of the captured inputs and labels against the number of rows of the embedding and the vocabulary.

    Why it matters:
        On a CPU such an id raises; on an accelerator it is an assertion far from its cause, or silently reads and
        trains a row that means nothing.

    How it decides:
        An id below 0, or not below the embedding's rows (the vocabulary where the rows are unknown): confirmed. An id
        between the vocabulary and the rows, that no special token claims, is in the table and means nothing: warning.

    Looks like it but is not:
        Labels at the ignore index (−100, that of the manifest, or −1 where the manifest names none); placeholders of
        images, audio or video; added special tokens; rows that pad the table to a round number and are never used.

    What to try next:
        Decode the row around the position; compare the length of the tokenizer with the embedding's rows.

    Fix:
        Resize the embedding after adding tokens; use one tokenizer for data and model; pad with a real id.
    """
    model, tokenizer = capsule.manifest.model, capsule.manifest.tokenizer
    batches = capsule.batches()
    vocabulary = (model.vocab_size if model else None) or (tokenizer.vocab_size if tokenizer else None)
    rows = (model.embedding_rows if model else None) or vocabulary or _columns(batches)
    if rows is None:
        return
    special = set((tokenizer.special_ids or {}).values() if tokenizer else ())
    known = max(vocabulary or rows, (tokenizer.vocab_size if tokenizer else None) or 0)
    training = capsule.manifest.training
    ignored = {
        IGNORE_INDEX,
        training.ignore_index if training and training.ignore_index is not None else USUAL_IGNORE_INDEX,
    }

    worst: Finding | None = None
    for batch in batches:
        for field in ("input_ids", "labels"):
            array = getattr(batch, field)
            if array is None:
                continue
            ids: NDArray[np.int64] = np.atleast_2d(np.asarray(array, np.int64))
            outside = (ids < 0) | (ids >= rows)
            unknown = (ids >= known) & ~outside & ~np.isin(ids, list(special))
            lawful = _media(batch, ids) | (np.isin(ids, list(ignored)) if field == "labels" else False)
            outside &= ~lawful
            if outside.any():
                yield _finding(batch, field, ids, outside, rows, inside=False)
                return
            unknown &= ~lawful
            if worst is None and unknown.any():
                worst = _finding(batch, field, ids, unknown, known, inside=True)
    if worst is not None:
        yield worst


def _columns(batches: list[Any]) -> int | None:
    """Size of the vocabulary that captured logits show."""
    return next((int(batch.logits.shape[-1]) for batch in batches if batch.logits is not None), None)


def _media(batch: Any, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Positions that stand for an image, audio or video."""
    roles = batch.roles
    if roles is None or np.shape(roles) != ids.shape:
        return np.zeros(ids.shape, bool)
    return np.isin(np.asarray(roles), MEDIA_ROLES)


def _finding(
    batch: Any, field: str, ids: NDArray[np.int64], bad: NDArray[np.bool_], limit: int, *, inside: bool
) -> Finding:
    row, position = (int(index) for index in np.argwhere(bad)[0])
    token, count = int(ids[row, position]), int(bad.sum())
    names = batch.sample_ids or ()
    sample = str(names[row]) if row < len(names) else f"row {row}"
    what = "belongs to no token of the vocabulary" if inside else "is outside the embedding"
    more = f" ({count} such ids in this batch)" if count > 1 else ""
    return Finding(
        severity="warning" if inside else None,
        confidence="likely" if inside else "confirmed",
        title="Token id without a token" if inside else "Token id out of range",
        summary=f"{field} of sample {sample} holds id {token} at position {position} in step {batch.step}; it {what} "
        f"of {limit}{more}.",
        where=Where(step=batch.step, rank=batch.rank, sample=sample),
        evidence=(
            Evidence(name="token id", value=token, expected=f"0 … {limit - 1}", note=field),
            Evidence(name="position", value=position, note=f"sample {sample}, row {row}"),
            Evidence(name="ids out of range", value=count, expected=0, unit="ids", note="in this batch"),
        ),
        cause="the data was made with another vocabulary than the model's, or padded with an id that is no token",
        next=("decode the row around this position", "compare len(tokenizer) with the embedding's rows"),
        fix=("resize the embedding, or tokenize again with the model's tokenizer", "pad with a real token id"),
    )
