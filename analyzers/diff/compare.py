"""Compares two runs: the first place where they part, and whether it looks like a fault, rounding or other data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import thresholds as limits
from .evidence import different_batches, different_tensors, epsilon
from .series import Pair, is_given, judge, rows_around, shared_series
from .settings import different_settings
from .types import (
    BatchDifference,
    Difference,
    Divergence,
    Kind,
    SeriesDifference,
    Side,
    TensorDifference,
)
from .words import verdict_of

if TYPE_CHECKING:
    from ...capsules import Capsule


class NothingShared(Exception):
    """The two hold no evidence of the same kind at the same step."""


def compare(left: Capsule, right: Capsule) -> Difference:
    """Compare two runs by all the evidence that both have.

    Data stands before tensors and tensors before curves within one step, because that is the order in which one
    decides the other.

    Raises:
        NothingShared: there is nothing to compare.
    """
    pairs, notes = shared_series(left, right)
    mine, theirs = epsilon(left), epsilon(right)
    rounding = max(mine or limits.ROUNDING, theirs or limits.ROUNDING)
    judged = [(pair, judge(pair, rounding)) for pair in pairs]
    batches, batches_compared = different_batches(left, right)
    tensors, tensors_compared = different_tensors(left, right, mine, theirs)
    if not judged and not batches_compared and not tensors_compared:
        raise NothingShared("; ".join(notes) or _nothing_shared(left, right))
    if batches_compared:
        notes.append(f"{batches_compared:,} micro-batches compared")
    if tensors_compared:
        notes.append(f"{tensors_compared:,} statistics of tensors compared, up to the first step that differs")
    chosen = _first_series(judged)
    first = _first(chosen[1] if chosen else None, batches, tensors)
    loss = next((each for _, each in judged if each.name == "loss"), None)
    outcome = loss if loss is not None and loss.step is not None else chosen[1] if chosen else None
    kind = _kind(first, outcome)
    known = _known(batches, batches_compared, mine != theirs)
    if kind == "constant-ratio" and any(each.name == "eval_loss" and each.step is None for _, each in judged):
        known = (*known, "eval_loss is the same: the models are.")
    settings = different_settings(left, right, kind)
    shown = chosen or (judged[0] if judged else None)
    return Difference(
        left=_side(left),
        right=_side(right),
        same=first is None,
        verdict=verdict_of(kind, first, outcome, settings, known),
        first_divergence=first,
        series=tuple(each for _, each in judged),
        around=rows_around(shown[0], shown[1].step) if shown and shown[1].step is not None else (),
        batches=batches,
        tensors=tensors,
        settings=settings,
        notes=tuple(notes),
    )


def _nothing_shared(left: Capsule, right: Capsule) -> str:
    """Why there is nothing to compare, and what to do instead."""
    traces = all(next(iter(each.records("profile")), None) is not None for each in (left, right))
    said = "two traces share" if traces else "they share"
    return f"{said} no series, no batch and no statistics of tensors; `llmconsole analyze` tells of each by itself"


def _known(batches: tuple[BatchDifference, ...], compared: int, different_precision: bool) -> tuple[str, ...]:
    """What else is known that bears on how the curves part."""
    found = ["The runs compute in different dtypes."] if different_precision else []
    if compared and not batches:
        found.append(f"The data is the same in all {compared:,} micro-batches that were compared.")
    return tuple(found)


def _first_series(judged: list[tuple[Pair, SeriesDifference]]) -> tuple[Pair, SeriesDifference] | None:
    """The series that differs first; of several at one step what was given, else the most telling one."""
    parted = [each for each in judged if each[1].step is not None]
    return min(parted, key=lambda each: (each[1].step or 0, not is_given(each[1].name)), default=None)


def _first(
    series: SeriesDifference | None, batches: tuple[BatchDifference, ...], tensors: tuple[TensorDifference, ...]
) -> Divergence | None:
    """The first place of all; within a step data and given values decide tensors, and tensors decide curves."""
    found: list[tuple[int, int, Divergence]] = []
    for batch in batches[:1]:
        place = Divergence(
            step=batch.step, stage="data", what="batch", name=batch.what, left=batch.left, right=batch.right
        )
        found.append((batch.step, 0, place))
    for tensor in tensors[:1]:
        name = f"{tensor.name} ({tensor.role})"
        place = Divergence(
            step=tensor.step,
            stage="objective" if tensor.role == "loss" else "numerics",
            what="tensor",
            name=name,
            left=tensor.left,
            right=tensor.right,
        )
        found.append((tensor.step, 2, place))
    if series is not None and series.step is not None:
        stage = "objective" if series.name in ("loss", "eval_loss") else "numerics"
        place = Divergence(
            step=series.step, stage=stage, what="series", name=series.name, left=series.left, right=series.right
        )
        found.append((series.step, 1 if is_given(series.name) else 3, place))
    return min(found, key=lambda each: each[:2])[2] if found else None


def _kind(first: Divergence | None, outcome: SeriesDifference | None) -> Kind:
    """What the comparison comes to: the data, a given value or a tensor that parts first, else how the curves part."""
    if first is None:
        return "none"
    if first.what == "batch":
        return "data"
    if first.what == "series" and is_given(first.name):
        return "setting"
    if outcome is None or outcome.step is None:
        return "tensor" if first.what == "tensor" else "undetermined"
    if outcome.manner == "rounding" and first.what == "tensor" and first.stage == "objective":
        return "start"  # the forward pass agrees up to the loss: rounding would have begun before it
    return outcome.manner


def _side(capsule: Capsule) -> Side:
    steps = capsule.scalars("loss").step
    return Side(
        id=capsule.id,
        title=capsule.title,
        path=str(capsule.path),
        first_step=int(steps[0]) if len(steps) else None,
        last_step=int(steps[-1]) if len(steps) else None,
    )
