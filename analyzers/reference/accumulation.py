"""What the gradient of an optimizer window is, when it is accumulated over micro-batches, in FP64.

The loss of a window that is a mean over tokens has the gradient Σᵢ Gᵢ / Σᵢ nᵢ, Gᵢ being the gradient of the summed
token losses of micro-batch i and nᵢ its number of supervised tokens. Backward adds up what it is given (torch autograd
accumulates into ``.grad``), so each micro-batch must enter with the weight nᵢ / Σ nⱼ times its own mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Weighting = Literal["token-mean", "mean-of-means", "sum-of-means", "sum"]


def weights(tokens: Sequence[int], weighting: Weighting = "token-mean", configured: int | None = None) -> Floats:
    """Weight [n] that the mean gradient of each micro-batch has in the gradient of the window.

    Args:
        tokens: supervised tokens of each micro-batch.
        weighting: token-mean weighs each by its tokens; mean-of-means divides each by the number of micro-batches;
            sum-of-means forgets to; sum adds the gradients of summed losses.
        configured: micro-batches a window is meant to have, where the job divides by that number instead of the actual
            one (a short last window).
    """
    count = np.asarray(tokens, dtype=np.float64)
    match weighting:
        case "token-mean":
            total = count.sum()
            return count / total if total else np.zeros_like(count)
        case "mean-of-means":
            return np.full_like(count, 1.0 / (configured or len(count) or 1))
        case "sum-of-means":
            return np.ones_like(count)
        case "sum":
            return count


def window_gradient(
    means: Sequence[Floats], tokens: Sequence[int], weighting: Weighting = "token-mean", configured: int | None = None
) -> Floats:
    """Gradient of the window from the mean gradient of each micro-batch, all of one shape.

    Raises:
        ValueError: there are not as many gradients as token counts, or none.
    """
    if not means or len(means) != len(tokens):
        raise ValueError(f"{len(means)} gradients for {len(tokens)} token counts")
    each = weights(tokens, weighting, configured)
    return np.asarray(sum(weight * mean for weight, mean in zip(each, means, strict=True)), dtype=np.float64)
