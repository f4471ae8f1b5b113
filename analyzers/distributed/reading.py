"""Reads what a capsule holds on collectives into columns: records, how far ranks came, and the words of watchdogs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from ..attempts import current_events, past_events
from . import thresholds as T
from .collectives import COMPLETED, MOST_RANKS, UNKNOWN, Calls, Group, Ints, Reached, Record, Table
from .signatures import POINT_TO_POINT, UNTOLD, Agreement, Shapes, Signature, agreement, dtype_name, liberties
from .unstated import as_the_others_say
from .watchdogs import words_of_watchdogs

if TYPE_CHECKING:
    from ...capsules import Capsule

#: States in the order in which a call passes them.
_STATES = {"scheduled": 0, "started": 1, "completed": COMPLETED}

_CALLS: WeakKeyDictionary[Capsule, Calls] = WeakKeyDictionary()


def calls(capsule: Capsule) -> Calls:
    """The collectives of a capsule, read once."""
    if capsule not in _CALLS:
        _CALLS[capsule] = _Reading(capsule).result()
    return _CALLS[capsule]


class _Reading:
    """Reads the streams of one capsule into columns."""

    def __init__(self, capsule: Capsule) -> None:
        self._capsule = capsule
        self._columns = capsule.columns("collectives")
        self._words: list[Record] = []
        self._groups: list[tuple[str, str, tuple[int, ...]]] = []
        self._named: dict[tuple[Any, ...], int] = {}
        self._signatures: dict[Any, int] = {}
        self._calls: list[Signature] = []

    def result(self) -> Calls:
        table, direct = self._tables()
        groups = self._resolved()
        table.group[:] = groups[table.group] if len(table) else table.group
        direct.group[:] = groups[direct.group] if len(direct) else direct.group
        direct = _without_repeats(direct)
        mixed = frozenset(np.unique(direct.group).tolist())
        status = [each for each in self._capsule.records("ranks") if _status(each)]
        timeouts = words_of_watchdogs(self._capsule, status)
        # A watchdog's words stand for the call that nothing else shows.
        seen = set(np.unique(np.concatenate([table.group, direct.group])).tolist())
        words = self._of_words(timeouts, seen)
        if words:
            table = _joined(table, _table(words))
        table = self._merged(_without_repeats(table))
        reached = self._reached(table, mixed, status, timeouts)
        _end(table, reached, mixed)
        rules = liberties(self._calls)
        table.signature[:] = as_the_others_say(table, self._calls, rules)
        agreements: dict[Agreement, int] = {}
        agreed = [agreements.setdefault(agreement(each, rules), len(agreements)) for each in self._calls]
        speaking = {each["rank"] for each in (*status, *timeouts)}.union(*(_ranks(each) for each in (table, direct)))
        world, stated = self._world(speaking)
        named = tuple(self._group(index, world, stated, table) for index in range(len(self._groups)))
        return Calls(
            columns=self._columns,
            words=tuple(self._words),
            groups=named,
            table=table,
            direct=direct,
            signatures=tuple(self._calls),
            agreements=tuple(agreements),
            agreed=np.array(agreed, np.int64),
            reached=reached,
            spoke=frozenset(each for each in speaking if 0 <= each < MOST_RANKS),
            dumped=frozenset(each["rank"] for each in self._capsule.records("ranks") if each.get("dump") is True),
            status_of=frozenset(each["rank"] for each in status),
            broken=frozenset(each["rank"] for each in status if each.get("entries_lost")),
            world=world,
            mixed=mixed,
            written=_written(status, table),
            timeouts=tuple(each for each in timeouts if each.get("kind") == "collective_timeout"),
            past=tuple(each for each in past_events(self._capsule) if each.get("kind") == "collective_timeout"),
            mismatches=tuple(
                each for each in current_events(self._capsule) if each.get("kind") == "collective_mismatch"
            ),
        )

    # -- groups

    def _group_of(self, name: Any, description: Any, ranks: Any) -> int:
        # Ranks by their ends: lists of one name that differ in between are one group in any case.
        key = (name, ranks[0], ranks[-1], len(ranks)) if ranks else (name,)
        found = self._named.get(key)
        if found is None:
            found = self._named[key] = len(self._groups)
            own = tuple(sorted(set(ranks))) if ranks else ()
            self._groups.append(("0" if name is None else str(name), str(description or ""), own))
        return found

    def _resolved(self) -> Ints:
        """int[G]: one number for all spellings of a group; those of one name with no rank in common stay apart."""
        same = np.arange(len(self._groups))
        by_name: dict[str, list[int]] = defaultdict(list)
        for index, (name, description, ranks) in enumerate(self._groups):
            for other in by_name[name]:
                theirs = self._groups[other]
                if not ranks or not theirs[2] or set(ranks) & set(theirs[2]):
                    same[index] = other
                    union = tuple(sorted({*ranks, *theirs[2]}))
                    self._groups[other] = (name, theirs[1] or description, union)
                    break
            else:
                by_name[name].append(index)
        # From here on there are only those that stand for the others.
        kept, number = np.unique(same, return_inverse=True)
        self._groups = [self._groups[each] for each in kept.tolist()]
        self._named = {key: int(number[index]) for key, index in self._named.items()}
        return number

    def _group(self, index: int, world: int, stated: bool, table: Table) -> Group:
        name, description, ranks = self._groups[index]
        whole = bool(ranks) or (name == "0" and stated)
        if not ranks:
            taking_part = set(table.rank[table.group == index].tolist())
            ranks = tuple(range(world)) if name == "0" else tuple(sorted(taking_part))
        return Group(name, description, tuple(each for each in ranks if each < MOST_RANKS), whole)

    def _world(self, speaking: Iterable[int]) -> tuple[int, bool]:
        """The number of ranks, and whether anything states it: else it is that of the highest known, or more."""
        run = self._capsule.manifest.run
        declared = run.world_size if run is not None and run.world_size else 0
        stated = max(declared, *(ranks[-1] + 1 for name, _, ranks in self._groups if name == "0" and ranks), 0)
        members = [rank for _, _, ranks in self._groups for rank in ranks[-1:]]
        known = max(stated, *(each + 1 for each in (*members, *speaking, *(() if stated else self._capsule.ranks))), 0)
        return min(MOST_RANKS, known), stated == known

    # -- calls

    def _signature(self, op: Any, dtype: Any, inputs: Any, outputs: Any) -> int:
        key = (op, dtype, _shape(inputs), _shape(outputs))
        found = self._signatures.get(key)
        if found is None:
            found = self._signatures[key] = len(self._calls)
            self._calls.append(Signature(str(op or UNTOLD), dtype_name(dtype), key[2], key[3]))
        return found

    def _tables(self) -> tuple[Table, Table]:
        """The records in columns, collectives and sends apart; the groups are not resolved yet."""
        columns = self._columns
        ended = columns.floats("t_completed")
        table = Table(
            rank=columns.integers("rank"),
            group=self._each(("group", "group_desc", "group_ranks"), self._group_of),
            seq=columns.integers("seq"),
            order=columns.integers("order"),
            signature=self._each(("op", "dtype", "shapes_in", "shapes_out"), self._signature),
            state=np.where(np.isnan(ended), self._each(("state",), _state), COMPLETED),
            created=columns.floats("t_created"),
            ended=ended,
            timeout=columns.floats("timeout_s"),
            peer=columns.integers("peer"),
            record=np.arange(len(columns)),
        )
        alone = np.array([each.family in POINT_TO_POINT for each in self._calls], np.bool_)
        direct = self._each(("p2p",), bool).astype(np.bool_)
        direct |= alone[table.signature] if len(alone) else direct
        return table.take(~direct), table.take(direct)

    def _each(self, names: tuple[str, ...], number: Callable[..., int]) -> Ints:
        """int64[N]: what a function makes of some fields of each record, asked once for records that are alike."""
        found, places = self._columns.combinations(*names)
        return np.array([number(*each) for each in found], np.int64)[places]

    def _of_words(self, timeouts: Iterable[Record], seen: set[int]) -> list[tuple[Any, ...]]:
        """Rows for calls that only a watchdog speaks of."""
        rows: list[tuple[Any, ...]] = []
        for event in timeouts:
            seq, rank = event.get("seq"), event["rank"]
            group = self._group_of(event.get("group"), event.get("group_desc"), None)
            same = [i for i, each in enumerate(self._groups) if each[0] == self._groups[group][0] and i in seen]
            if same or type(seq) is not int or seq < 0 or event.get("kind") != "collective_timeout":
                continue
            shapes = event.get("shapes") or [[size] for size in (event.get("numel_in"),) if type(size) is int]
            out = [[size] for size in (event.get("numel_out"),) if type(size) is int]
            number = len(self._columns) + len(self._words)
            self._words.append(event)
            signature = self._signature(_word(event.get("op")), _word(event.get("dtype")), _lists(shapes), out)
            started, ran = _number(event.get("t")), _number(event.get("ran_s"))
            created = started - ran if started is not None and ran is not None else None
            timeout = _number(event.get("timeout_s"))
            rows.append((rank, group, seq, UNKNOWN, signature, 0, created, None, timeout, UNKNOWN, number))
        return rows

    def _merged(self, table: Table) -> Table:
        """Number what has no number, and make one row of the parts of a coalesced call."""
        order = np.lexsort((np.arange(len(table)), table.order, table.seq, table.rank, table.group))
        table = table.take(order)
        unnumbered = table.seq < 0
        if unnumbered.any():
            counted: dict[tuple[int, int], int] = {}
            some = set(zip(table.group[~unnumbered].tolist(), table.rank[~unnumbered].tolist(), strict=True))
            keep = np.ones(len(table), np.bool_)
            for row in np.flatnonzero(unnumbered).tolist():
                key = (int(table.group[row]), int(table.rank[row]))
                if key in some:
                    keep[row] = False  # no place can be told among calls that have one
                    continue
                counted[key] = counted.get(key, 0) + 1
                table.seq[row] = counted[key]
            table = table.take(keep)
        same = (
            (table.seq[1:] == table.seq[:-1])
            & (table.rank[1:] == table.rank[:-1])
            & (table.group[1:] == table.group[:-1])
        )
        if not same.any():
            return table
        starts = np.flatnonzero(np.concatenate([[True], ~same]))
        ends = np.append(starts[1:], len(table))
        several = ends - starts > 1
        for start, end in zip(starts[several].tolist(), ends[several].tolist(), strict=True):
            numbers = tuple(table.signature[start:end].tolist())
            key = ("coalesced", numbers)
            if key not in self._signatures:
                parts = tuple(self._calls[each] for each in numbers)
                self._signatures[key] = len(self._calls)
                self._calls.append(Signature("coalesced", parts[0].dtype, parts[0].inputs, parts[0].outputs, parts))
            table.signature[start] = self._signatures[key]
            table.state[start] = table.state[start:end].min()
        return table.take(starts)

    # -- how far each rank came

    def _reached(
        self, table: Table, mixed: frozenset[int], status: list[Record], timeouts: Iterable[Record]
    ) -> dict[tuple[int, int], Reached]:
        found: dict[tuple[int, int], Reached] = defaultdict(Reached)
        if len(table):
            last = np.flatnonzero(
                np.append((table.group[1:] != table.group[:-1]) | (table.rank[1:] != table.rank[:-1]), True)
            )
            for row in last.tolist():
                found[int(table.group[row]), int(table.rank[row])].enqueued = int(table.seq[row])
            done = np.flatnonzero(~table.pending)
            keys = table.group[done] * (MOST_RANKS + 1) + np.minimum(table.rank[done], MOST_RANKS)
            unique, first = np.unique(keys[::-1], return_index=True)
            for row in done[::-1][first].tolist() if len(unique) else []:
                found[int(table.group[row]), int(table.rank[row])].completed = int(table.seq[row])
        names: dict[str, list[int]] = defaultdict(list)
        for index, (name, _, _) in enumerate(self._groups):
            names[name].append(index)

        def tell(name: str, rank: int, enqueued: Any, completed: Any) -> None:
            for index in names.get(name, ()):
                ranks = self._groups[index][2]
                if index in mixed or (ranks and rank not in ranks):
                    continue  # numbers of a group that sends and receives count those
                reached = found[index, rank]
                if type(enqueued) is int:
                    reached.enqueued = max(reached.enqueued, enqueued)
                if type(completed) is int:
                    reached.completed = max(reached.completed, completed)

        for record in status:
            enqueued, completed = record.get("last_seq") or {}, record.get("last_completed") or {}
            for name in {*enqueued, *completed}:
                tell(name, record["rank"], enqueued.get(name), completed.get(name))
        for event in timeouts:
            name = "0" if event.get("group") is None else str(event["group"])
            tell(name, event["rank"], event.get("last_enqueued"), event.get("last_completed"))
        return dict(found)


def _end(table: Table, reached: Mapping[tuple[int, int], Reached], mixed: frozenset[int]) -> None:
    """What lies at or before the last completed call of its group has ended, whatever its state says."""
    if len(table):
        starts = np.flatnonzero(
            np.concatenate([[True], (table.group[1:] != table.group[:-1]) | (table.rank[1:] != table.rank[:-1])])
        )
        ends = np.append(starts[1:], len(table))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            key = (int(table.group[start]), int(table.rank[start]))
            if key in reached and key[0] not in mixed:
                until = start + int(np.searchsorted(table.seq[start:end], reached[key].completed, side="right"))
                table.state[start:until] = COMPLETED


def _written(status: list[Record], table: Table) -> dict[int, float]:
    """When each rank's dump was written, as far as its file says; nothing where a call in one is younger than it."""
    told = {each["rank"]: _number(each.get("dumped", each.get("t"))) for each in status if each.get("dump") is True}
    known = {rank: moment for rank, moment in told.items() if moment is not None and np.isfinite(moment)}
    ranks, places = np.unique(table.rank, return_inverse=True)
    moments = np.array([known.get(rank, np.inf) for rank in ranks.tolist()], np.float64)[places]
    return {} if (table.created > moments + T.CLOCK_S).any() else known


def _ranks(table: Table) -> set[int]:
    return set(np.unique(table.rank).tolist())


def _state(state: str | None) -> int:
    """UNKNOWN, which is of a call that has not ended as far as is known, where none is stated."""
    return _STATES.get(state or "", UNKNOWN)


def _status(record: Record) -> bool:
    return bool(record.get("last_seq") or record.get("last_completed") or record.get("dump"))


def _table(rows: list[tuple[Any, ...]]) -> Table:
    columns = list(zip(*rows, strict=True))
    rank, group, seq, order, signature, state, peer, record = (
        np.array(columns[each], np.int64) for each in (0, 1, 2, 3, 4, 5, 9, 10)
    )
    created, ended, timeout = (np.array(each, np.float64) for each in columns[6:9])
    return Table(rank, group, seq, order, signature, state, created, ended, timeout, peer, record)


def _joined(one: Table, other: Table) -> Table:
    return Table(*(np.concatenate([getattr(one, n), getattr(other, n)]) for n in Table.__dataclass_fields__))


def _without_repeats(table: Table) -> Table:
    """One row for a call that is on record twice (a dump that was copied); the further state counts.

    They come by rank and its order; where they lie so already, with one call a place, none is there twice.
    """
    onward = (table.rank[1:] == table.rank[:-1]) & (table.order[1:] > table.order[:-1])
    if np.all(onward | (table.rank[1:] > table.rank[:-1])):
        return table
    keys = (table.state, table.peer, table.signature, table.seq, table.group, table.order, table.rank)
    order = np.lexsort((np.arange(len(table)), *keys))
    same = np.ones(max(0, len(table) - 1), np.bool_)
    for column in keys[1:]:
        ordered = column[order]
        same &= ordered[1:] == ordered[:-1]
    return table.take(order[np.append(~same, True)[: len(table)]]) if len(table) else table


def _shape(value: Any) -> Shapes:
    return tuple(map(tuple, value)) if value else ()


def _lists(value: Any) -> Any:
    sound = isinstance(value, list) and all(
        isinstance(each, list) and all(type(size) is int for size in each) for each in value
    )
    return value if sound else None


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
