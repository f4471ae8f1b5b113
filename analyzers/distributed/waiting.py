"""Who waits for whom: ranks that wait are victims, those that others wait for and that wait for nobody are not.

A rank waits, in a group, for every member that has not entered a call which it has entered and not left; and for the
other side of a send or receive that is not posted there. Where nobody stands outside, the waiting goes in a circle.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from .collectives import COMPLETED, UNKNOWN, Calls
from .graph import circles, ends
from .signatures import ROOTED

#: The oldest call in flight of each rank: whether it is a send or receive, and its row.
Heads = dict[int, tuple[bool, int]]
#: For whom each rank waits, call by call. Ranks that wait in one call share a set: one for each would be ranks squared.
Edges = dict[int, list[frozenset[int]]]
Held = dict[int, frozenset[int]]
_NOBODY: Final = frozenset[int]()


@dataclass(frozen=True)
class Wait:
    """One call that some members of a group entered and others did not.

    ``seq`` is the number in the group, or in the order of sends for ``direct`` ones; ``silent`` members have left no
    evidence; ``row`` is the call of a waiting rank, in the table or among the sends.
    """

    group: int
    seq: int
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    silent: tuple[int, ...]
    row: int
    direct: bool = False


@dataclass(frozen=True)
class Waiting:
    """The state of a job that may hang.

    ``culprits`` are waited for and wait for nobody; ``victims`` wait; ``circles`` are sets of ranks that wait for each
    other and for nobody else; ``stuck`` have entered calls which others have left, by (group, rank) their last
    completed number. ``outdated`` ranks lack calls that others have completed: their evidence is older.
    """

    waits: tuple[Wait, ...]
    culprits: tuple[int, ...]
    victims: tuple[int, ...]
    circles: tuple[tuple[int, ...], ...]
    outdated: frozenset[int]

    def first_missed(self, rank: int) -> Wait | None:
        """The first call that others made and this rank did not; collectives before sends."""
        return next((each for each in self.waits if rank in each.absent), None)

    def blocked_in(self, rank: int) -> Wait | None:
        """The first call in which a rank waits for somebody."""
        return next((each for each in self.waits if rank in each.waiting), None)


@dataclass
class _Member:
    """How far one member of a group is: last call entered, first and last call entered and not left; -1 for none."""

    entered: int
    completed: int = UNKNOWN
    first: int = UNKNOWN
    last: int = UNKNOWN


def waiting(calls: Calls, conflicts: Iterable[tuple[tuple[int, ...], tuple[int, ...], bool]] = ()) -> Waiting:
    """Who waits for whom, by the collectives and the sends of a job.

    Args:
        calls: the calls of the job.
        conflicts: ranks of two sides whose calls hold each other: (one side, the other, whether the first is at fault).
    """
    waits: list[Wait] = []
    edges: Edges = defaultdict(list)
    outdated: set[int] = set()
    from_start = _from_start(calls)
    for group in range(len(calls.groups)):
        waits.extend(_of_group(calls, group, from_start, edges, outdated))
    other_side = _other_sides(calls)
    waits.extend(_of_sends(calls, other_side, edges))
    heads = oldest_in_flight(calls)
    held = _held(calls, heads, other_side, from_start)
    for ranks, others, decided in conflicts:
        for side, other in ((others, frozenset(ranks)), (() if decided else ranks, frozenset(others))):
            for rank in side:
                held[rank] = held.get(rank, _NOBODY) | other
                edges[rank].append(other)
    waits.extend(_of_silent(calls, heads, held))
    lacking = _lacking(edges, heads, held)
    shared = {id(each): each for each in lacking.values()}
    waited_for = sorted(calls.spoke & _NOBODY.union(*shared.values()))
    # A rank may be in calls behind which others are held, and still be the one that they wait for.
    free = [rank for rank in waited_for if rank not in held or not lacking.get(rank)]
    culprits = [rank for rank in ends(held, free) if not _inside(calls, heads, rank)]
    silent = {rank for wait in waits for rank in wait.silent if not wait.absent}
    turning = circles(held, {*culprits, *silent})
    waits.sort(key=lambda each: _moment(calls, each))
    victims = sorted({rank for rank, others in held.items() if others} - set(culprits))
    return Waiting(tuple(waits), tuple(culprits), tuple(victims), tuple(turning), frozenset(outdated))


def oldest_in_flight(calls: Calls) -> Heads:
    """The oldest call in flight of each rank: whether it is a send or receive, and its row."""
    found: dict[int, tuple[int, bool, int]] = {}
    for direct, table in ((False, calls.table), (True, calls.direct)):
        pending = np.flatnonzero(table.pending)
        for row in pending[np.lexsort((table.seq[pending], table.order[pending]))[::-1]].tolist():
            rank, order = int(table.rank[row]), int(table.order[row])
            if rank not in found or order <= found[rank][0]:
                found[rank] = order, direct, row
    return {rank: (direct, row) for rank, (_, direct, row) in found.items()}


def _lacking(edges: Edges, heads: Heads, held: Held) -> Held:
    """For whom each rank waits of those that hold its oldest call, or of all where it has none in flight.

    Hosts run ahead of their devices, by whole steps: only what a rank's oldest call lacks is what it waits for.
    """
    found: Held = {}
    seen: dict[tuple[int, ...], frozenset[int]] = {}  # by the sets: ranks in one call share them
    for rank, parts in edges.items():
        own = held[rank] if rank in heads else None
        key = (id(own), *map(id, parts))
        if key not in seen:
            others = _NOBODY.union(*parts)
            seen[key] = others if own is None else others & own
        found[rank] = seen[key]
    return found


def _held(calls: Calls, heads: Heads, other_side: dict[int, int], from_start: frozenset[int]) -> Held:
    """By whom each rank is held in its oldest call: who has not entered it, and who is in it behind an older call."""
    found: Held = {}
    in_call: dict[tuple[int, int], frozenset[int]] = {}
    for rank, (direct, row) in heads.items():
        if direct:
            found[rank] = frozenset(_not_posted(calls, heads, other_side, rank, row))
            continue
        key = int(calls.table.group[row]), int(calls.table.seq[row])
        if key not in in_call:
            in_call[key] = _not_there(calls, heads, *key, from_start)
        found[rank] = in_call[key]  # who is in the call with nothing older is not among these
    return found


def _not_posted(calls: Calls, heads: Heads, other_side: dict[int, int], rank: int, row: int) -> set[int]:
    """The other sides of a send or receive, and of its batch, that are not posted or lie behind older calls."""
    table = calls.direct
    parts = np.flatnonzero(
        (table.rank == rank) & (table.group == table.group[row]) & (table.seq == table.seq[row]) & table.pending
    )
    found: set[int] = set()
    for part in {row, *parts.tolist()}:
        peer, other = int(table.peer[part]), other_side.get(part, UNKNOWN)
        if other == UNKNOWN:
            found.add(peer)
        elif table.state[other] < COMPLETED:
            at = heads[peer]  # it has a call in flight: at least this one
            same = at[0] and table.group[at[1]] == table.group[other] and table.seq[at[1]] == table.seq[other]
            if not same:
                found.add(peer)
    return found - {rank, UNKNOWN}


def _not_there(calls: Calls, heads: Heads, group: int, seq: int, from_start: frozenset[int]) -> frozenset[int]:
    """Who has not entered a call, or is in it behind an older one."""
    found: set[int] = set()
    for other in calls.groups[group].ranks:
        reached = calls.reached.get((group, other))
        if reached is None and (other not in from_start or group in calls.mixed):
            continue
        absent = reached is None or reached.enqueued < seq
        ended = reached is not None and reached.completed >= seq
        if absent or (not ended and other in heads and heads[other] != (False, calls.at(group, other, seq))):
            found.add(other)
    return frozenset(found)


def _inside(calls: Calls, heads: Heads, rank: int) -> bool:
    """Whether the oldest call of a rank is the oldest one of all members, and none of them left it: it does not end."""
    if rank not in heads or heads[rank][0]:
        return False
    row = heads[rank][1]
    group, seq = int(calls.table.group[row]), int(calls.table.seq[row])
    ranks = calls.groups[group].ranks
    return len(ranks) > 1 and all(heads.get(other) == (False, calls.at(group, other, seq)) for other in ranks)


def _from_start(calls: Calls) -> frozenset[int]:
    """Ranks of which nothing is missing: how far they are is stated, or their record begins with their first call."""
    known = set(calls.status_of)
    for table in (calls.table, calls.direct):
        known |= set(table.rank[(table.order == 0) | (table.order == 1)].tolist())
    return calls.spoke & known


def _members(calls: Calls, group: int, from_start: frozenset[int]) -> tuple[dict[int, _Member], list[int]]:
    """The members of a group that are known, and those of which nothing is."""
    found: dict[int, _Member] = {}
    silent: list[int] = []
    for rank in calls.groups[group].ranks:
        reached = calls.reached.get((group, rank))
        if reached is not None and reached.enqueued >= 0:
            found[rank] = _Member(reached.enqueued, reached.completed)
        elif rank in from_start and group not in calls.mixed:
            found[rank] = _Member(0)
        elif rank not in calls.spoke:
            silent.append(rank)
    return found, silent


def _of_group(calls: Calls, group: int, from_start: frozenset[int], edges: Edges, outdated: set[int]) -> Iterable[Wait]:
    table = calls.table
    low, high = np.searchsorted(table.group, [group, group + 1])
    members, silent = _members(calls, group, from_start)
    pending = low + np.flatnonzero(table.pending[low:high])
    for row in pending.tolist():
        member = members.get(int(table.rank[row]))
        if member is not None:
            seq = int(table.seq[row])
            member.first = seq if member.first == UNKNOWN else min(member.first, seq)
            member.last = max(member.last, seq)
    for member in members.values():  # a status without entries still says that something is open
        if member.first == UNKNOWN and UNKNOWN < member.completed < member.entered:
            member.first, member.last = member.completed + 1, member.entered
    waiting_ranks = {rank: member for rank, member in members.items() if member.last != UNKNOWN}
    if not waiting_ranks:
        return
    furthest = max(member.last for member in waiting_ranks.values())
    by_number: dict[int, list[int]] = defaultdict(list)
    for rank, member in members.items():
        if member.entered < furthest:
            by_number[member.entered + 1].append(rank)
    ended = max((member.completed for member in members.values()), default=UNKNOWN)
    absent: list[int] = []
    lacking: list[tuple[int, frozenset[int]]] = []  # from which number on whom it lacks, more and more
    for seq, ranks in sorted(by_number.items()):
        held = [rank for rank, member in waiting_ranks.items() if member.last >= seq]
        row = _row(calls, group, held, seq)
        old = [rank for rank in ranks if row != UNKNOWN and calls.written.get(rank, np.inf) < table.created[row]]
        if ended >= seq and _needs_all(calls, group, seq, ended):
            old = ranks  # the others left a call that nobody leaves before all have come
        outdated.update(old)
        absent.extend(rank for rank in ranks if rank not in old)
        if not absent:
            continue
        lacking.append((seq, frozenset(absent)))
        yield Wait(group, seq, tuple(held), tuple(absent), tuple(silent), row)
    for rank, member in waiting_ranks.items():
        at = bisect_right(lacking, member.last, key=lambda each: each[0])
        if at:
            edges[rank].append(lacking[at - 1][1])


def _of_silent(calls: Calls, heads: Heads, edges: Held) -> list[Wait]:
    """Ranks whose oldest call lacks nobody but members without evidence: it is for these that they wait."""
    table = calls.table
    held: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, (direct, row) in heads.items():
        if not direct and not edges.get(rank):
            held[int(table.group[row]), int(table.seq[row])].append(rank)
    found: list[Wait] = []
    for (group, seq), ranks in held.items():
        silent = [each for each in calls.groups[group].ranks if each not in calls.spoke]
        if silent:
            edges |= dict.fromkeys(ranks, frozenset(silent))
            found.append(Wait(group, seq, tuple(sorted(ranks)), (), tuple(silent), _row(calls, group, ranks, seq)))
    return found


def _row(calls: Calls, group: int, ranks: Iterable[int], seq: int) -> int:
    rows = (calls.at(group, rank, seq) for rank in ranks)
    return next((each for each in rows if each is not None), UNKNOWN)


def _needs_all(calls: Calls, group: int, first: int, last: int) -> bool:
    """Whether one of these calls ends on no rank before every rank has entered it."""
    table = calls.table
    low, high = np.searchsorted(table.group, [group, group + 1])
    rows = low + np.flatnonzero((table.seq[low:high] >= first) & (table.seq[low:high] <= last))
    return any(calls.signatures[each].family not in ROOTED for each in np.unique(table.signature[rows]).tolist())


def _other_sides(calls: Calls) -> dict[int, int]:
    """For each send and receive in flight the row of its other side; nothing where that is not posted.

    The nth send between two ranks goes with the nth receive. Where one of them no longer holds all of its calls, those
    in flight on both sides are paired from the oldest on.
    """
    table = calls.direct
    sends = np.array([each.family == "send" for each in calls.signatures], np.bool_)
    rows: dict[tuple[int, int, int, bool], list[int]] = defaultdict(list)
    for row in np.flatnonzero(table.peer >= 0).tolist():
        rank, peer, sent = int(table.rank[row]), int(table.peer[row]), bool(sends[table.signature[row]])
        rows[int(table.group[row]), *((rank, peer) if sent else (peer, rank)), sent].append(row)
    in_flight = table.pending
    whole = {
        rank for each in (table, calls.table) for rank in each.rank[(each.order == 0) | (each.order == 1)].tolist()
    }
    found: dict[int, int] = {}
    for (group, source, target, sent), own in rows.items():
        theirs = rows.get((group, source, target, not sent), [])
        if not {source, target} <= whole:
            own, theirs = ([row for row in each if in_flight[row]] for each in (own, theirs))
        found |= {row: other for row, other in zip(own, theirs, strict=False) if in_flight[row]}
    return found


def _of_sends(calls: Calls, other_side: dict[int, int], edges: Edges) -> Iterable[Wait]:
    """Sends and receives whose other side is not posted."""
    table = calls.direct
    first: dict[tuple[int, int, int, int], int] = {}
    for row in np.flatnonzero(table.pending & (table.peer >= 0)).tolist():
        rank, peer = int(table.rank[row]), int(table.peer[row])
        if row not in other_side and peer != rank:
            first.setdefault((int(table.group[row]), rank, peer, int(table.signature[row])), row)
    for (group, rank, peer, _), row in first.items():
        known = peer in calls.spoke
        if known:
            edges[rank].append(frozenset((peer,)))
        yield Wait(
            *(group, int(table.seq[row]), (rank,), (peer,) if known else (), () if known else (peer,), row), direct=True
        )


def _moment(calls: Calls, wait: Wait) -> tuple[bool, bool, float, int]:
    """Collectives before sends, then the earliest entered."""
    if wait.row == UNKNOWN:
        return wait.direct, True, np.inf, wait.seq
    created = float((calls.direct if wait.direct else calls.table).created[wait.row])
    return wait.direct, False, np.inf if np.isnan(created) else created, wait.seq


def behind(calls: Calls, group: int, ranks: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Ranks that completed less than the furthest of a group though they entered as much: (theirs, furthest)."""
    reached = {rank: calls.reached[group, rank] for rank in ranks if (group, rank) in calls.reached}
    furthest = max((each.completed for each in reached.values()), default=UNKNOWN)
    return {
        rank: (each.completed, furthest)
        for rank, each in reached.items()
        if UNKNOWN < each.completed < furthest <= each.enqueued
    }


def newest_in_flight(calls: Calls) -> frozenset[int]:
    """The ranks whose newest call, over all groups, has not ended."""
    newest: dict[int, tuple[int, float, bool]] = {}
    for table in (calls.table, calls.direct):
        created = np.nan_to_num(table.created)
        rows = np.lexsort((table.seq, created, table.order, table.rank))
        last = rows[np.flatnonzero(np.diff(table.rank[rows], append=UNKNOWN))]
        for rank, *found in zip(
            *(each[last].tolist() for each in (table.rank, table.order, created, table.pending)), strict=True
        ):
            newest[rank] = max(newest.get(rank, (UNKNOWN, -np.inf, False)), (found[0], found[1], found[2]))
    return frozenset(rank for rank, (_, _, pending) in newest.items() if pending)
