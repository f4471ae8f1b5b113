"""Appends the evidence of one rank to its directory. Every call that returns has its rows in the file."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import numpy as np

from .arrays import Description, array_info, build_image
from .blocks import HISTOGRAMS, NORMS, ROWS, SCALARS, STATS, encode_block, encode_rows
from .dtypes import Plain
from .errors import EvidenceError
from .jsonio import encode, number
from .layout import rank_directory
from .lines import encode_line
from .manifest import RankState, Trigger
from .process import host, process_start, utc
from .storage import Appender, make_directory, replace
from .streams import stream_type
from .tables import COUNTS, MEASURES, UNITS, StatRow
from .typed import check

#: Seconds after which an append renews the heartbeat.
HEARTBEAT_EVERY = 5.0

#: What a norm row is: name, role, dtype, shape, Euclidean norm, micro, call.
NormRow = tuple[str, str, str, tuple[int, ...], float, int, int]

_STREAM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")
_SCALAR = struct.Struct("<Iqdd")
_NAN = float("nan")
_CHUNK = 1 << 20


class RankWriter:
    """The files of one rank.

    Args:
        root: directory of the capsule.
        rank: the rank.
        appender: keeps files open; shared by the ranks of one writer.
        clock: Unix seconds.

    Raises:
        EvidenceError: another writer has this rank already.
    """

    def __init__(self, root: Path, rank: int, appender: Appender, clock: Callable[[], float]) -> None:
        self.directory = root / rank_directory(rank)
        make_directory(root / "ranks")
        try:
            self.directory.mkdir(mode=0o700)
        except FileExistsError:
            raise EvidenceError(
                f"rank {rank} of this capsule has a writer already", str(root), "give each process its own rank="
            ) from None
        self.rank = rank
        self._appender = appender
        self._clock = clock
        self._ids: dict[tuple[Any, ...], int] = {}
        self._counts: dict[str, int] = {}
        self._arrays = 0
        now = clock()
        pid = os.getpid()
        self.state = RankState(rank=rank, host=host(), pid=pid, process_start=process_start(pid), started=utc(now))
        self.heartbeat()

    def heartbeat(self, status: Any = None, trigger: Trigger | None = None, step: int | None = None) -> None:
        """Replace ``rank.json``."""
        self.state.heartbeat = self._clock()
        self.state.status = status or self.state.status
        self.state.trigger = trigger or self.state.trigger
        self.state.step = self.state.step if step is None else step
        known = {name: value for name, value in msgspec.to_builtins(self.state).items() if value is not None}
        replace(self.directory / "rank.json", encode(known))

    def _append(self, name: str, data: bytes) -> None:
        self._appender.append(self.directory / name, data)
        beaten = self.state.heartbeat or 0.0
        if not 0 <= self._clock() - beaten < HEARTBEAT_EVERY:
            self.heartbeat()

    # -- names

    def _identify(self, keys: Sequence[tuple[Any, ...]], describe: Callable[[tuple[Any, ...]], dict[str, Any]]) -> None:
        """Give every new key an id and write their names, before any row uses them."""
        lines: list[bytes] = []
        added: dict[tuple[Any, ...], int] = {}
        for key in keys:
            if key not in self._ids and key not in added:
                added[key] = len(self._ids) + len(added)
                lines.append(encode_line({"id": added[key], **describe(key)}))
        if lines:
            self._append("names.jsonl", b"".join(lines))
            self._ids.update(added)

    def _ids_of(
        self, keys: Sequence[tuple[Any, ...]], describe: Callable[[tuple[Any, ...]], dict[str, Any]]
    ) -> list[int]:
        try:
            return [self._ids[key] for key in keys]
        except KeyError:
            self._identify(keys, describe)
            return [self._ids[key] for key in keys]

    # -- scalars

    def scalar_row(self, step: int, values: Mapping[str, float], time: float | None) -> None:
        """One row a name, all of one step, in one write."""
        step = count(step, "scalars.step")
        if not values:
            return
        ids = self._ids_of([("scalars", name, "", None) for name in values], _describe_scalar)
        at = _NAN if time is None else time
        rows = bytearray()
        for identity, (name, value) in zip(ids, values.items(), strict=True):
            if type(value) is not float:
                value = number(value, f"scalars.{name}")
            rows += _SCALAR.pack(identity, step, value, at)
        self._append("scalars.bin", encode_block(SCALARS, bytes(rows), len(ids)))

    def scalars(self, name: str, step: Any, value: Any, time: Any, unit: str, side: str | None) -> None:
        """Many rows of one name."""
        where = f"scalars.{name}"
        values = column(value, where, "value")
        rows = np.empty(len(values), ROWS[SCALARS])
        rows["step"] = steps(step, where, len(values))
        rows["value"] = values
        rows["time"] = _NAN if time is None else column(time, where, "time", len(values))
        rows["id"] = self._ids_of([("scalars", name, unit, side)], _describe_scalar)[0]
        if len(rows):
            self._append("scalars.bin", encode_rows(SCALARS, rows))

    # -- statistics

    def norms(self, step: int, rows: Sequence[NormRow], order: int) -> None:
        """Norm-only rows of one step in one write; 16 bytes a row."""
        step, order = count(step, "norms.step"), count(order, "norms.order")
        if not rows:
            return
        packed = np.empty(len(rows), ROWS[NORMS])
        packed["id"] = self._ids_of([("norms", *row[:4]) for row in rows], _describe_norm)
        try:
            packed["norm"] = [row[4] for row in rows]
            packed["micro"] = [row[5] for row in rows]
            packed["call"] = [row[6] for row in rows]
        except (TypeError, ValueError, OverflowError) as error:
            raise EvidenceError(f"expected norm, micro, call as numbers below 32,768 ({error})", "norms") from None
        self._append("stats.bin", encode_rows(NORMS, packed, step=step, order=order))

    def stats(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Full rows, and their histograms, in one write."""
        parsed = [check(row, StatRow, f"stats, record {at}")[1] for at, row in enumerate(rows)]
        if not parsed:
            return
        ids = self._ids_of([_stat_key(row) for row in parsed], _describe_stat)
        packed = np.empty(len(parsed), ROWS[STATS])
        packed["id"] = ids
        packed["step"] = [row.step for row in parsed]
        packed["order"] = [at if row.order is None else row.order for at, row in enumerate(parsed)]
        for name in ("micro", "call", *COUNTS):
            packed[name] = [-1 if (value := getattr(row, name)) is None else value for row in parsed]
        for name in MEASURES:
            packed[name] = [_NAN if (value := getattr(row, name)) is None else value for row in parsed]
        data = encode_rows(STATS, packed)
        bins = [
            (*(packed[name][at] for name in ("id", "order", "micro", "call", "step")), exponent, elements)
            for at, row in enumerate(parsed)
            for exponent, elements in sorted((row.log2_histogram or {}).items())
        ]
        if bins:
            data += encode_rows(HISTOGRAMS, np.array(bins, ROWS[HISTOGRAMS]))
        self._append("stats.bin", data)

    # -- arrays

    def arrays(self, description: Description, arrays: dict[str, Plain]) -> None:
        """Write one arrays file and then its line in the index."""
        description.arrays = {key: array_info(each) for key, each in arrays.items()}
        image = build_image(description, arrays)
        directory = self.directory / "arrays"
        if not self._arrays:
            make_directory(directory)
        name = f"{description.step}-{self._arrays}.h5"
        replace(directory / name, image)
        self._arrays += 1
        line = msgspec.to_builtins(description) | {"file": name, "bytes": len(image), "checksum": f"{crc32(image):08x}"}
        self._append("arrays.jsonl", encode_line({key: each for key, each in line.items() if each is not None}))

    # -- records

    def records(self, stream: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records; each write holds whole lines."""
        if not _STREAM.fullmatch(stream):
            raise EvidenceError(f"stream name {stream!r:.60} is not made of letters, digits, _ . and -")
        kind = stream_type(stream)
        if stream not in self._counts:
            make_directory(self.directory / "records")
        name = f"records/{stream}.jsonl"
        pending, size = [], 0
        try:
            for record in records:
                number_ = self._counts.get(stream, 0)
                line = encode_line(check(record, kind, f"{stream}, record {number_}")[0])
                self._counts[stream] = number_ + 1
                pending.append(line)
                size += len(line)
                if size >= _CHUNK:
                    data, pending, size = b"".join(pending), [], 0
                    self._append(name, data)
        finally:
            if pending:
                self._append(name, b"".join(pending))


def count(value: Any, where: str) -> int:
    """A non-negative integer that fits 64 bits.

    Raises:
        EvidenceError: it is none.
    """
    if type(value) is not int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise EvidenceError(f"found {value!r:.60}, expected a count", where)
        value = value.__index__()
    if not 0 <= value < 2**63:
        raise EvidenceError(f"found {value!r:.60}, expected a count of at least 0 and below 2^63", where)
    return value


def column(value: Any, where: str, name: str, length: int | None = None) -> np.ndarray[Any, Any]:
    """A float64 column from a number or a sequence of numbers.

    Raises:
        EvidenceError: naming the row that holds something else, or the lengths that differ.
    """
    items = value.tolist() if hasattr(value, "tolist") else value
    listed: list[Any] = (
        list(items)
        if isinstance(items, list | tuple | range) or (hasattr(items, "__iter__") and not isinstance(items, str))
        else [items]
    )
    if length is not None and len(listed) != length:
        if len(listed) != 1:
            raise EvidenceError(f"{len(listed)} entries of {name} for {length} values", where)
        listed = listed * length
    if all(type(each) is float for each in listed):
        return np.array(listed, np.float64)
    return np.array([number(each, f"{where}, row {at}, {name}") for at, each in enumerate(listed)], np.float64)


def steps(value: Any, where: str, length: int) -> np.ndarray[Any, Any]:
    """An int64 column of steps.

    Raises:
        EvidenceError: naming the row that holds no count, or the lengths that differ.
    """
    items = value.tolist() if hasattr(value, "tolist") else value
    listed: list[Any] = [items] if hasattr(items, "__index__") else list(items)
    if len(listed) != length:
        raise EvidenceError(f"{len(listed)} steps for {length} values", where)
    return np.array([count(each, f"{where}, row {at}, step") for at, each in enumerate(listed)], np.int64)


def _describe_scalar(key: tuple[Any, ...]) -> dict[str, Any]:
    _, name, unit, side = key
    named = {"table": "scalars", "name": name, "unit": unit or UNITS.get(name, "")}
    return named | ({"side": side} if side else {})


def _describe_norm(key: tuple[Any, ...]) -> dict[str, Any]:
    _, name, role, dtype, shape = key
    row = check({"step": 0, "name": name, "role": role, "dtype": dtype, "shape": shape}, StatRow, "norms")[1]
    return {"table": "stats", "name": row.name, "role": row.role, "dtype": row.dtype, "shape": row.shape}


def _stat_key(row: StatRow) -> tuple[Any, ...]:
    return ("stats", row.name, row.role, row.dtype, row.shape, row.stride, row.device)


def _describe_stat(key: tuple[Any, ...]) -> dict[str, Any]:
    fields = dict(zip(("table", "name", "role", "dtype", "shape", "stride", "device"), key, strict=True))
    return {name: value for name, value in fields.items() if value not in (None, "")}
