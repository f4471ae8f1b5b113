"""Token cross-entropy in FP64: what a language model's loss is made of.

    loss[b, t] = logsumexp_v(logits[b, t, v]) − logits[b, t, target[b, t]]

in nats. Convention: the logits at position t predict the token at t + 1, and a position whose target is the ignore
index adds neither to the numerator nor to the denominator (torch.nn.functional.cross_entropy with
``reduction="mean"``). The scores come either as logits [B, T, V] or as what is left of them where V is too large to
keep: the log-sum-exp and the logits of the three tokens that follow in flattened row order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Vocabulary rows converted to FP64 at a time.
_CHUNK = 1 << 22


def logsumexp(logits: NDArray[np.floating]) -> Floats:
    """Stable log Σ exp over the last axis in FP64; [..., V] → [...].

    A row with +Inf gives +Inf, a row of −Inf only gives −Inf, a NaN gives NaN.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    result = np.empty(len(rows), dtype=np.float64)
    step = max(1, _CHUNK // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        part = rows[start : start + step].astype(np.float64)
        top = part.max(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            total = np.log(np.exp(part - top[:, None]).sum(axis=1)) + top
        result[start : start + step] = np.where(np.isinf(top), top, total)
    return result.reshape(logits.shape[:-1])


def logsumexp_rounding(logits: NDArray[np.floating]) -> Floats:
    """√Σ p²x² over the last axis: root mean square move of the log-sum-exp for ± one unit roundoff on each logit x.

    p is the softmax; to first order d(logsumexp) = Σ p dx, and the roundings of different logits are independent.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    result = np.empty(len(rows), dtype=np.float64)
    step = max(1, _CHUNK // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        part = rows[start : start + step].astype(np.float64)
        weight = np.exp(part - part.max(axis=1, keepdims=True))
        weight /= weight.sum(axis=1, keepdims=True)
        result[start : start + step] = np.sqrt(np.square(np.where(weight > 0, weight * part, 0.0)).sum(axis=1))
    return result.reshape(logits.shape[:-1])


def target_logits(logits: NDArray[np.floating], input_ids: Ints) -> Floats:
    """Entry [b, t, o] is the logit at (b, t) for the token ``input_ids.flat[b·T + t + o]``; NaN past the end."""
    batch, length, vocabulary = logits.shape
    flat = input_ids.reshape(-1)
    result = np.full((batch * length, 3), np.nan)
    rows = logits.reshape(-1, vocabulary)
    for offset in range(3):
        count = max(0, batch * length - offset)
        ids = flat[offset:]
        lawful = (ids >= 0) & (ids < vocabulary)
        picked = rows[np.arange(count), np.where(lawful, ids, 0)].astype(np.float64)
        result[:count, offset] = np.where(lawful, picked, np.nan)
    return result.reshape(batch, length, 3)


@dataclass(frozen=True)
class Scores:
    """The scores of one batch, from which the loss of any target can be asked.

    Attributes:
        logsumexp: [B, T] in FP64.
        input_ids: [B, T].
        following: [B, T, 3], logits of the tokens at flattened offsets 0, 1, 2.
        logits: [B, T, V] where they were kept: any target can then be asked, not only the three.
        known_loss: [B, T] losses that the job itself kept, used where the scores do not reach. NaN elsewhere.
        rounding: [B, T], how far one unit roundoff on each logit moves the log-sum-exp; None where it is itself what
            was rounded.
    """

    logsumexp: Floats
    input_ids: Ints
    following: Floats
    logits: NDArray[np.floating] | None = None
    known_loss: Floats | None = None
    rounding: Floats | None = None

    @classmethod
    def from_logits(cls, logits: NDArray[np.floating], input_ids: Ints) -> Scores:
        """From full logits [B, T, V]."""
        return cls(logsumexp(logits), input_ids, target_logits(logits, input_ids), logits)

    def losses(
        self,
        targets: Ints,
        counted: NDArray[np.bool_],
        perturb: Callable[[Floats, str], Floats] | None = None,
        job_targets: Ints | None = None,
    ) -> Floats:
        """Token losses [B, T] in nats, 0 where not counted, NaN where the scores cannot say.

        Args:
            targets: [B, T] token each position is scored on.
            counted: [B, T] which positions are scored.
            perturb: applied to log-sum-exp and target logits, to measure what rounding does.
            job_targets: [B, T] targets to which ``known_loss`` belongs; −1 where none.
        """
        wanted = self._logit(targets)
        total = self.logsumexp
        if perturb is not None:
            moved = np.abs(total) if self.rounding is None else self.rounding
            total = total + (perturb(moved, "logsumexp") - moved)
            wanted = perturb(wanted, "target_logit")
        loss = total - wanted
        if self.known_loss is not None and job_targets is not None:
            loss = np.where(np.isnan(loss) & (targets == job_targets), self.known_loss, loss)
        return np.where(counted, loss, 0.0)

    def _logit(self, targets: Ints) -> Floats:
        """The logit of each target [B, T]; NaN where it was not kept."""
        if self.logits is not None:
            vocabulary = self.logits.shape[-1]
            lawful = (targets >= 0) & (targets < vocabulary)
            picked = np.take_along_axis(self.logits, np.where(lawful, targets, 0)[..., None], axis=-1)[..., 0]
            return np.where(lawful, picked.astype(np.float64), np.nan)
        flat = self.input_ids.reshape(-1)
        result = np.full(targets.size, np.nan)
        wanted = targets.reshape(-1)
        for offset in (2, 1, 0):
            count = max(0, flat.size - offset)
            equal = np.zeros(flat.size, dtype=bool)
            equal[:count] = wanted[:count] == flat[offset:]
            result = np.where(equal, self.following.reshape(-1, 3)[:, offset], result)
        return result.reshape(targets.shape)


def mean(losses: Floats, counted: NDArray[np.bool_]) -> float:
    """Σ loss / number of counted positions; NaN where none is counted (torch gives 0/0 as well)."""
    count = int(counted.sum())
    return float(losses[counted].sum() / count) if count else float("nan")
