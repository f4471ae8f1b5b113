"""JSON lines whose last field is the CRC-32 of the rest of the line.

``{"step":3,"kind":"clip","crc32":"1f0a9c44"}``: the checksum covers every byte of the line before ``"crc32":`` (the
last 19 bytes are left out, and the newline). A line without the field is accepted unchecked, so that any tool can
append; a line that is torn, malformed or fails its checksum is dropped and counted. A hole that a file system left (NUL
bytes, after a crash of the machine) is counted, and what stands behind it in the line is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

from .errors import EvidenceError
from .jsonio import decode_object, encode
from .limits import MAX_BAD_LINES, MAX_LINE_BYTES, MAX_LINES

#: Bytes of ``"crc32":"xxxxxxxx"}``.
TAIL = 19


def encode_line(record: dict[str, Any], nulls: int | None = None) -> bytes:
    """One line with its checksum and newline.

    Args:
        record: what the line holds.
        nulls: how often None is in it, where the caller knows that, and that it is nested no deeper than may be.

    Raises:
        EvidenceError: the record has a field of the reserved name, or is too long.
    """
    if "crc32" in record:
        raise EvidenceError("the field name crc32 is reserved for the checksum of the line")
    body = encode(record, nulls)[:-1] + (b"," if record else b"")
    if len(body) + TAIL + 1 > MAX_LINE_BYTES:
        raise EvidenceError(f"a record of {len(body):,} bytes is longer than {MAX_LINE_BYTES:,}")
    return b'%s"crc32":"%08x"}\n' % (body, crc32(body))


class Line(NamedTuple):
    """One record: its line number from 1, and whether non-finite numbers may be spelled out in it."""

    number: int
    record: dict[str, Any]
    spelled: bool


@dataclass
class Lines:
    """What one JSON-lines file held: the records, what was dropped and why, and the bytes of a torn last line."""

    records: list[Line] = field(default_factory=list[Line])
    bad: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    torn_bytes: int = 0
    skipped: int = 0


def decode_lines(data: bytes) -> Lines:
    """Decode a JSON-lines file; never raises for what the file holds. Of too many lines the newest are read."""
    lines = Lines()
    lines.skipped = max(0, data.count(b"\n") - MAX_LINES)
    if lines.skipped:
        data = _newest(data, MAX_LINES)
    parts = data.split(b"\n")
    lines.torn_bytes = len(parts.pop())  # a write that was cut off left no newline
    for number, line in enumerate(parts, start=lines.skipped + 1):
        if not line or line.isspace():
            continue
        try:
            lines.records.append(_line(number, line))
        except EvidenceError as error:
            rest = line.strip(b"\0")
            hole = len(line) - len(rest)
            lines.bad.append((number, f"a hole of {hole:,} NUL bytes" if hole else error.what))
            if hole and rest:
                try:
                    lines.records.append(_line(number, rest))
                except EvidenceError as behind:
                    lines.bad.append((number, behind.what))
            if len(lines.bad) >= MAX_BAD_LINES:
                lines.bad.append((number + 1, "after so many damaged lines the rest is not read"))
                break
    return lines


def _newest(data: bytes, most: int) -> bytes:
    at = len(data)
    for _ in range(most + 1):
        at = data.rfind(b"\n", 0, at)
    return data[at + 1 :]


def _line(number: int, line: bytes) -> Line:
    return Line(number, _decode_line(line), b'NaN"' in line or b'Infinity"' in line)


def _decode_line(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise EvidenceError(f"line of {len(line):,} bytes is longer than {MAX_LINE_BYTES:,}")
    checked = line[-TAIL : -TAIL + 9] == b'"crc32":"'
    if checked and b"%08x" % crc32(line[:-TAIL]) != line[-10:-2]:
        raise EvidenceError("checksum of the line does not match")
    record = decode_object(line)
    if checked:
        record.pop("crc32", None)
    return record
