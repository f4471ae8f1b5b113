"""What a torn JSON document still says: its longest valid prefix, member by member."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ..errors import EvidenceError
from ..jsonio import decode
from ..limits import MAX_JSON_DEPTH

_BLANK = " \t\r\n"
_AFTER_NUMBERS = frozenset(_BLANK + ",]}")
_decoder = json.JSONDecoder()


class Document(NamedTuple):
    """A JSON value, and whether it was whole."""

    value: Any
    whole: bool


def decode_prefix(data: bytes, where: str) -> Document:
    """Decode one JSON document; of a torn one, everything before the tear (bare ``NaN`` is accepted).

    Raises:
        EvidenceError: nothing of it can be read.
    """
    try:
        return Document(decode(data, where), True)
    except EvidenceError as error:
        text = data.decode("utf-8", "replace").lstrip("\ufeff")
        try:
            value, _ = _prefix(text, _skip(text, 0), 0)
        except (ValueError, RecursionError):
            raise error from None
        return Document(value, False)


def _prefix(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value that begins at ``at``, as far as it goes, and where it ends.

    Raises:
        ValueError: nothing of it can be read.
    """
    try:
        value, end = _decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        value, end = None, -1
    # A number that nothing follows, or the tear, may have lost its last digits.
    if end >= 0 and (text[end - 1] in '}]"' or text[end : end + 1] in _AFTER_NUMBERS):
        return value, end
    if depth >= MAX_JSON_DEPTH or at >= len(text) or text[at] not in "{[":
        raise ValueError("no value")
    return _items(text, at + 1, depth) if text[at] == "[" else _members(text, at + 1, depth)


def _items(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    while True:
        at = _skip(text, at)
        try:
            value, at = _prefix(text, at, depth + 1)
        except ValueError:
            return found, len(text)
        found.append(value)
        at = _skip(text, at)
        if text[at : at + 1] != ",":
            return found, at + 1
        at += 1


def _members(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    while True:
        at = _skip(text, at)
        try:
            key, at = _decoder.raw_decode(text, at)
            at = _skip(text, at)
            if not isinstance(key, str) or text[at : at + 1] != ":":
                return found, len(text)
            found[key], at = _prefix(text, _skip(text, at + 1), depth + 1)
        except ValueError:
            return found, len(text)
        at = _skip(text, at)
        if text[at : at + 1] != ",":
            return found, at + 1
        at += 1


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _BLANK:
        at += 1
    return at
