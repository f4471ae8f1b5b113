"""Which rank did which collective, and how far it got: a grid of ranks and collectives, cut to the screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...analyzers.distributed.collectives import Calls
from ...analyzers.distributed.diagnosis import diagnosis
from ...analyzers.distributed.reproduction import among_sends
from ...capsules import Capsule
from ..text import one_line
from .kept import kept
from .rank_cells import BEFORE, DIFFERS, DONE, MISSING, SIGNS, WAITING, Cells, of_group
from .types import RankRow, RanksGrid


@dataclass(frozen=True)
class _Table:
    calls: Calls
    groups: dict[str, Cells]
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
    last = len(here.numbers) - 1
    at = min(max(0, at), last) if at is not None else here.first if here.first is not None else last
    row = min(max(0, row), len(here.ranks) - 1) if row is not None else _odd_one(here.cells[:, at])
    left, top = _window(at, columns, len(here.numbers)), _window(row, rows, len(here.ranks))
    shown = here.cells[top : top + rows, left : left + columns]
    return RanksGrid(
        group=chosen,
        groups=tuple(table.groups),
        columns=len(here.numbers),
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
        detail=_detail(table.calls, here, at, row),
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
        detail=(), longest_ms=_longest(table),
        note="; ".join(filter(None, ("no collectives were captured", table.note))),
    )  # fmt: skip


def _table(capsule: Capsule) -> _Table:
    told = diagnosis(capsule)
    groups: dict[str, Cells] = {}
    for index in range(len(told.calls.groups)):
        cells = of_group(told, index)
        if cells is not None:
            again = cells.label in groups  # one name for two sets of ranks
            groups[f"{cells.label} #{index + 1}" if again else cells.label] = cells
    # The last record of a rank counts.
    summaries: dict[int, Mapping[str, Any]] = {record["rank"]: record for record in capsule.records("ranks")}
    direct = len(told.calls.direct)
    note = f"{direct:,} sends and receives are not in the grid" if direct else ""
    note += ", and what is at fault is among them" if direct and among_sends(told) else ""
    return _Table(told.calls, groups, summaries, note)


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
    """The rank to look at: the first that differs, else the first that says what fewest say."""
    if (differs := np.flatnonzero(cells == DIFFERS)).size:
        return int(differs[0])
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


def _detail(calls: Calls, group: Cells, at: int, row: int) -> tuple[str, ...]:
    """What most ranks did in the collective at the cursor, who did otherwise, and what the rank at the cursor did."""
    column, made = group.cells[:, at], group.row[:, at]
    ranks = np.array(group.ranks)
    head = f"seq {group.numbers[at]:,}" if group.numbers[at] >= 0 else "a call of its own"
    if sides := group.undecided.get(at):
        head += f" · {_undecided(sides)}"
    for words, code in (("differs", DIFFERS), ("missing", MISSING)):
        if not (sides and code == DIFFERS) and (who := ranks[column == code]).size:
            head += f" · {words}: rank {_listed(who)}"
    for words, code in (("done", DONE), ("waiting", WAITING)):
        if count := int((column == code).sum()):
            head += f" · {count} {words}"
    usual = made[(made >= 0) & (column != DIFFERS)]
    if (meant := usual if usual.size else made[made >= 0]).size:
        signatures = Counter(calls.table.signature[meant].tolist())
        calls_here = [str(calls.signatures[each]) for each, _ in signatures.most_common(2 if sides else 1)]
        head += f" · {' or '.join(one_line(each, 120) for each in calls_here)}"
    state = {
        MISSING: "never came to it",
        DONE: "done",
        WAITING: "in it, not done",
        BEFORE: "not captured, its buffer begins later or its dump is not here",
    }
    reached = calls.reached.get((group.group, group.ranks[row]))
    if group.numbers[at] < 0:
        state[BEFORE] = "makes no such call"
    elif reached is not None and group.numbers[at] <= reached.completed and (group.row[row, :at] >= 0).any():
        state[BEFORE] = f"done, as its last number ({reached.completed:,}) says; its record is lost"
    here = f"rank {group.ranks[row]}: "
    if column[row] == DIFFERS and made[row] < 0:
        here += "made no such call here"
    elif column[row] == DIFFERS:
        here += f"did {_words(calls, int(made[row]))}"
    else:
        here += state[int(column[row])]
        if column[row] == MISSING and (own := np.flatnonzero(group.row[row] >= 0)).size:
            last = int(own[-1])
            skipped = last > at
            last = int(own[own < at][-1]) if skipped and (own < at).any() else last
            seq, words = group.numbers[last], f"  {_words(calls, int(group.row[row, last]))}"
            if not skipped and reached is not None and reached.enqueued > seq:
                seq, words = reached.enqueued, ", whose record is lost"
            here += f"; {'before it' if skipped else 'its last'} is seq {seq:,}{words}"
        elif column[row] == MISSING:
            if reached is not None and reached.enqueued >= 0:
                here += f"; its last is seq {reached.enqueued:,}"
            else:
                here += "; it took part in other groups only"
        elif made[row] >= 0 and (frame := calls.frame(int(made[row]))) is not None:
            here += f"  {one_line(frame, 200)}"
    return head, here


def _undecided(ranks: tuple[int, ...]) -> str:
    """That ranks differ, and that no rule says which of them is right."""
    if len(ranks) == 2:
        return f"rank {ranks[0]} and rank {ranks[1]} differ; of two nothing tells which"
    return f"rank {_listed(np.array(ranks))} differ; nothing tells which"


def _words(calls: Calls, row: int) -> str:
    """A call, and the line that made it."""
    frame = calls.frame(row)
    return one_line(f"{calls.call(row)}", 120) + (f"  {one_line(frame, 200)}" if frame is not None else "")


def _listed(ranks: NDArray[np.int64], most: int = 8) -> str:
    words = ", ".join(str(each) for each in ranks[:most])
    return words if len(ranks) <= most else f"{words} … ({len(ranks)})"
