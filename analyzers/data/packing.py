"""Several documents in one row, and whether they can see each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..finding import Confidence, Evidence, Finding, Severity, Where
from ..registry import NotJudged, rule
from . import thresholds as T
from .rows import Ints, Mask, Rows, rows_of

if TYPE_CHECKING:
    from ...capsules import Capsule


@dataclass(frozen=True, eq=False)
class Packed:
    """A packed batch: ``documents`` [B, T] numbers the documents of a row from 0, −1 at padding.

    ``marked`` is false where only end-of-text tokens tell documents apart, and nobody said that they are separate.
    """

    rows: Rows
    documents: Ints
    marked: bool
    crossing: int | None  # pairs of a query and a key of an earlier document in the mask; None without such a mask
    restart: bool | None  # whether positions restart at each document; None without position ids


@rule(
    "data/packing-contamination",
    stage="data",
    needs=(
        "batches.input_ids",
        "batches.segment_ids|batches.position_ids|batches.cu_seqlens|manifest.training.packing",
    ),
)
def packing_contamination(capsule: Capsule) -> Iterator[Finding]:
    """Documents packed into one row see each other.

    What it checks:
        Rows that are said to hold several documents (document numbers, or positions that restart): whether a mask
        [B, T, T] is block-diagonal and whether position ids restart. Where the same documents were captured alone, too,
        the loss sums are compared.

    Why it matters:
        Attention across documents mixes answers of one into prompts of another; in fine-tuning on short samples much of
        what a token sees is foreign.

    How it decides:
        The mask lets a token see another document: confirmed. Position ids run on through the row and no mask separates
        the documents: likely, and confirmed where the packed loss sum differs by more than 1 % from the sum over the
        same documents alone. Where only end-of-text tokens and the manifest's packing tell of documents: info and
        undetermined.

    Looks like it but is not:
        Pre-training on a stream of documents with an end-of-text between them, which nobody meant to separate: nothing
        marks the documents there. Padding-free batches, whose cumulative lengths separate them in the kernel; positions
        that restart, which variable-length kernels read; positions that run on under a mask that separates (rotary
        positions are relative).

    What to try next:
        Compute the loss of two samples alone and packed: the sums must agree.

    Fix:
        Hand position ids that restart to a kernel that reads them, or a block-diagonal mask, or the cumulative lengths.
    """
    training = capsule.manifest.training
    declared = training is not None and bool(training.packing)
    packed = [each for rows in rows_of(capsule) if (each := _packed(rows, declared)) is not None]
    if not packed:
        return
    bad = [each for each in packed if _contaminated(each)]
    if not bad:
        if all(each.crossing is None and each.restart is None for each in packed):
            raise NotJudged("position_ids or a mask [B, T, T] is needed to see whether packed documents are separate")
        return
    alone = _alone(capsule)
    sums = next((found for each in bad if (found := _sums(each, alone)) is not None), None)
    clean = next((s[0] for each in packed if each not in bad and (s := _sums(each, alone)) is not None), None)
    yield _finding(capsule, bad[0], sums, clean)


def _packed(rows: Rows, declared: bool = False) -> Packed | None:
    """The batch with its documents, where any row has two; ``declared``: ends of text count, too."""
    real, marked = rows.real, True
    segments = rows.same("segment_ids")
    if segments is not None:
        real = real & (segments >= 0)
        changes = np.zeros(real.shape, bool)
        changes[:, 1:] = (segments[:, 1:] != segments[:, :-1]) & real[:, 1:] & real[:, :-1]
        # 0 counts padding in some loaders: a row that ends in it and has other numbers before.
        if (segments == 0).any() and (segments > 0).any():
            ends = np.logical_and.accumulate((segments == 0)[:, ::-1], axis=1)[:, ::-1]
            real = real & ~ends
            changes &= ~ends
    elif rows.batch.cu_seqlens is not None:
        changes = np.zeros(real.shape, bool)
        ends = np.asarray(rows.batch.cu_seqlens, np.int64).ravel()
        changes.ravel()[ends[(ends > 0) & (ends < changes.size)]] = True
        changes[:, 0] = False
    elif rows.restarts is not None and rows.restarts.any():
        changes = rows.restarts
    elif declared and rows.special.eos is not None:
        marked = False
        changes = np.zeros(real.shape, bool)
        changes[:, 1:] = (rows.ids[:, :-1] == rows.special.eos) & (rows.ids[:, 1:] != rows.special.eos) & real[:, 1:]
    else:
        return None
    if not changes.any():
        return None
    documents = np.where(real, np.cumsum(changes, axis=1), -1)
    restart = None
    if rows.restarts is not None:
        restart = bool(rows.restarts[changes].all())
    return Packed(rows, documents, marked, _crossing(rows, documents), restart)


def _crossing(rows: Rows, documents: Ints) -> int | None:
    """How many (query, key) pairs of different documents the mask allows; None where there is no mask [B, T, T]."""
    mask = rows.batch.attention_mask
    if mask is None or np.shape(mask) != (*rows.ids.shape, rows.ids.shape[1]):
        return None
    mask = np.asarray(mask)
    seen = mask > -1 if mask.dtype.kind == "f" and not (mask > 0).any() else mask != 0
    count = 0
    for row, owner in zip(seen, documents, strict=True):
        foreign = (owner[:, None] != owner[None, :]) & (owner[:, None] >= 0) & (owner[None, :] >= 0)
        count += int((row & foreign).sum())
    return count


def _contaminated(packed: Packed) -> bool:
    if packed.crossing is not None:
        return packed.crossing > 0
    if _numbers_in_mask(packed) or packed.rows.batch.cu_seqlens is not None:
        return False
    return packed.restart is False


def _numbers_in_mask(packed: Packed) -> bool:
    """Whether a mask [B, T] numbers the documents: kernels that read it keep them apart."""
    mask = packed.rows.same("attention_mask")
    return mask is not None and int(mask.max()) > 1


def _row_sums(rows: Rows) -> NDArray[np.float64] | None:
    """[B], loss summed over the supervised tokens of each row."""
    losses = rows.batch.token_loss
    if losses is None or np.shape(losses) != rows.ids.shape:
        return None
    return np.where(_counted(rows), np.asarray(losses, np.float64), 0.0).sum(axis=1)


def _counted(rows: Rows) -> Mask:
    """Positions that predict a supervised token of their own document."""
    losses = np.asarray(rows.batch.token_loss, np.float64)
    counted = np.isfinite(losses) & rows.real
    if rows.asked is not None:
        if rows.batch.label_layout == "shifted":
            counted &= rows.asked
        else:
            counted[:, :-1] &= rows.asked[:, 1:]
            counted[:, -1] = False
    return counted


_Alone = dict[tuple[int, ...], float]


def _alone(capsule: Capsule) -> _Alone:
    """Loss sum of every captured row that holds one document, by its tokens."""
    found: _Alone = {}
    summed = capsule.manifest.training is not None and capsule.manifest.training.reduction == "sum"
    for rows in rows_of(capsule):
        if _packed(rows) is not None:
            continue
        sums = _row_sums(rows)
        reported = rows.batch.reported_loss
        if sums is None and len(rows.ids) == 1 and reported is not None and summed:
            sums = np.array([reported])
        if sums is None:
            continue
        for row in range(len(rows.ids)):
            found.setdefault(tuple(rows.ids[row][rows.real[row]].tolist()), float(sums[row]))
    return found


def _sums(packed: Packed, alone: _Alone) -> tuple[float, float, int] | None:
    """(packed loss sum, sum over the same documents alone, documents) of the first row of which all are known."""
    rows = packed.rows
    losses, reported = rows.batch.token_loss, rows.batch.reported_loss
    for row in range(len(rows.ids)):
        numbers = [each for each in np.unique(packed.documents[row]).tolist() if each >= 0]
        apart = [alone.get(tuple(rows.ids[row][packed.documents[row] == each].tolist())) for each in numbers]
        known = [each for each in apart if each is not None]
        if len(numbers) < 2 or len(known) < len(numbers):
            continue
        if losses is not None and np.shape(losses) == rows.ids.shape:
            counted = _counted(rows)[row]
            # The last token of a document predicts the first of the next: no document alone pays for that.
            counted[:-1] &= packed.documents[row, 1:] == packed.documents[row, :-1]
            together = float(np.asarray(losses, np.float64)[row][counted].sum())
        elif reported is not None and len(rows.ids) == 1:
            together = float(reported)
        else:
            continue
        return together, float(sum(known)), len(numbers)
    return None


def _finding(capsule: Capsule, packed: Packed, sums: tuple[float, float, int] | None, clean: float | None) -> Finding:
    rows, batch = packed.rows, packed.rows.batch
    documents = int((packed.documents.max(axis=1) + 1).max())
    row = int(np.argmax(packed.documents.max(axis=1)))
    differs = sums is not None and abs(sums[0] - sums[1]) > T.PACKED_LOSS_WITHIN * abs(sums[1])
    confirmed = (bool(packed.crossing) and packed.marked) or differs
    rope = capsule.manifest.model is not None and capsule.manifest.model.rope is not None
    separate = packed.crossing == 0
    mild = (rope and separate) or not packed.marked
    severity: Severity | None = None if confirmed else "info" if mild else "warning"
    confidence: Confidence = "confirmed" if confirmed else "likely" if packed.marked else "undetermined"
    how = (
        f"the mask lets {packed.crossing} pairs of tokens of different documents see each other"
        if packed.crossing
        else "position ids run on from one to the next and no mask separates them"
    )
    evidence = [
        Evidence(name="documents in a row", value=documents, note=rows.name(row)),
        Evidence(
            name="positions restart",
            value={True: "yes", False: "no", None: "not captured"}[packed.restart],
            expected="yes",
        ),
    ]
    if packed.crossing is not None:
        evidence.append(Evidence(name="pairs across documents", value=packed.crossing, expected=0, unit="pairs"))
    told = ""
    if sums is not None:
        together, apart, count = sums
        note = "" if clean is None else f"packed and kept apart {clean:.5g}"
        evidence += [
            Evidence(name="loss sum packed", value=together, expected=apart, unit="nats", note=note),
            Evidence(name="difference", value=together - apart, expected=0.0, unit="nats"),
        ]
        told = (
            f"; the loss sum of the {count} documents is {together:.5g} packed and {apart:.5g} alone "
            f"({together - apart:+.4g}, {100 * (together - apart) / apart:+.3g} %)"
            if apart
            else ""
        )
    return Finding(
        severity=severity,
        confidence=confidence,
        title="Packed documents see each other",
        summary=f"{rows.name(row)} of step {batch.step} holds {documents} documents and {how}{told}.",
        where=Where(step=batch.step, rank=batch.rank, sample=rows.name(row)),
        evidence=tuple(evidence),
        cause="rows are packed and attention is not told where documents end",
        next=("compute the loss of two samples alone and packed and compare the sums",),
        fix=("use position ids that restart with a kernel that reads them, or a block-diagonal mask",),
    )
