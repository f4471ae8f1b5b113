"""Which rank did which collective, and how far it got: a grid of ranks and collectives, cut to the screen.

A collective is known by its sequence number in its process group. Where ranks say different things of one number, the
majority is what was meant, and the others differ from it; that is a picture, and the verdict is a rule's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...capsules import Capsule
from ..text import one_line
from .kept import kept
from .types import RankRow, RanksGrid

#: What a cell says: missing, done, waiting, differs, not captured (the buffer begins later, or no dump), no state.
MISSING, DONE, WAITING, DIFFERS, BEFORE, UNKNOWN = range(6)
SIGNS = " ·○✗-?"

_STATES = {"completed": DONE, "started": WAITING, "scheduled": WAITING}

#: Here shapes lawfully depend on the rank: uneven splits, or a list on one rank only.
_SHAPES_MAY_DIFFER = ("all_to_all", "alltoall", "gather", "scatter")
_SHAPES_MUST_AGREE = ("all_gather", "allgather", "reduce_scatter")

Signature = tuple[str, str, str]


@dataclass(frozen=True)
class _Group:
    """One process group: ``cells`` [ranks, collectives], and what each rank recorded of each collective."""

    ranks: tuple[int, ...]
    seqs: tuple[int, ...]
    cells: NDArray[np.int8]
    signatures: NDArray[np.int32]  # index into ``names``, -1 where nothing was recorded
    meant: NDArray[np.int32]
    names: tuple[Signature, ...]
    first: int | None


@dataclass(frozen=True)
class _Table:
    groups: dict[str, _Group]
    summaries: dict[int, Mapping[str, Any]]
    note: str


def ranks(
    path: str,
    columns: int,
    rows: int,
    group: str | None = None,
    at: int | None = None,
    row: int | None = None,
) -> RanksGrid:
    """A window of ``rows`` × ``columns`` cells with the cursor in its middle.

    Args:
        path: the capsule.
        columns: collectives that fit on the screen.
        rows: ranks that fit.
        group: process group; default the one with the earliest difference.
        at: collective at the cursor; default the first in which ranks differ, else the last.
        row: rank (its place in the group) at the cursor; default the first that differs there.
    """
    table = kept(path, "ranks", _table)
    chosen = group if group in table.groups else _worst(table)
    if chosen is None:
        return _without_collectives(table, rows, row or 0)
    here = table.groups[chosen]
    last = len(here.seqs) - 1
    at = min(max(0, at), last) if at is not None else here.first if here.first is not None else last
    row = min(max(0, row), len(here.ranks) - 1) if row is not None else _odd_one(here.cells[:, at])
    left, top = _window(at, columns, len(here.seqs)), _window(row, rows, len(here.ranks))
    shown = here.cells[top : top + rows, left : left + columns]
    return RanksGrid(
        group=chosen,
        groups=tuple(table.groups),
        columns=len(here.seqs),
        left=left,
        at=at,
        count=len(here.ranks),
        top=top,
        row=row,
        first=here.first,
        rows=tuple(
            _row(rank, "".join(SIGNS[cell] for cell in cells), table.summaries.get(rank))
            for rank, cells in zip(here.ranks[top : top + rows], shown, strict=True)
        ),
        detail=_detail(here, at, row),
        longest_ms=_longest(table),
        note=table.note,
    )


def _without_collectives(table: _Table, rows: int, row: int) -> RanksGrid:
    """Only the bars: every rank that said something of itself."""
    known = sorted(table.summaries)
    row = min(max(0, row), max(0, len(known) - 1))
    top = _window(row, rows, len(known))
    return RanksGrid(
        group="", groups=(), columns=0, left=0, at=0, count=len(known), top=top, row=row, first=None,
        rows=tuple(_row(rank, "", table.summaries[rank]) for rank in known[top : top + rows]),
        detail=(), longest_ms=_longest(table), note="no collectives were captured",
    )  # fmt: skip


# -- the table


def _table(capsule: Capsule) -> _Table:
    by_group: dict[str, dict[int, dict[int, Mapping[str, Any]]]] = {}
    members: dict[str, set[int]] = {}
    unplaced = 0
    for record in capsule.records("collectives"):
        seq = record.get("seq")
        if record.get("p2p") or seq is None:
            unplaced += 1
            continue
        name = str(record.get("group") if record.get("group") is not None else "default")
        by_group.setdefault(name, {}).setdefault(record["rank"], {})[seq] = record
        members.setdefault(name, set()).update(record.get("group_ranks") or (), (record["rank"],))
    captured = {rank for by_rank in by_group.values() for rank in by_rank}
    groups = {name: _group(sorted(members[name]), by_rank, captured) for name, by_rank in by_group.items()}
    # The last record of a rank counts.
    summaries: dict[int, Mapping[str, Any]] = {record["rank"]: record for record in capsule.records("ranks")}
    note = f"{unplaced:,} point-to-point or unnumbered operations are not in the grid" if unplaced else ""
    return _Table(groups, summaries, note)


def _group(ranks: list[int], by_rank: Mapping[int, Mapping[int, Mapping[str, Any]]], captured: set[int]) -> _Group:
    seqs = sorted({seq for records in by_rank.values() for seq in records})
    column = {seq: index for index, seq in enumerate(seqs)}
    names: dict[Signature, int] = {}
    cells = np.full((len(ranks), len(seqs)), MISSING, dtype=np.int8)
    signatures = np.full((len(ranks), len(seqs)), -1, dtype=np.int32)
    for index, rank in enumerate(ranks):
        for seq, record in by_rank.get(rank, {}).items():
            cells[index, column[seq]] = _STATES.get(str(record.get("state")), UNKNOWN)
            signatures[index, column[seq]] = names.setdefault(_signature(record), len(names))
        if recorded := by_rank.get(rank):  # a ring buffer forgets: what came before its first entry is no difference
            cells[index, : column[min(recorded)]] = BEFORE
        elif rank not in captured:  # its dump is not here, which says nothing of what it did
            cells[index] = BEFORE
    meant = _majority(signatures, len(names))
    cells[(signatures >= 0) & (signatures != meant)] = DIFFERS
    return _Group(tuple(ranks), tuple(seqs), cells, signatures, meant, tuple(names), _first_difference(cells))


def _signature(record: Mapping[str, Any]) -> Signature:
    op, free = _operation(str(record.get("op") or ""))
    return op, str(record.get("dtype") or ""), "" if free else _shapes(record.get("shapes_in"))


@lru_cache(maxsize=256)
def _operation(op: str) -> tuple[str, bool]:
    """The name without the back end (``nccl:``), and whether its shapes lawfully depend on the rank."""
    plain = op.lower().rpartition(":")[2].lstrip("_")
    must = any(each in plain for each in _SHAPES_MUST_AGREE)
    return op.rpartition(":")[2], not must and any(each in plain for each in _SHAPES_MAY_DIFFER)


def _shapes(shapes: Sequence[Sequence[int]] | None) -> str:
    if not shapes:
        return ""
    return str(shapes[0]) if len(shapes) == 1 else str(shapes)


def _majority(signatures: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """What most ranks say of each collective; of a tie, what the lowest of those ranks says.

    Args:
        signatures: [ranks, collectives], -1 where a rank recorded nothing.
        count: number of signatures.

    Returns:
        [collectives]
    """
    low = np.where(signatures < 0, count, signatures).min(axis=0).astype(np.int32)
    high = signatures.max(axis=0)
    meant = high.copy()
    for index in np.flatnonzero(low != high):
        said = signatures[:, index]
        said = said[said >= 0]
        votes = np.bincount(said, minlength=count)
        meant[index] = next(each for each in said if votes[each] == votes.max())
    return meant


def _first_difference(cells: NDArray[np.int8]) -> int | None:
    """The first collective of which not all ranks say the same, leaving out what a ring buffer forgot."""
    known = cells != BEFORE
    low = np.where(known, cells, UNKNOWN + 1).min(axis=0)
    high = np.where(known, cells, -1).max(axis=0)
    different = np.flatnonzero(low != high)
    return int(different[0]) if different.size else None


def _worst(table: _Table) -> str | None:
    """The group to show first: one in which ranks differ before one in which they only wait, then the largest."""
    if not table.groups:
        return None

    def need(name: str) -> tuple[bool, bool, int]:
        group = table.groups[name]
        return group.first is None, not bool((group.cells == WAITING).any()), -len(group.ranks)

    return min(table.groups, key=need)


# -- the window


def _window(cursor: int, size: int, count: int) -> int:
    """First index on screen so that the cursor is in the middle where the ends allow it."""
    return max(0, min(cursor - size // 2, count - size))


def _odd_one(cells: NDArray[np.int8]) -> int:
    """The rank to look at: the first that says what fewest say, where any differs."""
    values, counts = np.unique(cells[cells != BEFORE], return_counts=True)
    if len(values) < 2:
        return 0
    return int(np.flatnonzero(cells == values[int(counts.argmin())])[0])


def _row(rank: int, cells: str, summary: Mapping[str, Any] | None) -> RankRow:
    told = summary or {}
    end = told.get("exit") or {}
    return RankRow(
        rank=rank,
        cells=cells,
        host=str(told.get("host") or ""),
        exit="" if end.get("kind") in (None, "ok") else str(end["kind"]),
        compute_ms=told.get("compute_ms"),
        communication_ms=told.get("communication_ms"),
        data_ms=told.get("data_ms"),
    )


def _longest(table: _Table) -> float:
    sums = [
        sum(each.get(name) or 0.0 for name in ("compute_ms", "communication_ms", "data_ms"))
        for each in table.summaries.values()
    ]
    return max((each for each in sums if each == each), default=0.0)


def _detail(group: _Group, at: int, row: int) -> tuple[str, ...]:
    """What most ranks did in the collective at the cursor, who did otherwise, and what the rank at the cursor did."""
    column = group.cells[:, at]
    ranks = np.array(group.ranks)
    head = f"seq {group.seqs[at]:,}"
    for words, code in (("differs", DIFFERS), ("missing", MISSING)):
        if (who := ranks[column == code]).size:
            head += f" · {words}: rank {_listed(who)}"
    for words, code in (("done", DONE), ("waiting", WAITING)):
        if count := int((column == code).sum()):
            head += f" · {count} {words}"
    head += f" · {_words(group.names[group.meant[at]])}"
    state = {
        MISSING: "never came to it",
        DONE: "done",
        WAITING: "in it, not done",
        BEFORE: "not captured, its buffer begins later or its dump is not here",
        UNKNOWN: "no state recorded",
    }
    here = f"rank {group.ranks[row]}: "
    if column[row] == DIFFERS:
        here += f"did {_words(group.names[group.signatures[row, at]])}"
    else:
        here += state[int(column[row])]
        if column[row] == MISSING and (own := np.flatnonzero(group.signatures[row] >= 0)).size:
            last = int(own[-1])
            here += f"; its last is seq {group.seqs[last]:,}  {_words(group.names[group.signatures[row, last]])}"
        elif column[row] == MISSING:
            here += "; it took part in other groups only"
    return head, here


def _words(signature: Signature) -> str:
    return one_line(" ".join(each for each in signature if each), 120)


def _listed(ranks: NDArray[np.int64], most: int = 8) -> str:
    words = ", ".join(str(each) for each in ranks[:most])
    return words if len(ranks) <= most else f"{words} … ({len(ranks)})"
