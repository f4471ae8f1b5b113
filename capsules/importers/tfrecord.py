"""The framing of TFRecord files: length, its checksum, payload, its checksum; many records at once.

Source of the convention: https://www.tensorflow.org/tutorials/load_data/tfrecord (u64 length, u32 masked CRC-32C of
the length, payload, u32 masked CRC-32C of the payload, all little-endian).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..limits import KIB, MIB
from .crc32c import crc32c, masked, masked_crc32c

Array = np.ndarray[Any, Any]

_LENGTH = struct.Struct("<Q")
HEADER, FOOTER = 12, 4
#: Payloads larger than this are left out: no point of a curve comes near.
LARGEST = 64 * MIB
#: Records are taken apart in pieces of about this size: large enough for NumPy, small enough for the cache.
_PIECE = 2 * MIB
#: Bytes searched for the next record after damage, in the whole file.
_MOST_SEARCHED = 64 * MIB


@dataclass
class Losses:
    """What of a file could not be read."""

    torn: int = 0
    damaged: int = 0
    searched: int = 0
    searching: bool = False
    oversized: int = 0
    unread: bool = False


@dataclass(frozen=True)
class Group:
    """Records of one length: uint8[N, L] and int64[N], their places among the records of the piece."""

    rows: Array
    place: Array


def first_record(head: bytes) -> bytes | None:
    """The payload of the first record as far as ``head`` holds it, or None where the head is no TFRecord file."""
    if len(head) < HEADER or _LENGTH.unpack_from(head)[0] > LARGEST:
        return None
    if masked_crc32c(head[:8]) != int.from_bytes(head[8:HEADER], "little"):
        return None
    return head[HEADER : HEADER + _LENGTH.unpack_from(head)[0]]


def pieces(chunks: Iterable[bytes], losses: Losses) -> Iterator[list[Group]]:
    """The records of a file whose checksums hold, piece by piece, those of one length together.

    Args:
        chunks: the file's content.
        losses: what could not be read is counted here.
    """
    buffer, skip, last = b"", 0, False
    parts: list[bytes] = []
    size, wanted = 0, _PIECE
    stream = iter(chunks)
    while not last:
        chunk = next(stream, b"")
        last = not chunk
        if skip:  # inside a payload that is left out
            skip, chunk = max(0, skip - len(chunk)), chunk[skip:]
        parts.append(chunk)
        size += len(chunk)
        if size < wanted and not last:
            continue
        buffer = b"".join(parts)
        groups, at, need = _whole_records(buffer, losses, last)
        if groups:
            yield groups
        if losses.unread:
            return
        skip = max(0, at - len(buffer))
        parts, size = [buffer[at:]], max(0, len(buffer) - at)
        wanted = max(_PIECE, need)
    losses.torn += size


def _whole_records(buffer: bytes, losses: Losses, last: bool) -> tuple[list[Group], int, int]:
    """The records that lie whole in the buffer, where the first other one begins, and the bytes that one needs."""
    found: list[Array] = []
    at, need, size = 0, 0, len(buffer)
    data = np.frombuffer(buffer, np.uint8)
    while True:
        places = _walk(buffer, at)
        sound = _headers_hold(data, places)
        end = int(places[-1]) + _whole(buffer, int(places[-1])) if len(places) else at
        if not sound.all():
            places = places[: int(np.argmin(sound))]
            end = int(places[-1]) + _whole(buffer, int(places[-1])) if len(places) else at
        found.append(places)
        at = end
        if size - at < HEADER:
            break
        if masked_crc32c(buffer[at : at + 8]) == int.from_bytes(buffer[at + 8 : at + HEADER], "little"):
            need = _whole(buffer, at)
            if need > LARGEST:
                losses.oversized += 1
                at, need = at + need, 0
                if at < size:
                    continue
            break
        at = _next_record(data, at, losses, last)  # the length cannot be trusted: look for the next record
        if losses.unread or size - at < HEADER:
            break
    return _groups(data, np.concatenate(found), losses), at, need


def _whole(buffer: bytes, at: int) -> int:
    """Bytes of the record at ``at``, frame included."""
    return int(_LENGTH.unpack_from(buffer, at)[0]) + HEADER + FOOTER


def _walk(buffer: bytes, at: int) -> Array:
    """int64[N]: where the records begin that end inside the buffer, if every length is true."""
    places: list[int] = []
    append, unpack, size = places.append, _LENGTH.unpack_from, len(buffer)
    limit = size - HEADER - FOOTER
    while at <= limit:
        end = at + unpack(buffer, at)[0] + 16
        if end > size:
            break
        append(at)
        at = end
    return np.array(places, np.int64)


def _headers_hold(data: Array, places: Array) -> Array:
    """bool[N]: the checksum of the length holds."""
    if not len(places):
        return np.ones(0, np.bool_)
    headers = _rows(data, places, HEADER)
    return masked(crc32c(headers[:, :8])) == _little(headers[:, 8:])


def _next_record(data: Array, at: int, losses: Losses, last: bool) -> int:
    """Where the next header with a true checksum begins; else where a header may begin that is not read yet."""
    stop = max(len(data) - HEADER + 1, at + 1)
    begin, window = at + 1, 64 * KIB
    losses.damaged += not losses.searching  # one place, though the search may go on in the next piece
    losses.searching = True
    while begin < stop:
        end = min(begin + window, stop)
        losses.searched += end - begin
        if losses.searched > _MOST_SEARCHED:
            losses.unread = True
            return begin
        # Lengths stay far below 2^32, so their upper half is zero: few places are worth a checksum.
        zero = data[begin + 4 : end + 7] == 0
        places = np.flatnonzero(zero[:-3] & zero[1:-2] & zero[2:-1] & zero[3:])[: end - begin] + begin
        places = places[places + HEADER <= len(data)]
        true = places[_headers_hold(data, places)]
        if len(true):
            losses.searching = False
            return int(true[0])
        begin = end
    return len(data) if last else stop


def _groups(data: Array, places: Array, losses: Losses) -> list[Group]:
    """Records by length, without those whose checksum does not hold."""
    if not len(places):
        return []
    lengths = _rows(data, places, 8).view("<u8").ravel()
    order = np.argsort(lengths, kind="stable")
    cuts = np.flatnonzero(np.diff(lengths[order])) + 1
    groups: list[Group] = []
    for members in np.split(order, cuts):
        length = int(lengths[members[0]])
        rows = _rows(data, places[members] + HEADER, length + FOOTER)
        true = masked(crc32c(rows[:, :length])) == _little(rows[:, length:])
        if not true.all():
            losses.damaged += int((~true).sum())
            rows, members = rows[true], members[true]
        groups.append(Group(rows[:, :length], members))
    return groups


def _rows(data: Array, places: Array, length: int) -> Array:
    """uint8[N, length]: the bytes from each place on."""
    return np.lib.stride_tricks.sliding_window_view(data, length)[places]


def _little(rows: Array) -> Array:
    """uint32[N] from uint8[N, 4]."""
    return np.ascontiguousarray(rows).view("<u4").ravel()
