"""Beginning and end of text: tokens that the model must see once, and must learn to write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..finding import Confidence, Evidence, Finding, Severity, Where
from ..registry import NotJudged, rule
from . import thresholds as T
from .rows import BIDIRECTIONAL, Ints, Mask, Rows, objective, rows_of, specials

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "data/pad-is-eos",
    stage="data",
    needs=(
        "batches.input_ids",
        "batches.labels|batches.loss_mask",
        "manifest.tokenizer.pad_id",
        "manifest.tokenizer.eos_id",
    ),
    cases=("tokens-without-end", "parrot-after-finetuning"),
)
def pad_is_eos(capsule: Capsule) -> Iterator[Finding]:
    """Padding is the end-of-text id, and masking the padding took every end-of-text label with it.

    What it checks:
        Where padding and end of text share an id: whether any label asks for that id, or for another stop id.

    Why it matters:
        A model that is never asked for the end of a text does not learn to stop: every answer runs to the limit.

    How it decides:
        The two ids are equal, rows with supervised tokens have the id after them, and no label of any captured batch
        asks for it or for another stop id. Confirmed where the attention mask shows that a masked one was a real end;
        without a mask likely.

    Looks like it but is not:
        Collators that mask by the attention mask and so keep the first end of text; chat models whose turns end in
        another token (a stop id, or one that ends nearly every row and is asked for); a stream of text cut to pieces
        with no end in it; rows cut at the maximum length.

    What to try next:
        Print the end of a row with its labels; look whether generation stops by length.

    Fix:
        Give padding an id of its own, or mask labels by the attention mask and not by the id.
    """
    special = specials(capsule)
    if special.eos is None or special.pad != special.eos or objective(capsule) in BIDIRECTIONAL:
        return
    seen, real, first = 0, 0, None
    lasts: Counter[int] = Counter()
    for rows in rows_of(capsule):
        targets, asked = _targets(rows)
        if asked is None or not asked.any():
            continue
        wanted = targets[asked]
        if (wanted == special.eos).any() or np.isin(wanted, list(special.stops - {special.eos})).any():
            return
        for row in np.flatnonzero(asked.any(axis=1)).tolist():
            start = int(np.argmax(asked[row]))
            ends = np.flatnonzero(rows.ids[row, start:] == special.eos)
            lasts[int(targets[row][np.flatnonzero(asked[row])[-1]])] += 1
            if not ends.size:
                continue
            seen += 1
            real += rows.marked is not None and bool(rows.marked[row, start + int(ends[0])])
            first = first or (rows, row)
    if first is None:
        return
    rows, row = first
    if rows.marked is not None and not real and _ends_alike(lasts):
        return
    stopped = _stopped_by_length(capsule)
    evidence = [
        Evidence(name="pad_id", value=special.pad, expected="another id than eos_id", note=f"eos_id {special.eos}"),
        Evidence(name="labels that ask for the end", value=0, expected=seen, unit="labels", note="one a row"),
        Evidence(name="real ends that are masked", value=real, expected=0, unit="rows", note="by the attention mask"),
    ]
    if stopped is not None:
        evidence.append(
            Evidence(name="generations ended by length", value=stopped[0], unit="share", note=f"of {stopped[1]}")
        )
    yield Finding(
        confidence="confirmed" if real else "likely",
        severity=None if real or rows.marked is None else "warning",
        title="The end of text is never a label",
        summary=f"Padding and end of text are both id {special.eos}, and of {seen} rows that hold it after their "
        f"supervised tokens no label asks for it (first {rows.name(row)} in step {rows.batch.step}).",
        where=Where(step=rows.batch.step, rank=rows.batch.rank, sample=rows.name(row)),
        evidence=tuple(evidence),
        cause="labels are masked wherever the token is the padding id, and that is the end of text, too"
        if real or rows.marked is None
        else "rows have no end of text of their own: what looks like one is padding",
        next=("print the end of a row with its labels", "look whether generation ends by length"),
        fix=("give padding an id of its own", "mask labels by the attention mask, not by the id"),
    )


def _targets(rows: Rows) -> tuple[Ints, Mask | None]:
    """Labels as they are, or the tokens that a loss mask asks for."""
    if rows.labels is not None:
        return rows.labels, rows.asked
    mask = rows.same("loss_mask")
    return rows.ids, None if mask is None else mask != 0


def _ends_alike(lasts: Counter[int]) -> bool:
    """Whether nearly every row's last label is one and the same token: the text has an end of its own."""
    total = sum(lasts.values())
    return total >= 4 and lasts.most_common(1)[0][1] >= T.ENDS_SHARE * total


def _stopped_by_length(capsule: Capsule) -> tuple[float, int] | None:
    reasons = [each.get("finish_reason") for each in capsule.records("generations") if each.get("finish_reason")]
    return (reasons.count("length") / len(reasons), len(reasons)) if reasons else None


@rule(
    "data/bos-count",
    stage="data",
    severity="warning",
    needs=("batches.input_ids|records.generations.prompt_ids", "manifest.tokenizer.bos_id"),
    cases=("good-training-poor-inference",),
)
def bos_count(capsule: Capsule) -> Iterator[Finding]:
    """Rows begin with no beginning-of-text token, or with several.

    What it checks:
        How many BOS tokens stand at the beginning of training rows (of each document of packed ones) and of the prompts
        of captured generations, after padding to the left.

    Why it matters:
        Template and tokenizer each add one, or neither does. The model then meets another beginning in training than
        at inference, and the first tokens are the ones all others attend to.

    How it decides:
        Half of the rows or more begin with two: confirmed. None begins with one although the tokenizer adds it, and it
        occurs nowhere else in the rows. Or the prompts of generations begin otherwise than the training rows; which
        side is wrong follows from the tokenizer (adds_bos), and where that is not known the verdict is undetermined.

    Looks like it but is not:
        Tokenizers without BOS, or with one that they do not add; turns of a chat that each begin with BOS; rows cut
        from a stream, which begin anywhere; padding with the BOS id; models whose end of text is the same id.

    What to try next:
        Tokenize one conversation as training and as serving do and compare the first five ids.

    Fix:
        Tokenize the output of a chat template with add_special_tokens=False; use one function for both sides.
    """
    special, tokenizer = specials(capsule), capsule.manifest.tokenizer
    bos = special.bos
    if bos is None or tokenizer is None:
        return
    counts: list[int] = []
    first: Rows | None = None
    elsewhere = False
    blurred = bos in (special.pad, special.eos)
    for rows in rows_of(capsule):
        if special.pad == bos and rows.marked is None:
            raise NotJudged("padding and BOS share an id: an attention_mask is needed to tell them apart")
        first = first or rows
        starts = _starts(rows)
        led = _leading(rows.ids, bos, starts, rows.real)
        counts += led.tolist()
        at_start = np.zeros(rows.ids.shape, bool)
        at_start[np.arange(len(rows.ids))[starts[0]], starts[1]] = True
        elsewhere |= bool(((rows.ids == bos) & rows.real & ~at_start).any())
    prompts = [_lead(each["prompt_ids"], bos) for each in capsule.records("generations") if _is_ids(each)]
    trained, asked = _usual(counts), _usual(prompts)
    adds = tokenizer.adds_bos
    if first is not None and counts and not blurred:
        doubled = sum(count >= 2 for count in counts)
        if doubled >= T.BOS_ROWS_SHARE * len(counts):
            often = Counter(count for count in counts if count >= 2).most_common(1)[0][0]
            yield _finding(
                first, often, 1, doubled, len(counts), "training", asked, "confirmed",
                "the chat template writes BOS and the tokenizer adds another",
            )  # fmt: skip
            return
        if adds and trained == 0 and not elsewhere and len(counts) >= T.SPECIAL_MIN_ROWS:
            yield _finding(
                first, 0, 1, len(counts), len(counts), "training", asked, "likely",
                "rows were made without the BOS that the tokenizer adds at inference",
            )  # fmt: skip
            return
    if asked is None:
        return
    if trained is None or elsewhere or len(counts) < T.SPECIAL_MIN_ROWS:
        if (asked >= 2 and not blurred) or (asked == 0 and adds):
            yield _finding(
                None, asked, 1, prompts.count(asked), len(prompts), "inference", None, "likely",
                "the prompt's template writes BOS and the tokenizer adds another"
                if asked
                else "prompts are made without the BOS that the tokenizer adds",
            )  # fmt: skip
        return
    if asked == trained:
        return
    right = 1 if adds else 0 if adds is False else None
    wrong = "inference" if asked >= 2 or trained == right else "training" if asked == right else None
    confidence: Confidence = "likely" if wrong is not None else "undetermined"
    value, expected = (trained, asked) if wrong == "training" else (asked, trained)
    side = wrong or "one of the two sides"
    count, total = (counts.count(trained), len(counts)) if wrong == "training" else (prompts.count(asked), len(prompts))
    yield _finding(
        first, value, expected, count, total, side, asked if wrong == "training" else trained, confidence,
        f"{side} tokenizes with another setting of add_special_tokens",
    )  # fmt: skip


def _starts(rows: Rows) -> tuple[Ints, Ints]:
    """(row, column) of the first real token of each row, and of each further document of a packed one."""
    real = rows.real
    begins = np.zeros(real.shape, bool)
    has = real.any(axis=1)
    begins[has, np.argmax(real, axis=1)[has]] = True
    segments = rows.same("segment_ids")
    if segments is not None:
        begins[:, 1:] |= (segments[:, 1:] != segments[:, :-1]) & real[:, 1:]
    if rows.restarts is not None:
        begins |= rows.restarts
    row, column = np.nonzero(begins)
    return row.astype(np.int64), column.astype(np.int64)


def _leading(ids: Ints, bos: int, starts: tuple[Ints, Ints], real: Mask) -> NDArray[np.int64]:
    """How many BOS tokens follow one another from each start."""
    is_bos = np.hstack(((ids == bos) & real, np.zeros((len(ids), 1), bool)))
    return np.array([int(np.argmin(is_bos[row, column:])) for row, column in zip(*starts, strict=True)], np.int64)


def _is_ids(record: dict[str, Any]) -> bool:
    prompt = record.get("prompt_ids")
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(each, int) for each in prompt[:8])


def _lead(prompt: list[int], bos: int) -> int:
    return next((at for at, token in enumerate(prompt) if token != bos), len(prompt))


def _usual(counts: list[int]) -> int | None:
    """The count that most rows share; None where no count is that of three rows in four."""
    if not counts:
        return None
    value, often = Counter(counts).most_common(1)[0]
    return value if often >= 0.75 * len(counts) else None


def _finding(
    rows: Rows | None,
    value: int,
    expected: int,
    count: int,
    total: int,
    side: str,
    other: int | None,
    confidence: Confidence,
    cause: str,
) -> Finding:
    severity: Severity | None = None
    evidence = [
        Evidence(name="leading BOS", value=value, expected=expected, unit="tokens", note=side),
        Evidence(name="rows or prompts", value=count, note=f"of {total}"),
    ]
    if other is not None:
        evidence.append(Evidence(name="leading BOS on the other side", value=other, unit="tokens"))
    what = {0: "no BOS", 1: "one BOS"}.get(value, f"{value} BOS")
    return Finding(
        severity=severity,
        confidence=confidence,
        title=f"{side[0].upper()}{side[1:]} begins with {what}",
        summary=f"{count} of {total} {'prompts of generations' if side == 'inference' else 'training rows'} begin with "
        f"{what}; {expected} {'is' if expected == 1 else 'are'} expected"
        + (f" and the other side has {other}." if other is not None else "."),
        where=Where(step=rows.batch.step if rows is not None else None, rank=rows.batch.rank if rows else None),
        evidence=tuple(evidence),
        cause=cause,
        next=("tokenize one conversation on both sides and compare the first five ids",),
        fix=("pass add_special_tokens=False where a chat template was applied",),
    )
