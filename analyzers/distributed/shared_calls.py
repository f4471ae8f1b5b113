"""When the ranks of the largest group came to the calls that all of them made, and when they left these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from .collectives import Floats, Ints

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Seconds (or Unix seconds, milliseconds) beyond which a number is none.
LONGEST = 1e12


@dataclass(frozen=True)
class SharedCalls:
    """Calls of the group that made most calls together.

    Attributes:
        ranks: its members, ascending.
        created: float64[calls, ranks], Unix seconds, in the order of the calls.
        ended: the same, NaN where it is not known.
        spans: float64[N, 2] by rank: when it was inside a call of any group, ascending and apart.
    """

    ranks: list[int]
    created: Floats
    ended: Floats
    spans: dict[int, Floats]

    def __len__(self) -> int:
        return len(self.created)


_SHARED: WeakKeyDictionary[Capsule, SharedCalls] = WeakKeyDictionary()


def shared_calls(capsule: Capsule) -> SharedCalls:
    """The shared calls of a capsule, looked up once; none of no ranks where there are none."""
    if capsule not in _SHARED:
        _SHARED[capsule] = _looked_up(capsule)
    return _SHARED[capsule]


def _looked_up(capsule: Capsule) -> SharedCalls:
    columns = capsule.columns("collectives")
    seq, created, ended = columns.integers("seq"), columns.floats("t_created"), columns.floats("t_completed")
    ended = np.where((np.abs(ended) < LONGEST) & (ended >= created), ended, np.nan)
    numbers: dict[str, int] = {}
    named, places = columns.combinations("group", "p2p")
    group = np.array([numbers.setdefault(str(name or "0"), len(numbers)) for name, _ in named], np.int64)[places]
    direct = np.array([bool(each) for _, each in named], np.bool_)[places]
    rows = np.flatnonzero(~direct & (seq >= 0) & (np.abs(created) < LONGEST))
    rank = columns.integers("rank")
    rows = rows[np.lexsort((rows, rank[rows], seq[rows], group[rows]))]
    same_call = (group[rows[1:]] == group[rows[:-1]]) & (seq[rows[1:]] == seq[rows[:-1]])
    repeated = same_call & (rank[rows[1:]] == rank[rows[:-1]])
    first = np.flatnonzero(np.append(True, ~same_call)) if len(rows) else rows  # of each call
    began = np.minimum.reduceat(rows, first) if len(rows) else rows
    kept = np.append(~repeated, True)[: len(rows)]  # of a call that is on record twice the later one
    sizes = np.add.reduceat(kept.astype(np.int64), first) if len(rows) else rows
    rows = rows[kept]
    chosen = _largest(group[rows], rank[rows], group[rows[np.cumsum(sizes) - sizes]], sizes, began)
    if chosen is None:
        return SharedCalls([], np.empty((0, 0)), np.empty((0, 0)), {})
    members, calls = chosen
    own = rows[np.repeat(calls, sizes)]
    shape = (-1, len(members))
    spans = dict(_spans(rank[rows], created[rows], ended[rows], members))
    return SharedCalls(members.tolist(), created[own].reshape(shape), ended[own].reshape(shape), spans)


def _largest(group: Ints, rank: Ints, called: Ints, sizes: Ints, began: Ints) -> tuple[Ints, Ints] | None:
    """The members of the group that made most calls together, and bool[calls]: those calls.

    Args:
        group: of each row.
        rank: of each row.
        called: the group of each call.
        sizes: rows of each call.
        began: place of the first record of each call, by which one of two equal groups counts.
    """
    ranks, place = np.unique(rank, return_inverse=True)
    pairs = np.unique(group * len(ranks) + place)  # each rank of each group once
    members = np.bincount(pairs // max(1, len(ranks)), minlength=1)
    shared = (sizes == members[called]) & (sizes > 1)
    if not shared.any():
        return None
    groups, counts = np.unique(called[shared], return_counts=True)
    first = np.full(len(members), np.iinfo(np.int64).max)
    np.minimum.at(first, called[shared], began[shared])
    best = int(groups[np.lexsort((-first[groups], counts, members[groups]))[-1]])
    own = pairs[pairs // len(ranks) == best]
    return ranks[own % len(ranks)], shared & (called == best)


def _spans(rank: Ints, created: Floats, ended: Floats, members: Ints) -> Iterator[tuple[int, Floats]]:
    """The times inside calls, by rank; those that overlap made one."""
    known = np.flatnonzero(np.isfinite(ended))
    known = known[np.lexsort((created[known], rank[known]))]
    rank, created, ended = rank[known], created[known], ended[known]
    starts, stops = np.searchsorted(rank, members, "left"), np.searchsorted(rank, members, "right")
    for member, start, stop in zip(members.tolist(), starts.tolist(), stops.tolist(), strict=True):
        begin, reached = created[start:stop], np.maximum.accumulate(ended[start:stop])
        apart = np.flatnonzero(begin[1:] > reached[:-1])
        first, last = np.append(0, apart + 1)[: len(begin)], np.append(apart, len(begin) - 1)[: len(begin)]
        yield member, np.stack([begin[first], reached[last]], axis=1)


def within(spans: Floats, moments: Floats) -> Floats:
    """float64[M]: seconds that lie inside of spans up to each moment."""
    if not len(spans):
        return np.zeros(len(moments))
    lengths = spans[:, 1] - spans[:, 0]
    before = np.append(0.0, np.cumsum(lengths))
    at = np.searchsorted(spans[:, 0], moments, "right")
    last = np.maximum(at - 1, 0)
    return np.where(at > 0, before[last] + np.minimum(moments - spans[last, 0], lengths[last]), 0.0)
