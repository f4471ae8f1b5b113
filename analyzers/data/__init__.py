"""Rules about what the model is fed: ids, labels and masks, lengths, repeats, samples that do not belong.

One module a theme; a new rule goes into the theme it belongs to or a module of its own, imported here. ``rows`` is how
all of them look at captured batches, and all thresholds are in ``thresholds``.
"""

from . import (
    fields,
    labels,
    lengths,
    long_samples,
    masks,
    mixture,
    packing,
    poison,
    repeats,
    special_tokens,
    splits,
    template,
    variety,
    vocabulary,
)

__all__ = [
    "fields",
    "labels",
    "lengths",
    "long_samples",
    "masks",
    "mixture",
    "packing",
    "poison",
    "repeats",
    "special_tokens",
    "splits",
    "template",
    "variety",
    "vocabulary",
]
