"""The wire format of protocol buffers, read without a schema: what event files and W&B's run files are made of.

Source of the convention: https://protobuf.dev/programming-guides/encoding/ (varint 0, fixed64 1, length-delimited 2,
fixed32 5; groups are not used by the formats read here).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from ..errors import EvidenceError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_FIXED = {FIXED64: 8, FIXED32: 4}
_DOUBLE, _FLOAT = struct.Struct("<d"), struct.Struct("<f")
_LONGEST_VARINT = 10


class Field(NamedTuple):
    """One field: its number, wire type, where its content lies in the data, and the value of a varint (unsigned)."""

    number: int
    wire: int
    start: int
    end: int
    value: int


def fields(data: bytes, start: int = 0, end: int | None = None) -> Iterator[Field]:
    """The fields of one message in the order of the data.

    Raises:
        EvidenceError: the bytes are no message, or end in the middle of a field.
    """
    at, end = start, len(data) if end is None else end
    while at < end:
        key, at = _varint(data, at, end)
        number, wire, value = key >> 3, key & 7, 0
        if wire == VARINT:
            begin = at
            value, at = _varint(data, at, end)
        elif wire == BYTES:
            size, begin = _varint(data, at, end)
            at = begin + size
        elif wire in _FIXED:
            begin, at = at, at + _FIXED[wire]
        else:
            raise EvidenceError(f"wire type {wire} at byte {at - start}, expected 0, 1, 2 or 5", "protocol buffer")
        if at > end or not number:
            raise EvidenceError(f"a field ends at byte {at - start} of {end - start}", "protocol buffer")
        yield Field(number, wire, begin, at, value)


def signed(value: int) -> int:
    """An int64 from its unsigned varint."""
    return value - (1 << 64) if value >= 1 << 63 else value


def zigzag(value: int) -> int:
    """A sint64 from its unsigned varint."""
    return (value >> 1) ^ -(value & 1)


def double(data: bytes, field: Field) -> float:
    """The float64 of a fixed64 field."""
    return float(_DOUBLE.unpack_from(data, field.start)[0])


def single(data: bytes, field: Field) -> float:
    """The float32 of a fixed32 field."""
    return float(_FLOAT.unpack_from(data, field.start)[0])


def text(data: bytes, field: Field) -> str:
    """The text of a length-delimited field; what is no UTF-8 becomes U+FFFD."""
    return data[field.start : field.end].decode("utf-8", "replace")


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Value and the position after it."""
    if at < end and data[at] < 0x80:  # nearly all of them
        return data[at], at + 1
    value = shift = 0
    for place in range(at, min(at + _LONGEST_VARINT, end)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, place + 1
        shift += 7
    raise EvidenceError(f"a varint does not end within {_LONGEST_VARINT} bytes", "protocol buffer")
