"""Packed tables on disk: fixed little-endian rows in blocks, each block with its own CRC-32.

A block is a 28-byte header and ``rows * width`` bytes of rows. Appending one is one ``write``, so a killed writer
leaves whole blocks and at most one torn one at the end. A reader that meets a damaged block looks for the next magic.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np

from .limits import MAX_BLOCK_BYTES

MAGIC = b"LCBK"
#: magic, CRC-32 of every byte of the block after this field, kind, bytes a row, rows, order of the first row, step.
HEADER = struct.Struct("<4sIHHIIq")
_CHECKED = struct.Struct("<HHIIq")
_CHECKED_FROM = HEADER.size - _CHECKED.size

SCALARS, STATS, NORMS, HISTOGRAMS = 1, 2, 3, 4

#: Rows of each kind. A later version may append fields to a row; readers take the fields they know.
ROWS: dict[int, np.dtype[Any]] = {
    SCALARS: np.dtype([("id", "<u4"), ("step", "<i8"), ("value", "<f8"), ("time", "<f8")]),
    STATS: np.dtype(
        [
            ("id", "<u4"),
            *((name, "<i4") for name in ("order", "micro", "call")),
            *((name, "<i8") for name in ("step", "numel", "nan", "posinf", "neginf", "zeros", "subnormals")),
            *((name, "<f8") for name in ("min", "max", "absmax", "absmean", "mean", "std", "rms")),
        ]
    ),
    NORMS: np.dtype([("id", "<u4"), ("micro", "<i2"), ("call", "<i2"), ("norm", "<f8")]),
    HISTOGRAMS: np.dtype(
        [
            ("id", "<u4"),
            *((name, "<i4") for name in ("order", "micro", "call")),
            ("step", "<i8"),
            ("exponent", "<i4"),
            ("count", "<i8"),
        ]
    ),
}


def encode_block(kind: int, rows: bytes, count: int, *, step: int = 0, order: int = 0) -> bytes:
    """One block from packed rows; ``step`` and ``order`` hold for kinds whose rows do not carry them."""
    checked = _CHECKED.pack(kind, len(rows) // count, count, order, step)
    return b"".join((MAGIC, crc32(rows, crc32(checked)).to_bytes(4, "little"), checked, rows))


def encode_rows(kind: int, rows: np.ndarray[Any, Any], *, step: int = 0, order: int = 0) -> bytes:
    """As many blocks as it takes for an array of ``ROWS[kind]``, to be appended by one write."""
    most = MAX_BLOCK_BYTES // rows.dtype.itemsize
    return b"".join(
        encode_block(kind, rows[at : at + most].tobytes(), len(rows[at : at + most]), step=step, order=order + at)
        for at in range(0, len(rows), most)
    )


@dataclass
class Gap:
    """Bytes of a table that are no valid block. ``tail``: nothing valid follows, as after a torn write."""

    offset: int
    size: int
    tail: bool


@dataclass
class Table:
    """What a packed table held: rows by kind, with the header of each block beside them."""

    rows: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict[int, "np.ndarray[Any, Any]"])
    #: kind → int64[blocks, 3]: rows, order of the first row, step
    headers: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict[int, "np.ndarray[Any, Any]"])
    gaps: list[Gap] = field(default_factory=list[Gap])


def decode_table(data: bytes) -> Table:
    """Decode a whole table; never raises for what the data holds."""
    view = memoryview(data)
    size = len(data)
    payloads: defaultdict[tuple[int, int], list[memoryview]] = defaultdict(list)
    headers: defaultdict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    gaps: list[Gap] = []
    budget = 4 * size + (64 << 20)  # bytes of failed checksums: crafted headers must not make this quadratic
    unpack, header = HEADER.unpack_from, HEADER.size
    at = 0
    while at + header <= size:
        magic, checksum, kind, width, rows, order, step = unpack(view, at)
        end = at + header + width * rows
        if magic == MAGIC and _plausible(kind, width, rows) and end <= size:
            if crc32(view[at + _CHECKED_FROM : end]) == checksum:
                payloads[kind, width].append(view[at + header : end])
                headers[kind, width].append((rows, order, step))
                at = end
                continue
            budget -= end - at
        following = data.find(MAGIC, at + 1) if budget > 0 else -1
        following = size if following < 0 else following
        _add_gap(gaps, at, following)
        at = following
    if at < size:  # fewer bytes than a header
        _add_gap(gaps, at, size)
    if gaps and gaps[-1].offset + gaps[-1].size == size:
        gaps[-1].tail = True
    return _joined(payloads, headers, gaps)


def _plausible(kind: int, width: int, rows: int) -> bool:
    known = ROWS.get(kind)
    return 0 < width * rows <= MAX_BLOCK_BYTES and (known is None or width >= known.itemsize)


def _add_gap(gaps: list[Gap], start: int, end: int) -> None:
    """Note that ``start`` to ``end`` is no valid block; neighbouring gaps are one."""
    if gaps and gaps[-1].offset + gaps[-1].size == start:
        gaps[-1].size += end - start
    else:
        gaps.append(Gap(start, end - start, tail=False))


def _joined(
    payloads: dict[tuple[int, int], list[memoryview]],
    headers: dict[tuple[int, int], list[tuple[int, int, int]]],
    gaps: list[Gap],
) -> Table:
    table = Table(gaps=gaps)
    for (kind, width), pieces in payloads.items():
        known = ROWS.get(kind)
        if known is None:
            continue  # a kind of a later version: not ours to judge
        raw = np.frombuffer(b"".join(pieces), np.uint8).reshape(-1, width)
        rows = np.ascontiguousarray(raw[:, : known.itemsize]).view(known).reshape(-1)
        places = np.array(headers[kind, width], np.int64)
        if kind in table.rows:  # blocks of two widths: a newer writer joined an older file
            rows = np.concatenate([table.rows[kind], rows])
            places = np.concatenate([table.headers[kind], places])
        table.rows[kind], table.headers[kind] = rows, places
    return table
