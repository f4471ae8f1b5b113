"""Rules about what the model is fed: token ids, lengths, samples that do not belong.

One module a theme; a new rule goes into the theme it belongs to or a module of its own, imported here. All thresholds
are in ``thresholds``.
"""

from . import lengths, poison, vocabulary

__all__ = ["lengths", "poison", "vocabulary"]
