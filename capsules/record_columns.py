"""Records of one stream seen as columns: for who looks at half a million of them, a dictionary each costs too much."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, repeat
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Record = dict[str, Any]

#: Below it the number of a combination is exact.
_EXACT = 1 << 62
#: So many numbers a record may combinations have, used or not, that fit a table.
_FEW = 16


class Column(NamedTuple):
    """One field of some records. A value of None stands for no such field.

    Attributes:
        values: one value a record, or the different values where there is ``at``.
        at: int64, for each record the place of its value.
    """

    values: list[Any]
    at: Ints | None = None

    @property
    def places(self) -> Ints:
        """int64[N]: for each record the place of its value."""
        return np.arange(len(self.values)) if self.at is None else self.at

    @property
    def listed(self) -> list[Any]:
        """One value a record."""
        return self.values if self.at is None else [self.values[each] for each in self.at.tolist()]

    @property
    def present(self) -> bool:
        """Whether any record has the field."""
        if self.at is None or None not in self.values:
            return any(each is not None for each in self.values) and (self.at is None or len(self.at) > 0)
        return any(self.values[each] is not None for each in np.unique(self.at).tolist())

    def filled(self, value: Any) -> Column:
        """The column with ``value`` for the records that do not have the field."""
        return Column([value if each is None else each for each in self.values], self.at)


class Chunk(Protocol):
    """Records that lie together."""

    def __len__(self) -> int: ...

    def column(self, name: str) -> Column | None:
        """The values of a field; None where no record has it."""
        ...

    def record(self, place: int) -> Record:
        """One record as a dictionary."""
        ...

    def records(self) -> list[Record]:
        """All records as dictionaries; they share their values."""
        ...

    def with_default(self, name: str, value: Any) -> Chunk:
        """The same records, of which those without a field have ``value`` in it."""
        ...


class Rows:
    """Records that are dictionaries already."""

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def column(self, name: str) -> Column | None:
        """One value a record; see ``Chunk``."""
        values = [each.get(name) for each in self._records]
        return Column(values) if any(each is not None for each in values) else None

    def with_default(self, name: str, value: Any) -> Rows:
        """See ``Chunk``; it is the dictionaries that get the value."""
        for record in self._records:
            record.setdefault(name, value)
        return self

    def record(self, place: int) -> Record:
        """See ``Chunk``."""
        return self._records[place]

    def records(self) -> list[Record]:
        """See ``Chunk``."""
        return self._records


class Packed:
    """Records that were written column by column."""

    def __init__(self, count: int, columns: dict[str, Column]) -> None:
        self._count = count
        self._columns = columns

    def __len__(self) -> int:
        return self._count

    def column(self, name: str) -> Column | None:
        """See ``Chunk``."""
        return self._columns.get(name)

    def with_default(self, name: str, value: Any) -> Packed:
        """See ``Chunk``."""
        column = self._columns.get(name)
        filled = Column([value], np.zeros(self._count, np.int64)) if column is None else column.filled(value)
        return Packed(self._count, {**self._columns, name: filled})

    def record(self, place: int) -> Record:
        """See ``Chunk``."""
        found = {
            name: column.values[place if column.at is None else int(column.at[place])]
            for name, column in self._columns.items()
        }
        return {name: value for name, value in found.items() if value is not None}

    def records(self) -> list[Record]:
        """See ``Chunk``."""
        whole: dict[str, Any] = {}
        partial: dict[str, list[Any]] = {}
        for name, column in self._columns.items():
            if None in column.values:
                partial[name] = column.listed
            else:
                one = column.at is not None and len(column.values) == 1
                whole[name] = repeat(column.values[0], self._count) if one else column.listed
        names = tuple(whole)
        records: list[Record] = [dict(zip(names, row, strict=True)) for row in zip(*whole.values(), strict=True)]
        if not whole:
            records = [{} for _ in range(self._count)]
        for name, values in partial.items():
            for record, value in zip(records, values, strict=True):
                if value is not None:
                    record[name] = value
        return records


class RecordColumns:
    """The records of a stream, chunk by chunk; ``columns[n]`` is the n-th as a dictionary."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = [each for each in chunks if len(each)]
        self._ends = list(accumulate(map(len, self._chunks)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> Record:
        if not 0 <= number < len(self):
            raise IndexError(number)
        at = bisect_right(self._ends, number)
        return self._chunks[at].record(number - (self._ends[at - 1] if at else 0))

    def has(self, name: str) -> bool:
        """Whether any record has a field."""
        columns = (each.column(name) for each in self._chunks)
        return any(each is not None and each.present for each in columns)

    def floats(self, name: str) -> Floats:
        """float64[N]: a field of numbers, NaN where it is absent."""

        def numbers(column: Column) -> Floats:
            values = np.array(column.values, np.float64)  # None becomes NaN
            return values if column.at is None else values[column.at]

        return self._joined(name, numbers, np.nan, np.float64)

    def integers(self, name: str, absent: int = -1) -> Ints:
        """int64[N]: a field of integers, ``absent`` where it is absent."""

        def numbers(column: Column) -> Ints:
            values = np.array(column.filled(absent).values if None in column.values else column.values, np.int64)
            return values if column.at is None else values[column.at]

        return self._joined(name, numbers, absent, np.int64)

    def _joined(self, name: str, numbers: Any, absent: float, dtype: Any) -> Any:
        parts: list[Any] = [np.empty(0, dtype)]
        for chunk in self._chunks:
            column = chunk.column(name)
            parts.append(np.full(len(chunk), absent, dtype) if column is None else numbers(column))
        return np.concatenate(parts)

    def combinations(self, *names: str) -> tuple[list[tuple[Any, ...]], Ints]:
        """What the records have in some fields.

        Returns:
            The different combinations, in the order in which they come up, None where a field is absent; one may be
            there several times. And int64[N]: for each record the place of its combination.
        """
        found: list[tuple[Any, ...]] = []
        places: list[Ints] = [np.empty(0, np.int64)]
        for chunk in self._chunks:
            own, at = _combinations([chunk.column(each) for each in names], len(chunk))
            places.append(at + len(found))
            found += own
        return found, np.concatenate(places)


def _combinations(columns: list[Column | None], count: int) -> tuple[list[tuple[Any, ...]], Ints]:
    code, size = np.zeros(count, np.int64), 1
    for column in columns:
        if column is None or (column.at is not None and len(column.values) == 1):
            continue
        if size * len(column.values) >= _EXACT:
            _, code = np.unique(code, return_inverse=True)
            size = count
        code = code * len(column.values) + column.places
        size *= len(column.values)
    first, places = _in_order(code, size)
    rows = cast("list[int]", first.tolist())
    values = [
        [None] * len(rows)
        if column is None
        else [column.values[row if column.at is None else int(column.at[row])] for row in rows]
        for column in columns
    ]
    return list(zip(*values, strict=True)), places


def _in_order(code: Ints, size: int) -> tuple[Ints, Ints]:
    """Where each different number below ``size`` first stands, ascending; and for each number which of these it is."""
    if size <= _FEW * len(code):  # a table of all numbers is quicker than sorting
        first = np.full(size, len(code))
        first[code[::-1]] = np.arange(len(code))[::-1]  # of several the last that is assigned stays
        used, inverse = np.flatnonzero(first < len(code)), code
        place = np.empty(size, np.int64)
    else:
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        used = np.arange(len(first))
        place = np.empty(len(first), np.int64)
    used = used[np.argsort(first[used])]
    place[used] = np.arange(len(used))
    return first[used], place[inverse]
