"""The calls of each rank over all its groups, in its own order: where one rank's program leaves that of its peers.

Ranks of one role run one program, so the n-th call of each is the same one, in sister groups. That decides what a group
of two cannot, and tells a call too many from one too few and from two that were exchanged between groups. Roles differ
lawfully (stages of a pipeline), so this accuses nobody alone: it is asked where calls are known to be in conflict.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from . import thresholds as T
from .alignment import ABSENT, Grid, Parting, first_difference, parting, sisters
from .collectives import Calls


def departures(calls: Calls) -> dict[int, Parting]:
    """Ranks whose program leaves that of their peers, each with its first departure.

    Peers are at least three ranks that made the same calls before; a call in a group of the departing ranks alone is
    none.
    """
    cells = _programs(calls)
    if cells is None:
        return {}
    found: dict[int, Parting] = {}
    pending = [np.arange(len(cells.ranks))]
    for _ in range(T.ROLES):
        if not pending:
            break
        peers = pending.pop()
        if len(peers) < T.DECIDING_RANKS:
            continue
        agreed = np.full_like(cells.agreed, ABSENT)
        agreed[peers] = cells.agreed[peers]
        column = first_difference(agreed)
        if column is None:
            continue
        present = peers[agreed[peers, column] != ABSENT]
        later = np.setdiff1d(peers, present)
        votes = Counter(agreed[present, column].tolist()).most_common()
        (most, count), *rest = votes
        history = bool((agreed[present, :column] != ABSENT).any(axis=1).all())
        few = T.FEW * (len(present) - count) <= count
        if history and few and len(present) >= T.DECIDING_RANKS:
            common = present[agreed[present, column] == most]
            for value, _ in rest:
                indices = present[agreed[present, column] == value].tolist()
                made = parting(calls, cells, column, indices, common.tolist(), "programs")
                made = _in_group(calls, cells, made, column, indices[0])
                if _concerns_peers(calls, made):
                    found |= dict.fromkeys(made.ranks, made)
            pending.append(np.union1d(common, later))
        else:  # roles of their own
            pending.extend(present[agreed[present, column] == value] for value, _ in votes)
    return found


def _programs(calls: Calls) -> Grid | None:
    """Calls of all ranks by their place in the rank's order; an element is a group's purpose and what is called."""
    table = calls.table
    known = np.flatnonzero(table.order >= 0)
    if not len(known):
        return None
    purposes: dict[str, int] = {}
    purpose = [purposes.setdefault(each.description or each.name, len(purposes)) for each in calls.groups]
    elements = (
        np.array(purpose, np.int64)[table.group[known]] * len(calls.agreements) + calls.agreed[table.signature[known]]
    )
    ranks, at_rank = np.unique(table.rank[known], return_inverse=True)
    orders, at_order = np.unique(table.order[known], return_inverse=True)
    if len(ranks) * len(orders) > T.MOST_CELLS:
        return None
    agreed = np.full((len(ranks), len(orders)), ABSENT, np.int64)
    row = np.full_like(agreed, ABSENT)
    agreed[at_rank, at_order] = elements
    row[at_rank, at_order] = known
    return Grid(ABSENT, ranks, orders, agreed, row)


def _in_group(calls: Calls, cells: Grid, made: Parting, column: int, index: int) -> Parting:
    """A departure in the words of the group in which the call is missing, too many or another."""
    row = made.common if made.edit == "skipped" else made.theirs
    own = calls.groups[int(calls.table.group[row])]
    homes = (
        number
        for number, group in enumerate(calls.groups)
        if made.ranks[0] in group.ranks and (group is own or (own.description and sisters(own, group)))
    )
    # How many calls of the rank are on record from there on: one alone fits a skipped call and an exchanged one.
    after = int((cells.agreed[index, column:] != ABSENT).sum())
    return replace(
        made,
        group=next(homes, int(calls.table.group[row])),
        seq=int(calls.table.seq[row]),
        run=min(made.run, after - 1) if made.edit == "skipped" else made.run,
    )


def _concerns_peers(calls: Calls, made: Parting) -> bool:
    """Whether the call is one that the peers should have made, too: its group is not made of departing ranks alone."""
    if made.edit == "added":
        return not set(calls.groups[made.group].ranks) <= set(made.ranks)
    return True


@dataclass(frozen=True)
class Reversal:
    """Two calls, rows of the table, that ranks entered in opposite orders: ``first`` the one, ``second`` the other."""

    one: int
    other: int
    first: tuple[int, ...]
    second: tuple[int, ...]


def reversals(calls: Calls) -> list[Reversal]:
    """Calls in flight that ranks entered in opposite orders, so that none of them can end.

    A rank that is in the later call and has not entered the earlier one went past it.
    """
    table = calls.table
    in_flight = table.pending
    pending = np.flatnonzero(in_flight & (table.order >= 0))
    follows: dict[tuple[int, int, int, int], list[int]] = {}
    rows = pending[np.lexsort((table.order[pending], table.rank[pending]))]
    for row, after in zip(rows[:-1].tolist(), rows[1:].tolist(), strict=True):
        if table.rank[row] == table.rank[after] and table.group[row] != table.group[after]:
            key = (*_key(calls, row), *_key(calls, after))
            follows.setdefault(key, []).extend((row, after))
    found: list[Reversal] = []
    for (group, seq, then, number), (row, after, *_) in follows.items():
        second: list[int] = []
        first: list[int] = []
        for rank in sorted(set(calls.groups[group].ranks) & set(calls.groups[then].ranks)):
            in_one, in_other = calls.at(group, rank, seq), calls.at(then, rank, number)
            reached = calls.reached.get((group, rank))
            if in_one is not None and in_other is not None and in_flight[in_one]:
                (first if table.order[in_one] < table.order[in_other] else second).append(rank)
            elif in_one is None and in_other is not None and reached is not None and reached.enqueued < seq:
                second.append(rank)
        if first and second:
            found.append(Reversal(row, after, tuple(first), tuple(second)))
    return found


def _key(calls: Calls, row: int) -> tuple[int, int]:
    return int(calls.table.group[row]), int(calls.table.seq[row])
