"""What the dumps of one job say together: whose each is, who belongs to which group, and then the records."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...columns import Distinct
from ...errors import EvidenceError
from ..run import MOST_RANKS, Run
from .dump import Calls, Dump, Group, Status
from .tables import Operation, Tables
from .whose import assign_ranks

#: Members of all groups together that the manifest lists.
_MOST_LISTED = 200_000
#: Members of a group up to which they stand with the calls of each of them; those of a larger one stand once.
_MOST_REPEATED = 256
_STATES = ("scheduled", "started", "completed")
_COMPLETED = 2
#: A name by which torch calls the group of all ranks.
_DEFAULT = "default_pg"


@dataclass
class Job:
    """Dumps of one job in the order in which they were read."""

    tables: Tables
    dumps: list[Dump] = field(default_factory=list[Dump])

    def write(self, out: Run) -> None:
        """Write the collectives, a state for every rank, and what the dumps say of the job."""
        by_rank: dict[int, list[Dump]] = defaultdict(list)
        for rank, dump in zip(assign_ranks(self.dumps, self.tables, out.note), self.dumps, strict=True):
            by_rank[rank].append(dump)
        kept = {rank: _merged(dumps, self.tables.frames.values, out) for rank, dumps in sorted(by_rank.items())}
        groups = _Groups(kept, self.tables)
        failed: list[EvidenceError] = []
        for rank, dump in kept.items():
            try:
                _Rank(rank, dump, groups, self.tables, out).write()
            except EvidenceError as error:  # of this dump; the others count all the same
                failed.append(EvidenceError(f"the dump of rank {rank} was left out: {error}", dump.where))
        self._state(kept, groups, out)
        if failed:
            raise failed[0]

    def _state(self, kept: dict[int, Dump], groups: _Groups, out: Run) -> None:
        world = max(kept) + 1
        whole = [group.ranks for group in groups.all() if group.desc == _DEFAULT or group.name == "0"]
        told = [each for each in whole if each] or [each for each in (group.ranks for group in groups.all()) if each]
        if told:
            world = max(world, *(max(each) + 1 for each in told))
        backends = {self.tables.operations.values[op].backend for dump in kept.values() for op in set(dump.calls.op)}
        backends.discard("")
        libraries = {dump.library for dump in kept.values() if dump.library}
        listed: dict[str, Any] = {}
        room = _MOST_LISTED
        for group in groups.all():
            if group.ranks and len(group.ranks) <= room:
                listed[group.name] = {"desc": group.desc, "ranks": list(group.ranks)}
                room -= len(group.ranks)
        out.manifest(
            {
                "run": {"world_size": world, "backend": backends.pop() if len(backends) == 1 else None},
                "environment": {"nccl": libraries.pop() if len(libraries) == 1 and backends != {"gloo"} else None},
                "placement": {"groups": listed} if listed else None,
            }
        )


def _merged(dumps: list[Dump], stacks: Sequence[Any], out: Run) -> Dump:
    """The newest dump of a rank, with the calls of older ones that its buffer no longer holds."""
    if len(dumps) == 1:
        return dumps[0]
    newest, *older = sorted(dumps, key=_age, reverse=True)
    for dump in older:
        _take_frames(newest, dump, stacks)
        first = newest.calls.order[0] if len(newest.calls) else None
        if first is None or _began(newest) < _began(dump):
            first = -1  # another life of the process, whose numbers mean other calls
        earlier = [at for at, order in enumerate(dump.calls.order) if order < first]
        if earlier and dump.groups == newest.groups[: len(dump.groups)]:
            for name, column in vars(newest.calls).items():
                theirs = getattr(dump.calls, name)
                setattr(newest.calls, name, [theirs[at] for at in earlier] + column)
        elif dump.calls.order and dump.calls.order[-1] < first:
            out.note("an older dump of a rank knows other groups than the newest one; left out")
    out.note("several dumps of a rank: the newest counts", len(older))
    return newest


def _take_frames(dump: Dump, other: Dump, stacks: Sequence[Any]) -> None:
    """The JSON of a dump has no frames: take them from the pickle beside it."""
    nowhere = [at for at, frames in enumerate(dump.calls.frames) if stacks[frames] is None]
    if not nowhere:
        return
    calls = other.calls
    frames = dict(zip(zip(calls.order, calls.created, strict=True), calls.frames, strict=True))
    for at in nowhere:
        same = (dump.calls.order[at], dump.calls.created[at])
        dump.calls.frames[at] = frames.get(same, dump.calls.frames[at])


def _age(dump: Dump) -> tuple[float, int, float]:
    """Sorts dumps of one rank from the oldest to the newest."""
    calls = dump.calls
    times = [each for each in calls.created[-50:] if each is not None]
    reached = sum(each.completed or 0 for each in dump.status.values())
    return max(times, default=0.0), reached, dump.modified


def _began(dump: Dump) -> float:
    return min((each for each in dump.calls.created[:50] if each is not None), default=0.0)


class _Groups:
    """The groups of the job: one name may stand for several, and some dumps do not say who belongs to one."""

    def __init__(self, dumps: dict[int, Dump], tables: Tables) -> None:
        told: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        seen: dict[str, set[int]] = defaultdict(set)
        self._desc: dict[str, str] = {}
        self._listed: set[str] = set()
        #: Groups that carry direct calls: their counters do not count collectives.
        self.direct: set[str] = set()
        for rank, dump in dumps.items():
            for group in (*dump.config.values(), *dump.groups):
                if group.name or group.ranks:
                    self._desc.setdefault(group.name, group.desc)
                if group.ranks:
                    told[group.name].add(group.ranks)
            for group in dump.groups:
                seen[group.name].add(rank)
            calls = dump.calls
            for place in {group for group, direct in zip(calls.group, calls.direct, strict=True) if direct}:
                self.direct.add(dump.groups[place].name)
        self._told, self._seen = told, seen
        self._world = max(dumps) + 1

    def all(self) -> list[Group]:
        """Every group under the name it has in the records."""
        found: list[Group] = []
        for name, desc in self._desc.items():
            for ranks in sorted(self._told.get(name) or {()}):
                found.append(self.of(Group(name, desc, ranks)))
        return found

    def of(self, group: Group) -> Group:
        """A group as the records call it: one name for one set of ranks, and its members where they can be told."""
        told = self._told.get(group.name, set[tuple[int, ...]]())
        ranks = group.ranks
        if not ranks and len(told) == 1:
            ranks = next(iter(told))
        if len(told) > 1 and ranks:
            return Group(f"{group.name} ({_span(ranks)})", group.desc, ranks)
        if not ranks and (group.desc == _DEFAULT or group.name == "0"):
            ranks = tuple(range(self._world))
        return Group(group.name, group.desc, ranks or tuple(sorted(self._seen.get(group.name, set[int]()))))

    def listed(self, group: Group) -> list[int] | None:
        """The members as the next rank's calls list them; None where none are known, or a rank before listed them."""
        if len(group.ranks) > _MOST_REPEATED:
            if group.name in self._listed:
                return None
            self._listed.add(group.name)
        return list(group.ranks) or None


def _span(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:3]))
    return f"ranks {shown}, … {ranks[-1]}" if len(ranks) > 4 else f"ranks {', '.join(map(str, ranks))}"


class _Rank:
    """Writes the records of one rank."""

    def __init__(self, rank: int, dump: Dump, groups: _Groups, tables: Tables, out: Run) -> None:
        self.rank, self.dump, self.groups, self.tables, self.out = rank, dump, groups, tables, out
        self.named = [groups.of(group) for group in dump.groups]
        self.status = _local_status(dump, self.groups, out)

    def write(self) -> None:
        state = self._completed()
        calls = self.dump.calls
        place = self.rank if self.rank < MOST_RANKS else 0
        if len(calls):
            self.out.columns("collectives", len(calls), self._columns(calls, state), place)
        summary = {name: [value] for name, value in self._summary(state).items() if value is not None}
        self.out.columns("ranks", 1, summary, place)  # beside the calls: a directory less for each rank

    def _completed(self) -> list[int | None]:
        """The state of each call; retired ones and, of collectives, those up to the last completed one are completed.

        Direct calls of one group run on several streams, so that a later one may be done before an earlier one.
        """
        calls = self.dump.calls
        done = [self._last_completed(group) for group in self.dump.groups]
        gloo = [self._counts_all(place) for place in range(len(self.named))]
        state = calls.state
        if state.count(_COMPLETED) == len(state):
            return state
        state = list(state)
        for at, each in enumerate(state):
            if each == _COMPLETED:
                continue
            group = calls.group[at]
            number = calls.op_id[at] if gloo[group] else None if calls.direct[at] else calls.collective_seq[at]
            if calls.retired[at] or (number is not None and number <= done[group]):
                state[at] = _COMPLETED
        self._close_batches(state)
        return state

    def _close_batches(self, state: list[int | None]) -> None:
        """Give the calls of a batch the state of the entry that closes it: torch never updates their own."""
        calls, operations = self.dump.calls, self.tables.operations.values
        open_: dict[int, list[int]] = defaultdict(list)  # by group: the calls just before that have one number
        closing = [each.name.lower().endswith("coalesced") for each in operations]
        if not any(closing[op] for op in set(calls.op)):
            return
        for at, (group, op) in enumerate(zip(calls.group, calls.op, strict=True)):
            before = open_[group]
            if closing[op] and not self.tables.shapes.values[calls.inputs[at]]:
                for part in before if before and self._of_one_batch(before[-1], at) else ():
                    state[part] = state[at]
                before.clear()
                continue
            if before and not self._of_one_batch(before[-1], at):
                before.clear()
            before.append(at)

    def _of_one_batch(self, part: int, other: int) -> bool:
        calls = self.dump.calls
        same = calls.collective_seq[part] == calls.collective_seq[other]
        return same and (not calls.direct[part] or calls.p2p_seq[part] == calls.p2p_seq[other])

    def _last_completed(self, group: Group) -> int:
        status = self.status.get(group.name)
        return -1 if status is None or status.completed is None else status.completed

    def _counts_all(self, place: int) -> bool:
        """Whether the counters of a group count every call, as those of Gloo do, and not only its collectives."""
        for at, group in enumerate(self.dump.calls.group):
            if group == place:
                operation: Operation = self.tables.operations.values[self.dump.calls.op[at]]
                return operation.backend == "gloo"
        return False

    def _columns(self, calls: Calls, state: list[int | None]) -> dict[str, Any]:
        tables, named = self.tables, self.named
        operations: list[Operation] = tables.operations.values
        peers, peer_at = self._peers(calls, operations)
        dtypes = [each[0] if each else None for each in tables.dtypes.values]
        both = list(zip(calls.dtypes, calls.dtypes_out, strict=True))
        told = {each: each[0] if dtypes[each[0]] else each[1] for each in set(both)}
        other = {each: each[1] if each[1] != told[each] and tables.dtypes.values[each[1]] else None for each in told}
        seq = calls.collective_seq
        if any(calls.direct):
            seq = [
                pair if direct and pair else whole
                for direct, pair, whole in zip(calls.direct, calls.p2p_seq, seq, strict=True)
            ]
        columns: dict[str, Any] = {
            "group": _few([group.name for group in named], calls.group),
            "group_desc": _few([group.desc for group in named], calls.group),
            "group_ranks": _few([self.groups.listed(group) for group in named], calls.group),
            "seq": seq,
            "order": calls.order,
            "op": _few([each.name for each in operations], calls.op),
            "dtype": _few(dtypes, [told[each] for each in both]),
            "dtypes_out": _few(tables.dtypes.values, [other[each] for each in both]),
            "shapes_in": _few(tables.shapes.values, calls.inputs),
            "shapes_out": _few(tables.shapes.values, calls.outputs),
            "state": _few(_STATES, state),
            "t_created": calls.created,
            "t_started": calls.started,
            "t_completed": calls.completed,
            "timeout_s": _repeated(calls.timeout),
            "p2p": _repeated(calls.direct),
            "peer": Distinct(peers, peer_at),
            "frames": _few(tables.frames.values, calls.frames),
            "thread": _repeated(calls.thread) if len(set(calls.thread)) > 1 else None,
        }
        if self.rank >= MOST_RANKS:
            columns["rank"] = Distinct([self.rank])
        return {name: column for name, column in columns.items() if column is not None and not _empty(column)}

    def _peers(self, calls: Calls, operations: list[Operation]) -> tuple[list[int], list[int | None]]:
        """Global rank of the other side of each direct call."""
        places: dict[tuple[int, int], int | None] = {}
        peers: dict[int, int] = {}
        pairs = list(zip(calls.group, calls.op, strict=True))
        for group, op in dict.fromkeys(pairs):
            other, ranks = operations[op].other, self.named[group].ranks
            known = other is not None and other < len(ranks)
            places[group, op] = peers.setdefault(ranks[other], len(peers)) if known and other is not None else None
        return list(peers), [places[each] for each in pairs] if peers else []

    def _summary(self, state: list[int | None]) -> dict[str, Any]:
        """The last record of the rank: how far each group had come, in numbers of its collectives."""
        calls = self.dump.calls
        enqueued: dict[str, int] = {}
        completed: dict[str, int] = {}
        names = [group.name for group in self.named]
        for group, seq, each, direct in zip(calls.group, calls.collective_seq, state, calls.direct, strict=True):
            if seq is None:
                continue
            name = names[group]
            if seq >= enqueued.get(name, seq):
                enqueued[name] = seq
            if each == _COMPLETED and not direct and seq >= completed.get(name, seq):
                completed[name] = seq
        started: dict[str, int] = {}
        counted = {group.name for place, group in enumerate(self.named) if self._counts_all(place)}
        for raw, status in self.status.items():
            group = self.groups.of(self.dump.config.get(raw) or self._in_entries(raw))
            if raw in self.groups.direct or group.name in counted:
                continue  # those counters count direct calls as well
            reached = (status.enqueued, status.started, status.completed)
            for numbers, value in zip((enqueued, started, completed), reached, strict=True):
                if value is not None and value >= 0:
                    numbers[group.name] = value
        return {
            "dump": True,
            "entries_lost": None if self._states_how_far() else self.dump.lost or None,
            "rank": self.rank,
            "last_seq": enqueued,
            "last_started": started or None,
            "last_completed": completed or None,
            "dumped": self.dump.modified,
            "t": max((each for each in calls.created[-100:] if each is not None), default=None),
        }

    def _states_how_far(self) -> bool:
        return any(each.enqueued is not None and each.enqueued >= 0 for each in self.status.values())

    def _in_entries(self, name: str) -> Group:
        return next((group for group in self.dump.groups if group.name == name), Group(name, "", ()))


def _local_status(dump: Dump, groups: _Groups, out: Run) -> dict[str, Status]:
    """States by the name of the group; dumps give them under local numbers.

    Entries give pairs of both. Beyond them, a number belongs to the only group that is left, or, both sorted, to the
    group at the same place where that contradicts no pair.
    """
    found = {
        local: dump.groups[next(iter(places))].name
        for local, places in dump.pairs.items()
        if local in dump.status and len({dump.groups[place].name for place in places}) == 1
    }
    names = [name for name in dict.fromkeys([*dump.config, *(group.name for group in dump.groups)]) if name]
    locals_ = list(dump.status)
    numeric = all(re.fullmatch(r"\d{1,18}", each) for each in (*names, *locals_))
    if len(names) == len(locals_) and numeric:
        paired = dict(zip(sorted(locals_, key=int), sorted(names, key=int), strict=True))
        if all(paired[local] == name for local, name in found.items()):
            found = paired
    left = [each for each in locals_ if each not in found]
    free = [each for each in names if each not in set(found.values())]
    if len(left) == len(free) == 1:
        found[left[0]] = free[0]
    elif "0" in left and (whole := [each for each in free if each == "0" or _desc(dump, each) == _DEFAULT]):
        found["0"] = whole[0]
    if unknown := len(dump.status) - len(found):
        out.note("states of groups of which nothing tells the name; left out", unknown)
    return {name: dump.status[local] for local, name in found.items()}


def _desc(dump: Dump, name: str) -> str:
    group = dump.config.get(name)
    return group.desc if group is not None else ""


def _few(values: Sequence[Any], at: Sequence[int | None]) -> Distinct | None:
    """A column of the values that come up, which need not be all of a table."""
    found = _repeated(at)
    return None if found is None else Distinct([values[place] for place in found.values], found.at)


def _repeated(listed: Sequence[Any]) -> Distinct | None:
    """A column of few different values."""
    different = list(dict.fromkeys(listed))
    if len(different) == 1 and different[0] is not None:
        return Distinct(different)
    places = {value: place for place, value in enumerate(each for each in different if each is not None)}
    return Distinct(list(places), list(map(places.get, listed))) if places else None


def _empty(column: Any) -> bool:
    if isinstance(column, Distinct):
        return not column.values
    return column.count(None) == len(column)
