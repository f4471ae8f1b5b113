"""Search in the case log: a plain scan over folded text, which finds a two-character Chinese word as well as NaN.

Words are substrings that must all occur; ``field:value`` narrows to a field; quotes keep a phrase.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from .cards import FIELDS, Card

_TERM = re.compile(r'(?:(?P<field>[^\W\d][\w-]*):)?(?:"(?P<phrase>[^"]*)(?:"|$)|(?P<word>\S+))')
_DATE = re.compile(r"\b20\d\d-[01]\d-[0-3]\d\b")

#: What people type for a field, beside its own name and its beginning.
_ALIASES = {"cause": "root cause", "suspect": "first suspect", "test": "regression test"}

#: Where a word was found, best first; a lower number ranks higher.
_RANKS = {"id": 0, "title": 0, "keywords": 1, "symptom": 2, "root cause": 3}
_REST = 4

#: Parts the cards in the one text of all; a term that holds it is in none of them.
_BETWEEN = b"\0"


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
    """A card with its texts folded once: a search is then nothing but substring tests.

    Attributes:
        card: as it was parsed.
        fields: name and folded value of each, with id and title.
        places: rank and folded text of the places that count, best first; the last is the whole card.
        newest: the latest date among its occurrences and its gate.
    """

    card: Card
    fields: tuple[tuple[str, str], ...]
    places: tuple[tuple[int, str], ...]
    newest: str


class Index:
    """Cards made ready for many searches; 5,000 of them answer a keystroke in a few milliseconds."""

    def __init__(self, cards: Iterable[Card]) -> None:
        entries = [_entry(card) for card in cards]
        # Stable sorts, the weakest first: later in the file, the user's own before ours, the later date.
        entries.reverse()
        entries.sort(key=lambda each: each.card.seed)
        entries.sort(key=lambda each: each.newest, reverse=True)
        self._entries = entries
        # One text of all cards: what none of 5,000 holds is found out by one search, not by 5,000. In UTF-8, where no
        # character's bytes lie within another's, it is half as long as one of 16-bit characters.
        texts = [_encoded(each.places[-1][1]) + _BETWEEN for each in entries]
        self._starts = [0, *accumulate(map(len, texts))]
        self._text = b"".join(texts)

    def __len__(self) -> int:
        return len(self._entries)

    def search(self, query: str) -> list[Card]:
        """The cards that hold every term, by title > keywords > symptom > cause > rest, then newest first."""
        # The longest is the rarest, and three bytes of Chinese say more than three letters.
        terms = tuple(sorted(parse_query(query), key=lambda term: -len(_encoded(term.text))))
        found = self._holding(_encoded(terms[0].text)) if terms else self._entries
        hits = [(rank, each) for each in found if (rank := _rank(each, terms)) is not None]
        hits.sort(key=lambda hit: hit[0])
        return [each.card for _, each in hits]

    def _holding(self, text: bytes) -> Iterator[_Entry]:
        """The entries in which a text occurs, in order."""
        if _BETWEEN in text:
            return
        at = self._text.find(text)
        while at >= 0:
            number = bisect_right(self._starts, at) - 1
            yield self._entries[number]
            at = self._text.find(text, self._starts[number + 1])


def search(cards: Iterable[Card], query: str) -> list[Card]:
    """One search in cards that are not kept; see ``Index.search``."""
    return Index(cards).search(query)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _entry(card: Card) -> _Entry:
    fields = [("id", fold(card.id)), ("title", fold(card.title))]
    fields += [(fold(field.name), fold(field.value)) for field in card.fields]
    places = sorted(((_RANKS[name], value) for name, value in fields if name in _RANKS), key=lambda each: each[0])
    newest = max(_DATE.findall(card.get("Occurrences") + " " + card.get("Gate")), default="")
    return _Entry(card, tuple(fields), (*places, (_REST, fold(card.text))), newest)


def _rank(entry: _Entry, terms: tuple[Term, ...]) -> int | None:
    """Sum over the terms of the best place each was found in, or None where one is nowhere."""
    total = 0
    for term in terms:
        text = term.text
        if term.field:
            if not any(name == term.field and text in value for name, value in entry.fields):
                return None
            total += _RANKS.get(term.field, _REST)
            continue
        for rank, place in entry.places:
            if text in place:
                total += rank
                break
        else:
            return None
    return total


def _field_name(word: str) -> str:
    """The field that a prefix of a query means (``rule`` → ``rules``), or an empty string."""
    name = word.replace("-", " ").replace("_", " ")
    name = _ALIASES.get(name, name)
    known = ["id", "title", *(fold(field) for field in FIELDS)]
    return next((each for each in known if each == name), next((each for each in known if each.startswith(name)), ""))
