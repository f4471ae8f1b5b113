"""Search in the case log: a plain scan over folded text, which finds a two-character Chinese word as well as NaN.

Words are substrings that must all occur; ``field:value`` narrows to a field; quotes keep a phrase.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from .cards import FIELDS, Card

_TERM = re.compile(r'(?:(?P<field>[^\W\d][\w-]*):)?(?:"(?P<phrase>[^"]*)"|(?P<word>\S+))')
_DATE = re.compile(r"\b20\d\d-[01]\d-[0-3]\d\b")

#: What people type for a field, beside its own name and its beginning.
_ALIASES = {"cause": "root cause", "suspect": "first suspect", "test": "regression test"}

#: Where a word was found, best first; a lower number ranks higher.
_RANKS = {"id": 0, "title": 0, "keywords": 1, "symptom": 2, "root cause": 3}
_REST = 4


@dataclass(frozen=True)
class Term:
    """One thing a card must hold: folded text, in one field or (``field`` empty) anywhere."""

    text: str
    field: str = ""


def fold(text: str) -> str:
    """NFKC and casefold: full-width letters, ligatures and case make no difference."""
    return unicodedata.normalize("NFKC", text).casefold()


def parse_query(query: str) -> tuple[Term, ...]:
    """The terms of a query; ``name:value`` whose name is no field is an ordinary word."""
    terms: list[Term] = []
    for match in _TERM.finditer(fold(query)):
        text = match["phrase"] if match["phrase"] is not None else match["word"]
        field = _field_name(match["field"]) if match["field"] else ""
        if match["field"] and not field:
            text = f"{match['field']}:{text}"
        if text.strip():
            terms.append(Term(text, field))
    return tuple(terms)


@dataclass(frozen=True)
class _Entry:
    """A card with its texts folded once: a search is then nothing but substring tests."""

    card: Card
    position: int
    whole: str
    fields: tuple[tuple[str, str], ...]
    newest: str


class Index:
    """Cards made ready for many searches; 5,000 of them answer a keystroke in a few milliseconds."""

    def __init__(self, cards: Iterable[Card]) -> None:
        self._entries = [_entry(card, position) for position, card in enumerate(cards)]

    def __len__(self) -> int:
        return len(self._entries)

    def search(self, query: str) -> list[Card]:
        """The cards that hold every term, by title > keywords > symptom > cause > rest, then newest first."""
        terms = parse_query(query)
        hits = [(rank, each) for each in self._entries if (rank := _rank(each, terms)) is not None]
        # Stable sorts, the weakest first: later in the file, the user's own before ours, the later date.
        hits.sort(key=lambda hit: hit[1].position, reverse=True)
        hits.sort(key=lambda hit: hit[1].card.seed)
        hits.sort(key=lambda hit: hit[1].newest, reverse=True)
        hits.sort(key=lambda hit: hit[0])
        return [each.card for _, each in hits]


def search(cards: Iterable[Card], query: str) -> list[Card]:
    """One search in cards that are not kept; see ``Index.search``."""
    return Index(cards).search(query)


def _entry(card: Card, position: int) -> _Entry:
    fields = [("id", fold(card.id)), ("title", fold(card.title))]
    fields += [(fold(field.name), fold(field.value)) for field in card.fields]
    whole = fold(card.text)
    newest = max(_DATE.findall(card.get("Occurrences") + " " + card.get("Gate")), default="")
    return _Entry(card, position, whole, (*fields, ("", whole)), newest)


def _rank(entry: _Entry, terms: tuple[Term, ...]) -> int | None:
    """Sum over the terms of the best place each was found in, or None where one is nowhere."""
    # Every field is part of the whole, so one test per term rules out most cards.
    if not all(term.text in entry.whole for term in terms):
        return None
    total = 0
    for term in terms:
        places = [
            _RANKS.get(name, _REST) for name, value in entry.fields if term.field in ("", name) and term.text in value
        ]
        if not places:
            return None
        total += min(places)
    return total


def _field_name(word: str) -> str:
    """The field that a prefix of a query means (``rule`` → ``rules``), or an empty string."""
    name = word.replace("-", " ").replace("_", " ")
    name = _ALIASES.get(name, name)
    known = ["id", "title", *(fold(field) for field in FIELDS)]
    return next((each for each in known if each == name), next((each for each in known if each.startswith(name)), ""))
