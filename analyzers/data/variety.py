"""Whether the data says more than one thing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import NotJudged, rule
from . import thresholds as T
from .rows import Ints, is_overfit, objective, rows_of

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Objectives whose samples are few and said again and again without harm, or are not text to learn by heart.
_OTHERS = frozenset({"grpo", "ppo", "dpo", "classification", "embedding", "contrastive"})


@rule(
    "data/low-diversity",
    stage="data",
    severity="warning",
    needs=("batches.input_ids|records.samples.sha256|manifest.training.dataset_samples",),
    cases=("parrot-after-finetuning",),
)
def low_diversity(capsule: Capsule) -> Iterator[Finding]:
    """The data repeats itself: few samples, one opening, the same phrases.

    What it checks:
        Distinct 8-grams of the captured answers (each row counted once), how many answers open with the same tokens,
        and how often each sample is passed over.

    Why it matters:
        A model fine-tuned on one phrase says that phrase; a few samples many times are learned by heart.

    How it decides:
        More than half of at least 16 distinct answers of 16 tokens or more open with the same 6 tokens. Less than 20 %
        of the 8-grams are distinct. Ten or more passes over fewer than 1,000 samples. Two of these, or the last one in
        fine-tuning, are a warning; one alone is info.

    Looks like it but is not:
        A system prompt that opens every row (only supervised tokens count, and where all are supervised the opening
        that all rows share is left out); short answers of a fixed set; epochs of pre-training on a small corpus made
        for a test; runs that overfit one batch on purpose; rollouts of policy training.

    What to try next:
        Read twenty answers; count the openings.

    Fix:
        Remove near-duplicates, mix in general data, train fewer epochs.
    """
    if is_overfit(capsule) or objective(capsule) in _OTHERS:
        return
    evidence: list[Evidence] = []
    words: list[str] = []
    answers = _answers(capsule)
    opening = _opening(answers)
    if opening is not None and opening[0] > T.OPENING_SHARE:
        share, tokens, count = opening
        evidence.append(
            Evidence(
                name="answers with one opening", value=share, expected=f"≤ {T.OPENING_SHARE:g}", note=f"of {count}"
            )
        )
        evidence.append(Evidence(name="opening", value=tokens, note="token ids"))
        words.append(f"{100 * share:.3g} % of {count} answers open with the same {len(tokens)} tokens")
    distinct = _distinct(answers)
    if distinct is not None and distinct < T.DISTINCT_SHARE:
        evidence.append(
            Evidence(name=f"distinct {T.DIVERSITY_N}-grams", value=distinct, expected=f"≥ {T.DISTINCT_SHARE:g}")
        )
        words.append(f"{100 * distinct:.3g} % of the {T.DIVERSITY_N}-grams are distinct")
    passes = _passes(capsule)
    many = passes is not None and passes[0] >= T.MANY_PASSES and passes[1] < T.FEW_SAMPLES
    if passes is not None and many:
        evidence += [
            Evidence(name="passes over each sample", value=passes[0], expected=f"< {T.MANY_PASSES}"),
            Evidence(name="samples", value=passes[1], expected=f"≥ {T.FEW_SAMPLES}", unit="samples"),
        ]
        words.append(f"{passes[1]} samples are passed over {passes[0]:.3g} times")
    if not words:
        if not answers and passes is None:
            raise NotJudged("batches with input_ids, or dataset_samples and epochs, are needed")
        return
    model = capsule.manifest.model
    tuned = objective(capsule) in ("sft", "instruction-tuning") or (
        model is not None and model.initialised == "pretrained"
    )
    loud = len(words) > 1 or (many and tuned)
    yield Finding(
        severity=None if loud else "info",
        kind=None if loud else "hygiene",
        title="The data says little",
        summary=f"{'; '.join(words)}.",
        where=Where(step=None),
        evidence=tuple(evidence),
        cause="the data set is small or made from few templates",
        next=("read twenty answers and count the openings",),
        fix=("remove near-duplicates, mix in general data", "train fewer epochs"),
    )


def _answers(capsule: Capsule) -> list[Ints]:
    """Supervised tokens of each distinct captured row; whole rows without their common opening where all count."""
    found: dict[bytes, Ints] = {}
    whole = True
    for rows in rows_of(capsule):
        asked = rows.asked
        for row, real in enumerate(rows.real):
            ids = rows.ids[row]
            if asked is not None and asked[row].any():
                kept = asked[row] & real
                whole = whole and int(kept.sum()) >= int(real.sum()) - 2
                answer = ids[kept] if rows.labels is None else rows.labels[row][asked[row]]
            else:
                answer = ids[real]
            if answer.size:
                found.setdefault(np.ascontiguousarray(answer).tobytes(), answer)
    answers = list(found.values())
    if not whole or len(answers) < 2:
        return answers
    least = min(map(len, answers))
    head = np.stack([each[:least] for each in answers])
    common = int(np.logical_and.accumulate((head == head[0]).all(axis=0)).sum())
    return [each[common:] for each in answers if len(each) > common]


def _opening(answers: list[Ints]) -> tuple[float, list[int], int] | None:
    """(share, token ids, answers) of the commonest opening among answers long enough to be no mere label."""
    long = [each for each in answers if len(each) >= T.ANSWER_TOKENS]
    if len(long) < T.DIVERSITY_MIN_ROWS:
        return None
    tokens, count = Counter(tuple(each[: T.OPENING_TOKENS].tolist()) for each in long).most_common(1)[0]
    return count / len(long), list(tokens), len(long)


def _distinct(answers: list[Ints]) -> float | None:
    """Share of n-grams that are distinct over all answers; None of too little text."""
    n = T.DIVERSITY_N
    long = [each for each in answers if len(each) >= n]
    total = sum(len(each) - n + 1 for each in long)
    if len(long) < T.DIVERSITY_MIN_ROWS or total < T.DIVERSITY_MIN_TOKENS:
        return None
    while total > T.DIVERSITY_MOST_TOKENS and len(long) > T.DIVERSITY_MIN_ROWS:
        long = long[::2]
        total = sum(len(each) - n + 1 for each in long)
    grams = np.concatenate([np.lib.stride_tricks.sliding_window_view(each, n) for each in long])
    return len(np.unique(grams, axis=0)) / total


def _passes(capsule: Capsule) -> tuple[float, int] | None:
    """(passes over each sample, distinct samples): as declared, else as counted from the records."""
    training = capsule.manifest.training
    if training is not None and training.dataset_samples and training.epochs:
        return float(training.epochs), int(training.dataset_samples)
    seen = Counter(
        str(record["sha256"])
        for record in capsule.records("samples")
        if record.get("sha256") and record.get("split") in (None, "train")
    )
    if not seen:
        return None
    return sum(seen.values()) / len(seen), len(seen)
