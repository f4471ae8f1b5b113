"""Many records of one stream in one line, column by column: what a job of a thousand ranks has to say in one go.

A line ``{"count": 3, "columns": {"seq": [7, 8, 9], "peer": {"distinct": [1, 3], "at": [1, 0, null]}}}`` stands for
three records. A column is a list with one value a record, or the distinct values and where each record has which: the
first everywhere where ``at`` is left out. ``null`` means that the record has no such field. Records share the distinct
values, so that a stack of twenty frames is held once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, NamedTuple, cast

import msgspec
import numpy as np

from .errors import EvidenceError
from .limits import MAX_COLUMN_RECORDS
from .lines import encode_line
from .record_columns import Chunk, Column, Packed, Rows
from .typed import all_floats, floats, salvage


class Distinct(NamedTuple):
    """A column of few different values: ``values[at[n]]`` belongs to record n; None where it has no such field.

    Attributes:
        values: the different values.
        at: one index a record; None where all have the first value.
    """

    values: Sequence[Any]
    at: Sequence[int | None] | None = None


Columns = Mapping[str, Sequence[Any] | Distinct]


def encode_columns(count: int, columns: Columns, kind: type[Any], where: str) -> Iterator[bytes]:
    """Lines that stand for ``count`` records, each of a bounded length.

    Args:
        count: number of records.
        columns: values by the name of the field.
        kind: type of the stream's records, against which the values are checked.
        where: what the error names as the place.

    Raises:
        EvidenceError: a column has another length, or a value of a wrong type.
    """
    for name, column in columns.items():
        values, at = column if isinstance(column, Distinct) else (column, None)
        length = len(values) if not isinstance(column, Distinct) else count if at is None else len(at)
        if length != count:
            raise EvidenceError(f"column {name} has {length:,} values for {count:,} records", where)
        if fault := _fault(values, name, kind):
            raise EvidenceError(f"column {name}: {fault}", where)
    yield from _pieces(0, count, columns, kind) if count else ()


def _pieces(start: int, stop: int, columns: Columns, kind: type[Any]) -> Iterator[bytes]:
    """The records from ``start`` to ``stop`` in as few lines as the limits allow."""
    if stop - start <= MAX_COLUMN_RECORDS:
        written = {name: _written(column, start, stop) for name, column in columns.items()}
        try:
            yield encode_line({"count": stop - start, "columns": written}, nulls=_nulls(written, kind))
            return
        except EvidenceError:
            if stop - start == 1:
                raise
    middle = (start + stop) // 2
    yield from _pieces(start, middle, columns, kind)
    yield from _pieces(middle, stop, columns, kind)


def _nulls(written: Mapping[str, Any], kind: type[Any]) -> int | None:
    """How often ``null`` stands in the columns; None where that is not known at a glance."""
    count = 0
    for name, column in written.items():
        if _column_type(kind, name) is None:
            return None  # anything may be in it
        count += sum(each.count(None) for each in column.values()) if isinstance(column, dict) else column.count(None)
    return count


def _written(column: Sequence[Any] | Distinct, start: int, stop: int) -> Any:
    if not isinstance(column, Distinct):
        return list(column[start:stop])
    if column.at is None:
        return {"distinct": list(column.values[:1])}
    at = column.at[start:stop]
    if len(at) == len(column.at) and len(column.values) <= len(at):
        return {"distinct": list(column.values), "at": list(at)}
    used = {old: new for new, old in enumerate(dict.fromkeys(each for each in at if each is not None))}
    return {
        "distinct": [column.values[each] for each in used],
        "at": [None if each is None else used[each] for each in at],
    }


def decode_columns(line: Mapping[str, Any], kind: type[Any], spelled: bool) -> tuple[Chunk, list[str]]:
    """The records of a line; they share their values.

    Args:
        line: the decoded line.
        kind: type of the stream's records.
        spelled: whether the line may hold non-finite numbers as strings.

    Returns:
        The records, and one sentence for each field of a record that was left out.

    Raises:
        EvidenceError: the line is no such line.
    """
    count, given = line.get("count"), line.get("columns")
    if type(count) is not int or not 0 <= count <= MAX_COLUMN_RECORDS or not isinstance(given, dict):
        raise EvidenceError("stands for no records: it has no count, or no columns")
    columns: dict[str, Column] = {}
    sound = True
    for name, column in cast("dict[str, Any]", given).items():
        values = column.get("distinct") if isinstance(column, dict) else column
        if not isinstance(values, list):
            raise EvidenceError(f"column {name[:60]!r} is no list")
        if spelled:
            expected = _column_type(kind, name)
            values = all_floats(values) if expected is None else floats(values, expected)
        sound = sound and not _fault(cast("list[Any]", values), name, kind)
        columns[name] = _column(cast("Any", column), cast("list[Any]", values), count, name)
    chunk = Packed(count, columns)
    if sound:
        return chunk, []
    records = chunk.records()  # one record at a time says which value is wrong
    return Rows(records), [sentence for record in records for sentence in salvage(record, kind, spelled=False)[1]]


def _column(column: Any, values: list[Any], count: int, name: str) -> Column:
    if isinstance(column, list):
        if len(values) != count:
            raise EvidenceError(f"column {name[:60]!r} has {len(values):,} values for {count:,} records")
        return Column(values)
    at = column.get("at")
    if at is None:
        return Column(values[:1] or [None], np.zeros(count, np.int64))
    if not isinstance(at, list) or len(cast("list[Any]", at)) != count:
        raise EvidenceError(f"column {name[:60]!r} does not say which value each record has")
    try:
        places = msgspec.convert(at, list[Annotated[int, msgspec.Meta(ge=0)] | None])
        if None in places:
            places = [len(values) if each is None else each for each in places]
            values = [*values, None]
        if count and max(cast("list[int]", places)) >= len(values):
            raise IndexError
    except (msgspec.ValidationError, IndexError):
        raise EvidenceError(f"column {name[:60]!r} points beside its values") from None
    return Column(values, np.array(places, np.int64))


@cache
def _column_type(kind: type[Any], name: str) -> Any:
    """The type of a list of values of a field; None where the format does not know the field."""
    for field in msgspec.structs.fields(kind):
        if field.encode_name == name:
            return list[field.type]
    return None


def _fault(values: Sequence[Any], name: str, kind: type[Any]) -> str:
    """What is wrong with a value of a column, or nothing."""
    expected = _column_type(kind, name)
    if expected is None:
        return ""
    try:
        msgspec.convert(values, expected)
    except (msgspec.ValidationError, RecursionError, UnicodeEncodeError) as error:
        return str(error)
    return ""
