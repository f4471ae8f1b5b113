"""Ranks that wait for each other in a circle, and which of them take the odd order: decided by vote of all ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from . import thresholds as T
from .alignment import sisters
from .collectives import Calls
from .programs import Reversal
from .waiting import Wait, Waiting


@dataclass(frozen=True)
class Circle:
    """Ranks that wait for each other: the first call that blocks each, as classes of ranks in one call.

    ``deviating`` enter the calls in another order than most; empty where nothing decides.
    """

    ranks: tuple[int, ...]
    classes: tuple[tuple[Wait, tuple[int, ...]], ...]
    deviating: tuple[int, ...]
    votes: int


def in_circles(known: Calls, state: Waiting) -> list[Circle]:
    """Ranks that wait for each other and for nobody else, with the call that holds each."""
    found: list[Circle] = []
    for ranks in state.circles:
        blocked: dict[Wait, list[int]] = defaultdict(list)
        for rank in ranks:
            wait = _first_blocked(known, state, rank)
            if wait is not None:
                blocked[wait].append(rank)
        classes = sorted(_alike(known, blocked).items(), key=lambda each: (-len(each[1]), each[1]))
        if classes:
            deviating, votes = _deviating(known, classes)
            found.append(Circle(ranks, tuple((wait, tuple(own)) for wait, own in classes), deviating, votes))
    return found


def in_reverse(known: Calls, reversed_: list[Reversal]) -> list[Circle]:
    """Calls in flight that ranks entered in opposite orders: nobody is missing, and none can end."""
    found: list[Circle] = []
    seen: set[int] = set()
    for each in reversed_:
        ranks = (*each.first, *each.second)
        if seen & set(ranks):
            continue
        seen |= set(ranks)
        classes = [
            (_held(known, each.one, each.first), [*each.first]),
            (_held(known, each.other, each.second), [*each.second]),
        ]
        deviating, votes = _deviating(known, classes)
        classes.sort(key=lambda each: (-len(each[1]), each[1]))
        found.append(Circle(ranks, tuple((wait, tuple(own)) for wait, own in classes), deviating, votes))
    return found


def _held(known: Calls, row: int, ranks: tuple[int, ...]) -> Wait:
    return Wait(int(known.table.group[row]), int(known.table.seq[row]), ranks, (), (), row)


def _alike(known: Calls, blocked: dict[Wait, list[int]]) -> dict[Wait, list[int]]:
    """Calls of one number in groups of one purpose are one class."""
    found: dict[tuple[object, int], tuple[Wait, list[int]]] = {}
    for wait, ranks in blocked.items():
        description = known.groups[wait.group].description
        key = (wait if wait.direct else description or wait.group, wait.seq)
        found.setdefault(key, (wait, []))[1].extend(ranks)
    return {wait: sorted(ranks) for wait, ranks in found.values()}


def _first_blocked(known: Calls, state: Waiting, rank: int) -> Wait | None:
    """The first call, in the rank's own order, in which it waits for somebody."""
    mine = [each for each in state.waits if rank in each.waiting]

    def order(wait: Wait) -> tuple[int, int]:
        if wait.direct:
            return int(known.direct.order[wait.row]), 0
        row = known.at(wait.group, rank, wait.seq)
        return (int(known.table.order[row]) if row is not None else 1 << 62), wait.seq

    return min(mine, key=order, default=None)


def _deviating(known: Calls, classes: list[tuple[Wait, list[int]]]) -> tuple[tuple[int, ...], int]:
    """Who enters two groups in the odd order, by vote of all ranks that made both calls or their sisters."""
    if len(classes) != 2 or any(wait.direct for wait, _ in classes):
        return (), 0
    (_, ranks_one), (other, ranks_other) = classes
    votes: Counter[bool] = Counter()
    own = next(
        (rank for rank in (*ranks_one, *ranks_other) if all(_homes(known, rank, each) for each, _ in classes)), 0
    )
    usual = _made_before(known, own, [_homes(known, own, wait) for wait, _ in classes], other)
    for rank in sorted(known.spoke):
        homes = [_homes(known, rank, wait) for wait, _ in classes]
        if not all(homes):
            continue
        before = _made_before(known, rank, homes, other)
        if None not in (before, usual) and before != usual:
            continue  # a stage with more layers, say: the numbers of its groups do not compare
        first, second = (_place(known, rank, wait, own) for (wait, _), own in zip(classes, homes, strict=True))
        if first != second:
            votes[first < second] += 1
    total = sum(votes.values())
    if total < T.DECIDING_RANKS or votes[True] == votes[False]:
        return (), total
    return tuple(ranks_other if votes[True] > votes[False] else ranks_one), total


def _made_before(known: Calls, rank: int, homes: list[list[int]], wait: Wait) -> int | None:
    """How far a rank was in the groups of one call when it made the call before the other one, ``wait``."""
    rows = [row for index in homes[1] if (row := known.at(index, rank, wait.seq - 1)) is not None]
    mine = np.isin(known.table.group, homes[0]) & (known.table.rank == rank)
    earlier = mine & (known.table.order < known.table.order[rows[0]]) if rows else mine[:0]
    return int(known.table.seq[np.flatnonzero(earlier)].max(initial=0)) if rows else None


def _homes(known: Calls, rank: int, wait: Wait) -> list[int]:
    """The group of a call and its sisters, of which a rank is a member."""
    own = known.groups[wait.group]
    return [
        index
        for index, group in enumerate(known.groups)
        if rank in group.ranks and (index == wait.group or (bool(own.description) and sisters(own, group)))
    ]


def _place(known: Calls, rank: int, wait: Wait, homes: list[int]) -> float:
    """Where in its own order a rank made the call of that number; infinity where it has not."""
    rows = [row for index in homes if (row := known.at(index, rank, wait.seq)) is not None]
    return min((float(known.table.order[row]) for row in rows), default=np.inf)
