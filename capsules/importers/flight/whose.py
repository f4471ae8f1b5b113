"""Whose dump it is: the rank in the file's name, or what only one rank can have recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from .dump import Dump
from .tables import Operation, Tables

Note = Callable[..., None]


def assign_ranks(dumps: Sequence[Dump], tables: Tables, note: Note) -> list[int]:
    """The rank of each dump.

    A number in a name is believed where the groups of the dump have that member, or where the names of all files have
    numbers of their own and most fit. Otherwise a direct call tells (``send 1->2`` is member 1's), then who is in all
    groups of the dump, then which rank is left.
    """
    members: Callable[[tuple[int, ...]], frozenset[int]] = cache(frozenset)  # ranks of one group share its set
    candidates = [_candidates(dump, tables, members) for dump in dumps]
    found: list[int | None] = [
        dump.named if dump.named is not None and (not possible or dump.named in possible) else None
        for dump, possible in zip(dumps, candidates, strict=True)
    ]
    numbers = [dump.named for dump in dumps]
    fitting = sum(each is not None for each in found)
    if len(dumps) > 1 and None not in numbers and len(set(numbers)) == len(dumps) and 2 * fitting > len(dumps):
        return [each or 0 for each in numbers]
    taken = {each for each in found if each is not None}
    settled = True
    while settled:
        settled = False
        for at, rank in enumerate(found):
            left = candidates[at] - taken if len(candidates[at]) > 1 else candidates[at]
            if rank is None and len(left) == 1:
                found[at] = next(iter(left))
                taken |= left
                settled = True
    for at, rank in enumerate(found):
        if rank is None:
            free = candidates[at] - taken or candidates[at]
            number = min(free) if free else next(each for each in range(len(dumps) + len(taken)) if each not in taken)
            found[at] = number
            taken.add(number)
            note(f"nothing tells which rank wrote it; taken for rank {number}")
    return [each or 0 for each in found]


def _candidates(dump: Dump, tables: Tables, members: Callable[[tuple[int, ...]], frozenset[int]]) -> frozenset[int]:
    """The ranks that may have written a dump; none where nothing tells."""
    told = {group.ranks for group in (*dump.config.values(), *dump.groups) if group.ranks}
    possible = frozenset[int]()
    for at, ranks in enumerate(sorted(told, key=len)):  # from the smallest on, so that no large set is made of two
        possible = possible & members(ranks) if at else members(ranks)
    own: set[int] = set()
    for place, op in set(zip(dump.calls.group, dump.calls.op, strict=True)):
        operation: Operation = tables.operations.values[op]
        ranks = dump.groups[place].ranks
        if operation.direct and operation.own is not None and operation.own < len(ranks):
            own.add(ranks[operation.own])
    if len(own) == 1:
        return frozenset(own)
    return possible
