"""How a loss is reduced, and the catalogue of ways in which it goes wrong.

One reference, ``reported_loss``, computes the number for a specification; each fault is one edit of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..fault import Fault
from ..rounding import Noise
from .loss_case import Micro, RecordedSums, Window


@dataclass(frozen=True)
class LossSpec:
    """A way to compute the loss of a window; the defaults are the token mean of supervised tokens.

    Attributes:
        shift: which token a position is scored on (``Micro`` explains the names).
        positions: supervised; inside-documents; with pads, prompt, tool, boundary or all added; ignored-label.
        denominator: counted, grid, padded-grid, attended, labels (also those that no position is scored on).
        reduction: token-mean, sequence-mean, sum, micro-mean, micro-sum, micro-sum/configured, one-rank.
        scale: 1, accumulation, world, 1/world.
        scope: own (this rank), ranks (all as one batch), rank-mean (the mean over ranks of their own).
    """

    shift: str = "1"
    positions: str = "supervised"
    denominator: str = "counted"
    reduction: str = "token-mean"
    scale: str = "1"
    scope: str = "own"


@dataclass(frozen=True)
class NamedFault:
    """A fault of the catalogue with the rule that reports it and the words for it."""

    fault: Fault
    rule: str
    cause: str
    fix: str


def reported_loss(case: Any, spec: Any, noise: Noise | None, rows: object) -> float:
    """The loss of a ``Window`` under a ``LossSpec`` in nats, FP64; NaN where the evidence cannot say.

    ``rows`` is for tensors and has no meaning here.
    """
    window: Window = case
    if spec.scope == "rank-mean":
        return float(np.mean([_reduced(window, micros, spec, noise) for micros in window.ranks]))
    micros = window.own if spec.scope == "own" else tuple(each for rank in window.ranks for each in rank)
    return _reduced(window, micros, spec, noise)


def _reduced(window: Window, micros: Sequence[Micro | RecordedSums], spec: LossSpec, noise: Noise | None) -> float:
    about = (spec.shift, spec.positions, spec.denominator, noise)
    parts = [each.totals(*about) for each in micros]
    total, count = sum(sums for sums, _ in parts), sum(counts for _, counts in parts)
    match spec.reduction:
        case "sum":
            value = total
        case "sequence-mean":
            row_sums, row_counts = (
                np.concatenate(each) for each in zip(*(m.rows(*about) for m in micros), strict=True)
            )
            used = row_counts > 0
            value = float((row_sums[used] / row_counts[used]).mean()) if used.any() else float("nan")
        case "micro-mean" | "micro-sum" | "micro-sum/configured":
            divisor = {"micro-mean": len(micros), "micro-sum": 1}.get(spec.reduction, window.configured or 1)
            value = sum(_divide(*each) for each in parts) / divisor
        case "one-rank":
            value = _divide(sum(each.totals(*about)[0] for rank in window.ranks for each in rank), count)
        case _:
            value = _divide(total, count)
    factor = {"accumulation": float(len(window.own)), "world": float(window.world), "1/world": 1.0 / window.world}
    return value * factor.get(spec.scale, 1.0)


def _divide(total: float, count: float) -> float:
    return total / count if count else float("nan")


def lawful_specs(reduction: str | None, window: Window) -> tuple[LossSpec, ...]:
    """What the job may lawfully report, the plain reading first.

    A packed row may or may not be scored across its document boundaries, and with several ranks the printed number
    may be this rank's, that of all as one batch, or the mean over ranks.
    """
    base = LossSpec(reduction=reduction or "token-mean")
    specs = [base]
    if any(each.boundary is not None for each in window.own):
        specs.append(replace(base, positions="inside-documents"))
    if len(window.ranks) > 1:
        specs += [replace(base, scope=scope) for scope in ("ranks", "rank-mean")]
    return tuple(specs)


def _set(knob: str, value: str) -> Callable[[LossSpec], LossSpec]:
    return lambda spec: replace(spec, **{knob: value})


def _any(condition: Callable[[Micro], bool]) -> Callable[[Window], bool]:
    return lambda window: any(isinstance(each, Micro) and condition(each) for each in window.own)


def _accumulates(window: Window) -> bool:
    return len(window.own) > 1


def _short_window(window: Window) -> bool:
    return window.configured is not None and window.configured != len(window.own)


def _several_kinds(micro: Micro) -> bool:
    """Whether what the labels leave out is of more than one kind, so that all of it is more than any one of them."""
    everything = micro.padding | micro.outside
    kinds = (micro.padding, micro.prompt, micro.tool, micro.masked_starts)
    return all((everything & ~kind).any() for kind in kinds)


_NOT_SHIFTED = "labels are compared with the token at the same position, not with the next one"
_TWICE = "labels are shifted twice: each position is scored on the token after the next one"
_SHIFT_ONCE = "shift in one place: pass unshifted labels to a model that shifts, or shift in the collator and not again"
_CUT_APART = "cut logits and labels at opposite ends: logits[:, :-1] against labels[:, 1:]"
_IGNORE = "pass the ignore index of the labels to the loss, and divide by the number of labels that are not ignored"
_REDUCE = "divide the loss sum of the whole window, all micro-batches and ranks, by its number of supervised tokens"
_ACCUMULATE = "divide each micro-batch's loss by the number of micro-batches, or its sum by the tokens of the window"


def _named(
    name: str, knob: str, value: str, rule: str, cause: str, fix: str, when: Callable[[Window], bool] | None = None
) -> NamedFault:
    fault = Fault(name, knob, _set(knob, value)) if when is None else Fault(name, knob, _set(knob, value), when)
    return NamedFault(fault, f"objective/{rule}", cause, fix)


#: The catalogue. Its order decides which rule speaks for a set of equivalent faults.
CATALOGUE: tuple[NamedFault, ...] = (
    _named(
        "labels-not-shifted",
        "shift",
        "0",
        "labels-not-shifted",
        _NOT_SHIFTED,
        "shift labels by one: score logits[:, :-1] against labels[:, 1:], or build targets as tokens[1:]",
    ),
    # Both slices cut at the same end; not tried where no label asks for what is cut.
    _named(
        "labels-not-shifted-cut-end",
        "shift",
        "0-cut-end",
        "labels-not-shifted",
        f"{_NOT_SHIFTED}; the last position of each row is cut from logits and labels alike",
        _CUT_APART,
        _any(lambda each: bool(each.supervised[:, -1 if each.shifted else -2].any())),
    ),
    _named(
        "labels-not-shifted-cut-start",
        "shift",
        "0-cut-start",
        "labels-not-shifted",
        f"{_NOT_SHIFTED}; the first position of each row is cut from logits and labels alike",
        _CUT_APART,
        _any(lambda each: bool(each.supervised[:, int(each.shifted)].any())),
    ),
    _named("labels-shifted-twice", "shift", "2", "labels-shifted-twice", _TWICE, _SHIFT_ONCE),
    _named(
        "labels-shifted-twice-flattened",
        "shift",
        "2-flat",
        "labels-shifted-twice",
        f"{_TWICE}, over the flattened batch: each row's end is scored on the start of the next row",
        _SHIFT_ONCE,
    ),
    _named(
        "labels-shifted-twice-into-next-row",
        "shift",
        "2-inner",
        "labels-shifted-twice",
        f"{_TWICE}, and each row's last target is the first token of the next row",
        _SHIFT_ONCE,
        _any(lambda each: not each.shifted),
    ),
    _named(
        "labels-shifted-twice-cut-rows",
        "shift",
        "2-ragged",
        "labels-shifted-twice",
        f"{_TWICE}, the second time over flattened rows already cut by one",
        _SHIFT_ONCE,
        _any(lambda each: not each.shifted),
    ),
    _named(
        "pad-in-loss",
        "positions",
        "pads",
        "pad-in-loss",
        "padding tokens are scored",
        "set the label of every padding token to the ignore index",
        _any(lambda each: bool(each.padding.any())),
    ),
    _named(
        "prompt-in-loss",
        "positions",
        "prompt",
        "prompt-in-loss",
        "tokens that the labels mask (the prompt) are scored",
        "apply the response mask to the labels that reach the loss",
        _any(lambda each: bool(each.prompt.any())),
    ),
    _named(
        "tool-in-loss",
        "positions",
        "tool",
        "tool-in-loss",
        "tokens of tool results are scored",
        "mask tool results in the labels: the model reads them and does not write them",
        _any(lambda each: bool(each.tool.any())),
    ),
    _named(
        "document-boundary-in-loss",
        "positions",
        "boundary",
        "document-boundary-in-loss",
        "the first token of each packed document is scored on the end of the document before it",
        "keep the labels of first tokens masked up to the loss, or score each document by itself",
        _any(lambda each: bool(each.masked_starts.any())),
    ),
    _named(
        "ignored-positions-scored",
        "positions",
        "all",
        "ignore-index-missing",
        "every ignored position is scored on its own token",
        _IGNORE,
        _any(_several_kinds),
    ),
    _named(
        "ignored-label-scored",
        "positions",
        "ignored-label",
        "ignore-index-missing",
        "ignored positions are scored on the ignore index itself, which is a token",
        _IGNORE,
        _any(lambda each: each.ignore_index >= 0 and not bool(each.supervised[:, 1:-1].all())),
    ),
    _named(
        "ignored-in-denominator",
        "denominator",
        "grid",
        "ignore-index-missing",
        "the loss sum is divided by all positions, ignored ones included",
        _IGNORE,
    ),
    _named(
        "ignored-in-denominator-full-rows",
        "denominator",
        "padded-grid",
        "ignore-index-missing",
        "the loss sum is divided by rows × length, ignored positions and the unscored end included",
        _IGNORE,
    ),
    _named(
        "attended-in-denominator",
        "denominator",
        "attended",
        "ignore-index-missing",
        "the loss sum is divided by the tokens that are not padding, masked prompt included",
        _IGNORE,
        _any(lambda each: bool(each.padding.any())),
    ),
    _named(
        "first-label-in-denominator",
        "denominator",
        "labels",
        "reduction",
        "the loss sum is divided by all labels, that of each row's first token included, which is never a target",
        "count labels[:, 1:] (num_items_in_batch of the Hugging Face Trainer, for models whose shift it does not know)",
        _any(lambda each: not each.shifted and bool(each.supervised[:, 0].any())),
    ),
    _named(
        "token-mean",
        "reduction",
        "token-mean",
        "reduction",
        "the loss is the mean over tokens",
        "reduce as declared, or declare what is meant",
    ),
    _named(
        "sequence-mean",
        "reduction",
        "sequence-mean",
        "reduction",
        "the loss is the mean over sequences of their own means: short sequences weigh more",
        _REDUCE,
    ),
    _named("sum", "reduction", "sum", "reduction", "the loss is a sum over tokens and is never divided", _REDUCE),
    _named(
        "mean-of-micro-batch-means",
        "reduction",
        "micro-mean",
        "reduction",
        "the loss is the mean of micro-batch means: tokens of short micro-batches weigh more",
        _REDUCE,
        _accumulates,
    ),
    _named(
        "accumulation-not-divided",
        "reduction",
        "micro-sum",
        "reduction",
        "micro-batch means are added and not divided by the number of accumulation steps",
        _ACCUMULATE,
        _accumulates,
    ),
    _named(
        "configured-window",
        "reduction",
        "micro-sum/configured",
        "reduction",
        "a shorter window is divided by the configured number of accumulation steps",
        _ACCUMULATE,
        _short_window,
    ),
    _named(
        "one-rank-denominator",
        "reduction",
        "one-rank",
        "reduction",
        "the loss sum of all ranks is divided by the tokens of one",
        _REDUCE,
        lambda window: len(window.ranks) > 1,
    ),
    _named(
        "times-accumulation",
        "scale",
        "accumulation",
        "reduction",
        "the loss is too large by the number of accumulation steps",
        _ACCUMULATE,
        _accumulates,
    ),
    _named(
        "times-world-size",
        "scale",
        "world",
        "reduction",
        "the loss is too large by the number of ranks",
        _REDUCE,
        lambda window: window.world > 1,
    ),
    _named(
        "divided-by-world-size",
        "scale",
        "1/world",
        "reduction",
        "the loss is divided by the number of ranks once too often",
        _REDUCE,
        lambda window: window.world > 1,
    ),
)

BY_NAME = {each.fault.name: each for each in CATALOGUE}
#: What recorded sums can tell. Whether a recorded mean was divided already is not written anywhere, so faults by the
#: number of accumulation steps are left out.
BY_RECORDED_SUMS = (
    *("sum", "mean-of-micro-batch-means", "configured-window"),
    *("one-rank-denominator", "times-world-size", "divided-by-world-size"),
)
#: Slips of libraries that change every loss by one part in the length of a row: never more than a remark.
HARMLESS = frozenset({"first-label-in-denominator"})
#: Choices that are lawful where nobody declared another: never more than a remark.
LAWFUL_CHOICES = frozenset({"token-mean", "sequence-mean", "sum"})
