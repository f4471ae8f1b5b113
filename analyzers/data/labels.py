"""Labels against the tokens of their own row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..finding import Evidence, Finding, Where
from ..registry import rule
from . import thresholds as T
from .rows import NEXT_TOKEN, TRAIN, Ints, Mask, Rows, objective, rows_of

if TYPE_CHECKING:
    from ...capsules import Capsule

_WORDS = {
    0: "the token at its own position (unshifted)",
    1: "the next token (shifted)",
    2: "the token after the next: shifted twice",
    3: "the token three places on",
    -1: "the token before it: shifted the wrong way",
    -2: "the token two places before it",
}


@dataclass(frozen=True, eq=False)
class Fit:
    """How the labels of one batch fit its tokens.

    Attributes:
        rows: the batch.
        judged: [B], rows with labels enough to be judged.
        share: offset → [B], share of a row's labels that are the token so many places on; NaN where none can tell.
        wrong: offset → [B, T], labels that are not.
    """

    rows: Rows
    judged: NDArray[np.bool_]
    share: dict[int, NDArray[np.float64]]
    wrong: dict[int, Mask]

    def best(self, offsets: tuple[int, ...]) -> NDArray[np.float64]:
        """[B], the best share over some offsets."""
        return np.nanmax(np.stack([np.nan_to_num(self.share[each], nan=-1.0) for each in offsets]), axis=0)


@rule(
    "data/labels-misaligned",
    stage="data",
    needs=("batches.labels", "batches.input_ids"),
    cases=("loss-near-zero-copies-input", "labels-shifted-twice"),
)
def labels_misaligned(capsule: Capsule) -> Iterator[Finding]:
    """Labels are not the tokens of their own row in any usual layout.

    What it checks:
        Every label that asks for a token against the token at its own position (unshifted layout: the model shifts) and
        against the next one (shifted: the collator did), and at other offsets.

    Why it matters:
        A label of another place or of another row trains the model on noise, and the loss only looks a little high.

    How it decides:
        All labels fit one other offset (99.9 %): confirmed, and the offset is named. Rows fit another row of the batch,
        or nothing at all, while others fit (or the objective is declared): confirmed. Single labels that differ:
        warning. The declared layout is not the one that the data show: warning. Shapes that differ, too.

    Looks like it but is not:
        Masked-language-model labels (the inputs at them are one mask token, or the objective says so), encoder-decoder
        targets, class labels, inputs corrupted on purpose with one token; the last label of a row cut from a longer
        one; labels that were shifted document by document and end each with a token that is not in the row.

    What to try next:
        Print one row as text, labels beneath tokens (`llmconsole show CAPSULE --batch`).

    Fix:
        Make labels from input_ids in one place, after shuffling, truncation and padding; shift once.
    """
    declared = objective(capsule)
    if declared is not None and declared not in NEXT_TOKEN:
        return
    yield from _shapes(capsule)
    fits = [fit for rows in rows_of(capsule) if (fit := _fit(rows)) is not None]
    if not fits:
        return
    judged = sum(int(fit.judged.sum()) for fit in fits)
    fitting = sum(int((fit.judged & (fit.best((0, 1)) >= T.LAYOUT_AGREEMENT)).sum()) for fit in fits)
    meant = declared is not None or 2 * fitting >= judged > 0
    said: set[str] = set()
    for fit in fits:
        for kind, finding in _judge(fit, meant):
            if kind not in said:
                said.add(kind)
                yield finding


def _fit(rows: Rows) -> Fit | None:
    asked, labels, ids = rows.asked, rows.labels, rows.ids
    if asked is None or labels is None or ids.shape[1] < 2 or not asked.any():
        return None
    share: dict[int, NDArray[np.float64]] = {}
    wrong: dict[int, Mask] = {}
    for offset in T.LABEL_OFFSETS:
        if abs(offset) >= ids.shape[1]:
            share[offset], wrong[offset] = np.full(len(ids), np.nan), np.zeros(ids.shape, bool)
            continue
        here = slice(max(0, -offset), ids.shape[1] - max(0, offset))
        there = slice(max(0, offset), ids.shape[1] - max(0, -offset))
        counted = np.zeros(ids.shape, bool)
        counted[:, here] = asked[:, here]
        if offset > 0:
            counted &= ~_before_end(ids, offset)
            counted &= ~_document_ends(rows, offset)
        differs = np.zeros(ids.shape, bool)
        differs[:, here] = labels[:, here] != ids[:, there]
        wrong[offset] = differs & counted
        with np.errstate(invalid="ignore"):
            share[offset] = 1 - wrong[offset].sum(axis=1) / counted.sum(axis=1)
    judged = asked.sum(axis=1) >= 1
    return Fit(rows, judged, share, wrong)


def _before_end(ids: Ints, offset: int) -> Mask:
    """Positions whose target lies in the run of equal tokens that ends the row: the row was cut there and padded."""
    ends = np.logical_and.accumulate((ids == ids[:, -1:])[:, ::-1], axis=1)[:, ::-1]
    found = np.zeros(ids.shape, bool)
    found[:, :-offset] = ends[:, offset:] & ~ends[:, :-offset]
    return found


def _document_ends(rows: Rows, offset: int) -> Mask:
    """Positions whose target belongs to the next document of a packed row."""
    found = np.zeros(rows.ids.shape, bool)
    segments = rows.same("segment_ids")
    if segments is not None:
        found[:, :-offset] |= segments[:, :-offset] != segments[:, offset:]
    if rows.restarts is not None:
        for step in range(1, offset + 1):
            found[:, :-step] |= rows.restarts[:, step:]
    lengths = rows.batch.cu_seqlens
    if lengths is not None and len(rows.ids) == 1:
        ends = np.asarray(lengths, np.int64)[1:-1]
        for step in range(1, offset + 1):
            at = ends - step
            found[0, at[(at >= 0) & (at < rows.ids.shape[1])]] = True
    return found


def _judge(fit: Fit, meant: bool) -> Iterator[tuple[str, Finding]]:
    """What one batch shows; at most one statement of a kind."""
    best = fit.best((0, 1))
    misfits = fit.judged & (best < T.LAYOUT_AGREEMENT)
    batch = fit.rows.batch
    if not misfits.any():
        if (finding := _other_layout(fit)) is not None:
            yield "layout", finding
        if (finding := _wrapped(fit)) is not None:
            yield "wrapped", finding
        return
    if _mask_token(fit, misfits) or _class_labels(fit):
        return
    whole = _whole_offset(fit, misfits)
    if whole is not None:
        yield "offset", _offset_finding(fit, misfits, whole)
        return
    enough = (fit.rows.asked if fit.rows.asked is not None else fit.rows.ids > 0).sum(axis=1) >= T.GARBAGE_MIN_LABELS
    garbage = misfits & (best < T.GARBAGE_AGREEMENT) & enough
    if garbage.any():
        # Labels that are the tokens of other rows of the batch were theirs, whatever the objective is.
        exchanged = sum(_owner(fit, row) is not None for row in np.flatnonzero(garbage)[:8].tolist())
        yield "garbage", _garbage_finding(fit, garbage, meant or exchanged >= T.EXCHANGED_ROWS)
    partial = misfits & ~garbage
    shifted = np.nan_to_num(fit.share[1], nan=-1.0) > np.nan_to_num(fit.share[0], nan=-1.0)
    partial &= ~(shifted & (best >= T.SHIFTED_CUT_AGREEMENT))
    partial &= best >= T.GARBAGE_AGREEMENT
    if partial.any() and meant:
        row = int(np.argmax(partial))
        offset = 1 if shifted[row] else 0
        at = int(np.argmax(fit.wrong[offset][row]))
        count = int(fit.wrong[offset][partial].sum())
        labels = fit.rows.labels
        label = int(labels[row, at]) if labels is not None else -1
        token = int(fit.rows.ids[row, min(at + offset, fit.rows.ids.shape[1] - 1)])
        yield (
            "single",
            Finding(
                severity="warning",
                title="Some labels are not the tokens of their row",
                summary=f"{count} labels in {int(partial.sum())} rows of step {batch.step} differ from the token they "
                f"should name, first in {fit.rows.name(row)} at position {at}: label {label}, token {token}.",
                where=Where(step=batch.step, rank=batch.rank, sample=fit.rows.name(row)),
                evidence=(
                    Evidence(name="layout", value="shifted" if offset else "unshifted", note="that the others show"),
                    Evidence(name="labels that differ", value=count, expected=0, unit="labels"),
                    Evidence(name="label", value=label, expected=token, note=f"position {at}"),
                ),
                cause="labels or tokens were changed after one was made from the other",
                next=("print the row with its labels beneath",),
                fix=("make labels from the final input_ids",),
            ),
        )


def _whole_offset(fit: Fit, misfits: NDArray[np.bool_]) -> int | None:
    """The one other offset that all misfits fit."""
    if fit.wrong[0][misfits].sum() < T.GARBAGE_MIN_LABELS:
        return None
    for offset in T.LABEL_OFFSETS[2:]:
        share = fit.share[offset][misfits]
        known = share[~np.isnan(share)]
        if known.size and (known >= T.LAYOUT_AGREEMENT).all():
            return offset
    return None


def _offset_finding(fit: Fit, misfits: NDArray[np.bool_], offset: int) -> Finding:
    batch, row = fit.rows.batch, int(np.argmax(misfits))
    share = float(np.nanmean(fit.share[offset][misfits]))
    return Finding(
        confidence="confirmed",
        title=f"Labels name {_WORDS[offset].partition(':')[0]}",
        summary=f"In step {batch.step} each label of {int(misfits.sum())} rows is {_WORDS[offset]}, "
        f"at {100 * share:.4g} % of the positions; the right layouts fit {100 * float(fit.best((0, 1))[row]):.3g} %.",
        where=Where(step=batch.step, rank=batch.rank, sample=fit.rows.name(row)),
        evidence=(
            Evidence(name="offset", value=offset, expected="0 (unshifted) or 1 (shifted)", unit="tokens"),
            Evidence(name="agreement", value=share, note="at this offset"),
            Evidence(name="agreement unshifted", value=float(np.nanmean(fit.share[0][misfits])), expected=1.0),
            Evidence(name="agreement shifted", value=float(np.nanmean(fit.share[1][misfits])), expected=1.0),
        ),
        cause="labels are shifted twice" if offset == 2 else f"labels are moved by {offset} places",
        next=("print one row with its labels beneath",),
        fix=("shift in one place only: in the collator or in the model",),
    )


def _garbage_finding(fit: Fit, garbage: NDArray[np.bool_], meant: bool) -> Finding:
    batch, rows, row = fit.rows.batch, fit.rows, int(np.argmax(garbage))
    best = float(fit.best((0, 1))[row])
    owner = _owner(fit, row)
    shown = f"row {owner} of the same batch" if owner is not None else "no row of the batch"
    return Finding(
        severity=None if meant else "info",
        confidence="confirmed" if meant else "undetermined",
        title="Labels belong to another row" if owner is not None else "Labels fit nothing in their row",
        summary=f"In step {batch.step} the labels of {int(garbage.sum())} of {len(rows.ids)} rows fit neither layout "
        f"(first {rows.name(row)}: {100 * max(best, 0):.3g} % of its labels); they are the tokens of {shown}.",
        where=Where(step=batch.step, rank=batch.rank, sample=rows.name(row)),
        evidence=(
            Evidence(name="rows that fit nothing", value=int(garbage.sum()), expected=0, unit="rows"),
            Evidence(name="agreement unshifted", value=float(fit.share[0][row]), expected=1.0, note=rows.name(row)),
            Evidence(name="agreement shifted", value=float(fit.share[1][row]), expected=1.0, note=rows.name(row)),
            Evidence(name="labels of", value=shown, expected="the row itself"),
        ),
        cause="inputs and labels were shuffled or batched apart from each other"
        if owner is not None
        else "the labels were made from something else than these tokens",
        next=(
            "print the row with its labels beneath",
            "declare training.objective where the labels are no tokens of the row",
        ),
        fix=("keep inputs and labels together through shuffling and batching",),
    )


def _owner(fit: Fit, row: int) -> int | None:
    """Another row of the batch whose tokens this row's labels are."""
    rows = fit.rows
    if rows.labels is None or rows.asked is None:
        return None
    for offset in (0, 1):
        length = rows.ids.shape[1] - offset
        asked = rows.asked[row, :length]
        if not asked.any():
            continue
        same = (rows.ids[:, offset:] == rows.labels[row, :length]) | ~asked
        for other in np.flatnonzero(same.mean(axis=1) >= T.SHIFTED_CUT_AGREEMENT).tolist():
            agreement = (rows.ids[other, offset:] == rows.labels[row, :length])[asked].mean()
            if other != row and agreement >= T.SHIFTED_CUT_AGREEMENT:
                return other
    return None


def _mask_token(fit: Fit, misfits: NDArray[np.bool_]) -> bool:
    """Whether the inputs at the labels that differ are mostly one token: masked-language-model labels, or noise."""
    at = fit.wrong[0] & misfits[:, None]
    tokens, counts = np.unique(fit.rows.ids[at], return_counts=True)
    if counts.size == 0 or int(counts.max()) < max(T.MASK_TOKEN_LEAST, T.MASK_TOKEN_SHARE * int(counts.sum())):
        return False
    # A constant row meets the first condition, too: its own token is no mask.
    labels = fit.rows.labels
    return labels is not None and len(np.unique(labels[at])) > 1 and len(np.unique(fit.rows.ids)) > len(tokens[:1])


def _class_labels(fit: Fit) -> bool:
    """Whether labels are a few small numbers that hardly occur among the tokens: tags, not tokens."""
    labels, asked = fit.rows.labels, fit.rows.asked
    if labels is None or asked is None:
        return False
    values, tokens = np.unique(labels[asked]), np.unique(fit.rows.ids)
    return len(values) <= 32 and int(values.max()) < 64 and len(values) * 4 <= len(tokens)


def _other_layout(fit: Fit) -> Finding | None:
    """The declared layout, where the data show the other one."""
    declared, batch = fit.rows.batch.label_layout, fit.rows.batch
    if declared not in ("unshifted", "shifted"):
        return None
    mine, other = (0, 1) if declared == "unshifted" else (1, 0)
    share, opposite = fit.share[mine][fit.judged], fit.share[other][fit.judged]
    if not (np.nanmean(opposite) >= T.LAYOUT_AGREEMENT and np.nanmean(share) < T.GARBAGE_AGREEMENT):
        return None
    name = "shifted" if other else "unshifted"
    return Finding(
        severity="warning",
        title=f"Labels are {name}, not {declared}",
        summary=f"The batch of step {batch.step} is declared as {declared}, but its labels are {_WORDS[other]}.",
        where=Where(step=batch.step, rank=batch.rank),
        evidence=(
            Evidence(name="layout", value=name, expected=declared),
            Evidence(name=f"agreement {declared}", value=float(np.nanmean(share)), expected=1.0),
            Evidence(name=f"agreement {name}", value=float(np.nanmean(opposite)), note="what the data show"),
        ),
        cause=f"whoever reads the labels as {declared} shifts them " + ("a second time" if other else "not at all"),
        next=("look who shifts: collator, model, or loss",),
        fix=("shift in one place only",),
    )


def _wrapped(fit: Fit) -> Finding | None:
    """Labels rolled around: the last label of every row is the row's first token."""
    rows = fit.rows
    if rows.labels is None or rows.asked is None or not (np.nan_to_num(fit.share[1]) >= T.LAYOUT_AGREEMENT).all():
        return None
    if (np.nan_to_num(fit.share[0]) >= T.LAYOUT_AGREEMENT).any():
        return None
    last = rows.asked[:, -1]
    around = rows.labels[:, -1] == rows.ids[:, 0]
    if int(last.sum()) < 4 or not around[last].all() or len(np.unique(rows.ids[last, 0])) < 3:
        return None
    batch = rows.batch
    return Finding(
        severity="warning",
        title="The last label of each row is its first token",
        summary=f"In all {int(last.sum())} rows of step {batch.step} the last position asks for the row's first token: "
        "the labels were rolled around.",
        where=Where(step=batch.step, rank=batch.rank),
        evidence=(Evidence(name="rows rolled around", value=int(last.sum()), expected=0, unit="rows"),),
        cause="torch.roll or np.roll was used to shift",
        next=("print the last label of a row",),
        fix=("set the last label to the ignore index after rolling, or slice instead",),
    )


def _shapes(capsule: Capsule) -> Iterator[Finding]:
    """Labels of another shape than the ids, where neither a shift nor another kind of target explains it."""
    for batch in capsule.batches():
        ids, labels = _shape(batch, "input_ids"), _shape(batch, "labels")
        if batch.split not in TRAIN or ids is None or labels is None or ids == labels:
            continue
        if len(ids) != 2 or len(labels) != 2 or any("decoder" in key for key in batch.keys or ()):
            continue  # a class a row, or an encoder with a decoder
        if ids[0] == labels[0] and abs(ids[1] - labels[1]) == 1:
            continue  # cut by one for the shift
        sure = objective(capsule) in NEXT_TOKEN
        yield Finding(
            severity="warning" if sure else "info",
            confidence="likely" if sure else "undetermined",
            title="Labels and tokens have different shapes",
            summary=f"In step {batch.step} input_ids are {list(ids)} and labels {list(labels)}.",
            where=Where(step=batch.step, rank=batch.rank, tensor="labels"),
            evidence=(Evidence(name="shape of labels", value=list(labels), expected=list(ids)),),
            cause="labels were padded or cut apart from the tokens",
            next=("print both shapes at the end of the collator",),
            fix=("pad labels together with input_ids, with the ignore index",),
        )
        return


def _shape(batch: Any, name: str) -> tuple[int, ...] | None:
    """Shape of an array, from the batch's own list of shapes (which also knows what could not be stored)."""
    if name in batch.arrays:
        return tuple(batch.arrays[name].shape)
    shapes = batch.attributes.get("shapes")
    shape = shapes.get(name) if isinstance(shapes, dict) else None
    if isinstance(shape, list) and all(isinstance(each, int) for each in shape):
        return tuple(shape)
    return None
