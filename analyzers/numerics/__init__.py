"""Rules about numbers: non-finite values, float16 range, spikes, explosions, the learning rate.

One module a theme; a new rule goes into the theme it belongs to or a module of its own, imported here. All thresholds
are in ``thresholds``; ``symptoms`` says when a run left its path, which several rules need to agree on.
"""

from . import (
    capability,
    convergence,
    evaluation,
    explosion,
    gradients,
    layers,
    learning_rate,
    nonfinite,
    overfitting,
    overflow,
    padding,
    precision,
    preprocessing,
    reporting,
    spikes,
)

__all__ = [
    "capability",
    "convergence",
    "evaluation",
    "explosion",
    "gradients",
    "layers",
    "learning_rate",
    "nonfinite",
    "overfitting",
    "overflow",
    "padding",
    "precision",
    "preprocessing",
    "reporting",
    "spikes",
]
