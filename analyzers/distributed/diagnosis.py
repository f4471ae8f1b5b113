"""One reading of all evidence on calls: what parted, who is missing, what goes in circles. Rules only speak of it.

Each fault is named once: a rank that left the common sequence is not also reported as missing from every later call.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from . import thresholds as T
from .alignment import Parting, partings, sisters, slip
from .collectives import UNKNOWN, Calls, calls
from .standstill import Standstill, standstill
from .waiting import Wait, Waiting, behind, waiting

if TYPE_CHECKING:
    from ...capsules import Capsule


@dataclass(frozen=True)
class Missing:
    """Ranks that others wait for in one call and that wait for nobody.

    ``decided`` is false where as many lack the call as made it. ``skipped`` is the row of the call that the ranks left
    out earlier, where call sites tell, with ``length`` calls. ``silent`` ranks left no evidence; ``slow`` ones entered
    the calls and completed less than the others, as (theirs, furthest).
    """

    wait: Wait
    ranks: tuple[int, ...]
    decided: bool
    skipped: int
    length: int
    slow: dict[int, tuple[int, int]]


@dataclass(frozen=True)
class Circle:
    """Ranks that wait for each other: the first call that blocks each, as classes of ranks in one call.

    ``deviating`` enter the calls in another order than most; empty where nothing decides.
    """

    ranks: tuple[int, ...]
    classes: tuple[tuple[Wait, tuple[int, ...]], ...]
    deviating: tuple[int, ...]
    votes: int


@dataclass(frozen=True)
class Diagnosis:
    """What the calls of a job say, each fault once.

    ``also`` maps a parting to further groups in which the same ranks part; ``added`` are calls at the end that only a
    minority made; ``all_inside`` is a call that every member entered and none left.
    """

    calls: Calls
    state: Waiting
    still: Standstill | None
    partings: tuple[Parting, ...]
    also: dict[Parting, tuple[int, ...]]
    missing: tuple[Missing, ...]
    added: tuple[Missing, ...]
    circles: tuple[Circle, ...]
    all_inside: Wait | None


_DIAGNOSES: WeakKeyDictionary[Capsule, Diagnosis] = WeakKeyDictionary()


def diagnosis(capsule: Capsule) -> Diagnosis:
    """The diagnosis of a capsule, made once."""
    if capsule not in _DIAGNOSES:
        _DIAGNOSES[capsule] = _diagnose(capsule)
    return _DIAGNOSES[capsule]


def _diagnose(capsule: Capsule) -> Diagnosis:
    known = calls(capsule)
    parted, also = _once(known, partings(known))
    state = waiting(known)
    still = standstill(capsule, known, state)
    missing: list[Missing] = []
    added: list[Missing] = []
    circles: list[Circle] = []
    inside: Wait | None = None
    if still is not None:
        explained = {rank for each in parted if not each.ended for rank in _involved(each)}
        for each in _missing(known, state):
            if set(each.ranks) <= explained or (not each.ranks and explained):
                continue
            (added if each.decided and _minority(known, each) else missing).append(each)
        circles = [each for each in _in_circles(known, state) if not set(each.ranks) & explained]
        if not (missing or added or circles or parted) and still.sure:
            inside = _all_inside(known)
    return Diagnosis(known, state, still, parted, also, tuple(missing), tuple(added), tuple(circles), inside)


def _involved(parting: Parting) -> tuple[int, ...]:
    return parting.ranks if parting.decided != "none" else (*parting.ranks, *parting.others)


def _once(known: Calls, found: list[Parting]) -> tuple[tuple[Parting, ...], dict[Parting, tuple[int, ...]]]:
    """A rank that left its path parts in several groups: the first parting is it, the others follow."""

    def moment(parting: Parting) -> tuple[int, int, float]:
        created = float(known.table.created[parting.theirs])
        order = int(known.table.order[parting.theirs])
        return parting.decided == "none", order if order >= 0 else parting.seq, np.nan_to_num(created)

    first: list[Parting] = []
    also: dict[Parting, list[int]] = defaultdict(list)
    for each in sorted(found, key=moment):
        earlier = next((other for other in first if set(_involved(each)) & set(_involved(other))), None)
        if earlier is None:
            first.append(each)
        elif each.group != earlier.group:
            also[earlier].append(each.group)
    return tuple(first), {parting: tuple(groups) for parting, groups in also.items()}


# -- missing ranks


def _missing(known: Calls, state: Waiting) -> list[Missing]:
    by_call: dict[Wait, list[int]] = defaultdict(list)
    for rank in state.culprits:
        wait = state.first_missed(rank)
        if wait is not None:
            by_call[wait].append(rank)
    found = [_of_call(known, state, wait, ranks) for wait, ranks in by_call.items()]
    if not found:  # nobody known is missing: those without evidence are what is left
        silent = next((wait for wait in state.waits if wait.silent and not wait.absent), None)
        if silent is not None:
            found.append(Missing(silent, (), False, UNKNOWN, 0, {}))
    return sorted(found, key=lambda each: state.waits.index(each.wait))


def _of_call(known: Calls, state: Waiting, wait: Wait, ranks: list[int]) -> Missing:
    entered = _entered(known, wait)
    victims = len(state.victims)
    if len(entered) + len(wait.absent) >= T.DECIDING_RANKS and not wait.direct:
        decided = len(entered) != len(wait.absent) or victims > len(ranks)
    else:
        decided = victims >= 2 and victims > len(ranks)
    row, length = UNKNOWN, 0
    if not wait.direct:
        slips = {slip(known, wait.group, rank, entered) for rank in ranks}
        if len(slips) == 1 and (found := slips.pop()) is not None:
            row, length = found
    slow = {} if wait.direct else behind(known, wait.group, entered)
    return Missing(wait, tuple(ranks), decided, row, length, slow)


def _entered(known: Calls, wait: Wait) -> list[int]:
    if wait.direct:
        return list(wait.waiting)
    reached = known.reached
    return [
        rank
        for rank in known.groups[wait.group].ranks
        if (wait.group, rank) in reached and reached[wait.group, rank].enqueued >= wait.seq
    ]


def _minority(known: Calls, missing: Missing) -> bool:
    """Whether most members of the group never make the call, so that those who do are the odd ones."""
    entered = _entered(known, missing.wait)
    everyone = len(entered) + len(missing.wait.absent)
    return (
        not missing.wait.direct
        and set(missing.ranks) == set(missing.wait.absent)
        and len(missing.ranks) > len(entered)
        and everyone >= T.DECIDING_RANKS
    )


def _all_inside(known: Calls) -> Wait | None:
    """The first call that every member entered and none left."""
    pending = np.flatnonzero(known.table.pending)
    order = np.lexsort((known.table.seq[pending], np.nan_to_num(known.table.created[pending], nan=np.inf)))
    for row in pending[order].tolist():
        group, seq = int(known.table.group[row]), int(known.table.seq[row])
        ranks = known.groups[group].ranks
        if len(ranks) > 1 and all((group, each) in known.reached for each in ranks):
            return Wait(group, seq, ranks, (), (), row)
    return None


# -- circles


def _in_circles(known: Calls, state: Waiting) -> list[Circle]:
    found: list[Circle] = []
    for ranks in state.circles:
        blocked: dict[Wait, list[int]] = defaultdict(list)
        for rank in ranks:
            wait = _first_blocked(known, state, rank)
            if wait is not None:
                blocked[wait].append(rank)
        classes = sorted(blocked.items(), key=lambda each: (-len(each[1]), each[1]))
        deviating, votes = _deviating(known, classes)
        found.append(Circle(ranks, tuple((wait, tuple(own)) for wait, own in classes), deviating, votes))
    return found


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
    (_, ranks_one), (_, ranks_other) = classes
    votes: Counter[bool] = Counter()
    for rank in sorted(known.spoke):
        homes = [_homes(known, rank, wait) for wait, _ in classes]
        if not all(homes):
            continue
        first, second = (_place(known, rank, wait, own) for (wait, _), own in zip(classes, homes, strict=True))
        if first != second:
            votes[first < second] += 1
    total = sum(votes.values())
    if total < T.DECIDING_RANKS or votes[True] == votes[False]:
        return (), total
    return tuple(ranks_other if votes[True] > votes[False] else ranks_one), total


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
