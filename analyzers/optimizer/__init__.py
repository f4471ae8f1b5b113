"""Rules of the optimizer: is what the gradients asked for what happened to the weights?

One module a theme: the order of the calls, the step recomputed, the groups and what they own, precision, the gradient
chain, what a resume brings back, adapters, recomputed activations. All thresholds are in ``thresholds``.
"""

from . import adapters, chain, groups, order, precision, recompute, restore, step, updates

__all__ = ["adapters", "chain", "groups", "order", "precision", "recompute", "restore", "step", "updates"]
