"""Samples that are in training and in validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..finding import Evidence, Finding, Severity, Where
from ..registry import NotJudged, rule
from . import thresholds as T
from .rows import TRAIN, is_overfit, rows_of

if TYPE_CHECKING:
    from ...capsules import Capsule

#: What held-out splits are called.
HELD_OUT = ("validation", "valid", "val", "eval", "evaluation", "test", "dev", "heldout", "held-out")

#: The split that the recorder writes for a pass that nobody named.
FOUND = "evaluation"


@rule(
    "data/split-leak",
    stage="data",
    needs=("records.samples.sha256|records.samples.text|batches.input_ids",),
    cases=("validation-jumps-training-fine",),
)
def split_leak(capsule: Capsule) -> Iterator[Finding]:
    """Validation samples are trained on.

    What it checks:
        Digests of the samples (of the real tokens of captured rows) in training against those in validation.

    Why it matters:
        The validation loss then measures memory: it falls while the model stops generalising.

    How it decides:
        A digest is in both splits: confirmed. Critical from 10 % of the validation samples on, warning below; info
        where all common samples are so short (below 8 tokens) that they are alike by chance. None is in both, and of
        a loader only the first batches were read: undetermined (info), with how many.

    Looks like it but is not:
        Ids that are alike because each split counts from 0: content decides, never an id. An overfit run that says so.
        One split alone, of which nothing can be said. Forwards without gradients that nobody called an evaluation:
        train accuracy, a policy's own log-probabilities (info).

    What to try next:
        Print a common sample; search both sources for it.

    Fix:
        Split by document before chunking and shuffling, and drop duplicates across splits by digest.
    """
    if is_overfit(capsule):
        return
    train: dict[str, tuple[int | None, str]] = {}
    held: dict[str, tuple[str, int | None]] = {}
    told = False
    for record in capsule.records("samples"):
        digest = record.get("sha256") or record.get("text")
        split = str(record.get("split") or "train").lower()
        if not digest:
            continue
        name = str(record.get("id") or digest)[:40]
        if split in HELD_OUT:
            told |= split != FOUND
            held.setdefault(str(digest), (name, record.get("length")))
        elif split in ("train", "training"):
            train.setdefault(str(digest), (record.get("step"), name))
    for rows in rows_of(capsule, splits=(*TRAIN, "validation")):
        lengths = rows.real.sum(axis=1).tolist()
        for row, digest in enumerate(rows.digests()):
            if rows.batch.split == "validation":
                told |= rows.batch.attributes.get("evaluation") != "found"
                held.setdefault(digest, (rows.name(row), lengths[row]))
            else:
                train.setdefault(digest, (rows.batch.step, rows.name(row)))
    if not held or not train:
        raise NotJudged("samples of training and of validation are needed")
    common = [digest for digest in held if digest in train]
    if not common:
        if part := _read_in_part(capsule):
            yield part
        return
    short = [digest for digest in common if (held[digest][1] or T.LEAK_MIN_TOKENS) < T.LEAK_MIN_TOKENS]
    share = len(common) / len(held)
    severity: Severity | None = "info" if len(short) == len(common) else None if share >= T.LEAK_CRITICAL else "warning"
    step, in_train = train[common[0]]
    if not told:
        yield _seen_again(len(common), len(held), step)
        return
    yield Finding(
        severity=severity,
        confidence="confirmed",
        title="Validation samples are in the training data",
        summary=f"{len(common)} of {len(held)} validation samples are trained on, first {held[common[0]][0]}"
        + (f" (in training {in_train}, step {step})." if step is not None else "."),
        where=Where(step=step, sample=held[common[0]][0]),
        evidence=(
            Evidence(name="common samples", value=len(common), expected=0, unit="samples", note="by digest"),
            Evidence(name="share of validation", value=share, expected=0.0),
            Evidence(name="training samples", value=len(train), unit="samples", note="distinct, on record"),
        ),
        cause="the splits were made after chunking, or from overlapping sources",
        next=("print a common sample and search both sources for it",),
        fix=("split by document first, and drop duplicates across splits by digest",),
    )


def _read_in_part(capsule: Capsule) -> Finding | None:
    """What no common sample says where loaders were not read to their end; None where they were, or nothing says."""
    read = [event for event in capsule.records("events") if event.get("kind") == "loader_read"]
    if all(event.get("exhausted") is not False for event in read):
        return None
    parts = [
        f"{'all' if event.get('exhausted') else 'the first'} {event.get('batches')} of "
        + ("training" if event.get("split") == "train" else str(event.get("split")))
        for event in read
    ]
    return Finding(
        severity="info",
        confidence="undetermined",
        title="Only a part of the loaders was searched for samples that are in both splits",
        summary=f"Of the batches {' and '.join(parts)} were read: no sample is in both splits there.",
        where=Where(),
        evidence=(Evidence(name="common samples", value=0, expected=0, unit="samples", note="in the part read"),),
        next=("read the loaders to their end: llmconsole probe with --batches",),
    )


def _seen_again(common: int, held: int, step: int | None) -> Finding:
    """What a forward without gradients saw is trained on: a look at training data, unless it was to be held out."""
    return Finding(
        severity="info",
        confidence="undetermined",
        title="A forward outside the training steps sees samples of the training data",
        summary=f"{common} of {held} samples that were seen outside the training steps are trained on; whether they "
        "were meant to be held out is not on record.",
        where=Where(step=step),
        evidence=(Evidence(name="common samples", value=common, expected=None, unit="samples", note="by digest"),),
        next=("wrap the evaluation in recorder.evaluation(name), which says that its data are held out",),
    )
