"""How long the rows of each step were, from whatever says it, and whether they grow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..series import Curve, curve
from .thresholds import LENGTHS_GROW, LENGTHS_POINTS, LENGTHS_RISE

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Names under which jobs log the length of a batch's rows.
_NAMES = (
    *("sequence_length", "seq_length", "seq_len", "seqlen", "max_length", "max_len", "length", "padded_length"),
    *("max_seq_len", "max_sequence_length", "context_length", "num_tokens", "tokens", "batch_tokens", "input_length"),
)


def length_curves(capsule: Capsule, rank: int | None = None) -> Iterator[Curve]:
    """The longest row, or the tokens, of each step: of the captured batches and samples, and as it was logged."""
    longest: dict[int, int] = defaultdict(int)
    for batch in capsule.batches():
        if batch.input_ids is not None and np.ndim(batch.input_ids) == 2 and batch.split != "validation":
            longest[batch.step] = max(longest[batch.step], int(np.shape(batch.input_ids)[1]))
    if longest:
        yield _curve(longest)
    said: dict[int, int] = defaultdict(int)
    for sample in capsule.records("samples"):
        step, length = sample.get("step"), sample.get("length")
        if type(step) is int and type(length) is int and length >= 0:
            said[step] = max(said[step], length)
    if said:
        yield _curve(said)
    for key in capsule.scalar_keys():
        name = key.name.rpartition("/")[2].lower()
        if name in _NAMES and rank in (None, key.rank):
            yield curve(capsule, key.name, key.rank, key.side).finite()


def _curve(values: dict[int, int]) -> Curve:
    step = np.array(sorted(values), np.int64)
    return Curve(step, np.array([values[each] for each in step.tolist()], np.float64))


def growing_lengths(capsule: Capsule, rank: int | None = None) -> Curve | None:
    """A curve of lengths that grow from the first to the last, where there is one."""
    for found in length_curves(capsule, rank):
        if grows(found.value):
            return found
    return None


def grows(values: Any) -> bool:
    """Whether values rise with their order: float64[N]."""
    if len(values) < LENGTHS_POINTS or not values[-1] >= (1 + LENGTHS_RISE) * values[0]:
        return False
    return rank_correlation(np.arange(len(values)), values) >= LENGTHS_GROW and values[-1] >= 0.9 * values.max()


def rank_correlation(left: Any, right: Any) -> float:
    """Spearman's coefficient of two sequences, 0 where one is constant."""
    first, second = _ranks(np.asarray(left, np.float64)), _ranks(np.asarray(right, np.float64))
    first, second = first - first.mean(), second - second.mean()
    scale = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum()) / scale if scale > 0 else 0.0


def _ranks(values: Any) -> Any:
    """Ranks, those of equal values averaged."""
    _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[inverse]
