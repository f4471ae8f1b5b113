"""The verdict of a comparison in words."""

from __future__ import annotations

import math
from typing import Any

from .types import Divergence, Kind, SeriesDifference, Setting, Verdict

_NEXT: dict[str, tuple[str, ...]] = {
    "data": ("compare the data order, the seed and the tokenizer of the two runs before anything else",),
    "setting": ("make the given values equal, and compare again",),
    "jump": ("record both runs with statistics at every step around it (Recorder(statistics_every=1))",),
    "rounding": ("no fault is needed to explain it: compare several seeds before blaming the code",),
    "data-noise": ("give both runs one seed, one data order and one initial checkpoint, and compare again",),
    "start": ("compare initial weights and the first batch: record both runs from step 0",),
    "constant-ratio": ("compare evaluation loss, and divide by the ratio: the model may be the same",),
    "tensor": ("look at this tensor's inputs: they agree, and its value does not",),
    "undetermined": ("let both runs go on, or log more digits",),
    "none": (),
}


def verdict_of(
    kind: Kind,
    first: Divergence | None,
    outcome: SeriesDifference | None,
    settings: tuple[Setting, ...],
    known: tuple[str, ...],
) -> Verdict:
    """The verdict with its sentence.

    Args:
        kind: what the comparison came to.
        first: the first place where the runs part.
        outcome: the loss, or the series that stands for it, where it parts.
        settings: what the manifests state differently, nearest first.
        known: sentences on what else bears on it.
    """
    if first is None:
        return Verdict(kind="none", summary="The runs are the same as far as both were logged.")
    sentence = _SENTENCES[kind](first, outcome)
    if kind in ("rounding", "data-noise", "start", "jump", "constant-ratio"):
        sentence = " ".join((sentence, *known))
    if kind == "data-noise" and not known:
        sentence += " Another seed or data order does that."
    if kind == "constant-ratio" and outcome is not None:
        sentence += _ratio_words(outcome.ratio or math.nan, settings)
    advice = _NEXT[kind]
    if kind == "start" and _only_the_loss(first):
        advice = ("run llmconsole analyze on each: it computes the loss again from the captured logits and labels",)
    return Verdict(kind=kind, summary=sentence, next=advice)


def _ratio_words(ratio: float, settings: tuple[Setting, ...]) -> str:
    """What the ratio is of: a setting whose two values have it."""
    for each in settings:
        if _is_number(each.left) and _is_number(each.right) and each.left and each.right:
            own = each.right / each.left
            if own != 1 and min(abs(own / ratio - 1), abs(own * ratio - 1)) < 0.05:
                return f" {each.name} has the same ratio ({each.left} against {each.right})."
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _data(first: Divergence, outcome: SeriesDifference | None) -> str:
    follows = "" if outcome is None else f" {outcome.name} follows at step {outcome.step}."
    name = {"batch_sha256": "the batch (its digest)"}.get(first.name, first.name)
    return f"The data differs first: {name} at step {first.step}.{follows}"


def _setting(first: Divergence, outcome: SeriesDifference | None) -> str:
    follows = ""
    if outcome is not None and outcome.name != first.name and outcome.step is not None:
        follows = f" {outcome.name} follows at step {outcome.step}."
    return f"The runs were given different values: {first.name} at step {first.step}.{follows}"


def _jump(first: Divergence, outcome: SeriesDifference | None) -> str:
    if outcome is None:
        return f"The runs part at step {first.step}."
    before = f"is equal at {_steps(outcome.equal_before)} before" if not outcome.note else outcome.note
    apart = f"{outcome.name} {before}, and at step {outcome.step}"
    if not math.isfinite(outcome.relative or 0.0):
        return f"A step like a bug's: {apart} one side is not finite."
    return f"A step like a bug's: {apart} differs by {_percent(outcome.relative)} at once."


def _rounding(first: Divergence, outcome: SeriesDifference | None) -> str:
    if outcome is None:
        return f"The runs part at step {first.step}."
    return (
        f"Noise like rounding: {outcome.name} differs by {_percent(outcome.relative)} at step {outcome.step}, "
        f"{outcome.note}."
    )


def _scatter(first: Divergence, outcome: SeriesDifference | None) -> str:
    return (
        f"Noise like that of other data: from step {first.step} on {outcome.name if outcome else first.name} differs "
        "to both sides by as much as it varies from step to step."
    )


def _start(first: Divergence, outcome: SeriesDifference | None) -> str:
    note = f" ({outcome.note})" if outcome and outcome.note else ""
    relative = _percent(outcome.relative) if outcome else "an amount that is not known"
    unlogged = " What comes before was not logged." if first.step > 1 else ""
    if _only_the_loss(first):
        return (
            f"The loss is the first number that differs, from the first step that both logged on (step {first.step}, "
            f"by {relative}){note}; the tensors in front of it that were compared agree: it is computed differently "
            f"or from other labels.{unlogged}"
        )
    return (
        f"The runs differ from the first step that both logged (step {first.step}, by {relative}){note}: another start "
        f"(weights, data, settings) or a fault in the first forward pass.{unlogged}"
    )


def _only_the_loss(first: Divergence) -> bool:
    """Whether the forward pass agrees up to the loss, as far as its tensors were compared."""
    return first.what == "tensor" and first.stage == "objective"


def _ratio(first: Divergence, outcome: SeriesDifference | None) -> str:
    if outcome is None or outcome.ratio is None:
        return f"The runs part at step {first.step}."
    return (
        f"Constant ratio ≈ {_number(outcome.ratio)}: {outcome.name} on the right is that many times the left at "
        f"{_steps(outcome.shared)}. That is normalisation or reporting, not the model."
    )


def _tensor(first: Divergence, outcome: SeriesDifference | None) -> str:
    return f"The first tensor that differs is {first.name} at step {first.step}; the curves agree so far."


def _undetermined(first: Divergence, outcome: SeriesDifference | None) -> str:
    if outcome is None:
        return f"The runs part at step {first.step}; what it is cannot be said."
    return (
        f"{outcome.name} differs by {_percent(outcome.relative)} at step {outcome.step} and {outcome.note}: "
        "neither a step nor noise that grows."
    )


_SENTENCES = {
    "data": _data,
    "setting": _setting,
    "jump": _jump,
    "rounding": _rounding,
    "data-noise": _scatter,
    "start": _start,
    "constant-ratio": _ratio,
    "tensor": _tensor,
    "undetermined": _undetermined,
}


def _steps(count: int) -> str:
    return f"{count:,} shared step{'' if count == 1 else 's'}"


def _percent(relative: float | None) -> str:
    if relative is None or not math.isfinite(relative):
        return "more than can be said"
    return f"{100 * relative:.2g} %"


def _number(value: float) -> str:
    """A ratio with a decimal where it is as good as whole: 2.0, 8.0, 0.125."""
    return f"{value:.1f}" if abs(value - round(value)) < 0.05 * max(1.0, value) and value >= 1 else f"{value:.3g}"
