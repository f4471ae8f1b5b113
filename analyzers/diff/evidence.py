"""Two runs batch by batch and tensor by tensor, in the order in which they were used and computed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from . import thresholds as limits
from .types import BatchDifference, TensorDifference

if TYPE_CHECKING:
    from ...capsules import Batch, Capsule, Stats

_ARRAYS = ("input_ids", "labels", "attention_mask", "loss_mask", "position_ids", "segment_ids")
#: Tensors listed of the first step at which any differs, and batches.
_MOST_TENSORS, _MOST_BATCHES = 20, 8

Key = tuple[int, int, int, int, str, str]


def different_batches(left: Capsule, right: Capsule) -> tuple[tuple[BatchDifference, ...], int]:
    """The first differences of the data by (step, micro-batch), and how many micro-batches could be compared.

    Digests cover every micro-batch, arrays those that were kept; where both are there, the arrays say more.
    """
    mine, theirs = _digests(left), _digests(right)
    shared = [place for place in mine if place in theirs]
    found = {
        place: _batch_difference((place[0], place[2], place[1]), "batch_sha256", mine[place][:12], theirs[place][:12])
        for place in shared
        if mine[place] != theirs[place]
    }
    kept = {(batch.step, batch.rank, batch.micro): batch for batch in right.batches()}
    compared = set(shared)
    for batch in left.batches():
        place = (batch.step, batch.rank, batch.micro)
        if place not in kept:
            continue
        compared.add(place)
        difference = _different_arrays(batch, kept[place])
        if difference is not None:
            found[place] = difference
    ordered = sorted(found.items(), key=lambda each: (each[0][0], each[0][2], each[0][1]))
    return tuple(difference for _, difference in ordered[:_MOST_BATCHES]), len(compared)


def _digests(capsule: Capsule) -> dict[tuple[int, int, int], str]:
    """(step, rank, micro) → digest of the rows."""
    found: dict[tuple[int, int, int], str] = {}
    for event in capsule.records("events"):
        digest, step = event.get("batch_sha256"), event.get("step")
        if event.get("kind") == "step_begin" and isinstance(digest, str) and isinstance(step, int):
            found[step, int(event["rank"]), int(event.get("micro") or 0)] = digest
    return found


def _different_arrays(left: Batch, right: Batch) -> BatchDifference | None:
    """The first array of a micro-batch that differs, with the first place in it."""
    place = (left.step, left.micro, left.rank)
    for name in _ARRAYS:
        mine, theirs = left.array(name), right.array(name)
        if mine is None or theirs is None:
            continue
        if mine.shape != theirs.shape:
            shapes = list(mine.shape), list(theirs.shape)
            return _batch_difference(place, f"shape of {name}", *shapes)
        with np.errstate(invalid="ignore"):
            unequal = mine != theirs
        if unequal.any():
            at = tuple(int(each) for each in np.argwhere(unequal)[0])
            counts = int(unequal.sum()), int(unequal.size)
            return _batch_difference(place, name, mine[at].item(), theirs[at].item(), at, *counts)
    return None


def _batch_difference(
    place: tuple[int, int, int],
    what: str,
    left: Any,
    right: Any,
    at: tuple[int, ...] | None = None,
    differing: int | None = None,
    elements: int | None = None,
) -> BatchDifference:
    step, micro, rank = place
    return BatchDifference(
        step=step,
        micro=micro,
        rank=rank,
        what=what,
        left=left,
        right=right,
        at=at,
        differing=differing,
        elements=elements,
    )


def different_tensors(
    left: Capsule, right: Capsule, epsilon_left: float | None = None, epsilon_right: float | None = None
) -> tuple[tuple[TensorDifference, ...], int]:
    """The tensors of the first step at which any differs beyond rounding, in execution order; and how many compared.

    Norms of float32 results agree to some 10⁻⁵, of bfloat16 ones to some per cent: what is within that is one result.
    A float32 tensor that was computed from bfloat16 ones is as coarse as they are, hence the epsilons of the jobs.
    """
    coarsest = max(epsilon_left or 0.0, epsilon_right or 0.0)
    least = limits.COARSE_EPSILONS * coarsest if coarsest > limits.EPSILON["float32"] else 0.0
    if epsilon_left != epsilon_right:
        least *= limits.OTHER_DTYPE
    mine, theirs = left.stats(), right.stats()
    there = {key: at for at, key in reversed(list(enumerate(_keys(theirs))))}
    first, second = _Columns(mine), _Columns(theirs)
    found: list[TensorDifference] = []
    compared = 0
    for at, key in enumerate(_keys(mine)):
        other = there.get(key)
        if other is None:
            continue
        if found and key[0] != found[0].step:
            break
        compared += 1
        difference = _difference(key, first, at, second, other, least)
        if difference is not None and len(found) < _MOST_TENSORS:
            found.append(difference)
    return tuple(found), compared


class _Columns:
    """The columns that are compared, as lists."""

    def __init__(self, stats: Stats) -> None:
        self.order: list[int] = stats.order.tolist()
        self.dtype: list[str] = stats.dtype.tolist()
        self.shape = stats.shape
        self.rms: list[float] = stats.rms.tolist()
        self.mean: list[float] = stats.mean.tolist()
        self.nonfinite: list[bool] = stats.nonfinite.tolist()


def _keys(stats: Stats) -> list[Key]:
    """(step, rank, micro, call, name, role) of every row."""
    columns = (stats.step, stats.rank, stats.micro, stats.call, stats.name, stats.role)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _difference(
    key: Key, left: _Columns, at: int, right: _Columns, other: int, least: float
) -> TensorDifference | None:
    dtypes = left.dtype[at], right.dtype[other]
    tolerance = max(limits.TENSOR_EPSILONS.get(each, 1.0) * limits.EPSILON.get(each, 2.0**-23) for each in dtypes)
    tolerance = max(tolerance, least)
    mine, theirs = left.rms[at], right.rms[other]
    relative, note = 0.0, ""
    if left.shape[at] != right.shape[other] and left.shape[at] and right.shape[other]:
        relative, note = math.inf, f"shape {list(left.shape[at])} against {list(right.shape[other])}"
    elif left.nonfinite[at] != right.nonfinite[other]:
        relative, note = math.inf, f"not finite on the {'left' if left.nonfinite[at] else 'right'} only"
    elif math.isfinite(mine) and math.isfinite(theirs):
        scale = max(abs(mine), abs(theirs))
        relative = abs(mine - theirs) / scale if scale else 0.0
        shift = abs(left.mean[at] - right.mean[other]) / scale if scale else 0.0
        if relative <= tolerance < shift and dtypes[0] == dtypes[1]:  # NaN (not measured) compares false
            relative, note = shift, "by its mean"
    if not relative > tolerance:
        return None
    return TensorDifference(
        step=key[0],
        rank=key[1],
        order=left.order[at],
        name=key[4],
        role=key[5],
        dtype_left=dtypes[0],
        dtype_right=dtypes[1],
        left=mine,
        right=theirs,
        relative=relative,
        tolerance=tolerance,
        note=note,
    )


def epsilon(capsule: Capsule) -> float | None:
    """Machine epsilon of the dtype in which a job computes, as far as its manifest or its statistics say it."""
    training, model = capsule.manifest.training, capsule.manifest.model
    stated = [training.precision if training else None, model.dtype if model else None]
    words: list[Any] = [each.lower() for each in stated if each]
    if not words and len(stats := capsule.stats()):
        words = sorted(set(stats.select(stats.role == "activation").dtype.tolist()))
    for word in words:
        for sign, name in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16"), ("float16", "float16")):
            if sign in word:
                return limits.EPSILON[name]
        if "32" in word:
            return limits.EPSILON["float32"]
    return None
