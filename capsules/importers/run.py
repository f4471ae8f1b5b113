"""What an importer writes to: a thin front of ``CapsuleWriter`` that buffers, and knows which file it is reading."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from ..columns import Columns
from ..errors import EvidenceError
from ..limits import MAX_INT64
from ..writer import CapsuleWriter

#: Rows kept in memory before they are written, of all series together.
_BUFFERED = 1 << 16
#: Series of one capsule; a file of random keys would make a million.
MOST_SERIES = 20_000
#: Ranks that get a directory of their own.
MOST_RANKS = 4096
#: Events of one kind that are kept; the rest is counted.
MOST_EVENTS = 100_000
_MOST_NOTES = 100
_MOST_MARKS = 100
#: Where points go whose series is one too many.
_REST = "(other series)"
_NAN = float("nan")


class _Column:
    """The rows of one series that are not written yet."""

    __slots__ = ("name", "rank", "side", "steps", "times", "unit", "values")

    def __init__(self, name: str, rank: int, unit: str, side: str | None) -> None:
        self.name, self.rank, self.unit, self.side = name, rank, unit, side
        self.steps, self.values, self.times = array("q"), array("d"), array("d")


class Run:
    """The evidence of one job while it is imported.

    Where two formats bring the same series (a trainer state and the event file beside it), the first keeps the name,
    and the series of the other carries the file's name as its ``side``: every point is kept, and none counts twice.

    Attributes:
        rank: the rank of what is written next, unless a call names one.
        points: rows of series written so far.
        records: records written so far.
        format: what a person would call the file that is read, more exactly than the importer's name; may be empty.
        several: whether more than one rank has evidence so far.
        told: whether where the file lies says surely which rank of the job wrote it.
        past: whether it is of an attempt that another one followed; its events of how the job ended say so.
        raised: the ranks of which an exception of the last attempt is on record.
    """

    several: bool = False
    told: bool = False
    past: bool = False

    def __init__(self, writer: CapsuleWriter) -> None:
        self.rank = 0
        self.raised: set[int] = set()
        self.points = 0
        self.records = 0
        self.format = ""
        self.notes: dict[str, int] = {}
        self.stated: dict[str, Any] = {}
        self._writer = writer
        self._asked: dict[tuple[str, int, str | None], _Column] = {}  # by what the importer says
        self._columns: dict[tuple[str, int, str | None], _Column] = {}  # by what is written
        self._buffered = 0
        self._waiting: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
        self._held = 0
        self._owners: dict[tuple[str, int], str] = {}
        self._part, self._side = "", ""
        self._kinds: dict[str, int] = {}
        self._ranks: set[int] = {0}
        self._last: dict[int, int] = {}
        self._marks = 0

    def begin(self, part: str, side: str, rank: int = 0, *, told: bool = False, past: bool = False) -> None:
        """Start with another file.

        Args:
            part: what the series of files that continue one another have in common: the format's name.
            side: what tells this file's series from those of other formats: its name.
            rank: the rank that wrote the file.
            told: whether that is surely its rank in the job.
            past: whether another attempt followed the one that the file is of.
        """
        self.flush()
        self._asked.clear()
        self._columns.clear()
        self._part, self._side = part, side
        self.format = ""
        self.rank = self._kept_rank(rank)
        self.told, self.past = told, past

    # -- evidence

    def scalar(
        self,
        name: str,
        step: int,
        value: float,
        time: float | None = None,
        unit: str = "",
        side: str | None = None,
        rank: int | None = None,
    ) -> None:
        """Append one point: step, value, Unix seconds where known. A step that is no count is dropped and noted."""
        place = self.rank if rank is None else rank
        column = self._asked.get((name, place, side)) or self._column(name, place, unit, side)
        try:
            column.values.append(value)
            column.steps.append(step)
        except (TypeError, OverflowError):
            del column.values[len(column.steps) :]
            self.note(f"points of {name} have a step or value that is no number; left out")
            return
        column.times.append(_NAN if time is None else time)
        self._buffered += 1
        if self._buffered >= _BUFFERED:
            self.flush()

    def scalars(
        self,
        name: str,
        steps: Any,
        values: Any,
        times: Any = None,
        unit: str = "",
        side: str | None = None,
        rank: int | None = None,
    ) -> None:
        """Append many points of one series, as sequences or arrays of one length.

        Raises:
            EvidenceError: the lengths differ, or something is no number.
        """
        try:
            step, value = np.asarray(steps, np.int64), np.asarray(values, np.float64)
            time = np.full(len(value), _NAN) if times is None else np.asarray(times, np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise EvidenceError(f"{error}", f"scalars.{name}") from None
        if not step.shape == value.shape == time.shape or step.ndim != 1:
            raise EvidenceError(f"{len(step)} steps for {len(value)} values", f"scalars.{name}")
        place = self.rank if rank is None else rank
        column = self._asked.get((name, place, side)) or self._column(name, place, unit, side)
        column.steps.frombytes(step.tobytes())
        column.values.frombytes(value.tobytes())
        column.times.frombytes(time.tobytes())
        self._buffered += len(step)
        if self._buffered >= _BUFFERED:
            self.flush()

    def event(self, kind: str, step: int | None = None, rank: int | None = None, **fields: Any) -> None:
        """Append a record to ``events``; of one kind so many are kept, and the rest is counted."""
        seen = self._kinds[kind] = self._kinds.get(kind, 0) + 1
        if seen > MOST_EVENTS:
            self.note(f"more than {MOST_EVENTS:,} events of kind {kind}; the first are kept")
            return
        if self.past and "past" in fields:  # of those that can be past, all are
            fields["past"] = True
        elif kind == "exception":
            self.raised.add(self.rank if rank is None else rank)
        self.record("events", {"kind": kind, "step": step, **fields}, rank)

    def record(self, stream: str, record: Mapping[str, Any], rank: int | None = None) -> None:
        """Append one record to a stream; fields that are None are left out. A record that does not fit is noted."""
        place = (stream, self.rank if rank is None else self._kept_rank(rank))
        self._waiting.setdefault(place, []).append({name: each for name, each in record.items() if each is not None})
        self._held += 1
        if self._held >= 10_000:
            self._write_records()

    def tensor(self, name: str, array: Any, rank: int | None = None, **attributes: Any) -> None:
        """Write one array under ``group/name``, of step 0. One that cannot be stored is noted."""
        place = self.rank if rank is None else self._kept_rank(rank)
        try:
            self._writer.tensor(name, array, step=0, rank=place, **attributes)
            self.records += 1
        except EvidenceError as error:
            self.note(f"an array was left out ({error.what})")

    def columns(self, stream: str, length: int, columns: Columns, rank: int | None = None) -> None:
        """Append ``length`` records of a stream as columns (``CapsuleWriter.columns``); a faulty one is an error."""
        if length:
            self._writer.columns(stream, length, columns, self.rank if rank is None else self._kept_rank(rank))
            self.records += length

    def manifest(self, fields: Mapping[str, Any]) -> None:
        """Merge what the file states of the job into the manifest; what was stated first stays."""
        self.stated = _merged(self.stated, fields)

    def note(self, text: str, times: int = 1) -> None:
        """Say something about the file that a reader of the capsule should know; the same words are counted."""
        if text in self.notes or len(self.notes) < _MOST_NOTES:
            self.notes[text] = self.notes.get(text, 0) + times

    # -- writing

    def flush(self) -> None:
        """Write everything that is buffered."""
        for column in self._columns.values():
            if column.steps:
                self._write(column)
        self._buffered = 0
        self._write_records()

    def _write(self, column: _Column) -> None:
        steps, values, times = cast(
            "tuple[Any, Any, Any]", tuple(np.array(each) for each in (column.steps, column.values, column.times))
        )
        column.steps, column.values, column.times = array("q"), array("d"), array("d")
        kept = steps >= 0
        if not kept.all():
            self.note(f"points of {column.name} have a negative step; left out", int((~kept).sum()))
            steps, values, times = steps[kept], values[kept], times[kept]
        if not len(steps):
            return
        if column.name == "loss" and column.side is None:
            self._mark_returns(column, steps)
        self._writer.scalars(column.name, steps, values, times, column.rank, column.unit, column.side)
        self.points += len(steps)

    def _mark_returns(self, column: _Column, steps: Any) -> None:
        """Leave an event where the steps of the loss go back: the run was resumed, or started again."""
        before = np.concatenate([[self._last.get(column.rank, -1)], steps[:-1]])
        self._last[column.rank] = int(steps[-1])
        for at in np.flatnonzero(steps < before):
            self._marks += 1
            if self._marks > _MOST_MARKS:
                return
            message = f"the steps go back from {before[at]} to {steps[at]}: resumed or started again"
            self.event("log", step=int(steps[at]), rank=column.rank, message=message)

    def _write_records(self) -> None:
        waiting, self._waiting, self._held = self._waiting, {}, 0
        for (stream, rank), records in waiting.items():
            self.records += len(records)
            left = iter(records)
            while True:
                try:
                    self._writer.records(stream, left, rank)
                    break
                except EvidenceError as error:  # the writer took it from the iterator: go on with the next one
                    self.records -= 1
                    self.note(f"a record was left out ({error.what})")

    def _column(self, name: str, rank: int, unit: str, side: str | None) -> _Column:
        """The column of a series that is met for the first time in this file."""
        asked = (name, rank, side)
        name, rank = name[:200], self._kept_rank(rank)
        if (name, rank) not in self._owners and len(self._owners) >= MOST_SERIES:
            self.note(f"more than {MOST_SERIES:,} series; the points of the rest are under the name {_REST}")
            name = _REST
        owner = self._owners.setdefault((name, rank), self._part)
        if side is None and owner != self._part:
            side = self._side
        column = self._columns.setdefault((name, rank, side), _Column(name, rank, unit, side))
        if name != _REST:
            self._asked[asked] = column
        return column

    def _kept_rank(self, rank: int) -> int:
        if rank in self._ranks:
            return rank
        if not 0 <= rank <= MAX_INT64 or len(self._ranks) >= MOST_RANKS or rank >= 10**9:
            self.note("more ranks than are kept apart; the rest is under rank 0")
            return 0
        self._ranks.add(rank)
        self.several = True
        return rank


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings as one; where they differ, the first stays."""
    merged = dict(first)
    for name, value in second.items():
        if isinstance(value, Mapping) and isinstance(merged.get(name), Mapping):
            merged[name] = _merged(merged[name], value)
        elif value is not None:
            merged.setdefault(name, value)
    return merged
