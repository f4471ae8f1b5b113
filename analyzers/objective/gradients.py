"""What the gradients say of a loss that was not divided: some loops divide the gradients afterwards instead.

Then the number that the loop reports is a sum over the window while the step is the mean, and nothing is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Share by which two norms of one gradient may differ and still be the same.
_SAME = 0.02


def divided_afterwards(capsule: Capsule, steps: Iterable[int]) -> bool | None:
    """Whether the gradients were divided by the accumulation steps between the last backward and the optimizer step.

    The norm of the accumulated parameter gradients is on record after each micro-batch. From the last but one to the
    last of n it grows by √(n/(n−1)) (independent gradients) to n/(n−1) (equal ones); after a division by n it falls
    to that through n. The two ranges never meet, and the geometric mean between them decides. Where the row was taken
    before the division, the norm that the optimizer saw (``scalars.grad_norm``) is smaller by n instead.

    Args:
        capsule: the evidence.
        steps: windows to look at.

    Returns:
        None where no window of two or more micro-batches has its parameter gradients on record.
    """
    parameters = {str(each["name"]) for each in capsule.records("param_groups") if each.get("name")}
    seen = capsule.scalars("grad_norm")
    votes: list[bool] = []
    for step in steps:
        rows = capsule.stats(role="gradient", step=step)
        rows = rows.select(np.array([name in parameters for name in rows.name], dtype=np.bool_))
        micros = np.unique(rows.micro)
        if len(micros) < 2:
            continue
        count = len(micros)
        squares = rows.rms**2 * rows.numel
        before, last = (float(np.sqrt(squares[rows.micro == micro].sum())) for micro in micros[-2:])
        if not (np.isfinite(before) and np.isfinite(last) and before > 0 and last > 0):
            continue
        decided = last / before < np.sqrt(np.sqrt(count / (count - 1)) / (count - 1))
        at = np.flatnonzero(seen.step == step)
        if not decided and len(at) and np.isfinite(seen.value[at[0]]):
            decided = abs(float(seen.value[at[0]]) * count / last - 1) < _SAME
        votes.append(bool(decided))
    return None if not votes else sum(votes) * 2 > len(votes)
