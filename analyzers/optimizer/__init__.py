"""Rules of the optimizer: is what the gradients asked for what happened to the weights?

One module a theme: the order of the calls, gradients left over, the step recomputed, the groups and what they own,
precision, the gradient chain, what a resume brings back, adapters, recomputed activations. All thresholds are in
``thresholds``.
"""

from . import adapters, chain, groups, left_over, order, precision, recompute, restore, step, updates

__all__ = ["adapters", "chain", "groups", "left_over", "order", "precision", "recompute", "restore", "step", "updates"]
