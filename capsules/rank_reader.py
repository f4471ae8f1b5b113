"""Reads the directory of one rank, as far as it can be read, and reports what cannot."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .arrays import ArraysFile, Description, parse_description
from .blocks import HISTOGRAMS, NORMS, ROWS, SCALARS, STATS, Table, decode_table
from .damage import Damage, DamageLog
from .dtypes import Array
from .errors import EvidenceError
from .jsonio import decode_object
from .limits import MAX_LINES_BYTES, MAX_MANIFEST_BYTES, MAX_TABLE_BYTES
from .lines import Lines, decode_lines
from .manifest import RankState
from .rank_writer import rank_directory
from .storage import read_inside, read_tail
from .streams import stream_type
from .tables import COMPACT, Name, numel
from .typed import salvage

#: Key of a histogram: id, step, rank, order, micro, call.
HistogramKey = tuple[int, int, int, int, int, int]


class RankReader:
    """Evidence of one rank, each file read once when first asked for.

    Args:
        root: directory of the capsule.
        rank: the rank.
        damage: where damage is reported.
        live: the rank may be writing right now, so that an unfinished last row is no damage.
    """

    def __init__(self, root: Path, rank: int, damage: DamageLog, live: bool) -> None:
        self._root = root
        self.rank = rank
        self.directory = rank_directory(rank)
        self._damage = damage
        self._live = live
        self._records: dict[str, list[dict[str, Any]]] = {}

    # -- files

    def _lines(self, name: str) -> Lines:
        relative = f"{self.directory}/{name}"
        entries: list[Damage] = []
        try:
            data, skipped = read_tail(self._root, relative, MAX_LINES_BYTES)
        except FileNotFoundError:
            return Lines()
        except EvidenceError as error:
            self._damage.report(relative, [Damage(what=error.what, where=relative, lost="the file")])
            return Lines()
        if skipped:
            data = data[data.find(b"\n") + 1 :]
            entries.append(
                Damage(what="file is beyond the size limit", where=relative, lost=f"oldest {skipped:,} bytes")
            )
        lines = decode_lines(data)
        kept = f"{len(lines.records):,} lines"
        for number, why in lines.bad:
            entries.append(Damage(what=why, where=f"{relative} line {number:,}", lost="the line", kept=kept))
        if lines.torn_bytes and not self._live:
            lost = f"{lines.torn_bytes:,} bytes"
            entries.append(Damage(what="last line is torn", where=relative, lost=lost, kept=kept))
        self._damage.report(relative, entries)
        return lines

    def _table(self, name: str) -> Table:
        relative = f"{self.directory}/{name}"
        try:
            data, skipped = read_tail(self._root, relative, MAX_TABLE_BYTES)
        except FileNotFoundError:
            return Table()
        except EvidenceError as error:
            self._damage.report(relative, [Damage(what=error.what, where=relative, lost="the file")])
            return Table()
        table = decode_table(data)
        kept = f"{sum(len(rows) for rows in table.rows.values()):,} rows"
        entries: list[Damage] = []
        if skipped:
            lost = f"oldest {skipped:,} bytes"
            entries.append(Damage(what="file is beyond the size limit", where=relative, lost=lost, kept=kept))
        for gap in table.gaps:
            if (gap.tail and self._live) or (skipped and gap.offset == 0):
                continue
            what = "last block is torn" if gap.tail else "a block is damaged"
            where = f"{relative} at byte {skipped + gap.offset:,}"
            entries.append(Damage(what=what, where=where, lost=f"{gap.size:,} bytes", kept=kept))
        self._damage.report(relative, entries)
        return table

    # -- tables

    @cached_property
    def names(self) -> dict[int, Name]:
        """Id → what rows of that id are about; the first line of an id holds."""
        names: dict[int, Name] = {}
        for number, record in self._lines("names.jsonl").records:
            try:
                name, _ = parse_name(record)
            except EvidenceError as error:
                where = f"{self.directory}/names.jsonl line {number:,}"
                self._damage.add(f"{where} type", Damage(what=error.what, where=where, lost="the rows of that name"))
                continue
            names.setdefault(name.id, name)
        return names

    @cached_property
    def scalars(self) -> Array:
        """Rows of ``scalars.bin`` whose id has a name, in file order."""
        rows = self._table("scalars.bin").rows.get(SCALARS, np.empty(0, ROWS[SCALARS]))
        return rows[self._named(rows, "scalars")]

    def _named(self, rows: Array, table: str) -> Array:
        """bool[N]: the id of the row has a name in this table; the others are reported."""
        ids, inverse, counts = np.unique(rows["id"], return_inverse=True, return_counts=True)
        known = np.array([(name := self.names.get(each)) is not None and name.table == table for each in ids.tolist()])
        known = known.astype(bool)
        if not known.all():
            where = f"{self.directory}/{table}.bin"
            lost = f"{int(counts[~known].sum()):,} rows of {int((~known).sum()):,} ids"
            self._damage.report(f"{where} names", [Damage(what="rows have no name", where=where, lost=lost)])
        return known[inverse]

    @cached_property
    def stats(self) -> tuple[Array, Array, dict[HistogramKey, dict[int, int]]]:
        """Compact rows in file order (``tables.COMPACT``), the full rows they point to, and the histograms."""
        table = self._table("stats.bin")
        full = table.rows.get(STATS, np.empty(0, ROWS[STATS]))
        full = full[self._named(full, "stats")]
        return np.concatenate([self._norm_rows(table), self._full_rows(full)]), full, self._histograms(table)

    def _full_rows(self, full: Array) -> Array:
        rows = np.zeros(len(full), COMPACT)
        for name in ("id", "step", "order", "micro", "call", "rms"):
            rows[name] = full[name]
        rows["rank"] = self.rank
        rows["detail"] = np.arange(len(full))
        return rows

    def _norm_rows(self, table: Table) -> Array:
        norms = table.rows.get(NORMS, np.empty(0, ROWS[NORMS]))
        rows = np.zeros(len(norms), COMPACT)
        if not len(norms):
            return rows
        sizes, orders, steps = table.headers[NORMS].T
        starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows["order"] = np.repeat(orders, sizes) + np.arange(len(norms)) - starts
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

    def _histograms(self, table: Table) -> dict[HistogramKey, dict[int, int]]:
        found: dict[HistogramKey, dict[int, int]] = {}
        for row in table.rows.get(HISTOGRAMS, np.empty(0, ROWS[HISTOGRAMS])).tolist():
            identity, order, micro, call, step, exponent, count = row
            found.setdefault((identity, step, self.rank, order, micro, call), {})[exponent] = count
        return found

    # -- arrays

    @cached_property
    def arrays(self) -> list[tuple[Description, ArraysFile]]:
        """Every arrays file that passes its checks, in the order of the index; files not in it come last."""
        indexed: dict[str, Description | None] = {}
        for number, record in self._lines("arrays.jsonl").records:
            where = f"{self.directory}/arrays.jsonl line {number:,}"
            try:
                description = parse_description(record, where)
                name = description.file or ""
                if "/" in name or not name.endswith(".h5"):
                    raise EvidenceError(f"file name {name!r:.60} is refused", where)
                indexed[name] = description
            except EvidenceError as error:
                self._damage.add(f"{where} type", Damage(what=error.what, where=where, lost="the line"))
        for name in self._list("arrays", ".h5"):
            indexed.setdefault(name, None)  # the writer died before the index line, or the line is damaged
        return [checked for name, description in indexed.items() if (checked := self._checked(name, description))]

    def _checked(self, name: str, description: Description | None) -> tuple[Description, ArraysFile] | None:
        relative = f"{self.directory}/arrays/{name}"
        file = ArraysFile(self._root, relative, description)
        try:
            return file.check(), file
        except EvidenceError as error:
            lost = ", ".join(description.arrays) if description else "its arrays"
            self._damage.add(
                relative, Damage(what=error.what, where=relative, lost=lost or description_kind(description))
            )
            return None

    def load(self, file: ArraysFile, key: str) -> Array | None:
        """The stored bits of an array, or None, and damage, where it cannot be read."""
        try:
            return file.read(key)
        except EvidenceError as error:
            self._damage.add(f"{file.relative} {key}", Damage(what=error.what, where=file.relative, lost=key))
            return None

    # -- records

    def _list(self, directory: str, suffix: str) -> list[str]:
        path = self._root / self.directory / directory
        try:
            if path.is_symlink():
                raise OSError("is a symbolic link; refused")
            return sorted(each for each in os.listdir(path) if each.endswith(suffix) and not each.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            where = f"{self.directory}/{directory}"
            self._damage.report(where, [Damage(what=error.strerror or str(error), where=where, lost="the directory")])
            return []

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams that have a file."""
        return tuple(name.removesuffix(".jsonl") for name in self._list("records", ".jsonl"))

    def records(self, stream: str) -> list[dict[str, Any]]:
        """Records of one stream in file order, ``rank`` set; a field of a wrong type is left out and reported."""
        if stream not in self._records:
            self._records[stream] = self._read_records(stream) if stream in self.streams else []
        return self._records[stream]

    def _read_records(self, stream: str) -> list[dict[str, Any]]:
        kind = stream_type(stream)
        relative = f"{self.directory}/records/{stream}.jsonl"
        faults: list[Damage] = []
        records: list[dict[str, Any]] = []
        for number, record in self._lines(f"records/{stream}.jsonl").records:
            _, sentences = salvage(record, kind)
            faults += [Damage(what=each, where=f"{relative} line {number:,}", lost="the field") for each in sentences]
            record.setdefault("rank", self.rank)
            records.append(record)
        self._damage.report(f"{relative} types", faults)
        return records

    # -- state

    @cached_property
    def state(self) -> RankState | None:
        """``rank.json``, or None where there is none or it cannot be read."""
        relative = f"{self.directory}/rank.json"
        try:
            raw = decode_object(read_inside(self._root, relative, MAX_MANIFEST_BYTES), relative)
        except FileNotFoundError:
            return None
        except EvidenceError as error:
            self._damage.report(relative, [Damage(what=error.what, where=relative, lost="heartbeat and trigger")])
            return None
        state, sentences = salvage(raw, RankState)
        self._damage.report(relative, [Damage(what=each, where=relative, lost="the field") for each in sentences])
        return state


def description_kind(description: Description | None) -> str:
    """Word for the evidence of a file without arrays."""
    return description.kind if description else "its arrays"


def parse_name(record: dict[str, Any]) -> tuple[Name, dict[str, Any]]:
    """One line of ``names.jsonl``.

    Raises:
        EvidenceError: a field is missing or has a wrong type.
    """
    import msgspec

    try:
        return msgspec.convert(record, Name), record
    except msgspec.ValidationError as error:
        raise EvidenceError(f"no usable name: {error}") from None
