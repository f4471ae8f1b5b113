"""What the gradients say of a loss that was not divided: some loops divide the gradients afterwards instead.

Then the number that the loop reports is a sum over the window while the step is the mean, and nothing is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Share by which two norms of one gradient may differ and still be the same.
_SAME = 0.02
#: Exponent of the growth of a sum of n gradients, n^a: independent ones ½, equal ones 1.
_INDEPENDENT, _EQUAL = 0.5, 1.0
#: Exponents below this are gradients that cancel: then a small last norm says nothing of a division.
_CANCELLING = 0.25


def divided_afterwards(capsule: Capsule, steps: Iterable[int]) -> bool | None:
    """Whether the gradients were divided by the accumulation steps between the last backward and the optimizer step.

    The norm of the accumulated parameter gradients is on record after each micro-batch. Where the row was taken before
    the division, the norm that the optimizer saw (``scalars.grad_norm``) is smaller by n, exactly. Where it was taken
    after it, the last norm breaks the growth that the earlier ones show.

    Args:
        capsule: the evidence.
        steps: windows to look at.

    Returns:
        None where no window of two or more micro-batches has its parameter gradients on record, or where they cancel
        so far that a division cannot be told from it.
    """
    parameters = {str(each["name"]) for each in capsule.records("param_groups") if each.get("name")}
    seen = capsule.scalars("grad_norm")
    votes: list[bool] = []
    for step in steps:
        rows = capsule.stats(role="gradient", step=step)
        rows = rows.select(np.array([name in parameters for name in rows.name], dtype=np.bool_))
        squares = rows.rms**2 * rows.numel
        norms = [float(np.sqrt(squares[rows.micro == micro].sum())) for micro in np.unique(rows.micro)]
        if len(norms) < 2 or not np.isfinite(norms).all() or min(norms) <= 0:
            continue
        at = np.flatnonzero(seen.step == step)
        vote = _vote(norms, float(seen.value[at[0]]) if len(at) else float("nan"))
        votes += [vote] if vote is not None else []
    return None if not votes else sum(votes) * 2 > len(votes)


def _vote(norms: Sequence[float], seen: float) -> bool | None:
    """One window: norms after each of its n micro-batches, and the norm that the optimizer saw (NaN where unknown).

    Undivided, the last norm is (n/(n−1))^a times the one before, with a between ½ (independent gradients) and 1 (equal
    ones), or as the norms before it grew. Divided, it is that through n.
    """
    count, last = len(norms), norms[-1]
    if np.isfinite(seen) and abs(seen * count / last - 1) < _SAME:
        return True
    exponents = np.array((_INDEPENDENT, _EQUAL))
    if count > 2:
        exponents[:] = np.log(norms[-2] / norms[0]) / np.log(count - 1)
    if exponents.min() < _CANCELLING:
        return None
    growth = np.log(last / norms[-2])
    expected = exponents * np.log(count / (count - 1))
    undivided = np.clip(growth, *np.sort(expected)) - growth
    divided = np.clip(growth, *np.sort(expected - np.log(count))) - growth
    if min(abs(undivided), abs(divided)) > np.log(count) / 2:
        return None  # neither: they cancel, or the last micro-batch is of another size altogether
    return bool(abs(divided) < abs(undivided))
