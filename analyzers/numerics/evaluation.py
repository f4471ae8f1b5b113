"""The mode that evaluations run in, and whether they give one number for one checkpoint."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..finding import Confidence, Evidence, Finding, Severity, Where
from ..passes import Pass, Row, compute_roundoff, evaluated_rows, passes, root_mean_square
from ..registry import NotCaptured, rule
from ..scores import Score, Track, tracks
from . import thresholds as T

if TYPE_CHECKING:
    from ...capsules import Capsule

_MONTE_CARLO = re.compile(r"(?:^|[^a-z])mc[-_ ]?(?:dropout|samples?|passes)|monte[-_ ]?carlo", re.IGNORECASE)
_LOSS = re.compile(r"(?:^|[^a-z])(?:loss|ppl|perplexity|nll|bpb|bpc|entropy)(?:[^a-z]|$)")
#: Objectives whose answers are sampled from the model that trains.
_ROLLOUTS = ("grpo", "ppo", "rloo", "reinforce", "gspo", "dapo")


@rule(
    "numerics/eval-mode",
    stage="numerics",
    needs=("records.events|records.evaluations|records.generations.training_mode|batches",),
    cases=("validation-jumps-training-fine",),
)
def eval_mode(capsule: Capsule) -> Iterator[Finding]:
    """The evaluation runs in training mode, keeps a graph, or gives another number each time.

    What it checks:
        Mode and gradients of every evaluation pass, the mode noted with scores and answers, and whether one checkpoint
        evaluated twice gives one number, for the whole and for single rows.

    Why it matters:
        With dropout on, the number belongs to a random part of the network: it is too bad, it jumps, and early
        stopping picks the luckiest draw. A graph that nobody needs costs the memory of all activations.

    How it decides:
        Training mode is confirmed where random numbers were drawn in the forward, likely where that is not on record,
        and a remark where none were drawn: there is no dropout then, and the numbers are right. A graph is a warning.
        Equal rows, padded alike, under equal weights must agree within the rounding of the dtype; repeats of a loss
        within 0.2 %, of other scores within 4 standard errors of a difference.

    Looks like it but is not:
        Monte-Carlo dropout that is declared (a name or a setting with mc_dropout); rollouts of policy optimisation;
        forwards without labels inside a step, or before training began; a second look at training samples; an average
        of the weights, evaluated beside them; answers sampled at a temperature, which differ by less than their
        standard error; rounding.

    What to try next:
        Print model.training where the evaluation computes its loss; evaluate one checkpoint twice and compare.

    Fix:
        model.eval() and torch.no_grad() around the evaluation, model.train() after it.
    """
    ran, scored, rows = passes(capsule), tracks(capsule), evaluated_rows(capsule)
    generations = [each for each in capsule.records("generations") if each.get("training_mode") is not None]
    if not ran and not scored and not generations and not rows:
        raise NotCaptured("an evaluation pass, or scores of a checkpoint")
    if _declared_monte_carlo(capsule):
        return
    seen = _steps_that_look_back(capsule)
    asked = [each for each in ran if _is_evaluation(each) and not _MONTE_CARLO.search(each.name or "")]
    asked = [each for each in asked if each.told is not False or each.step not in seen]
    training = [each for each in asked if each.training and not _is_inert(each)]
    shaky = _disagreeing(rows, compute_roundoff(capsule))
    if training:
        yield _training_mode(training, len(asked), shaky)
    elif inert := [each for each in asked if each.training and _is_inert(each)]:
        yield _inert(inert, len(asked))
    kept = [each for each in asked if each.grad and each.training is not True and each.told is not False]
    kept += [each for each in asked if each.grad and not each.training and each.told is False and each.supervised]
    if kept:
        yield _graph_kept(kept, len(asked))
    if shaky and not training:
        yield _unsteady(shaky)
    yield from _scores_in_training_mode(scored)
    yield from _repeats_that_differ(scored)
    yield from _answers_in_training_mode(capsule, generations)


def _is_evaluation(each: Pass) -> bool:
    """Whether a pass is one, and not a look at the model for another purpose."""
    if each.told is not False or (each.supervised and not each.nested):
        return True
    # Found by itself and without labels: random numbers make it worth a word, once training has begun.
    return not each.nested and not each.first and each.random is True and each.grad is False


def _is_inert(each: Pass) -> bool:
    """Whether the mode made no difference to the numbers."""
    return each.random is False and not each.normalised


def _steps_that_look_back(capsule: Capsule) -> set[int]:
    """Steps after which nothing but samples of training was looked at again: a number for a log, no evaluation."""
    trained: set[str] = set()
    looked: dict[int, set[str]] = defaultdict(set)
    for each in capsule.records("samples"):
        digest, split, step = each.get("sha256"), each.get("split"), each.get("step")
        if digest and split == "train":
            trained.add(digest)
        elif digest and split == "evaluation" and step is not None:
            looked[step].add(digest)
    return {step for step, digests in looked.items() if digests <= trained}


def _declared_monte_carlo(capsule: Capsule) -> bool:
    """Whether a setting anywhere in the configuration asks for it."""

    def asks(value: Any, depth: int = 0) -> bool:
        if isinstance(value, dict) and depth < 8:
            return any((_MONTE_CARLO.search(str(key)) and each) or asks(each, depth + 1) for key, each in value.items())
        if isinstance(value, list) and depth < 8:
            return any(asks(each, depth + 1) for each in value)
        return isinstance(value, str) and bool(_MONTE_CARLO.search(value))

    raw = capsule.manifest.raw
    return any(asks(raw.get(part)) for part in ("config", "training", "evaluation"))


def _training_mode(found: Sequence[Pass], asked: int, shaky: list[tuple[Row, Row, float, float]]) -> Finding:
    """Passes in training mode, of which nothing says that it made no difference."""
    sure = [each for each in found if (each.random or each.normalised) and (each.told is not False or each.supervised)]
    guessed = not sure and all(each.told is False and not each.supervised for each in found)
    first = (sure or found)[0]
    confidence: Confidence = "confirmed" if sure else "likely"
    severity: Severity | None = "warning" if guessed else None
    graph = any(each.grad for each in found)
    drawn = "unknown" if first.random is None else "yes" if first.random else "no, but batch statistics were"
    what = "A forward outside the training steps" if guessed else f"The evaluation {first.name or ''}".rstrip()
    seen = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return Finding(
        severity=severity,
        confidence=confidence,
        title="The evaluation runs in training mode",
        summary=f"{what} after step {first.step}{seen} ran with the model in training mode"
        + (", and drew random numbers" if first.random else ", and normalised by the batch" if first.normalised else "")
        + (", with gradients on" if graph else "")
        + (f"; one and the same row differs by {shaky[0][2]:.3g} nats/token" if shaky else "")
        + (
            ": its loss depends on the batch."
            if first.random is False
            else ": its loss is that of a part of the network."
        ),
        where=Where(step=first.step, rank=first.rank),
        evidence=(
            Evidence(name="training mode in evaluation", value=True, expected=False, note=first.name or ""),
            Evidence(name="random numbers drawn in the forward", value=drawn, expected="no"),
            Evidence(name="evaluations in training mode", value=len(found), expected=0, note=f"of {asked}"),
            *([Evidence(name="gradients on", value=True, expected=False)] if graph else []),
            *(_apart(*shaky[0]) if shaky else ()),
        ),
        cause="model.eval() was not called before the evaluation: dropout is on",
        next=("print model.training where the evaluation computes its loss", "evaluate one checkpoint twice"),
        fix=("call model.eval() before the evaluation and model.train() after it",),
    )


def _inert(found: Sequence[Pass], asked: int) -> Finding:
    return Finding(
        severity="info",
        kind="hygiene",
        confidence="confirmed",
        title="The evaluation runs in training mode, without an effect",
        summary=f"{len(found)} of {asked} evaluations, first after step {found[0].step}, ran in training mode; no "
        "random numbers were drawn, so there is no dropout and their numbers are right.",
        where=Where(step=found[0].step, rank=found[0].rank),
        evidence=(
            Evidence(name="training mode in evaluation", value=True, expected=False),
            Evidence(name="random numbers drawn in the forward", value="no", expected="no"),
        ),
        cause="model.eval() is missing, and nothing in the model asks for the mode",
        next=("nothing, as long as dropout stays 0",),
        fix=("call model.eval() before the evaluation all the same",),
    )


def _graph_kept(found: Sequence[Pass], asked: int) -> Finding:
    first = found[0]
    return Finding(
        severity="warning",
        title="The evaluation keeps a graph for gradients",
        summary=f"The evaluation {first.name or ''}".rstrip() + f" after step {first.step} ran with gradients on: all "
        "activations stay in memory until its result is freed.",
        where=Where(step=first.step, rank=first.rank),
        evidence=(
            Evidence(name="gradients on", value=True, expected=False, note=first.name or ""),
            Evidence(name="evaluations with gradients on", value=len(found), expected=0, note=f"of {asked}"),
        ),
        cause="torch.no_grad() is missing around the evaluation",
        next=("compare the peak of memory inside and outside the evaluation",),
        fix=("put torch.no_grad() or torch.inference_mode() around the evaluation",),
    )


def tolerance(left: Row, right: Row, roundoff: float) -> float:
    """How far the token losses of one sample may lie apart by rounding, as a root mean square in nats."""
    return max(T.EVAL_ROUNDING * roundoff, T.EVAL_FLOOR) * max(left.scale, right.scale, 1.0)


def repeated(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one sample under one set of weights, the least padded first, where there are several."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.key].append(row)
    return [sorted(each, key=lambda row: row.width) for each in groups.values() if len(each) > 1]


def _disagreeing(rows: Sequence[Row], roundoff: float) -> list[tuple[Row, Row, float, float]]:
    """Rows that were evaluated twice in the same place and came out otherwise, the furthest apart first."""
    found: list[tuple[Row, Row, float, float]] = []
    for group in repeated(rows):
        for left, right in pairwise(group):
            random = any(each.ran is not None and each.ran.random for each in (left, right))
            if left.same_place(right) and (left.beside == right.beside or random):
                apart, limit = root_mean_square(left, right), tolerance(left, right, roundoff)
                if apart > limit:
                    found.append((left, right, apart, limit))
    return sorted(found, key=lambda each: -each[2])


def _apart(left: Row, right: Row, apart: float, limit: float) -> tuple[Evidence, ...]:
    note = f"{left.sample}: {left.mean:.6g} and {right.mean:.6g} nats/token"
    return (Evidence(name="one row, twice", value=apart, expected=f"≤ {limit:.2g}", unit="nats/token", note=note),)


def _unsteady(shaky: list[tuple[Row, Row, float, float]]) -> Finding:
    """The same rows differ though the model is, as far as is known, in evaluation mode."""
    left, right, apart, limit = shaky[0]
    random = any(each.ran is not None and each.ran.random for each in (left, right))
    # Without random numbers, a pass that nobody named may as well have run on an average of the weights.
    vague = left.found and not random
    confidence: Confidence = "confirmed" if random else "undetermined" if vague else "likely"
    return Finding(
        severity=None if random else "info" if vague else "warning",
        confidence=confidence,
        title="The evaluation of one row differs from time to time",
        summary=f"{left.sample} was evaluated twice after step {left.step}, padded alike and beside the same rows, "
        f"with {left.mean:.4g} and {right.mean:.4g} nats/token ({len(shaky)} such pairs): "
        + ("random numbers are drawn in its forward." if random else "the weights alone do not decide its loss."),
        where=Where(step=left.step, rank=left.rank, sample=left.sample),
        evidence=(
            *_apart(left, right, apart, limit),
            Evidence(name="pairs that differ", value=len(shaky), expected=0),
            Evidence(name="random numbers drawn", value="yes" if random else "unknown or no", expected="no"),
        ),
        cause="dropout that does not ask for the mode, or another random part of the forward"
        if random
        else "something beside weights and tokens enters: random numbers, running statistics, other weights",
        next=(
            "evaluate the same batch twice in a row under a fixed seed and compare",
            "wrap the evaluation in recorder.evaluation(name), with a name of its own for averaged weights",
        ),
        fix=("pass training=self.training to functional dropout", "let no statistic be updated during evaluation"),
    )


def _scores_in_training_mode(scored: Sequence[Track]) -> Iterator[Finding]:
    found = [
        (track, score)
        for track in scored
        for score in track.scores
        if score.record.get("training_mode") and not _MONTE_CARLO.search(f"{track.label} {score.record.get('harness')}")
    ]
    if not found:
        return
    track, score = found[0]
    spread = _spread(score)
    yield Finding(
        title="A checkpoint was scored in training mode",
        summary=f"{track.label} = {score.value:.4g}"
        + (f" (repeats {', '.join(f'{each:.4g}' for each in score.repeats[:4])})" if spread else "")
        + f" was measured with the model in training mode; so were {len(found)} scores in all.",
        where=Where(step=score.step),
        evidence=(
            Evidence(name="training mode in evaluation", value=True, expected=False, note=track.label),
            Evidence(name="scores in training mode", value=len(found), expected=0),
            *([Evidence(name="range of the repeats", value=spread, expected=0, note=track.label)] if spread else []),
        ),
        cause="model.eval() was not called before the evaluation: dropout is on",
        next=("evaluate one checkpoint twice and compare",),
        fix=("call model.eval() after loading the checkpoint",),
    )


def _spread(score: Score) -> float:
    return max(score.repeats) - min(score.repeats)


def _repeats_that_differ(scored: Sequence[Track]) -> Iterator[Finding]:
    """Scores of one checkpoint, measured in one way several times."""
    for track in scored:
        for score in track.scores:
            if len(score.repeats) < 2 or score.record.get("training_mode"):
                continue
            if _MONTE_CARLO.search(f"{track.label} {score.record.get('harness')}"):
                continue
            spread, known = _spread(score), math.isfinite(score.stderr)
            exact = bool(_LOSS.search(track.label.lower())) or (track.sign < 0 and not known)
            limit = T.REPEAT_SHARE * abs(score.value) if exact else T.REPEAT_ERRORS * math.sqrt(2) * score.stderr
            if not spread > limit:  # NaN: nothing says how much sampling alone may do
                continue
            yield Finding(
                severity="warning",
                title="Repeated evaluation of one checkpoint disagrees with itself",
                summary=f"{track.label} of one checkpoint is "
                + ", ".join(f"{each:.6g}" for each in score.repeats[:6])
                + f" in {len(score.repeats)} runs: a range of {spread:.3g}, where {limit:.2g} is explained.",
                where=Where(step=score.step),
                evidence=(
                    Evidence(name="range of the repeats", value=spread, expected=f"≤ {limit:.3g}", note=track.label),
                    *(Evidence(name=f"run {at}", value=each) for at, each in enumerate(score.repeats[:6])),
                ),
                cause="the evaluation is not a function of the weights alone: dropout, or something random in its data",
                next=("print model.training during the evaluation", "compare the token ids of two runs"),
                fix=("call model.eval() before it", "fix order, augmentation and seed of the evaluation data"),
            )
            return


def _answers_in_training_mode(capsule: Capsule, generations: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    found = [each for each in generations if each.get("training_mode")]
    declared = capsule.manifest.training.objective if capsule.manifest.training is not None else None
    if not found or any(word in (declared or "").lower() for word in _ROLLOUTS):
        return
    yield Finding(
        severity="warning",
        title="Answers were generated in training mode",
        summary=f"{len(found)} of {len(generations)} answers were generated with the model in training mode.",
        where=Where(step=found[0].get("step"), sample=str(found[0].get("id") or "") or None),
        evidence=(Evidence(name="answers in training mode", value=len(found), expected=0),),
        cause="model.eval() was not called before generating",
        next=("generate one prompt twice at temperature 0 and compare",),
        fix=("call model.eval() after loading the checkpoint",),
    )
