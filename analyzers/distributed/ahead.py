"""Ranks that did more than ever between two calls of a group: they left one of its calls out and are a round ahead.

Hosts queue calls ahead of their devices, so that a rank that skipped a call has often entered the next one of that
number. No number is missing then; what it did in its other groups in between tells it.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from . import thresholds as T
from .collectives import Calls
from .waiting import Heads, Wait


def ahead(calls: Calls, heads: Heads, beyond: int = 0) -> list[Wait]:
    """Calls that most ranks of a group are in, while a few have them queued behind a round of others.

    Args:
        calls: the calls of the job.
        heads: the oldest call in flight of each rank.
        beyond: calls more than ever that are none yet, where calls may have been exchanged.

    Returns:
        For each such call a wait, in which the ranks that left a call out are ``absent``.
    """
    table = calls.table
    inside: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, (direct, row) in heads.items():
        if not direct:
            inside[int(table.group[row]), int(table.seq[row])].append(rank)
    found: list[Wait] = []
    for (group, seq), ranks in inside.items():
        others = set(calls.groups[group].ranks).difference(ranks)
        behind = [rank for rank in sorted(others) if calls.at(group, rank, seq) is not None]
        if len(ranks) < T.DECIDING_RANKS or not 0 < len(behind) < len(ranks):
            continue
        further = [rank for rank in behind if _did_more(calls, group, rank, seq, beyond)]
        if further and not any(_did_more(calls, group, rank, seq, 0) for rank in ranks):
            row = calls.at(group, ranks[0], seq)
            found.append(Wait(group, seq, tuple(sorted(ranks)), tuple(further), (), -1 if row is None else row))
    return found


def _did_more(calls: Calls, group: int, rank: int, seq: int, beyond: int) -> bool:
    """Whether a rank made more calls of any other group before a call than before each earlier one of its group."""
    rows = [calls.at(group, rank, each) for each in range(max(1, seq - T.ROUNDS), seq + 1)]
    orders = [int(calls.table.order[row]) for row in rows if row is not None]
    if len(orders) < 3 or min(orders) < 0:
        return False
    for other, start, end in calls.of_rank(rank):
        if other != group:
            places = np.sort(calls.table.order[start:end])
            made = np.diff(np.searchsorted(places, orders))
            if made[-1] > made[:-1].max() + beyond and made[:-1].any():
                return True
    return False
