"""Appends the evidence of one rank to its directory. Every call that returns has its rows in the file."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import msgspec
import numpy as np

from .arrays import Description, array_info, build_image
from .blocks import HISTOGRAMS, NORMS, ROWS, SCALARS, STATS, encode_block, encode_rows
from .columns import Columns, encode_columns
from .dtypes import Plain
from .errors import EvidenceError
from .jsonio import encode, number, present
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

#: What identifies a name inside one kind of rows.
Key = tuple[Any, ...]
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
        try:
            try:
                self.directory.mkdir(mode=0o700)
            except FileNotFoundError:
                make_directory(self.directory.parent)
                self.directory.mkdir(mode=0o700)
        except FileExistsError:
            raise EvidenceError(
                f"rank {rank} of this capsule has a writer already", str(root), "give each process its own rank="
            ) from None
        self.rank = rank
        self._appender = appender
        self._clock = clock
        self._ids: dict[str, dict[Key, int]] = {}
        self._next_id = 0
        self._counts: dict[str, int] = {}
        self._columned: set[str] = set()
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
        replace(self.directory / "rank.json", encode(present(msgspec.to_builtins(self.state))))

    def _append(self, name: str, data: bytes) -> None:
        self._appender.append(self.directory / name, data)
        beaten = self.state.heartbeat or 0.0
        if not 0 <= self._clock() - beaten < HEARTBEAT_EVERY:
            self.heartbeat()

    # -- names

    def _ids_of(self, kind: str, keys: Iterable[Key]) -> list[int]:
        """Ids of names; new ones are written first, so that no row is ever without a name."""
        known = self._ids.setdefault(kind, {})
        keys = list(keys)
        try:
            return [known[key] for key in keys]
        except (KeyError, TypeError):
            described = {key: _DESCRIBE[kind](key) for key in dict.fromkeys(map(_hashable, keys)) if key not in known}
            added = {key: self._next_id + at for at, key in enumerate(described)}
            lines = [encode_line({"id": added[key], **names}) for key, names in described.items()]
            if lines:
                self._append("names.jsonl", b"".join(lines))
            known.update(added)
            self._next_id += len(added)
            return [known[_hashable(key)] for key in keys]

    # -- scalars

    def scalar_row(self, step: int, values: Mapping[str, float], time: float | None) -> None:
        """One row a name, all of one step, in one write."""
        step = count(step, "scalars.step")
        if not values:
            return
        ids = self._ids_of("scalars", [(name, "", None) for name in values])
        at = _NAN if time is None else time
        rows = bytearray()
        for identity, (name, value) in zip(ids, values.items(), strict=True):
            if type(value) is not float:
                value = number(value, f"scalars.{name}")
            rows += _SCALAR.pack(identity, step, value, at)
        self._reached(step)
        self._append("scalars.bin", encode_block(SCALARS, bytes(rows), len(ids)))

    def scalars(self, name: str, step: Any, value: Any, time: Any, unit: str, side: str | None) -> None:
        """Many rows of one name."""
        where = f"scalars.{name}"
        values = column(value, where, "value")
        rows = np.empty(len(values), ROWS[SCALARS])
        rows["step"] = steps(step, where, len(values))
        rows["value"] = values
        rows["time"] = _NAN if time is None else column(time, where, "time", len(values))
        rows["id"] = self._ids_of("scalars", [(name, unit, side)])[0]
        if len(rows):
            self._reached(int(rows["step"].max()))
            self._append("scalars.bin", encode_rows(SCALARS, rows))

    def _reached(self, step: int) -> None:
        """The next heartbeat says how far the series have come, so that a list need not read them."""
        if self.state.step is None or step > self.state.step:
            self.state.step = step

    # -- statistics

    def norms(self, step: int, rows: Sequence[NormRow], order: int) -> None:
        """Norm-only rows of one step in one write; 16 bytes a row."""
        step, order = count(step, "norms.step"), count(order, "norms.order")
        if not rows:
            return
        try:
            names, roles, dtypes, shapes, norms, micros, calls = zip(*rows, strict=True)
        except ValueError:
            raise EvidenceError("expected rows of name, role, dtype, shape, norm, micro, call", "norms") from None
        packed = np.empty(len(rows), ROWS[NORMS])
        packed["id"] = self._ids_of("norms", zip(names, roles, dtypes, shapes, strict=True))
        packed["norm"] = column(norms, "norms", "norm")
        packed["micro"] = _small(micros, "micro")
        packed["call"] = _small(calls, "call")
        self._append("stats.bin", encode_rows(NORMS, packed, step=step, order=order))

    def stats(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Full rows, and their histograms, in one write."""
        parsed = [check(row, StatRow, f"stats, record {at}")[1] for at, row in enumerate(rows, start=1)]
        if not parsed:
            return
        packed = np.empty(len(parsed), ROWS[STATS])
        packed["id"] = self._ids_of("stats", map(_stat_key, parsed))
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
        self._append("arrays.jsonl", encode_line(present(line)))

    # -- records

    def records(self, stream: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records; each write holds whole lines."""
        if not _STREAM.fullmatch(stream):
            raise EvidenceError(f"stream name {stream!r:.60} is not made of letters, digits, _ . and -")
        kind = stream_type(stream)
        if stream not in self._counts:
            (self.directory / "records").mkdir(mode=0o700, exist_ok=True)
        name = f"records/{stream}.jsonl"
        pending: list[bytes] = []
        size = 0
        try:
            for record in records:
                number_ = self._counts.get(stream, 0) + 1
                line = encode_line(check(record, kind, f"{stream}, record {number_}")[0])
                self._counts[stream] = number_
                pending.append(line)
                size += len(line)
                if size >= _CHUNK:
                    data, pending, size = b"".join(pending), [], 0
                    self._append(name, data)
        finally:
            if pending:
                self._append(name, b"".join(pending))

    def rewrite(self, stream: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Put these records in the place of all that the stream holds; a reader sees the old ones or the new ones."""
        self.records(stream, ())  # the name is right, the directory is there
        kind = stream_type(stream)
        lines = [encode_line(check(each, kind, f"{stream}, record {at}")[0]) for at, each in enumerate(records, 1)]
        path = self.directory / f"records/{stream}.jsonl"
        replace(path, b"".join(lines))
        self._appender.forget(path)
        self._counts[stream] = len(lines)

    def columns(self, stream: str, length: int, columns: Columns) -> None:
        """Append ``length`` records column by column, in as few lines as can be."""
        if not _STREAM.fullmatch(stream):
            raise EvidenceError(f"stream name {stream!r:.60} is not made of letters, digits, _ . and -")
        if stream not in self._columned:
            (self.directory / "columns").mkdir(mode=0o700, exist_ok=True)
            self._columned.add(stream)
        for line in encode_columns(length, columns, stream_type(stream), stream):
            self._append(f"columns/{stream}.jsonl", line)


def count(value: Any, where: str, below: int = 2**63) -> int:
    """A non-negative integer that fits the column it is for.

    Raises:
        EvidenceError: it is none.
    """
    if type(value) is not int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise EvidenceError(f"found {value!r:.60}, expected a count", where)
        value = value.__index__()
    if not 0 <= value < below:
        raise EvidenceError(f"found {value!r:.60}, expected a count of at least 0 and below {below:,}", where)
    return value


def column(value: Any, where: str, name: str, length: int | None = None) -> np.ndarray[Any, Any]:
    """A float64 column from a number or a sequence of numbers.

    Raises:
        EvidenceError: naming the row that holds something else, or the lengths that differ.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.ndim == 1 and length in (None, len(value)):
        return value.astype(np.float64)
    listed = _listed(value)
    if length is not None and len(listed) != length:
        if len(listed) != 1:
            raise EvidenceError(f"{len(listed)} entries of {name} for {length} values", where)
        listed = listed * length
    if all(type(each) is float for each in listed):
        return np.array(listed, np.float64)
    return np.array([number(each, f"{where}, row {at}, {name}") for at, each in enumerate(listed, 1)], np.float64)


def _listed(value: Any) -> list[Any]:
    """A column as a list, from a scalar, a sequence, an array or a tensor."""
    items = value.tolist() if hasattr(value, "tolist") else value
    return list(cast("Iterable[Any]", items)) if isinstance(items, Iterable) and type(items) is not str else [items]


def _small(values: Sequence[Any], name: str) -> list[int]:
    """Indices of a norm row: from -1 (not known) to 32,767."""
    if all(type(each) is int and -1 <= each < 2**15 for each in values):
        return list(values)
    return [count(each, f"norms, row {at}, {name}", below=2**15) for at, each in enumerate(values, 1)]


def steps(value: Any, where: str, length: int) -> np.ndarray[Any, Any]:
    """An int64 column of steps.

    Raises:
        EvidenceError: naming the row that holds no count, or the lengths that differ.
    """
    if isinstance(value, range):
        value = np.arange(value.start, value.stop, value.step)
    if isinstance(value, np.ndarray) and value.dtype == np.int64 and value.shape == (length,) and (value >= 0).all():
        return value
    listed = _listed(value)
    if len(listed) != length:
        raise EvidenceError(f"{len(listed)} steps for {length} values", where)
    return np.array([count(each, f"{where}, row {at}, step") for at, each in enumerate(listed, 1)], np.int64)


def _hashable(key: Key) -> Key:
    """A key whose shape came as a list."""
    return tuple(tuple(cast("list[Any]", each)) if isinstance(each, list) else each for each in key)


def _describe_scalar(key: Key) -> dict[str, Any]:
    name, unit, side = key
    if not isinstance(name, str):
        raise EvidenceError(f"name is {name!r:.60}, expected str", "scalars")
    named = {"table": "scalars", "name": name, "unit": unit or UNITS.get(name, "")}
    return named | ({"side": side} if side else {})


def _describe_norm(key: Key) -> dict[str, Any]:
    name, role, dtype, shape = key
    row = check({"step": 0, "name": name, "role": role, "dtype": dtype, "shape": shape}, StatRow, "norms")[1]
    return {"table": "stats", "name": row.name, "role": row.role, "dtype": row.dtype, "shape": row.shape}


def _stat_key(row: StatRow) -> Key:
    return (row.name, row.role, row.dtype, row.shape, row.stride, row.device)


def _describe_stat(key: Key) -> dict[str, Any]:
    fields = dict(zip(("name", "role", "dtype", "shape", "stride", "device"), key, strict=True))
    return {"table": "stats"} | {name: value for name, value in fields.items() if value not in (None, "")}


_DESCRIBE: dict[str, Callable[[Key], dict[str, Any]]] = {
    "scalars": _describe_scalar,
    "norms": _describe_norm,
    "stats": _describe_stat,
}
