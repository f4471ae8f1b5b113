"""All collectives of a capsule in columns: which call each rank made in which group, and how far each rank came.

Flight-recorder dumps, the recorder's own stream and what watchdogs print give one view. Sequence numbers count in a
group; a call of several coalesced parts is one row. Frames stay in the records and are read where they decide.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..call_sites import call_site
from .signatures import Agreement, Signature

if TYPE_CHECKING:
    from ...capsules.record_columns import RecordColumns

Record = dict[str, Any]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

UNKNOWN = -1
COMPLETED = 2
#: Ranks that a view spans at most: evidence may claim any number.
MOST_RANKS = 16_384


@dataclass(frozen=True)
class Group:
    """A process group: the job's name of it, what it is for, and its global ranks, ascending.

    ``whole`` is false where nothing states who belongs to it: these ranks are known, and there may be more.
    """

    name: str
    description: str
    ranks: tuple[int, ...]
    whole: bool = True

    def __str__(self) -> str:
        if self.description and self.description not in ("undefined", self.name):
            return f"{self.description} ({self.name})"
        return "the default group" if self.name == "0" else f"group {self.name}"


@dataclass(frozen=True)
class Table:
    """Calls in columns, all of one length. Times are Unix seconds, NaN where unknown; numbers -1 where unknown."""

    rank: Ints
    group: Ints
    seq: Ints
    order: Ints
    signature: Ints
    state: Ints
    created: Floats
    ended: Floats
    timeout: Floats
    peer: Ints
    record: Ints

    def __len__(self) -> int:
        return len(self.rank)

    def take(self, rows: NDArray[Any]) -> Table:
        """The rows of these numbers, or where this mask is true."""
        if rows.dtype == np.bool_ and rows.all():
            return self
        return Table(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    @property
    def pending(self) -> NDArray[np.bool_]:
        """bool[N]: the call has not ended."""
        return self.state < COMPLETED


@dataclass
class Reached:
    """The last sequence number that a rank enqueued and completed in a group; -1 where unknown."""

    enqueued: int = UNKNOWN
    completed: int = UNKNOWN


@dataclass(frozen=True)
class Calls:
    """Everything that is known of a job's collectives.

    ``table`` holds collectives, sorted by (group, rank, seq); ``direct`` sends and receives by (rank, order).
    ``agreed`` gives for each signature the number of what must be equal on all ranks. ``spoke`` are ranks of which
    there is evidence on collectives, ``dumped`` those that left a flight-recorder dump, ``status_of`` those that state
    how far they came; of ``broken`` ones entries are lost: they may have come further. ``written`` is when a rank's
    dump was written, Unix seconds, or later: a copy is younger.
    In ``mixed`` groups there are sends, which have numbers of their own. The number in ``table.record`` is that of a
    record in ``columns``, or, beyond these, of a watchdog's event in ``words``. ``past`` are time-outs of earlier
    attempts of the job, after which training went on.
    """

    columns: RecordColumns = field(repr=False)
    words: tuple[Record, ...] = field(repr=False)
    groups: tuple[Group, ...] = field(repr=False)
    table: Table
    direct: Table
    signatures: tuple[Signature, ...]
    agreements: tuple[Agreement, ...]
    agreed: Ints
    reached: Mapping[tuple[int, int], Reached]
    spoke: frozenset[int]
    dumped: frozenset[int]
    status_of: frozenset[int]
    broken: frozenset[int]
    world: int
    mixed: frozenset[int] = frozenset()
    written: Mapping[int, float] = field(default_factory=dict[int, float])
    timeouts: tuple[Record, ...] = ()
    past: tuple[Record, ...] = ()
    mismatches: tuple[Record, ...] = ()
    _sites: dict[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])

    def without(self, ranks: frozenset[int]) -> Calls:
        """The calls as if these ranks had left nothing of this moment: they wait for nobody, and are silent.

        What they called before stays in ``table``, as calls that ended, so that it can be compared.
        """
        gone = np.array(sorted(ranks), np.int64)
        state = np.where(np.isin(self.table.rank, gone), COMPLETED, self.table.state)
        return replace(
            self,
            table=replace(self.table, state=state),
            direct=self.direct.take(~np.isin(self.direct.rank, gone)),
            reached={key: each for key, each in self.reached.items() if key[1] not in ranks},
            spoke=self.spoke - ranks,
            dumped=self.dumped - ranks,
            status_of=self.status_of - ranks,
            written={rank: moment for rank, moment in self.written.items() if rank not in ranks},
        )

    def record(self, number: int) -> Record:
        """What a row was made of, by the number in its column ``record``."""
        known = len(self.columns)
        return self.columns[number] if number < known else self.words[number - known]

    def site(self, row: int, table: Table | None = None) -> tuple[str, ...]:
        """Call site of a row, innermost first: up to 8 frames that are not the library's, as ``file:line in name``."""
        number = int((table or self.table).record[row])
        if number not in self._sites:
            self._sites[number] = call_site(self.record(number)) if number >= 0 else ()
        return self._sites[number]

    def frame(self, row: int, table: Table | None = None) -> str | None:
        """The innermost line of the job that made the call, None where no frames were recorded."""
        return next(iter(self.site(row, table)), None)

    def call(self, row: int) -> Signature:
        """What was called in a row of the table."""
        return self.signatures[int(self.table.signature[row])]

    def at(self, group: int, rank: int, seq: int) -> int | None:
        """The row of a call, None where it is not on record."""
        starts, numbers = self._index
        first, last = starts.get((group, rank), (0, 0))
        found = bisect_left(numbers, seq, first, last)
        return found if found < last and numbers[found] == seq else None

    def of_rank(self, rank: int) -> list[tuple[int, int, int]]:
        """The groups in which a rank made calls, each with the first of its rows and the one after the last."""
        return self._by_rank.get(rank, [])

    @cached_property
    def _by_rank(self) -> dict[int, list[tuple[int, int, int]]]:
        found: dict[int, list[tuple[int, int, int]]] = {}
        for (group, rank), (start, end) in self._index[0].items():
            found.setdefault(rank, []).append((group, start, end))
        return found

    @cached_property
    def _index(self) -> tuple[dict[tuple[int, int], tuple[int, int]], list[int]]:
        """Where the calls of each rank in each group stand, and the number of each call.

        Rules ask for a million places in a job of a thousand ranks, which numpy answers one by one too slowly.
        """
        group, rank = self.table.group, self.table.rank
        new = np.flatnonzero((np.diff(group, prepend=-1) != 0) | (np.diff(rank, prepend=-1) != 0))
        ends = [*new[1:].tolist(), len(group)]
        keys = zip(group[new].tolist(), rank[new].tolist(), strict=True)
        return dict(zip(keys, zip(new.tolist(), ends, strict=True), strict=False)), self.table.seq.tolist()
