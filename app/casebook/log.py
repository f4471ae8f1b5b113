"""The whole case log: the cases of the user's file, and beside them those that ship with the product."""

from __future__ import annotations

from pathlib import Path

from .. import paths
from . import cards

#: Bytes beyond which a file is no case log.
LARGEST = 64 << 20


def load(file: Path) -> tuple[cards.Card, ...]:
    """The user's cases, then those that ship with the product.

    Raises:
        ResolveError: the file is there and cannot be read.
    """
    from .resolve import read

    own = cards.parse(read(file))
    same = {card.text for card in own}  # in our own repository the two files are one
    return own + tuple(card for card in seed() if card.text not in same)


def own_text(file: Path) -> str:
    """The text of the user's log, read to search it; empty where it cannot be read, or is the one that we ship."""
    try:
        known = file.is_file() and file.stat().st_size <= LARGEST  # a pipe would keep its reader waiting
        found = file.read_text("utf-8", "replace") if known else ""
    except OSError:
        return ""
    return "" if found == paths.seed_cases() else found


def own(text: str) -> tuple[cards.Card, ...]:
    """The cases of a log that people wrote: without those that ship with the product, where the log holds them too."""
    shipped = {card.text for card in seed()}
    return tuple(card for card in cards.parse(text) if card.text not in shipped)


def seed() -> tuple[cards.Card, ...]:
    """The cases that ship with the product."""
    return cards.parse(paths.seed_cases(), seed=True)
