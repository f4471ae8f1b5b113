"""One bad sample among good ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Severity, Where
from ..numerics.overflow import find_overflow
from ..numerics.symptoms import Symptom, first_nonfinite, first_symptom
from ..registry import rule
from ..samples import Outlier, Sample, distinct_share, samples_by_step, worst_sample
from . import thresholds as T

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "data/poison-sample",
    cases=("poison-sample",),
    stage="data",
    needs=("records.samples|batches.token_loss",),
    # Weights that were replaced make some sample the worst by far; so does a loss of next to nothing, labels that are
    # not the row's own, and data of another kind.
    explained_by=(
        "numerics/learning-rate",
        "objective/labels-not-shifted",
        "data/labels-misaligned",
        "data/nonfinite-input",
        "data/mixture-shift",
    ),
)
def poison_sample(capsule: Capsule) -> Iterator[Finding]:
    """One sample's loss stands far out from its batch and from everything before it.

    What it checks:
        The mean loss of each training sample against the others of its step and against the samples of the 32 steps
        before.

    Why it matters:
        A corrupt sample (broken encoding, random bytes, a wrong template) gives a gradient that dwarfs the others and
        can turn a run. The log shows a spike and not the row that made it.

    How it decides:
        One sample alone is not finite. Or it lies more than 6 robust σ above the trailing median and beyond anything
        in that window, and is worse than a uniform guess over the vocabulary by a nat, or more than half of the loss of
        a step of four or more samples; or it is more than 10 σ and 2 × beyond, which is info up to 20 σ without harm.
        The other samples of the step must be ordinary, and the run must not have left its path before; samples whose
        loss covers few tokens are allowed a wider spread, and below 16 only a loss that is not finite counts.
        A sample of 120 tokens or fewer may be a single line: unless harm follows within 20 steps or the loss is above
        twice that guess, its tokens must be on record and must not merely repeat themselves (less than half the variety
        of their neighbours); info otherwise. Where the run leaves its path only later than that, the sample is a
        finding of its own and not the cause.

    Looks like it but is not:
        A short answer, whose loss is that of one or two tokens; hard text, whose losses have a heavy tail but recur; a
        line of dashes, as improbable to a young model as noise; several samples high at once (the model or the rate);
        every sample after a run diverged; a float16 overflow that reached one row first; a memorised set, where one
        sample holds most of a loss of nothing; a batch of one.

    What to try next:
        Decode the sample; run the step without it from the same state.

    Fix:
        Drop or repair it and look for others of its source; filter by loss before training; clip the gradient norm.
    """
    steps = samples_by_step(capsule)
    if not steps:
        return
    symptom = first_symptom(capsule)
    start = np.median([sample.loss for rows in list(steps.values())[: T.MIN_STEPS] for sample in rows])
    guess = _uniform_guess(capsule)
    numbers = list(steps)
    mild: Finding | None = None
    for index, (step, rows) in enumerate(steps.items()):
        if symptom is not None and symptom.step < step:
            break  # from here on the model is in trouble, and every sample with it
        per_step = max(1, len(rows))
        back = max(T.WINDOW_STEPS, math.ceil(T.WINDOW_SAMPLES / per_step))
        past_steps = numbers[max(0, index - back) : index]
        past = [sample for number in past_steps for sample in steps[number]]
        known = len(past_steps) >= T.MIN_STEPS and len(past) >= T.MIN_SAMPLES
        outlier = worst_sample(rows, past if known else [], far=T.OTHERS_SIGMA)
        if outlier is None:
            continue
        later = [sample for number in numbers[index + 1 : index + 1 + T.WINDOW_STEPS] for sample in steps[number]]
        reason = _reason(outlier, float(start), guess, later, known=known)
        if reason is None or (reason == "nonfinite" and _not_the_sample(capsule, step)):
            continue
        finding = _finding(capsule, outlier, reason, guess, symptom)
        if finding.severity != "info":
            yield finding
            return
        mild = mild or finding
    if mild is not None:
        yield mild


def _uniform_guess(capsule: Capsule) -> float | None:
    """Loss of a model that knows nothing, ln V, in nats a token."""
    model, tokenizer = capsule.manifest.model, capsule.manifest.tokenizer
    size = (model.vocab_size if model else None) or (tokenizer.vocab_size if tokenizer else None)
    return math.log(size) if size and size > 1 else None


def _reason(outlier: Outlier, start: float, guess: float | None, later: Sequence[Sample], *, known: bool) -> str | None:
    """Which of the four tests the worst sample of a step fails, or None."""
    loss = outlier.sample.loss
    if not math.isfinite(loss):
        return "nonfinite" if outlier.others and outlier.others_finite else None
    few = outlier.sample.loss_tokens is not None and outlier.sample.loss_tokens < T.MIN_LOSS_TOKENS
    if not known or few or not outlier.alone or not _others_ordinary(outlier):
        return None
    if not outlier.others and not _ordinary_again(outlier, later):
        return None
    beyond = outlier.excess / outlier.usual_excess if outlier.usual_excess > 0 else math.inf
    if outlier.z > T.FAR_SIGMA and beyond > T.BEYOND_USUAL:
        if guess is not None and loss > guess + T.WORSE_THAN_GUESS:
            return "guess"
        if outlier.others + 1 >= T.SHARE_MIN_SAMPLES and outlier.share > T.LOSS_SHARE and loss > T.MIN_OF_START * start:
            return "share"
    if outlier.z > T.VERY_FAR_SIGMA and beyond > T.FAR_BEYOND_USUAL and outlier.excess > T.MIN_OF_START * start:
        return "far"
    return None


def _others_ordinary(outlier: Outlier) -> bool:
    """Whether the median of the step's other samples is where the window was."""
    if not outlier.others:
        return True
    return abs(outlier.others_median - outlier.median) <= T.OTHERS_SIGMA * outlier.sigma


def _ordinary_again(outlier: Outlier, later: Sequence[Sample]) -> bool:
    """Whether the samples after a batch of one are back at the level before; without them nothing can be said."""
    losses = [sample.loss for sample in later[: T.SINGLE_AFTER]]
    if len(losses) < T.SINGLE_AFTER:
        return False
    return float(np.median(losses)) <= outlier.median + T.OTHERS_SIGMA * outlier.sigma


def _not_the_sample(capsule: Capsule, step: int) -> bool:
    """Whether the model explains a single non-finite sample.

    A magnitude that grows to the limit reaches one row first; a parameter or an earlier step that is not finite is
    nobody's sample.
    """
    if not capsule.has("stats"):
        return False
    stats = capsule.stats()
    overflow = find_overflow(capsule, stats)
    if overflow is not None and overflow.grew and int(stats.step[overflow.row]) <= step:
        return True
    row = first_nonfinite(capsule, stats)
    return row is not None and (int(stats.step[row]) < step or stats.role[row] in ("parameter", "moment1", "moment2"))


def _finding(capsule: Capsule, outlier: Outlier, reason: str, guess: float | None, symptom: Symptom | None) -> Finding:
    sample = outlier.sample
    length = f", {sample.length} tokens" if sample.length else ""
    source = f", from {sample.source}" if sample.source else ""
    shown = f"{sample.loss:.4g}" if math.isfinite(sample.loss) else ("NaN" if math.isnan(sample.loss) else "Infinity")
    told = {
        "nonfinite": "while every other sample of the step is finite",
        "guess": f"worse than a uniform guess ({guess or 0:.4g})",
        "share": f"which is {100 * outlier.share:.0f} % of the step's loss",
        "far": f"{outlier.z:.1f} σ above the steps before",
    }[reason]
    # What goes wrong long after, with the run in order in between, is not this sample's doing.
    before_trouble = symptom is not None and symptom.step - sample.step > T.HARM_STEPS
    harmful = symptom is not None and not before_trouble
    variety = distinct_share(capsule, sample)
    repeats = variety is not None and variety[0] < T.REPETITIVE * variety[1]
    extreme = sample.loss > T.EXTREME_OF_GUESS * guess if guess is not None else reason == "share"
    short = sample.length is None or sample.length <= T.LINE_TOKENS
    excused = short and (repeats or variety is None) and not (reason == "nonfinite" or harmful or extreme)
    beyond = outlier.excess / outlier.usual_excess if outlier.usual_excess > 0 else math.inf
    excused |= reason == "guess" and not harmful and beyond <= T.CLEARLY_BEYOND
    excused |= reason == "far" and not harmful and outlier.z <= T.EXTREME_SIGMA
    severity: Severity | None = "info" if excused else "warning" if reason == "far" or before_trouble else None
    evidence = [Evidence(name="sample loss", value=sample.loss, unit="nats/token", note=f"sample {sample.id}")]
    if outlier.others:
        evidence.append(
            Evidence(
                name="loss of the others",
                value=outlier.others_median,
                unit="nats/token",
                note=f"median of {outlier.others} in the same step",
            )
        )
    if math.isfinite(outlier.z):
        evidence += [
            Evidence(
                name="z",
                value=outlier.z,
                expected=_broken(outlier.z > T.FAR_SIGMA, f"≤ {T.FAR_SIGMA:g}"),
                unit="robust σ",
            ),
            Evidence(
                name="largest of the window",
                value=outlier.median + outlier.usual_excess,
                unit="nats/token",
                note=f"median {outlier.median:.4g}",
            ),
        ]
    if outlier.others and math.isfinite(outlier.share):
        evidence.append(
            Evidence(
                name="share of the step's loss",
                value=outlier.share,
                expected=_broken(outlier.share > T.LOSS_SHARE, f"≤ {T.LOSS_SHARE:g}"),
                note=f"{1 / (outlier.others + 1):.3g} where all are alike",
            )
        )
    if guess is not None:
        evidence.append(Evidence(name="uniform guess", value=guess, unit="nats/token", note="ln of the vocabulary"))
    if variety is not None:
        fewest = T.REPETITIVE * variety[1]
        evidence.append(
            Evidence(
                name="distinct tokens",
                value=variety[0],
                expected=_broken(variety[0] < fewest, f"≥ {fewest:.3g}"),
                note=f"share of its tokens; at least {variety[1]:.3g} in the others",
            )
        )
    if sample.length:
        evidence.append(Evidence(name="length", value=sample.length, unit="tokens"))
    return Finding(
        severity=severity,
        kind="hygiene" if before_trouble else None,
        title="A sample unlike the others" if excused else "One bad sample among good ones",
        summary=f"Sample {sample.id} (step {sample.step}{length}{source}) has a loss of {shown}, {told}"
        + (f"; the others are at {outlier.others_median:.4g}." if outlier.others else "."),
        where=Where(step=sample.step, rank=sample.rank, sample=sample.id),
        evidence=tuple(evidence),
        cause=f"sample {sample.id} "
        + (
            "repeats itself, which the model has not learned yet"
            if repeats
            else "is hard for the model"
            if excused
            else "does not belong to this data"
        ),
        next=(
            "decode the sample",
            "keep the batch of such a step, so that its tokens can be judged"
            if variety is None
            else "run the step without it from the same state",
        ),
        fix=("drop or repair it, and look for others of its source", "clip the gradient norm"),
    )


def _broken(is_broken: bool, limit: str) -> str | None:
    """The limit that a number broke; one that holds would be read as the reason."""
    return limit if is_broken else None
