"""CRC-32C (Castagnoli, reflected, as in RFC 3720 appendix B.4) of many equally long rows at once, and its mask.

The checksum is linear over XOR: a byte contributes a value that depends on its distance from the end of the row only.
So a row's checksum is the XOR of one table look-up a byte, without the chain of a byte-by-byte loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_POLYNOMIAL = 0x82F63B78
_ALL = np.uint32(0xFFFFFFFF)
#: Bytes of a row that are looked up together; longer rows go block by block.
BLOCK = 1024
#: Look-ups gathered at once; more rows go column by column, which needs no room for the indices.
_FEW = 64


def crc32c(rows: Array) -> Array:
    """uint32[N]: the checksum of each row of uint8[N, L]."""
    count, length = rows.shape
    register = np.full(count, _ALL)
    for at in range(0, length, BLOCK):
        register = _advance(register, rows[:, at : at + BLOCK])
    return register ^ _ALL


def masked(checksums: Array) -> Array:
    """uint32[N]: checksums as TFRecord files store them, rotated right by 15 bits plus a constant."""
    return (checksums >> np.uint32(15) | checksums << np.uint32(17)) + np.uint32(0xA282EAD8)


def masked_crc32c(data: bytes | memoryview) -> int:
    """The masked checksum of one piece of data."""
    return int(masked(crc32c(np.frombuffer(data, np.uint8)[None, :]))[0])


def _advance(register: Array, block: Array) -> Array:
    """The registers after one more block; the four bytes of a register act like bytes of the block's head."""
    count, length = block.shape
    if length < 4:
        for column in range(length):
            register = register >> np.uint32(8) ^ _TABLES.upto(1)[0][(register ^ block[:, column]) & np.uint32(0xFF)]
        return register
    tables = _TABLES.upto(length)[length - 1 :: -1]  # by position: the first byte has the whole row behind it
    if count < _FEW:
        values = np.bitwise_xor.reduce(tables[np.arange(length)[None, :], block], axis=1)
        for byte in range(4):
            values ^= tables[byte][register >> np.uint32(8 * byte) & np.uint32(0xFF)]
        return values
    values = np.zeros(count, np.uint32)
    for column in range(length):
        index = block[:, column]
        if column < 4:  # the table is linear: index and register may be joined before the look-up
            index = (register >> np.uint32(8 * column) & np.uint32(0xFF)).astype(np.uint8) ^ index
        values ^= tables[column][index]
    return values


class _Tables:
    """``tables[k][b]``: what byte ``b`` contributes with ``k`` bytes behind it; grown as longer rows come."""

    def __init__(self) -> None:
        first = np.arange(256, dtype=np.uint32)
        for _ in range(8):
            first = np.where(
                first & np.uint32(1), first >> np.uint32(1) ^ np.uint32(_POLYNOMIAL), first >> np.uint32(1)
            )
        self._tables = first.astype(np.uint32)[None, :]

    def upto(self, length: int) -> Array:
        """uint32[at least length, 256]."""
        known = len(self._tables)
        if known < length:
            grown = np.empty((length, 256), np.uint32)
            grown[:known] = self._tables
            for at in range(known, length):
                last = grown[at - 1]
                grown[at] = last >> np.uint32(8) ^ grown[0][last & np.uint32(0xFF)]
            self._tables = grown
        return self._tables


_TABLES = _Tables()
