"""Batches from which no loss can be made: no token to average over, or scores that are not numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..finding import Confidence, Evidence, Finding, Severity, Where
from ..reference.token_ce import logsumexp
from ..registry import rule
from ..series import curve
from .loss_batch import attended, ignore_index, is_shifted
from .thresholds import MASKED_ROWS

if TYPE_CHECKING:
    from ...capsules import Capsule
    from ...capsules.batches import Batch

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class _Count:
    """Supervised tokens of one micro-batch; rows that are nothing but padding are left out."""

    step: int
    rank: int
    micro: int
    tokens: int
    rows: int
    empty_rows: int
    sample: str | None
    scores_finite: bool | None  # None where no scores were captured


def supervised_targets(capsule: Capsule, batch: Batch) -> tuple[Mask, NDArray[np.int64]] | None:
    """(positions that labels and loss mask ask for, the token each predicts), both [B, T]; None without labels."""
    labels = batch.labels
    if labels is None or labels.ndim != 2 or labels.size == 0:
        return None
    values = np.asarray(labels, np.int64)
    asked: Mask = (values != ignore_index(capsule)) & (values >= 0)
    if batch.loss_mask is not None and batch.loss_mask.shape == asked.shape:
        asked &= np.asarray(batch.loss_mask) != 0
    ids = batch.input_ids
    shifted = batch.label_layout == "shifted"
    if ids is not None and ids.shape == values.shape and asked.any():
        seen = is_shifted(np.asarray(ids, np.int64), values, asked, batch.label_layout)
        shifted = shifted if seen is None else seen
    if not shifted:  # nothing predicts the first token of a row
        asked = np.hstack((asked[:, 1:], np.zeros_like(asked[:, :1])))
        values = np.roll(values, -1, axis=1)
    return asked, values


def _padding_rows(batch: Batch, rows: int) -> Mask:
    """Rows that only fill up the batch [B]."""
    mask, roles = batch.attention_mask, batch.roles
    if mask is not None and mask.shape[0] == rows:
        return np.asarray(~attended(mask).reshape(rows, -1).any(axis=1), bool)
    if roles is not None and roles.shape[0] == rows:
        return np.asarray((np.asarray(roles) == 0).all(axis=1), bool)
    return np.zeros(rows, bool)


def _counts(capsule: Capsule) -> list[_Count]:
    """Every micro-batch whose supervised tokens are on record, in order; captured labels go before recorded counts."""
    found: dict[tuple[int, int, int], _Count] = {}
    for record in capsule.records("microbatches"):
        step, tokens = record.get("step"), record.get("tokens")
        if step is not None and tokens is not None:
            key = (int(step), int(record["rank"]), int(record.get("micro") or 0))
            found[key] = _Count(*key, int(tokens), 1, int(tokens == 0), None, scores_finite=None)
    for batch in capsule.batches():
        known = supervised_targets(capsule, batch) if batch.split in (None, "train") else None
        if known is None:
            continue
        asked = known[0]
        real = ~_padding_rows(batch, len(asked))
        empty = np.flatnonzero(~asked.any(axis=1) & real)
        name = batch.sample_ids[empty[0]] if len(empty) and batch.sample_ids else None
        key = (batch.step, batch.rank, batch.micro)
        sample = None if not len(empty) else name or f"row {empty[0]}"
        finite = _scores_finite(batch)
        found[key] = _Count(*key, int(asked.sum()), int(real.sum()), len(empty), sample, finite)
    return [found[key] for key in sorted(found)]


def _scores_finite(batch: Batch) -> bool | None:
    for array in (batch.logsumexp, batch.logits):
        if array is not None:
            return not bool(np.isnan(array).any())
    return None


@rule(
    "objective/all-masked",
    stage="objective",
    needs=("batches.labels|records.microbatches.tokens",),
    explained_by=("data/template-not-found", "data/labels-misaligned"),
    cases=("nan-at-first-step",),
)
def all_masked(capsule: Capsule) -> Iterator[Finding]:
    """Nothing is supervised: a row, a batch or the whole run has no token to average over.

    What it checks:
        The supervised tokens of every row, micro-batch and of the run: labels that are not ignored and that a position
        predicts, under the loss mask; where no labels were captured, the recorded token counts.
    Why it matters:
        A mean over no token is 0/0: NaN in the loss, and NaN in every weight after the step. A loss that guards against
        it prints 0.0, and the step teaches nothing.
    How it decides:
        No supervised token in any micro-batch, or in one whose loss is not finite while its scores are: confirmed and
        critical. In a micro-batch with a finite loss: a warning, a remark inside a longer window. In single rows: a
        remark, and a warning where they are more than half of the rows.
    Looks like it but is not:
        Rows that only fill up a batch (all padding); objectives without labels; a first label that nothing predicts.
    What to try next:
        Decode the row; count the labels that are not ignored before and after truncation, and look for the response
        template in it.
    Fix:
        Drop samples whose answer was truncated away, or divide by max(count, 1).
    """
    counts = _counts(capsule)
    empty = [each for each in counts if each.tokens == 0 and each.rows]
    if not empty:
        yield from _empty_rows(counts)
        return
    loss = curve(capsule, "loss")
    reported = {(b.step, b.rank): b.reported_loss for b in capsule.batches() if b.reported_loss is not None}
    lost = loss.step[~np.isfinite(loss.value)]
    onset = int(lost[0]) if len(lost) else None
    broken = [
        each for each in empty if _not_finite(reported.get((each.step, each.rank)), loss.at(each.step), loss.step, each)
    ]
    alone = {(each.step, each.rank) for each in counts if each.tokens > 0}
    broken = [each for each in broken if each.scores_finite or onset is None or each.step == onset]
    whole = len(empty) == len([each for each in counts if each.rows])
    first = (broken or empty)[0]
    lonely = (first.step, first.rank) not in alone
    severity: Severity = "critical" if whole or broken else "warning" if lonely else "info"
    # A loss that was lost before, or scores that are no numbers themselves, are another cause of the same NaN.
    sure = bool(broken and first.scores_finite is not False) or (whole and len(empty) > 1)
    confidence: Confidence = "confirmed" if sure else "likely"
    what = "No token is supervised in any recorded batch" if whole else "A batch has no supervised token"
    number = reported.get((first.step, first.rank), loss.at(first.step))
    yield Finding(
        title=what,
        summary=(
            f"{len(empty):,} of {len(counts):,} micro-batches have no supervised token, first at step {first.step:,}"
            + (f", where the loss is {number:g}: 0/0." if broken else ".")
        ),
        severity=severity,
        confidence=confidence,
        where=Where(step=first.step, rank=first.rank, sample=first.sample),
        evidence=(
            Evidence(name="supervised_tokens", value=0, expected=1, unit="tokens", note=f"at least, step {first.step}"),
            Evidence(name="empty_microbatches", value=len(empty), expected=0, note=f"of {len(counts)}"),
            Evidence(name="loss", value=float(number), unit="nats/token", note=f"step {first.step}"),
        ),
        cause="every label is ignored, so that the mean over supervised tokens is 0/0",
        next=("decode one row and look for its answer", "count labels that are not ignored in the collator"),
        fix=("drop samples without a supervised token", "divide by max(count, 1)"),
    )


def _not_finite(reported: float | None, logged: float, steps: NDArray[np.int64], count: _Count) -> bool:
    """Whether the number of that step is on record and no finite one."""
    if reported is not None:
        return not np.isfinite(reported)
    return bool(np.isin(count.step, steps)) and not np.isfinite(logged)


def _empty_rows(counts: list[_Count]) -> Iterator[Finding]:
    rows, empty = sum(each.rows for each in counts), sum(each.empty_rows for each in counts)
    if not empty:
        return
    first = next(each for each in counts if each.empty_rows)
    share = empty / rows
    yield Finding(
        title="Rows without a supervised token",
        summary=(
            f"{empty:,} of {rows:,} captured rows have no supervised token: they cost what every row costs and teach "
            "nothing."
        ),
        severity="warning" if share > MASKED_ROWS else "info",
        confidence="likely",
        where=Where(step=first.step, rank=first.rank, sample=first.sample),
        evidence=(
            Evidence(name="empty_rows", value=empty, expected=0, unit="rows", note=f"of {rows}"),
            Evidence(name="share", value=share, expected=MASKED_ROWS, note="at most"),
        ),
        cause="every label of these rows is ignored",
        next=("decode one of the rows: was its answer cut off, or the response template not found?",),
        fix=("drop such rows, or shorten their prompts",),
    )


@rule(
    "objective/logits-nonfinite",
    stage="objective",
    needs=("batches.logits|batches.logsumexp",),
    explained_by=(
        *("numerics/first-nonfinite", "numerics/fp16-overflow", "numerics/learning-rate"),
        *("data/nonfinite-input", "data/token-out-of-vocabulary", "data/poison-sample"),
    ),
    cases=("nan-at-first-step",),
)
def logits_nonfinite(capsule: Capsule) -> Iterator[Finding]:
    """Output scores are not numbers.

    What it checks:
        The logits of every captured batch (or their log-sum-exp), and the score of the next token where it is asked
        for.
    Why it matters:
        One NaN at a position that counts makes the loss NaN, and the step every weight. At a position that does not
        count it is harmless until someone multiplies by the mask instead of selecting with it: 0 · NaN is NaN.
    How it decides:
        A NaN or +Inf among the logits of a position, nothing but −Inf, or −Inf for a token that the labels ask for.
        Confirmed; critical at supervised positions, or where labels are unknown or the loss is not finite. A warning
        where all of them lie behind the mask (padding or ignored labels) and the loss is finite.
    Looks like it but is not:
        −Inf for tokens that are ruled out (padding of the vocabulary, constrained output) and that no label asks for.
    What to try next:
        Look for the first non-finite tensor before the logits; a left-padded row whose first query sees no key.
    Fix:
        Give a fully masked row a finite output; compute logits and loss in a dtype whose range holds them.
    """
    for batch in capsule.batches():
        bad = _bad_positions(batch)
        if bad is None:
            continue
        known = supervised_targets(capsule, batch)
        asked = known[0] if known is not None else None
        ruled_out = _ruled_out(batch, asked) & ~bad if asked is not None and asked.shape == bad.shape else None
        wrong = bad if ruled_out is None else bad | ruled_out
        if not wrong.any():
            continue
        yield _nonfinite_finding(capsule, batch, wrong, ruled_out, asked)
        return


def _bad_positions(batch: Batch) -> Mask | None:
    """Positions whose scores hold a NaN or +Inf, or nothing finite [B, T]."""
    logits = batch.logits
    if logits is not None:
        total = logsumexp(np.asarray(logits))
        return ~np.isfinite(total)
    return None if batch.logsumexp is None else ~np.isfinite(np.asarray(batch.logsumexp, np.float64))


def _ruled_out(batch: Batch, asked: Mask) -> Mask:
    """Positions whose next token is asked for and has the logit −Inf [B, T]."""
    following, ids = batch.target_logits, batch.input_ids
    if following is not None:
        score = np.asarray(following, np.float64)[..., 1]
    elif batch.logits is not None and ids is not None and ids.shape == asked.shape:
        logits, after = np.asarray(batch.logits), np.roll(np.asarray(ids, np.int64), -1, axis=1)
        lawful = (after >= 0) & (after < logits.shape[-1])
        score = np.take_along_axis(logits, np.where(lawful, after, 0)[..., None], axis=-1)[..., 0]
        score = np.where(lawful, score, 0.0)
    else:
        return np.zeros_like(asked)
    inside = np.ones_like(asked)
    inside[:, -1] = False  # what follows a row is another row
    return np.isneginf(score) & asked & inside


def _nonfinite_finding(
    capsule: Capsule, batch: Batch, wrong: Mask, ruled_out: Mask | None, asked: Mask | None
) -> Finding:
    counts = wrong if asked is None or asked.shape != wrong.shape else wrong & asked
    loss = curve(capsule, "loss")
    number = batch.reported_loss if batch.reported_loss is not None else loss.at(batch.step)
    known = batch.reported_loss is not None or bool(np.isin(batch.step, loss.step))
    row, at = (int(each) for each in np.argwhere(counts if counts.any() else wrong)[0])
    behind = not counts.any()
    harmless = behind and (not known or np.isfinite(number))
    out = ruled_out is not None and bool(ruled_out[row, at])
    kind = "−Inf for the token that is asked for" if out else _kind(batch, row, at)
    sample = batch.sample_ids[row] if batch.sample_ids and row < len(batch.sample_ids) else f"row {row}"
    place = "behind the mask, where nothing is scored" if behind else "at a position that is scored"
    return Finding(
        title="The logits are not finite" + (" behind the mask" if behind else ""),
        summary=(
            f"{int(wrong.sum()):,} of {wrong.size:,} positions of step {batch.step:,} have scores that are not finite, "
            f"first {sample}, position {at}: {kind}, {place}."
        ),
        severity="warning" if harmless else "critical",
        confidence="confirmed",
        where=Where(step=batch.step, rank=batch.rank, sample=sample),
        evidence=(
            Evidence(name="position", value=at, note=f"{sample}: {kind}"),
            Evidence(name="nonfinite_positions", value=int(wrong.sum()), expected=0, note=f"of {wrong.size}"),
            Evidence(name="nonfinite_scored", value=int(counts.sum()), expected=0, note="of them are scored"),
            Evidence(name="loss", value=float(number), unit="nats/token", note=f"step {batch.step}"),
            Evidence(name="logits_dtype", value=batch.logits_dtype or "unknown"),
        ),
        cause="the label is a token that the output rules out" if out else "the model's output is not finite",
        next=(
            "look for the first non-finite tensor of the step",
            "in a left-padded row look at the first query: it may see no key at all",
        ),
        fix=("give rows without an allowed key a finite output; compute the scores in float32",),
    )


def _kind(batch: Batch, row: int, at: int) -> str:
    scores: Any = batch.logits if batch.logits is not None else batch.logsumexp
    values = np.atleast_1d(np.asarray(scores)[row, at])
    return "NaN" if np.isnan(values).any() else "+Inf" if np.isposinf(values).any() else "nothing but −Inf"
