"""Samples that are far longer than the others, and samples that were cut."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..finding import Confidence, Evidence, Finding, Severity, Where
from ..registry import rule
from . import thresholds as T
from .rows import TRAIN, rows_of, specials

if TYPE_CHECKING:
    from ...capsules import Capsule

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Length:
    """One sample: tokens, and where it was seen."""

    tokens: int
    step: int | None
    rank: int | None
    name: str
    truncated: bool | None = None


def sample_lengths(capsule: Capsule) -> list[Length]:
    """Lengths of training samples: from the records, else real tokens of the captured rows that hold one document."""
    found: list[Length] = []
    for record in capsule.records("samples"):
        if record.get("split") not in TRAIN:
            continue
        length, marked = record.get("length"), record.get("truncated")
        if isinstance(length, int) or marked is not None:
            name = record.get("id") or str(record.get("sha256") or "")[:12] or "a sample"
            size = int(length) if isinstance(length, int) else -1
            found.append(Length(size, record.get("step"), record.get("rank"), str(name), marked))
    if found:
        return found
    for rows in rows_of(capsule):
        if not rows.packed:
            found += [
                Length(int(size), rows.batch.step, rows.batch.rank, rows.name(row))
                for row, size in enumerate(rows.real.sum(axis=1))
            ]
    return found


@rule(
    "data/length-outlier",
    stage="data",
    severity="warning",
    needs=("records.samples.length|batches.input_ids",),
    cases=("out-of-memory-after-hours",),
)
def length_outlier(capsule: Capsule) -> Iterator[Finding]:
    """A few samples are far longer than all others, or most of what is computed is padding.

    What it checks:
        Lengths of at least 20 training samples, and the share of padding in the captured batches.

    Why it matters:
        One long sample sets the memory peak and pads its whole batch; it is often two samples that were not separated.

    How it decides:
        Longer than three times the 95th percentile, and longer than the tail of the others lets expect in a set of this
        size (a log-normal through median and 95th percentile, and a power law through the longest fifth). Padding: more
        than half of all positions of the captured batches; info where it is so in single batches only.

    Looks like it but is not:
        A smooth long tail, whose longest sample is where the tail leads; packed and padding-free rows; rows padded to a
        fixed length on purpose still compute on padding, and are told.

    What to try next:
        Look at the longest samples; plot the lengths (`llmconsole probe module:loader`).

    Fix:
        Cut or split what is too long; bucket by length; pack.
    """
    lengths = [each for each in sample_lengths(capsule) if each.tokens > 0]
    far = _far_out(np.array([each.tokens for each in lengths], np.float64))
    if far is not None:
        limit, p95 = far
        outliers = sorted((each for each in lengths if each.tokens > limit), key=lambda each: -each.tokens)
        longest = outliers[0]
        rest = max(each.tokens for each in lengths if each.tokens <= limit)
        yield Finding(
            title="Samples far longer than the others",
            summary=f"{len(outliers)} of {len(lengths)} samples are longer than {limit:.4g} tokens, the longest "
            f"({longest.name}) {longest.tokens}; 95 % are within {p95:.4g} and the longest other is {rest}.",
            where=Where(step=longest.step, rank=longest.rank, sample=longest.name),
            evidence=(
                Evidence(name="longest", value=longest.tokens, expected=f"≤ {limit:.5g}", unit="tokens"),
                Evidence(name="p95", value=p95, unit="tokens", note=f"of {len(lengths)} samples"),
                Evidence(name="samples beyond", value=len(outliers), expected=0, unit="samples"),
                Evidence(name="longest of the others", value=rest, unit="tokens"),
            ),
            cause="samples that were not separated, or not cut",
            next=("look at the longest samples",),
            fix=("cut or split what is too long", "bucket by length"),
        )
    yield from _padding(capsule)


def _far_out(lengths: Floats) -> tuple[float, float] | None:
    """(limit, p95) where samples lie beyond what the others' tail leads to; None where none does."""
    if len(lengths) < T.OUTLIER_MIN_SAMPLES:
        return None
    p95 = float(np.percentile(lengths, 95))
    limit = T.OUTLIER_OF_P95 * p95
    if not (lengths > limit).any():
        return None
    limit = max(limit, _log_normal(lengths, p95), _power_law(lengths, limit))
    return (limit, p95) if (lengths > limit).any() else None


def _log_normal(lengths: Floats, p95: float) -> float:
    """Length that a log-normal through median and 95th percentile passes in one of a hundred sets of this size."""
    from statistics import NormalDist

    median = float(np.median(lengths))
    sigma = (math.log(p95) - math.log(median)) / NormalDist().inv_cdf(0.95)
    return median * math.exp(sigma * NormalDist().inv_cdf(1 - T.TAIL_CHANCE / len(lengths)))


def _power_law(lengths: Floats, cap: float) -> float:
    """Length that a power law through the longest fifth passes in one of twenty sets of this size.

    The tail index is Hill's estimate, with what lies beyond ``cap`` counted as just reaching it (censored), so that the
    outliers in question do not excuse themselves.
    """
    start = float(np.quantile(lengths, T.TAIL_FROM))
    tail = lengths[lengths > start]
    below = int((tail <= cap).sum())
    if not below:
        return start
    index = float(np.log(np.minimum(tail, cap) / start).sum()) / below
    return start * math.exp(index * math.log(len(tail) / T.HEAVY_TAIL_CHANCE))


def _padding(capsule: Capsule) -> Iterator[Finding]:
    """Share of positions that hold padding."""
    real, size, worst = 0, 0, (0.0, None)
    batches, over = 0, 0
    for rows in rows_of(capsule):
        if rows.special.pad is None and rows.visible is None and rows.same("roles") is None:
            continue
        own = int(rows.real.sum())
        share = 1 - own / rows.ids.size
        real, size, batches = real + own, size + rows.ids.size, batches + 1
        over += share > T.PADDING_SHARE
        if share > worst[0]:
            worst = (share, rows)
    rows = worst[1]
    if rows is None or worst[0] <= T.PADDING_SHARE:
        return
    overall = 1 - real / size
    severity: Severity | None = None if overall > T.PADDING_SHARE else "info"
    yield Finding(
        severity=severity,
        kind="hygiene",
        title="Most of what is computed is padding" if severity is None else "A batch is mostly padding",
        summary=f"{100 * overall:.3g} % of the positions of {batches} captured batches are padding, "
        f"{100 * worst[0]:.3g} % in that of step {rows.batch.step}.",
        where=Where(step=rows.batch.step, rank=rows.batch.rank),
        evidence=(
            Evidence(name="padding share", value=overall, expected=f"≤ {T.PADDING_SHARE:g}", note=f"{batches} batches"),
            Evidence(name="padding share of the worst batch", value=worst[0], expected=f"≤ {T.PADDING_SHARE:g}"),
            Evidence(name="batches above", value=over, expected=0, unit="batches"),
        ),
        cause="rows of very different lengths share a batch, or all are padded to a fixed length",
        next=("plot the lengths of one epoch",),
        fix=("bucket by length, pack, or pad to the longest of the batch",),
    )


@rule(
    "data/truncation",
    stage="data",
    severity="warning",
    needs=("records.samples.length|records.samples.truncated|batches.input_ids",),
)
def truncation(capsule: Capsule) -> Iterator[Finding]:
    """Many samples are cut at the maximum length.

    What it checks:
        How many samples are marked as truncated, or are exactly as long as the maximum, and whether rows of that length
        lack the end of text that shorter ones have.

    Why it matters:
        What is cut off is the end: the answer, and the token that says that it is over.

    How it decides:
        More than 5 % are marked. Or more than 5 %, and at least three, are exactly of the maximum length (the
        manifest's max_length, else the longest where the lost ends show the cut), and three times as many as at each of
        the lengths just below.

    Looks like it but is not:
        Packed rows, and text cut to pieces of one length for pre-training: all rows are of that length. Lengths that
        simply reach as far as the limit. Rows padded to a fixed length, whose mask tells the true one.

    What to try next:
        Decode the end of some rows of that length.

    Fix:
        Raise the maximum length, split long samples, or drop them; append the end of text after cutting.
    """
    training = capsule.manifest.training
    lengths = sample_lengths(capsule)
    marked = [each for each in lengths if each.truncated]
    if lengths and len(marked) > T.CUT_SHARE * len(lengths):
        yield _cut(marked[0], len(marked), len(lengths), "marked as truncated", None, None, "confirmed")
        return
    if training is not None and training.packing:
        return
    known = [each for each in lengths if each.tokens > 0]
    if not known:
        return
    longest = max(each.tokens for each in known)
    declared = training.max_length if training is not None else None
    at_limit = [each for each in known if each.tokens == longest]
    share = len(at_limit) / len(known)
    if share >= T.FIXED_LENGTH_SHARE or (declared is not None and longest != declared):
        return
    if len(at_limit) < T.CUT_MIN_SAMPLES or share <= T.CUT_SHARE:
        return
    near = [sum(each.tokens == longest - back for each in known) for back in range(1, 1 + _neighbours(longest))]
    if len(at_limit) < T.CUT_OVER_NEIGHBOURS * max(near, default=0):
        return
    lost = _lost_ends(capsule, longest)
    if declared is None and lost is None:
        return
    what = f"exactly {longest} tokens long"
    yield _cut(at_limit[0], len(at_limit), len(known), what, longest, lost, "likely")


def _neighbours(longest: int) -> int:
    return max(4, min(32, longest // 16))


def _lost_ends(capsule: Capsule, longest: int) -> float | None:
    """Share of rows of the maximum length that lack the end that shorter ones have; None where that shows nothing."""
    special = specials(capsule)
    ends = special.stops | ({special.eos} if special.eos is not None else set())
    if not ends:
        return None
    cut: list[bool] = []
    whole: list[bool] = []
    for rows in rows_of(capsule):
        for row in range(len(rows.ids)):
            kept = rows.ids[row][rows.real[row]]
            if kept.size:
                (cut if kept.size >= longest else whole).append(int(kept[-1]) in ends)
    if not cut or not whole or sum(whole) < T.ENDS_SHARE * len(whole):
        return None
    lost = 1 - sum(cut) / len(cut)
    return lost if lost >= T.ENDS_SHARE else None


def _cut(
    first: Length, count: int, total: int, what: str, limit: int | None, lost: float | None, confidence: Confidence
) -> Finding:
    evidence: list[Any] = [
        Evidence(
            name="share of samples", value=count / total, expected=f"≤ {T.CUT_SHARE:g}", note=f"{count} of {total}"
        )
    ]
    if limit is not None:
        evidence.append(Evidence(name="maximum length", value=limit, unit="tokens"))
    told = ""
    if lost is not None:
        evidence.append(Evidence(name="of them without an end of text", value=lost, expected=0.0, unit="share"))
        told = f"; {100 * lost:.3g} % of them lack the end of text that shorter ones have"
    return Finding(
        confidence=confidence,
        title="Samples are cut at the maximum length",
        summary=f"{count} of {total} samples ({100 * count / total:.3g} %) are {what}{told}.",
        where=Where(step=first.step, rank=first.rank, sample=first.name),
        evidence=tuple(evidence),
        cause="samples are longer than the maximum length and their ends are cut off",
        next=("decode the end of some of these rows",),
        fix=("raise the maximum length, split or drop long samples", "append the end of text after cutting"),
    )
