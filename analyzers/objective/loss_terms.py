"""Terms that jobs add to the cross-entropy on purpose: which of them, at a usual strength, would give the number.

None of them is a fault. Where one reproduces the number, the only thing missing is its declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..reference.token_ce import Floats, Scores
from ..rounding import scalar_tolerance
from .loss_case import Micro, Window
from .loss_faults import LossSpec, reported_loss
from .loss_windows import Observed
from .thresholds import TERM_CHANCE, USUAL_SMOOTHING, USUAL_Z


@dataclass(frozen=True)
class Term:
    """An extra term that gives every observed number.

    Attributes:
        words: what it is.
        setting: how a configuration would declare it.
        value: the loss with it, at the first window.
        observed: the reported loss there.
    """

    words: str
    setting: str
    value: float
    observed: float


def declarable_terms(observed: Sequence[Observed], spec: LossSpec) -> tuple[Term, ...]:
    """Extra terms of usual strength under which ``spec`` gives all observed numbers, the weakest first.

    Label smoothing with ε (torch and Hugging Face agree: (1 − ε) of the cross-entropy and ε of the mean over the
    vocabulary of −log p) and a z-loss (PaLM: a coefficient on the square of the log-sum-exp, over scored or all
    positions). Smoothing needs whole logits.
    """
    found: list[Term] = []
    plain = [reported_loss(each.window, spec, None, None) for each in observed]
    tries = len(USUAL_SMOOTHING) + 2 * len(USUAL_Z)
    for words, setting, strengths, term, mixes in _TERMS:
        extra = [term(each.window, spec) for each in observed]
        if not np.isfinite(extra).all():
            continue
        for strength in strengths:
            values = [(1 - mixes * strength) * p + strength * e for p, e in zip(plain, extra, strict=True)]
            tolerances = [_tolerance(each, value) for each, value in zip(observed, values, strict=True)]
            miss = [abs(each.value - value) / t for each, value, t in zip(observed, values, tolerances, strict=True)]
            moved = (abs(value - p) / t for value, p, t in zip(values, plain, tolerances, strict=True))
            # The chance that one of the tries lies this near to the number anywhere between here and the plain loss.
            if max(miss) <= 1 and tries / max(moved) <= TERM_CHANCE:
                name = words.format(strength)
                found.append(Term(name, setting.format(strength), values[0], observed[0].value))
    return tuple(found)


def _tolerance(observed: Observed, value: float) -> float:
    # A mean over many tokens averages the rounding of its inputs: a quarter of one input's is on the safe side.
    return scalar_tolerance(
        value, 0.25 * observed.input_roundoff * abs(value), observed.value_roundoff, observed.decimals
    )


def _of_tokens(score: Callable[[Scores], Floats | None]) -> Callable[[Window, LossSpec], float]:
    """A per-token number reduced as the loss is."""

    def value(window: Window, spec: LossSpec) -> float:
        ranks: list[tuple[Micro, ...]] = []
        for rank in window.ranks:
            changed: list[Micro] = []
            for each in rank:
                numbers = score(each.scores) if isinstance(each, Micro) else None
                if numbers is None or not isinstance(each, Micro):
                    return float("nan")
                nothing = np.zeros_like(each.scores.following)
                scores = Scores(numbers, each.scores.input_ids, nothing)
                changed.append(replace(each, scores=scores, _parts={}))
            ranks.append(tuple(changed))
        return reported_loss(replace(window, ranks=tuple(ranks)), spec, None, None)

    return value


def _spread_over_vocabulary(scores: Scores) -> Floats | None:
    """Mean over the vocabulary of −log p [B, T]."""
    if scores.logits is None:
        return None
    return scores.logsumexp - scores.logits.mean(axis=-1, dtype=np.float64)


def _everywhere(window: Window, spec: LossSpec) -> float:
    """Mean square of the log-sum-exp over all positions, scored or not, averaged over micro-batches."""
    means = [float(np.square(each.scores.logsumexp).mean()) for each in window.own if isinstance(each, Micro)]
    return float(np.mean(means)) if len(means) == len(window.own) else float("nan")


_TERMS: tuple[tuple[str, str, tuple[float, ...], Callable[[Window, LossSpec], float], bool], ...] = (
    (
        "label smoothing of {:g}",
        "label_smoothing_factor = {:g}",
        USUAL_SMOOTHING,
        _of_tokens(_spread_over_vocabulary),
        True,
    ),
    (
        "a z-loss of {:g} over scored tokens",
        "z_loss = {:g}",
        USUAL_Z,
        _of_tokens(lambda scores: np.square(scores.logsumexp)),
        False,
    ),
    ("a z-loss of {:g} over all positions", "z_loss = {:g}", USUAL_Z, _everywhere, False),
)
