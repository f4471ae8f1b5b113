"""Reads the directory of one rank, as far as it can be read, and reports what cannot."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from . import underway
from .arrays import ArraysFile, Description, parse_description
from .blocks import HISTOGRAMS, NORMS, ROWS, SCALARS, STATS, Table, decode_table
from .columns import decode_columns
from .damage import TORN_BLOCK, TORN_LINE, Damage, DamageLog
from .dtypes import Array
from .errors import EvidenceError
from .jsonio import decode_object, present
from .layout import rank_directory
from .limits import MAX_GLANCED_BYTES, MAX_LINES, MAX_LINES_BYTES, MAX_MANIFEST_BYTES, MAX_STREAMS
from .lines import Lines, decode_lines
from .manifest import RankState
from .record_columns import Chunk, Rows
from .status import DerivedStatus, rank_status
from .storage import read_inside, read_tail
from .streams import STREAMS, stream_type
from .tables import COMPACT, Name, numel
from .typed import salvage


class StatsOfRank(NamedTuple):
    """Statistics of one rank: compact rows (``tables.COMPACT``), the full rows they point to, histogram bins."""

    compact: Array
    full: Array
    bins: Array


class RankReader:
    """Evidence of one rank, each file read once when first asked for.

    Args:
        root: directory of the capsule.
        rank: the rank.
        damage: where damage is reported.
        clock: Unix seconds, for the age of the heartbeat.
    """

    def __init__(self, root: Path, rank: int, damage: DamageLog, clock: Callable[[], float]) -> None:
        self._root = root
        self.rank = rank
        self.directory = rank_directory(rank)
        self._damage = damage
        self._clock = clock
        self._names: dict[int, Name] | None = None
        self._chunks: dict[str, list[Chunk]] = {}
        self._records: dict[str, list[dict[str, Any]]] = {}

    def _report(self, name: str, what: str, lost: str = "", kept: str = "", at: str = "") -> None:
        file = f"{self.directory}/{name}" if name else self.directory
        self._damage.add(file, Damage(what=what, where=f"{file} {at}".rstrip(), lost=lost, kept=kept))

    # -- state

    @cached_property
    def state(self) -> RankState | None:
        """``rank.json``, or None where there is none or it cannot be read."""
        relative = f"{self.directory}/rank.json"
        try:
            raw = decode_object(read_inside(self._root, relative, MAX_MANIFEST_BYTES))
        except FileNotFoundError:
            self._report("rank.json", "is missing", lost="heartbeat and trigger")
            return None
        except EvidenceError as error:
            self._report("rank.json", error.what, lost="heartbeat and trigger")
            return None
        state, sentences = salvage(present(raw), RankState)
        for sentence in sentences:
            self._report("rank.json", sentence, lost="the field")
        return state

    @cached_property
    def status(self) -> DerivedStatus:
        """Status of the rank, stale where ``rank.json`` cannot be read."""
        return rank_status(self.state, self._clock()) if self.state else "stale"

    @property
    def live(self) -> bool:
        """The rank may be writing right now, so that an unfinished last row is no damage."""
        return self.status == "recording"

    # -- files

    @cached_property
    def _entries(self) -> frozenset[str] | None:
        """What lies in the rank's directory, so that nothing is opened that is not there; None where none can tell."""
        try:
            return frozenset(os.listdir(self._root / self.directory))
        except OSError:
            return None

    def _lacks(self, name: str) -> bool:
        """Whether a file, or the directory that it lies in, was not there at the first look."""
        return self._entries is not None and name.partition("/")[0] not in self._entries

    def _tail(self, name: str, limit: int) -> tuple[bytes, int]:
        """The newest bytes of a file, and how many older ones were left out; nothing where it cannot be read."""
        if self._lacks(name):
            return b"", 0
        try:
            data, skipped = read_tail(self._root, f"{self.directory}/{name}", limit)
        except FileNotFoundError:
            return b"", 0
        except EvidenceError as error:
            self._report(name, error.what, lost="the file")
            return b"", 0
        if skipped:
            self._report(name, "file is beyond the size that is read", f"oldest {skipped:,} bytes")
        return data, skipped

    def _lines(self, name: str) -> Lines:
        data, skipped = self._tail(name, MAX_LINES_BYTES)
        try:
            lines = decode_lines(data[data.find(b"\n") + 1 :] if skipped else data)
        except MemoryError:
            self._report(name, "does not fit in memory", lost="the file")
            return Lines()
        if lines.skipped:
            self._report(name, "has more lines than are read", lost=f"oldest {lines.skipped:,} lines")
        self._report_bad(name, lines, "line")
        kept = f"{len(lines.records):,} lines"
        if lines.torn_bytes and not self.live:
            self._report(name, TORN_LINE, f"{lines.torn_bytes:,} bytes", kept)
        return lines

    def _report_bad(self, name: str, lines: Lines, of: str) -> None:
        for number, why in lines.bad:
            self._report(name, why, f"the {of}", f"{len(lines.records):,} lines", at=f"{of} {number:,}")

    def _table(self, name: str, limit: int) -> Table:
        data, skipped = self._tail(name, limit)
        table = decode_table(data)
        kept = f"{sum(len(rows) for rows in table.rows.values()):,} rows"
        for gap in table.gaps:
            if (gap.tail and self.live) or (skipped and gap.offset == 0):
                continue
            what = TORN_BLOCK if gap.tail else "a block is damaged"
            self._report(name, what, f"{gap.size:,} bytes", kept, at=f"at byte {skipped + gap.offset:,}")
        return table

    # -- tables

    @property
    def names(self) -> dict[int, Name]:
        """Id → what rows of that id are about; the first line of an id holds."""
        if self._names is None:
            self._names = {}
            for number, record, _ in self._lines("names.jsonl").records:
                try:
                    name = msgspec.convert(present(record), Name)
                    self._names.setdefault(name.id, name)
                except (msgspec.ValidationError, UnicodeEncodeError) as error:
                    self._report("names.jsonl", str(error), "the rows of that name", at=f"line {number:,}")
        return self._names

    def _named(self, rows: Array, table: str) -> Array:
        """bool[N]: the id of the row has a name in this table; the others are reported."""
        if not len(rows):
            return np.ones(0, np.bool_)
        ids, inverse, counts = np.unique(rows["id"], return_inverse=True, return_counts=True)

        def known() -> Array:
            return np.array([each in self.names and self.names[each].table == table for each in ids.tolist()], np.bool_)

        found = known()
        if self.live and not found.all():
            self._names = None  # names that were written since the names were read
            found = known()
        if not self.live and not found.all():
            lost = f"{int(counts[~found].sum()):,} rows of {int((~found).sum()):,} ids"
            self._report(f"{table}.bin", "rows have no name in names.jsonl", lost)
        return found[inverse]

    def read_scalars(self, limit: int) -> Array:
        """Rows of ``scalars.bin`` whose id has a name, in file order; the newest ``limit`` bytes of the file."""
        rows = self._table("scalars.bin", limit).rows.get(SCALARS, np.empty(0, ROWS[SCALARS]))
        return rows[self._named(rows, "scalars")]

    def read_stats(self, limit: int) -> StatsOfRank | None:
        """Rows of ``stats.bin`` whose id has a name, in file order; the newest ``limit`` bytes of the file."""
        if self._lacks("stats.bin"):
            return None
        table = self._table("stats.bin", limit)
        full = table.rows.get(STATS, np.empty(0, ROWS[STATS]))
        full = full[self._named(full, "stats")]
        bins = table.rows.get(HISTOGRAMS, np.empty(0, ROWS[HISTOGRAMS]))
        bins = bins[self._named(bins, "stats")]
        return StatsOfRank(np.concatenate([self._norm_rows(table), self._full_rows(full)]), full, bins)

    def _full_rows(self, full: Array) -> Array:
        rows = np.empty(len(full), COMPACT)
        for name in ("id", "step", "order", "micro", "call", "rms"):
            rows[name] = full[name]
        rows["rank"] = self.rank
        rows["detail"] = np.arange(len(full))
        return rows

    def _norm_rows(self, table: Table) -> Array:
        """Norm-only rows: step and order come from the header of their block, rms = norm / √numel."""
        norms = table.rows.get(NORMS, np.empty(0, ROWS[NORMS]))
        rows = np.empty(len(norms), COMPACT)
        if not len(norms):
            return rows
        sizes, orders, steps = table.headers[NORMS].T
        position = np.arange(len(norms)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows["order"] = np.repeat(orders, sizes) + position
        rows["step"] = np.repeat(steps, sizes)
        rows["rank"], rows["detail"] = self.rank, -1
        for name in ("id", "micro", "call"):
            rows[name] = norms[name]
        named = self._named(norms, "stats")
        rows, norms = rows[named], norms[named]
        ids, inverse = np.unique(norms["id"], return_inverse=True)
        elements = np.array([numel(self.names[each].shape) for each in ids.tolist()], np.float64)
        rows["rms"] = norms["norm"] / np.sqrt(np.maximum(elements, 1.0))[inverse]
        return rows

    # -- arrays

    @cached_property
    def arrays(self) -> list[tuple[Description, ArraysFile]]:
        """Every arrays file that is as it was written, in the order of the index; files not in it come last.

        None is opened for that, since thousands would take seconds; what is inside is checked when it is loaded.
        """
        indexed: dict[str, Description | None] = {}
        for number, record, _ in self._lines("arrays.jsonl").records:
            try:
                description = parse_description(record)
                name = description.file or ""
                if "/" in name or not name.endswith(".h5"):
                    raise EvidenceError(f"file name {name!r:.60} is refused")
                indexed[name] = description
            except EvidenceError as error:
                self._report("arrays.jsonl", error.what, "the line", at=f"line {number:,}")
        for name in self._list("arrays", ".h5"):
            indexed.setdefault(name, None)  # the writer died before the index line, or the line is damaged
        room = MAX_GLANCED_BYTES
        found: list[tuple[Description, ArraysFile]] = []
        for name, description in indexed.items():
            file = ArraysFile(self._root, f"{self.directory}/arrays/{name}", description)
            try:
                known, read = file.glance(room)
                room -= read
                found.append((known, file))
            except EvidenceError as error:
                lost = ", ".join(description.arrays) or description.kind if description else "its arrays"
                self._report(f"arrays/{name}", error.what, lost)
        return found

    def load(self, file: ArraysFile, key: str) -> Array | None:
        """The stored bits of an array, or None, and damage, where it cannot be read."""
        try:
            return file.read(key)
        except EvidenceError as error:
            self._damage.add(file.relative, Damage(what=error.what, where=file.relative, lost=key))
            return None

    # -- records

    def _list(self, directory: str, suffix: str) -> list[str]:
        if self._lacks(directory):
            return []
        path = self._root / self.directory / directory
        try:
            if path.is_symlink():
                raise OSError("is a symbolic link; refused")
            return sorted(each for each in os.listdir(path) if each.endswith(suffix) and not each.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self._report(directory, error.strerror or str(error), "the directory")
            return []

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams that have a file."""
        found = list(dict.fromkeys(self._list("records", ".jsonl") + self._list("columns", ".jsonl")))
        if len(found) > MAX_STREAMS:
            self._report("records", "more streams than are read", f"{len(found) - MAX_STREAMS:,} files")
            found.sort(key=lambda name: name.removesuffix(".jsonl") not in STREAMS)
        if "collectives.jsonl" not in found:
            found += self._list("underway", "collectives.jsonl")
        return tuple(sorted(name.removesuffix(".jsonl") for name in found[:MAX_STREAMS]))

    def columns(self, stream: str) -> list[Chunk]:
        """Records of one stream in file order, ``rank`` set; a field of a wrong type is left out and reported."""
        if stream not in self._chunks:
            found = self._read_records(stream) if stream in self.streams else []
            if stream == "collectives":
                found += self._under_way(found)
            self._chunks[stream] = found
        return self._chunks[stream]

    def records(self, stream: str) -> list[dict[str, Any]]:
        """The same as dictionaries."""
        if stream not in self._records:
            self._records[stream] = [record for chunk in self.columns(stream) for record in chunk.records()]
        return self._records[stream]

    def _read_records(self, stream: str) -> list[Chunk]:
        kind = stream_type(stream)
        name = f"records/{stream}.jsonl"
        records: list[dict[str, Any]] = []
        for number, record, spelled in self._lines(name).records:
            for sentence in salvage(record, kind, spelled)[1]:
                self._report(name, sentence, "the field", at=f"line {number:,}")
            record.setdefault("rank", self.rank)
            records.append(record)
        found: list[Chunk] = [Rows(records)]
        return found + self._read_columns(stream) if f"{stream}.jsonl" in self._columned else found

    def _under_way(self, known: list[Chunk]) -> list[Chunk]:
        """Calls that were written before they were made, and of which nothing more is known."""
        lines = underway.in_places(*self._tail(underway.RELATIVE, underway.PLACES * underway.PLACE))
        if not self.live:  # else a place may be half written right now
            self._report_bad(underway.RELATIVE, lines, "place")
        found = [record for _, record, _ in lines.records]
        if not found:
            return []
        for record in found:
            salvage(record, stream_type("collectives"))
            record.setdefault("rank", self.rank)
        return [Rows(underway.later(found, [record for chunk in known for record in chunk.records()]))]

    @cached_property
    def _columned(self) -> frozenset[str]:
        return frozenset(self._list("columns", ".jsonl"))

    def _read_columns(self, stream: str) -> list[Chunk]:
        """Records that were written column by column."""
        kind = stream_type(stream)
        name = f"columns/{stream}.jsonl"
        chunks: list[Chunk] = []
        for number, line, spelled in self._lines(name).records:
            try:
                found, sentences = decode_columns(line, kind, spelled)
            except EvidenceError as error:
                self._report(name, error.what, "its records", at=f"line {number:,}")
                continue
            if sum(map(len, chunks)) + len(found) > MAX_LINES:
                self._report(name, "stands for more records than are read", "the newest", at=f"line {number:,}")
                break
            for sentence in sentences:
                self._report(name, sentence, "the field", at=f"line {number:,}")
            chunks.append(found.with_default("rank", self.rank))
        return chunks
