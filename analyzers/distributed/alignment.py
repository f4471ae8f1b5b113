"""Where the calls of ranks in one group part, found by aligning what they called and not by numbers alone.

A call that one rank skips shifts all its later numbers: compared by number everything after it looks wrong. So the
majority's sequence is the reference, and a rank that leaves it is compared with it under each small edit (one call
other, calls skipped, calls added, calls exchanged); the edit after which the longest run agrees is named, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from . import thresholds as T
from .collectives import Calls, Group, Ints
from .signatures import difference

Edit = Literal["op", "dtype", "shape", "skipped", "added", "exchanged"]
Decision = Literal["majority", "sister groups", "programs", "none"]
_Edit = Literal["other", "skipped", "added", "exchanged"]
ABSENT = -1


@dataclass(frozen=True)
class Parting:
    """Ranks that leave the common sequence of a group at one call.

    ``ranks`` deviate, where ``decided`` says so; with ``none`` they are one side and ``others`` the other. ``length``
    is the number of calls skipped, added or exchanged, ``run`` of calls that agree again after it. ``theirs`` and
    ``common`` are rows of the table: the call of the first deviating rank and that of a rank of the others.
    """

    group: int
    seq: int
    edit: Edit
    length: int
    run: int
    ranks: tuple[int, ...]
    others: tuple[int, ...]
    decided: Decision
    theirs: int
    common: int
    ended: bool


@dataclass(frozen=True)
class Grid:
    """One group's calls: ``agreed`` [ranks, numbers] of what must be equal, ABSENT where a call is not on record."""

    group: int
    ranks: Ints
    numbers: Ints
    agreed: Ints
    row: Ints


def grid(calls: Calls, group: int) -> Grid:
    """The calls of a group as rank × sequence number."""
    table = calls.table
    low, high = np.searchsorted(table.group, [group, group + 1])
    ranks, at_rank = np.unique(table.rank[low:high], return_inverse=True)
    numbers, at_number = np.unique(table.seq[low:high], return_inverse=True)
    agreed = np.full((len(ranks), len(numbers)), ABSENT, np.int64)
    row = np.full_like(agreed, ABSENT)
    agreed[at_rank, at_number] = calls.agreed[table.signature[low:high]]
    row[at_rank, at_number] = np.arange(low, high)
    return Grid(group, ranks, numbers, agreed, row)


def partings(calls: Calls) -> list[Parting]:
    """Every place where ranks of a group do not make the same call, the first of each rank."""
    found: list[Parting] = []
    for group in _differing(calls):
        found.extend(_in_group(calls, grid(calls, group)))
    return found


def _differing(calls: Calls) -> list[int]:
    """Groups in which two ranks have different calls under one number; most jobs have none, so this is one pass."""
    table = calls.table
    if len(table) < 2:
        return []
    agreed = calls.agreed[table.signature]
    order = np.lexsort((agreed, table.seq, table.group))
    group, seq, agreed = table.group[order], table.seq[order], agreed[order]
    differ = (group[1:] == group[:-1]) & (seq[1:] == seq[:-1]) & (agreed[1:] != agreed[:-1])
    return np.unique(group[1:][differ]).tolist()


def _in_group(calls: Calls, cells: Grid) -> Iterator[Parting]:
    left = np.ones(len(cells.ranks), np.bool_)
    for _ in range(T.DIFFERENCES):
        agreed = np.where(left[:, None], cells.agreed, ABSENT)
        column = first_difference(agreed)
        if column is None:
            return
        present = np.flatnonzero(agreed[:, column] != ABSENT)
        votes = Counter(agreed[present, column].tolist())
        (most, count), *_ = votes.most_common(1)
        silent = sum(rank not in calls.spoke for rank in calls.groups[cells.group].ranks)
        if len(present) >= T.DECIDING_RANKS and 2 * count > len(present) + silent:
            normal: int | None = most
            decided: Decision = "majority"
        else:
            normal, decided = _of_sisters(calls, cells, column, votes), "sister groups"
        if normal is None:
            yield _undecided(calls, cells, column, present)
            return
        common = present[agreed[present, column] == normal]
        deviating = np.setdiff1d(present, common)
        # Ranks that went the same way are one statement.
        alike: dict[bytes, list[int]] = {}
        for index in deviating.tolist():
            alike.setdefault(cells.agreed[index, column : column + 8].tobytes(), []).append(index)
        for indices in alike.values():
            yield parting(calls, cells, column, indices, common.tolist(), decided)
        left[deviating] = False


def first_difference(agreed: Ints) -> int | None:
    """The first column of [ranks, numbers] in which two calls on record differ, None where none does."""
    highest = agreed.max(axis=0)
    lowest = np.where(agreed == ABSENT, np.iinfo(np.int64).max, agreed).min(axis=0)
    columns = np.flatnonzero((lowest != highest) & (highest != ABSENT))
    return int(columns[0]) if len(columns) else None


def _undecided(calls: Calls, cells: Grid, column: int, present: Ints) -> Parting:
    """Two sides of which nothing tells which one is right; the smaller, or else the later rank, is compared."""
    sides: dict[int, list[int]] = {}
    for index in present.tolist():
        sides.setdefault(int(cells.agreed[index, column]), []).append(index)
    ordered = sorted(sides.values(), key=lambda side: (-len(side), side))
    rest = [index for side in ordered[1:] for index in side]
    return parting(calls, cells, column, rest, ordered[0], "none")


def parting(
    calls: Calls, cells: Grid, column: int, deviating: list[int], common: Sequence[int], decided: Decision
) -> Parting:
    """How the rows ``deviating`` of a grid leave the rows ``common`` at a column, by the smallest edit."""
    reference = max(common, key=lambda index: int((cells.agreed[index, column:] != ABSENT).sum()))
    history = cells.agreed[reference, :column]
    theirs, normal = _calls_from(cells, deviating[0], column), _calls_from(cells, reference, column)
    edit, length, run = _edit(theirs, normal, _foretold(history, normal))
    one, other = (calls.agreements[_agreed(calls, int(cells.row[each, column]))] for each in (deviating[0], reference))
    # The same call in another group: two were exchanged, and only the first of them is on record.
    kind: Edit = "exchanged" if one == other else difference(one, other)
    kind = edit if edit != "other" else kind
    at = column
    if kind in ("skipped", "added"):
        at = _refined(calls, cells, column, deviating[0], reference, length if kind == "skipped" else -length)
    rows = [int(each) for index in (*deviating, *common) if (each := cells.row[index, column]) != ABSENT]
    # Ended on all sides, and the job went on: the back end did not mind.
    ended = not calls.table.pending[rows].any() and column + 1 < len(cells.numbers)
    return Parting(
        group=cells.group,
        seq=int(cells.numbers[at]),
        edit=kind,
        length=length,
        run=run,
        ranks=tuple(cells.ranks[deviating].tolist()),
        others=tuple(cells.ranks[list(common)].tolist()),
        decided=decided,
        theirs=int(cells.row[deviating[0], at]),
        common=int(cells.row[reference, at]),
        ended=ended,
    )


def _calls_from(cells: Grid, index: int, column: int) -> list[int]:
    calls = cells.agreed[index, column : column + T.COMPARED]
    gap = np.flatnonzero(calls == ABSENT)
    return calls[: gap[0] if len(gap) else None].tolist()


def _foretold(history: Ints, normal: list[int]) -> list[int]:
    """What the group would have called next, by what followed the same calls before; it blocks before it can."""
    if len(normal) >= T.COMPARED or len(history) < 2:
        return []
    past = [*history[-4 * T.COMPARED :].tolist(), *normal]
    context = past[-T.CONTEXT :]
    for end in range(len(past) - 2, len(context) - 2, -1):
        if past[end - len(context) + 1 : end + 1] == context:
            return past[end + 1 :][:8]
    return []


def _edit(theirs: list[int], normal: list[int], foretold: list[int]) -> tuple[_Edit, int, int]:
    """The smallest edit after which the longest run of calls agrees: (edit, calls, run).

    Calls that were made count before those that are ``foretold``.
    """
    longer = [*normal, *foretold]
    run = _run(theirs[1:], longer[1:])
    best: tuple[_Edit, int, int] = ("other", 1, run)
    score = (_run(theirs[1:], normal[1:]), run)
    for length in range(1, min(T.LONGEST_EDIT, max(len(theirs), len(longer))) + 1):
        tries: list[tuple[_Edit, int, int, int]] = [("skipped", 0, length, 0), ("added", length, 0, 0)]
        short = 1 < length <= min(T.LONGEST_EXCHANGE, len(theirs), len(longer))
        if short and Counter(theirs[:length]) == Counter(longer[:length]):
            tries.append(("exchanged", length, length, length))
        for edit, mine, others, extra in tries:
            made, run = (_run(theirs[mine:], each[others:]) + extra for each in (normal, longer))
            if (made, run) > score:
                score = (made, run)
                best = (edit, length, run)
    return best


def _run(one: Sequence[object], other: Sequence[object]) -> int:
    """How many calls agree from the start."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _refined(calls: Calls, cells: Grid, column: int, deviating: int, reference: int, shift: int) -> int:
    """Among equal calls in a row the one that was skipped or added is told by the call sites, where there are any.

    ``shift``: calls skipped (positive) or added (negative). Returns the column, ``column`` itself where the sites say
    nothing.
    """
    at = column
    while at > 0 and cells.agreed[reference, at - 1] == cells.agreed[reference, column if shift > 0 else at - 1]:
        at -= 1
        theirs, common = int(cells.row[deviating, at]), int(cells.row[reference, at])
        if theirs == ABSENT or common == ABSENT or calls.site(theirs) == calls.site(common):
            return at + 1
        if shift < 0 and cells.agreed[deviating, at] != cells.agreed[deviating, column]:
            return at + 1
    return at


def slip(calls: Calls, group: int, rank: int, others: Sequence[int]) -> tuple[int, int] | None:
    """A call that a rank skipped among equal ones, told by the call sites alone: (row of another rank, calls).

    Calls of one kind pair up with each other's successors and hang only at the end. From the skipped one on, each call
    of the rank then comes from where the others' next one comes from.
    """
    reference = next((each for each in others if each != rank), None)
    if reference is None:
        return None
    cells = grid(calls, group)
    rows = {int(each): cells.row[index] for index, each in enumerate(cells.ranks.tolist())}
    if rank not in rows or reference not in rows:
        return None
    both = np.flatnonzero((rows[rank] != ABSENT) & (rows[reference] != ABSENT))
    theirs = [calls.site(int(each)) for each in rows[rank][both]]
    common = [
        calls.site(int(each))
        for each in rows[reference]
        if each != ABSENT and each >= rows[reference][both[:1]].min(initial=0)
    ]
    start = _run(theirs, common)
    if start >= len(theirs):
        return None
    for length in range(1, len(common) - start):
        if _run(theirs[start:], common[start + length :]) == len(theirs) - start:
            return int(rows[reference][both[start]]), length
    return None


# -- sister groups


def _of_sisters(calls: Calls, cells: Grid, column: int, votes: Counter[int]) -> int | None:
    """What the other groups of the same kind called under this number, where they agree on one of the two calls.

    In a group of two ranks nobody can be outvoted; but the tensor-parallel pairs of a job all run one program.
    """
    own = calls.groups[cells.group]
    if not own.description or len(votes) != 2:
        return None
    seen: Counter[int] = Counter()
    before = cells.numbers[column] - 1
    common = next((int(each) for each in cells.agreed[:, column - 1] if each != ABSENT), None) if column else None
    for index, group in enumerate(calls.groups):
        if index == cells.group or not sisters(own, group):
            continue
        for rank in group.ranks:
            row, previous = (calls.at(index, rank, int(each)) for each in (cells.numbers[column], before))
            if row is None:
                continue
            if common is not None and previous is not None and _agreed(calls, previous) != common:
                continue  # another program: a stage of its own
            seen[_agreed(calls, row)] += 1
    decided = [each for each in votes if seen[each] >= 2]
    return decided[0] if len(decided) == 1 and sum(seen.values()) == seen[decided[0]] else None


def _agreed(calls: Calls, row: int) -> int:
    return int(calls.agreed[calls.table.signature[row]])


def sisters(one: Group, other: Group) -> bool:
    """Whether two groups have the same purpose and size and no rank in common."""
    return (
        one.description == other.description
        and len(one.ranks) == len(other.ranks)
        and not set(one.ranks) & set(other.ranks)
    )
