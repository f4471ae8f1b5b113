"""One reading of all evidence on calls: what parted, who is missing, what goes in circles. Rules only speak of it.

Each fault is named once: a rank that left the common sequence is not also reported as missing from every later call.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from . import thresholds as T
from .ahead import ahead
from .alignment import Parting, partings, sisters, slip
from .circle import Circle, in_circles, in_reverse
from .collectives import UNKNOWN, Calls
from .programs import departures, reversals
from .reading import calls
from .standstill import Standstill, last_exits, standstill
from .waiting import Wait, Waiting, behind, oldest_in_flight, waiting

if TYPE_CHECKING:
    from ...capsules import Capsule


@dataclass(frozen=True)
class Missing:
    """Ranks that others wait for in one call and that wait for nobody.

    ``decided`` is false where as many lack the call as made it. ``skipped`` is the row of the call that the ranks left
    out earlier, where call sites tell, with ``length`` calls. ``silent`` ranks left no evidence; ``slow`` ones entered
    the calls and completed less than the others, as (theirs, furthest). ``late``: seconds after which they came, when
    the others had given up.
    """

    wait: Wait
    ranks: tuple[int, ...]
    decided: bool
    skipped: int
    length: int
    slow: dict[int, tuple[int, int]]
    late: float = 0.0


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
    found = partings(known)
    reversed_ = reversals(known)
    held = [(each.ranks, each.others, each.decided != "none") for each in found if not each.ended]
    conflicts = [*held, *((each.first, each.second, False) for each in reversed_)]
    state = waiting(known, conflicts)
    # What a rank left of an earlier moment is as good as nothing; one that took another way lacks calls all the same.
    aside = state.outdated | known.broken.intersection(state.culprits)
    if aside := aside - {rank for each in found if not each.ended for rank in involved(each)}:
        known, outdated = known.without(aside), state.outdated & aside
        state = replace(waiting(known, conflicts), outdated=outdated)
    missing = _missing(known, state)
    circles = in_reverse(known, reversed_)
    turned = {rank for each in circles for rank in each.ranks}
    circles += [each for each in in_circles(known, state) if not turned & set(each.ranks)]
    # Programs over all groups are asked only where calls are in conflict and a single group cannot decide.
    open_ = [each for each in missing if each.ranks and (not each.decided or _minority(known, each))]
    gone: dict[int, Parting] = {}
    if open_ or circles or any(each.decided == "none" for each in found):
        gone = departures(known)
    found = [_settled(each, gone) for each in found]
    still = standstill(capsule, known, state, conflict=bool(reversed_) or any(_departed(each, gone) for each in open_))
    added: list[Missing] = []
    if still is not None:
        found += [each for circle in circles if (each := _of_circle(circle, gone)) is not None]
        found += [each for other in open_ if (each := _departed(other, gone)) is not None]
    parted, also = _once(known, found)
    explained = {rank for each in parted if not each.ended for rank in involved(each)}
    if still is None:
        missing, circles = [], []
    circles = [each for each in circles if not set(each.deviating or each.ranks) & explained]
    unanswered = {each: found for each in circles if (found := _unanswered(known, state, each, gone)) is not None}
    circles = [
        replace(each, deviating=each.deviating or _left(each, gone)) for each in circles if each not in unanswered
    ]
    left = [each for each in (*missing, *unanswered.values()) if not (explained and set(each.ranks) <= explained)]
    left = [each for each in left if _departed(each, gone) is None]
    added = [each for each in left if each.decided and _minority(known, each)]
    missing = [each for each in left if each not in added]
    exchanged = T.LONGEST_EXCHANGE if reversed_ else 0
    if still is not None and not parted and (skips := ahead(known, oldest_in_flight(known), exchanged)):
        missing, circles = [Missing(each, each.absent, True, each.row, 1, {}) for each in skips[:1]], []
    inside = None
    if still is not None and still.sure and not (missing or added or circles or parted):
        inside = _all_inside(known)
        if inside is not None and (late := _too_late(known, inside, last_exits(capsule))) is not None:
            missing, inside = [late], None
    return Diagnosis(known, state, still, parted, also, tuple(missing), tuple(added), tuple(circles), inside)


def _settled(parting: Parting, gone: dict[int, Parting]) -> Parting:
    """Two sides of one group, decided by what the ranks of one side did over all groups."""
    if parting.decided != "none":
        return parting
    left = [rank for rank in involved(parting) if rank in gone]
    if not left or (set(left) & set(parting.ranks) and set(left) & set(parting.others)):
        return parting
    return gone[left[0]]


def _of_circle(circle: Circle, gone: dict[int, Parting]) -> Parting | None:
    """The call too many or too few that made a circle, where the programs tell it from an exchanged one."""
    left = _left(circle, gone)
    if not left or (circle.deviating and not set(left) <= set(circle.deviating)):
        return None
    first = gone[left[0]]
    sends = any(wait.direct for wait, _ in circle.classes)
    return first if not sends and first.edit != "exchanged" and (first.run > 0 or first.edit != "skipped") else None


def _left(circle: Circle, gone: dict[int, Parting]) -> tuple[int, ...]:
    """Ranks of a circle that left the program of their peers, where not all did."""
    left = tuple(rank for rank in circle.ranks if rank in gone)
    return left if len(left) < len(circle.ranks) else ()


def _unanswered(known: Calls, state: Waiting, circle: Circle, gone: dict[int, Parting]) -> Missing | None:
    """A send or receive that a rank of a circle left out, and its other side waits in."""
    left = set(_left(circle, gone))
    for wait in state.waits:
        if wait.direct and wait.absent and set(wait.absent) <= left and set(wait.waiting) <= set(circle.ranks):
            return Missing(wait, wait.absent, True, UNKNOWN, 0, {})
    return None


def _departed(missing: Missing, gone: dict[int, Parting]) -> Parting | None:
    """The earlier call too many on a waiting rank that made it wait for ranks which are in order."""
    ranks = missing.wait.waiting
    if not ranks or not all(rank in gone for rank in ranks) or any(rank in gone for rank in missing.ranks):
        return None
    return gone[ranks[0]]


def involved(parting: Parting) -> tuple[int, ...]:
    """The ranks that may be at fault: those that deviate, or both sides where nothing decides between them."""
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
        earlier = next((other for other in first if set(involved(each)) & set(involved(other))), None)
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
    if not found and not state.circles:  # nobody known is missing: those without evidence are what is left
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
        held = len(np.unique(known.direct.rank[known.direct.pending])) if wait.direct else 0
        held = max(held, len(np.unique(known.table.rank[known.table.pending]))) if wait.direct else victims
        decided = held >= 2 and held > len(ranks)
    if not decided and not wait.direct:
        decided = _sisters_made(known, wait) is not None
    row, length = UNKNOWN, 0
    if not wait.direct:
        slips = {slip(known, wait.group, rank, entered) for rank in ranks[: T.LISTED]}
        if len(slips) == 1 and (found := slips.pop()) is not None:
            row, length = found
    slow = {} if wait.direct else behind(known, wait.group, entered)
    return Missing(wait, tuple(ranks), decided, row, length, slow)


def _sisters_made(known: Calls, wait: Wait) -> bool | None:
    """Whether the groups of the same purpose made a call of that number, None where they do not agree on it."""
    own = known.groups[wait.group]
    made: Counter[bool] = Counter()
    for index, group in enumerate(known.groups):
        if index != wait.group and own.description and sisters(own, group):
            reached = [known.reached[index, rank].enqueued for rank in group.ranks if (index, rank) in known.reached]
            made.update(each >= wait.seq for each in reached)
    return made[True] > 0 if sum(made.values()) >= 2 and len(made) == 1 else None


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
    wait = missing.wait
    if wait.direct:
        return False
    entered = len(_entered(known, wait))
    if entered + len(wait.absent) >= T.DECIDING_RANKS and entered != len(wait.absent):
        return len(missing.ranks) > entered
    return _sisters_made(known, wait) is False


def _all_inside(known: Calls) -> Wait | None:
    """The first call that every member entered and none left."""
    pending = np.flatnonzero(known.table.pending)
    order = np.lexsort((known.table.seq[pending], np.nan_to_num(known.table.created[pending], nan=np.inf)))
    for row in pending[order].tolist():
        group, seq = int(known.table.group[row]), int(known.table.seq[row])
        ranks = known.groups[group].ranks
        reached = [known.reached.get((group, each)) for each in ranks]
        if len(ranks) > 1 and all(each is not None and each.completed < seq <= each.enqueued for each in reached):
            return Wait(group, seq, ranks, (), (), row)
    return None


def _too_late(known: Calls, wait: Wait, exits: dict[int, dict[str, Any]]) -> Missing | None:
    """Ranks that entered a call when the others' time-out, or watchdog, had already been."""
    rows = {rank: row for rank in wait.waiting if (row := known.at(wait.group, rank, wait.seq)) is not None}
    entered = {rank: float(known.table.created[row]) for rank, row in rows.items()}
    first = min(entered.values(), default=np.nan)
    limits = [first + float(known.table.timeout[row]) for row in rows.values()]
    told = [each.get("t") for rank, each in exits.items() if each.get("kind") == "hang" and rank in rows]
    limits += [float(each) for each in told if isinstance(each, int | float) and each > first]
    gave_up = min((each for each in limits if np.isfinite(each)), default=np.inf)
    late = tuple(rank for rank, created in entered.items() if created >= gave_up - T.CLOCK_S / 100)
    others = tuple(rank for rank in rows if rank not in late)
    if not late or not others:
        return None
    by = min(entered[rank] for rank in late) - first
    found = Wait(wait.group, wait.seq, others, late, (), rows[others[0]])
    return Missing(found, late, len(others) >= len(late), UNKNOWN, 0, {}, late=by)
