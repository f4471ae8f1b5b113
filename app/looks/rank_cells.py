"""The calls of a process group as cells rank × call, aligned: a call that one rank skipped or added shifts nothing.

The alignment is that of the rules, so that the picture and the verdict cannot part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...analyzers.distributed.alignment import ABSENT, Grid, Parting, grid
from ...analyzers.distributed.collectives import Calls
from ...analyzers.distributed.diagnosis import Diagnosis, involved

#: What a cell says: missing, done, waiting, differs, not kept (lost, forgotten by its buffer, no dump) or not asked.
MISSING, DONE, WAITING, DIFFERS, BEFORE = range(5)
SIGNS = " ·○✗-"


@dataclass(frozen=True)
class Cells:
    """One process group.

    Attributes:
        group: number of the group among the calls.
        label: the group in words.
        ranks: its members.
        numbers: of each column, the call's number in the group as most ranks count.
        cells: int8 [ranks, columns].
        row: int64 [ranks, columns], the row in the table of calls, ABSENT where there is none.
        first: the first column in which ranks differ, None where they do not.
        undecided: the ranks of both sides of columns in which nothing tells who is right; all of them differ alike.
    """

    group: int
    label: str
    ranks: tuple[int, ...]
    numbers: tuple[int, ...]
    cells: NDArray[np.int8]
    row: NDArray[np.int64]
    first: int | None
    undecided: dict[int, tuple[int, ...]]


def of_group(told: Diagnosis, index: int) -> Cells | None:
    """The cells of one group, None where no call of it is on record."""
    calls = told.calls
    known = grid(calls, index)
    if not len(known.numbers):
        return None
    own = [each for each in told.partings if each.group == index]
    members = sorted({*calls.groups[index].ranks, *map(int, known.ranks)})
    row, numbers, asked, marks = _aligned(known, own)
    placed = np.full((len(members), row.shape[1]), ABSENT, np.int64)
    placed[np.searchsorted(members, known.ranks)] = row
    cells = _states(calls, placed, [rank in calls.spoke for rank in members])
    _count(calls, index, members, numbers, placed, cells, own)
    cells[:, ~asked] = np.where(placed[:, ~asked] == ABSENT, BEFORE, cells[:, ~asked])
    undecided: dict[int, tuple[int, ...]] = {}
    for parting, column in marks:
        at = np.flatnonzero(np.isin(members, involved(parting)))
        if parting.decided == "none":  # what one side alone calls is a difference of both
            undecided[column] = tuple(members[each] for each in at)
        else:
            at = at[placed[at, column] != ABSENT]
        cells[at, column] = DIFFERS
    return Cells(
        index, str(calls.groups[index]), tuple(members), tuple(numbers.tolist()), cells, placed,
        _first(told, index, numbers, cells, [column for _, column in marks]), undecided,
    )  # fmt: skip


def _aligned(
    known: Grid, partings: Iterable[Parting]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], list[tuple[Parting, int]]]:
    """Rows of the calls with each rank's calls under those that it made together with the others.

    Returns:
        Rows [ranks, columns], the number of each column, whether all members were to make its call, and the columns in
        which the ranks of a parting differ.
    """
    partings = list(partings)
    columns = len(known.numbers)
    at = {parting: int(np.searchsorted(known.numbers, parting.seq)) for parting in partings}
    inserted = np.zeros(columns + 1, np.int64)
    longest = max((each.length for each in partings if each.edit == "skipped"), default=0)
    for each in partings:
        if each.edit == "added":
            inserted[at[each]] = max(inserted[at[each]], each.length)
    place = np.arange(columns + longest) + np.cumsum(np.append(inserted[:columns], np.zeros(longest, np.int64)))
    width = int(place[-1]) + 1
    row = np.full((len(known.ranks), width), ABSENT, np.int64)
    for index, rank in enumerate(known.ranks.tolist()):
        where = place[:columns].copy()
        for each in partings:
            if rank not in each.ranks:
                continue
            start, length = at[each], each.length
            if each.edit == "skipped":
                where[start:] = place[start + length : columns + length]
            elif each.edit == "added":
                new = int(place[start]) - length
                where[start : start + length] = np.arange(new, new + length)[: columns - start]
                where[start + length :] = place[start : columns - length]
        row[index, where] = known.row[index]
    marks: list[tuple[Parting, int]] = []
    for each in partings:
        first = int(place[at[each]]) - (each.length if each.edit == "added" else 0)
        marks += [(each, first + step) for step in range(each.length) if first + step < width]
    numbers = np.full(width, -1, np.int64)
    numbers[place[:columns]] = known.numbers
    asked = numbers >= 0
    empty = (row == ABSENT).all(axis=0)  # what only the numbers of a rank that skipped something reach
    numbers[place[columns:]] = known.numbers[-1] + 1 + np.arange(longest)
    asked[place[columns:]] = True
    keep = ~empty
    shift = np.cumsum(keep) - 1
    return row[:, keep], numbers[keep], asked[keep], [(each, int(shift[c])) for each, c in marks if keep[c]]


def _states(calls: Calls, row: NDArray[np.int64], spoke: list[bool]) -> NDArray[np.int8]:
    pending = np.append(calls.table.pending, False)
    cells = np.where(row == ABSENT, MISSING, np.where(pending[row], WAITING, DONE)).astype(np.int8)
    for index, known in enumerate(spoke):
        own = np.flatnonzero(row[index] != ABSENT)
        if len(own):  # a ring buffer forgets: what came before its first entry is no difference
            cells[index, : own[0]] = BEFORE
        elif not known:  # its dump is not here, which says nothing of what it did
            cells[index] = BEFORE
    return cells


def _count(
    calls: Calls,
    group: int,
    members: list[int],
    numbers: NDArray[np.int64],
    row: NDArray[np.int64],
    cells: NDArray[np.int8],
    partings: Iterable[Parting],
) -> None:
    """A call that the last numbers of its rank cover was made, though its record is lost.

    That count is the one of all ranks until the rank leaves the common sequence.
    """
    left = {rank: each.seq for each in partings for rank in each.ranks}
    for index, rank in enumerate(members):
        if (reached := calls.reached.get((group, rank))) is None:
            continue
        lost = (row[index] == ABSENT) & (cells[index] == MISSING) & (numbers >= 0)
        lost &= numbers < left.get(rank, np.iinfo(np.int64).max)
        cells[index, lost & (numbers <= reached.enqueued)] = WAITING
        cells[index, lost & (numbers <= reached.completed)] = BEFORE


def _first(
    told: Diagnosis, index: int, numbers: NDArray[np.int64], cells: NDArray[np.int8], marked: list[int]
) -> int | None:
    """The first column that a rule would name; else, in a job that stands still, that in which states differ."""
    waits = [each.wait for each in (*told.missing, *told.added)]
    waits += [wait for circle in told.circles for wait, _ in circle.classes]
    place = {number: column for column, number in enumerate(numbers.tolist())}
    named = [place.get(each.seq) for each in waits if each.group == index and not each.direct]
    columns = [*marked, *(each for each in named if each is not None)]
    if columns:
        return min(columns)
    if told.still is None and not (cells == MISSING).any():
        return None
    known = cells != BEFORE
    low = np.where(known, cells, len(SIGNS)).min(axis=0)
    high = np.where(known, cells, -1).max(axis=0)
    different = np.flatnonzero(low < high)
    return int(different[0]) if len(different) else None
