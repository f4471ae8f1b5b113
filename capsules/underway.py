"""Calls that a rank has written before it made them (``underway/collectives.jsonl``), beside those it wrote after.

The file is there while a rank records, and stays where its process ended without a word. It has ``PLACES`` places of
``PLACE`` bytes, filled in turn; a place holds one line as in ``records/`` and is filled up with line breaks. One that a
file system lost is NUL bytes.
"""

from __future__ import annotations

from typing import Any

from .lines import Lines, decode_lines

#: Where the file lies below the directory of a rank.
RELATIVE = "underway/collectives.jsonl"
PLACES, PLACE = 32, 4096

Record = dict[str, Any]


def in_places(data: bytes, skipped: int = 0) -> Lines:
    """What the places of the file hold, each read for itself; ``number`` of a line is that of its place from 1.

    Args:
        data: of the file.
        skipped: bytes of it that lie before ``data``.
    """
    places = [data[at : at + PLACE].strip(b"\n") for at in range(-skipped % PLACE, len(data), PLACE)]
    if places and not places[0].strip(b"\0"):
        places[0] = b""  # writers of before began with the second place
    return decode_lines(b"".join((place.strip(b"\0") or place) + b"\n" for place in places))


def later(found: list[Record], known: list[Record]) -> list[Record]:
    """Those calls that are beyond all that is known of their group, with their place in the order of the rank.

    Args:
        found: records of the file, in any order; ``call`` counts them.
        known: records of the stream.
    """
    if not found:
        return []
    last: dict[tuple[Any, bool], int] = {}
    order = -1
    for record in known:
        order = max(order, _count(record.get("order")))
        key = _key(record)
        last[key] = max(last.get(key, 0), _count(record.get("seq")))
    fresh: list[Record] = []
    for record in sorted(found, key=lambda each: _count(each.get("call"))):
        if _count(record.get("seq")) > last.get(_key(record), 0):
            order += 1
            fresh.append({name: value for name, value in record.items() if name != "call"} | {"order": order})
    return fresh


def _key(record: Record) -> tuple[Any, bool]:
    group = record.get("group")
    return (group if isinstance(group, str | int) else None), bool(record.get("p2p"))


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else -1
