"""The attention mask against the tokens that it covers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Severity, Where
from ..registry import rule
from . import thresholds as T
from .rows import BIDIRECTIONAL, MEDIA_ROLES, Mask, Rows, objective, rows_of

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "data/attention-mask-mismatch",
    stage="data",
    needs=("batches.attention_mask", "batches.input_ids"),
)
def attention_mask_mismatch(capsule: Capsule) -> Iterator[Finding]:
    """The attention mask hides real tokens or shows padding.

    What it checks:
        The mask against padding: the runs of the padding id at the ends of a row, or role 0. Of a mask [B, T, T] it is
        asked whether any other token sees a position.

    Why it matters:
        A hidden token is one that the model trains to guess blind; visible padding mixes into real tokens, shifts
        positions and counts in whatever averages over the mask.

    How it decides:
        At least two positions disagree. Real tokens hidden (of more than one kind, or inside the row), the mask the
        wrong way round, or padding that real tokens see (to the left, or under an objective that reads both ways):
        confirmed. Padding to the right that only the mask shows: warning.

    Looks like it but is not:
        The first end-of-text of a run where padding uses the same id; a padding id that is a token, too; padding with
        another id than the tokenizer names; padding inside a row between packed documents; a padding_mask, which is the
        other way round by name; document numbers in the mask; images and audio.

    What to try next:
        Print a row as text with the mask beneath (`llmconsole show CAPSULE --batch`).

    Fix:
        Make the mask where the padding is made, from lengths and not from ids.
    """
    both_ways = objective(capsule) in BIDIRECTIONAL
    said: set[str] = set()
    for rows in rows_of(capsule, splits=(None, "train", "validation")):
        for kind, finding in _judge(rows, both_ways):
            if kind not in said:
                said.add(kind)
                yield finding


def _judge(rows: Rows, both_ways: bool) -> Iterator[tuple[str, Finding]]:
    visible = rows.visible
    if visible is None:
        return
    leading, trailing, padding = _padding(rows)
    square = rows.marked is None
    shown = _seen_by_real(rows, padding) if square else visible & padding
    hidden = _hidden(rows, visible, padding)
    exact = padding.any() and (~padding).any() and bool((visible == padding).all())
    if exact and not square:
        keys = rows.batch.keys or []
        if "attention_mask" in keys or not any("padding_mask" in key for key in keys):
            yield "inverted", _finding(rows, padding | hidden, "inverted", None)
        return
    if int(hidden.sum()) >= T.MASK_MIN_POSITIONS or (hidden.any() and _interior(visible, hidden)):
        yield "hidden", _finding(rows, hidden, "inside" if _interior(visible, hidden) else "hidden", None)
    # An id that stands between visible tokens, too, is a token in its own right and no padding.
    inside = 0 if rows.special.pad is None else int(((rows.ids == rows.special.pad) & ~padding & visible).sum())
    if int(shown.sum()) >= max(T.MASK_MIN_POSITIONS, 4 * inside):
        harmful = both_ways or bool((shown & leading & ~trailing).any()) or square
        yield "shown", _finding(rows, shown, "shown", None if harmful else "warning")


def _padding(rows: Rows) -> tuple[Mask, Mask, Mask]:
    """(leading, trailing, all) padding as ids or roles show it, without asking the mask."""
    leading, trailing = rows.runs
    roles = rows.same("roles")
    if roles is not None and (roles == 0).any():
        ahead = np.logical_and.accumulate(roles == 0, axis=1)
        return ahead, np.logical_and.accumulate((roles == 0)[:, ::-1], axis=1)[:, ::-1], roles == 0
    if rows.special.pad_says_nothing and rows.special.pad is not None:
        # The token next to the text may be its own end or beginning.
        first = leading & np.roll(leading, -1, axis=1)
        first[:, -1] = False
        last = trailing & np.roll(trailing, 1, axis=1)
        last[:, 0] = False
        return first, last, first | last
    return leading, trailing, leading | trailing


def _hidden(rows: Rows, visible: Mask, padding: Mask) -> Mask:
    """Real tokens that the mask hides; empty where the hidden ids are one kind of padding of its own."""
    hidden = ~visible & ~padding
    roles = rows.same("roles")
    if roles is not None:
        hidden &= ~np.isin(roles, MEDIA_ROLES)
    pad = rows.special.pad
    if pad is None or roles is None:
        # Padding inside a row (between packed documents), or with an id that the tokenizer does not name.
        ends = ~visible & (np.logical_and.accumulate(~visible, axis=1) | _backwards(~visible))
        values, counts = np.unique(rows.ids[ends], return_counts=True)
        usual = pad if pad is not None else int(values[counts.argmax()]) if counts.size else None
        if usual is not None:
            hidden &= rows.ids != usual
        edge = np.unique(rows.ids[hidden & ends])
        if len(edge) == 1 and int(edge[0]) not in (rows.special.eos, rows.special.bos):
            hidden &= ~ends
        elif len(edge) == 1 and int((hidden & ends).sum(axis=1).max()) > 1:
            hidden &= ~ends  # padded with the end-of-text id, whatever the tokenizer says
    return hidden


def _backwards(mask: Mask) -> Mask:
    return np.logical_and.accumulate(mask[:, ::-1], axis=1)[:, ::-1]


def _interior(visible: Mask, hidden: Mask) -> bool:
    """Whether a hidden token has visible ones on both sides."""
    before = np.logical_or.accumulate(visible, axis=1)
    after = np.logical_or.accumulate(visible[:, ::-1], axis=1)[:, ::-1]
    return bool((hidden & before & after).any())


def _seen_by_real(rows: Rows, padding: Mask) -> Mask:
    """Padding that a real query of the same row sees; the mask is [B, T, T] (query, key)."""
    mask = np.asarray(rows.batch.attention_mask)
    seen = mask > -1 if mask.dtype.kind == "f" and not (mask > 0).any() else mask != 0
    if seen.shape != (*rows.ids.shape, rows.ids.shape[1]):
        return np.zeros(rows.ids.shape, bool)
    return (seen & ~padding[:, :, None]).any(axis=1) & padding


def _finding(rows: Rows, at: Mask, kind: str, severity: Severity | None) -> Finding:
    batch = rows.batch
    row, position = (int(each) for each in np.argwhere(at)[0])
    count, where = int(at.sum()), f"{rows.name(row)}, position {position}, id {int(rows.ids[row, position])}"
    title, words, cause, fix = {
        "hidden": (
            "The attention mask hides real tokens",
            "real tokens are hidden by the attention mask",
            "the mask was made for another row or length than the tokens",
            "make the mask from the lengths of the final rows",
        ),
        "inside": (
            "The attention mask has holes",
            "real tokens inside their rows are hidden by the attention mask",
            "the mask was made by comparing ids, or for other rows",
            "make the mask from the lengths of the final rows",
        ),
        "shown": (
            "The attention mask shows padding",
            "padding tokens are visible to attention",
            "the mask was made before padding, or is all ones",
            "make the mask where the padding is made",
        ),
        "inverted": (
            "The attention mask is the wrong way round",
            "positions are marked the other way round: padding is visible and real tokens are hidden",
            "a mask of what to leave out is given where one of what to attend to is expected",
            "invert the mask, or rename it",
        ),
    }[kind]
    expected = 1 if kind in ("hidden", "inside") else 0
    return Finding(
        severity=severity,
        confidence="confirmed",
        title=title,
        summary=f"In step {batch.step} {count} {words}, first {where}.",
        where=Where(step=batch.step, rank=batch.rank, tensor="attention_mask", sample=rows.name(row)),
        evidence=(
            Evidence(name="mask", value=1 - expected, expected=expected, note=where),
            Evidence(name="positions that disagree", value=count, expected=0, unit="tokens"),
            Evidence(name="rows that disagree", value=int(at.any(axis=1).sum()), expected=0, unit="rows"),
        ),
        cause=cause,
        next=("print the row with its mask beneath",),
        fix=(fix,),
    )
