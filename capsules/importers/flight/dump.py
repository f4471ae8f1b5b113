"""One dump as columns: each call's fields as numbers and as places in tables that all dumps of the job share."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

from ...errors import EvidenceError
from ...plain_pickle import integer, text
from .tables import Operation, Tables, all_of, counts, seconds, sized, stacked, typed

#: Entries of one dump that are read, the newest; the recorder's buffer holds 2,000 unless somebody asks for more.
MOST_ENTRIES = 500_000
#: Groups, and ranks of one group.
MOST_GROUPS, MOST_MEMBERS = 65_536, 1 << 20
_STATES = {"scheduled": 0, "started": 1, "completed": 2}

Note = Callable[..., None]


@dataclass
class Calls:
    """The calls of one rank, column by column; ``group``, ``op`` and the like are places in tables."""

    group: list[int] = field(default_factory=list[int])
    op: list[int] = field(default_factory=list[int])
    collective_seq: list[int | None] = field(default_factory=list["int | None"])
    p2p_seq: list[int | None] = field(default_factory=list["int | None"])
    op_id: list[int | None] = field(default_factory=list["int | None"])
    order: list[int] = field(default_factory=list[int])
    inputs: list[int] = field(default_factory=list[int])
    outputs: list[int] = field(default_factory=list[int])
    dtypes: list[int] = field(default_factory=list[int])
    dtypes_out: list[int] = field(default_factory=list[int])
    frames: list[int] = field(default_factory=list[int])
    state: list[int | None] = field(default_factory=list["int | None"])
    retired: list[bool] = field(default_factory=list[bool])
    direct: list[bool] = field(default_factory=list[bool])
    created: list[float | None] = field(default_factory=list["float | None"])
    started: list[float | None] = field(default_factory=list["float | None"])
    completed: list[float | None] = field(default_factory=list["float | None"])
    timeout: list[float | None] = field(default_factory=list["float | None"])
    thread: list[str | None] = field(default_factory=list["str | None"])

    def __len__(self) -> int:
        return len(self.order)


@dataclass(frozen=True)
class Group:
    """A process group as one dump knows it: its name in the job, its description, its members (none: not told)."""

    name: str
    desc: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Status:
    """How far a group had come: sequence numbers, -1 or None where not known."""

    enqueued: int | None
    started: int | None
    completed: int | None


@dataclass
class Dump:
    """What one file says.

    Attributes:
        version: major and minor number, None where there is none.
        library: version of the communication library.
        config: groups by name.
        status: by local number of the group.
        groups: the groups that the calls name, to which ``calls.group`` points.
        pairs: local number of a group → places in ``groups`` that entries give it.
        lost: entries that could not be read, or of which the number could not: the rank may have come further.
        named: the rank in the file's name.
        modified: Unix seconds of the file.
    """

    where: str
    version: tuple[int, int] | None
    library: str
    config: dict[str, Group]
    status: dict[str, Status]
    groups: list[Group]
    pairs: dict[str, set[int]]
    calls: Calls
    lost: int = 0
    named: int | None = None
    modified: float = 0.0


def parse(value: Any, where: str, tables: Tables, note: Note) -> Dump:
    """Take a dump apart, whatever is in it.

    Args:
        value: the decoded file.
        where: the file, for errors.
        tables: shared by the dumps of a job.
        note: told what could not be used.

    Raises:
        EvidenceError: it is no dump.
    """
    if not isinstance(value, dict):
        raise EvidenceError("is no flight-recorder dump: it holds no mapping", where)
    top = cast("dict[str, Any]", value)
    entries, unlisted = top.get("entries", ()), 0  # the JSON of a dump has no entries where there are none
    if not isinstance(entries, list | tuple):
        note("the entries are no list, and cannot be read")
        entries, unlisted = [], 1
    version = _version(top.get("version"))
    if version is not None and version[0] > 2:
        note(f"version {version[0]}.{version[1]} is newer than the versions known here; read as far as it is alike")
    library = text(top.get("comm_lib_version")) or text(top.get("nccl_version")) or ""
    config = _config(top.get("pg_config"), note)
    reader = _Entries(tables, config, note)
    reader.read(cast("list[Any]", entries))
    status = _status(top.get("pg_status"))
    lost = reader.left_out + unlisted
    return Dump(where, version, library[:100], config, status, reader.groups, reader.pairs, reader.calls, lost)


def _version(value: Any) -> tuple[int, int] | None:
    """Versions are pairs of integers: 2.10 comes after 2.9."""
    found = re.match(r"\s*(\d{1,6})(?:\.(\d{1,6}))?", str(value) if isinstance(value, str | int | float) else "")
    return (int(found[1]), int(found[2] or 0)) if found else None


def _config(value: Any, note: Note) -> dict[str, Group]:
    config: dict[str, Group] = {}
    if not isinstance(value, dict):
        return config
    for key, entry in cast("dict[Any, Any]", value).items():
        name = text(key, 200)
        if name is None:
            continue
        if len(config) >= MOST_GROUPS:
            note(f"more than {MOST_GROUPS:,} groups; the first are kept")
            break
        if isinstance(entry, dict):
            fields = cast("dict[str, Any]", entry)
            config[name] = Group(name, text(fields.get("desc"), 200) or "", members(fields.get("ranks")))
        elif isinstance(entry, list | tuple):  # older recorders: name, description, ranks
            parts = [*cast("list[Any]", entry)[:3], None, None, None]
            config[name] = Group(name, text(parts[1], 200) or "", members(parts[2]))
    return config


def members(value: Any) -> tuple[int, ...]:
    """Ranks from a list, or from a list that was printed."""
    return _printed(value) if isinstance(value, str) else _listed(value)


@lru_cache(maxsize=1024)
def _printed(value: str) -> tuple[int, ...]:
    """The dumps of a thousand ranks print the same group a thousand times."""
    return _listed(re.findall(r"\d{1,7}", value[: 8 * MOST_MEMBERS]))


def _listed(value: Any) -> tuple[int, ...]:
    if isinstance(value, list | tuple | set):
        ranks = [integer(each) for each in list(cast("list[Any]", value))[:MOST_MEMBERS]]
    else:
        return ()
    return tuple(dict.fromkeys(each for each in ranks if each is not None and 0 <= each < MOST_MEMBERS))


def _status(value: Any) -> dict[str, Status]:
    status: dict[str, Status] = {}
    if not isinstance(value, dict):
        return status
    for key, entry in list(cast("dict[Any, Any]", value).items())[:MOST_GROUPS]:
        local = text(key, 60)
        if local is None or not isinstance(entry, dict):
            continue
        fields = cast("dict[str, Any]", entry)
        reached = (integer(fields.get(f"last_{each}_collective")) for each in ("enqueued", "started", "completed"))
        status[local] = Status(*reached)
    return status


class _Entries:
    """The entries of one dump, read column by column: there may be half a million."""

    def __init__(self, tables: Tables, config: dict[str, Group], note: Note) -> None:
        self.calls = Calls()
        self.groups: list[Group] = []
        self.pairs: dict[str, set[int]] = {}
        self.left_out = 0
        self._lost: Counter[str] = Counter()
        self._tables = tables
        self._config = config
        self._note = note

    def read(self, entries: list[Any] | tuple[Any, ...]) -> None:
        if len(entries) > MOST_ENTRIES:
            self._note(f"more than {MOST_ENTRIES:,} entries; the newest are kept")
            entries = entries[-MOST_ENTRIES:]
        kept: list[dict[str, Any]] = [entry for entry in entries if type(entry) is dict]
        if len(kept) < len(entries):
            self.left_out = len(entries) - len(kept)
            self._note("entries that are no mappings left out", self.left_out)
        numbers = counts(kept, "record_id", Counter())
        order = [each for each in numbers if each is not None]
        if len(order) < len(kept):
            self._note("entries without a number keep the order in which they stand")
            order = list(range(len(kept)))
        elif any(map(operator.gt, order, order[1:])):
            kept = [kept[at] for at in sorted(range(len(kept)), key=order.__getitem__)]
            order.sort()
        self.calls.order = order
        if kept:
            self._columns(kept)
        for name, times in self._lost.items():
            if times:
                self._note(f"{name} is missing, or cannot be read, and is taken as unknown in entries", times)

    def _columns(self, kept: list[dict[str, Any]]) -> None:
        calls, tables, lost = self.calls, self._tables, self._lost
        said = [entry.get("profiling_name") for entry in kept]
        calls.op = tables.operations.places(said) if all_of(said, str) else tables.operations.odd(said)
        operations: list[Operation] = tables.operations.values
        nameless = {place for place in set(calls.op) if not operations[place].name}
        lost["profiling_name"] = sum(map(nameless.__contains__, calls.op))
        calls.group = self._grouped([(entry.get("process_group"), entry.get("pg_id")) for entry in kept])
        older = all("collective_seq_id" not in entry for entry in kept)
        number = "seq_id" if older else "collective_seq_id"
        calls.collective_seq = counts(kept, number, lost)
        self.left_out += lost[number]
        calls.p2p_seq = counts(kept, "p2p_seq_id", lost)
        calls.op_id = counts(kept, "op_id", lost)
        calls.inputs = sized(kept, "input_sizes", tables.shapes, lost)
        calls.outputs = sized(kept, "output_sizes", tables.shapes, lost)
        calls.dtypes = typed(kept, "input_dtypes", tables.dtypes, lost)
        calls.dtypes_out = typed(kept, "output_dtypes", tables.dtypes, lost)
        calls.frames = stacked([entry.get("frames") for entry in kept], tables.frames)
        states = [entry.get("state") for entry in kept]
        calls.state = [_STATES.get(each) if type(each) is str else None for each in states]
        lost["state"] = calls.state.count(None)
        calls.retired = [entry.get("retired") is True for entry in kept]
        direct = [entry.get("is_p2p") for entry in kept]
        if not all_of(direct, bool):
            known = zip(direct, calls.op, strict=True)
            direct = [each if type(each) is bool else operations[op].direct for each, op in known]
        calls.direct = cast("list[bool]", direct)
        calls.created = seconds(kept, "time_created_ns", lost)
        calls.started = seconds(kept, "time_discovered_started_ns", lost)
        calls.completed = seconds(kept, "time_discovered_completed_ns", lost)
        calls.timeout = [each / 1e3 if each else None for each in counts(kept, "timeout_ms", lost)]
        threads = [entry.get("thread_id") for entry in kept]
        calls.thread = threads if all_of(threads, type(None)) else [text(each, 100) for each in threads]

    def _grouped(self, raw: list[tuple[Any, Any]]) -> list[int]:
        """The places of the groups that entries name; their local numbers are remembered with them."""
        try:
            keys: list[Any] = [(said[0], said[1], local) for said, local in raw]
            different = list(dict.fromkeys(keys))
        except (TypeError, IndexError, KeyError):
            keys = [_group_key(said, local) for said, local in raw]
            different = list(dict.fromkeys(keys))
        places: dict[Any, int] = {}
        for key in different:
            name, desc, local = _group_key(key[:2], key[2])
            group = self._described(name, desc, local)
            if group not in self.groups:
                self.groups.append(group)
            places[key] = self.groups.index(group)
            if local is not None:
                self.pairs.setdefault(local, set()).add(places[key])
        return [places[key] for key in keys]

    def _described(self, name: str | None, desc: str | None, local: str | None) -> Group:
        if name is None:
            name = local or "0"
        known = self._config.get(name)
        if known is None and name == "0":  # Gloo knows the default group by no name
            known = self._config.get("")
        if known is None and desc:
            alike = [each for each in self._config.values() if each.desc == desc]
            known = alike[0] if len(alike) == 1 else None
        return Group(name, desc or (known.desc if known else ""), known.ranks if known else ())


def _group_key(said: Any, local: Any) -> tuple[str | None, str | None, str | None]:
    """Name, description and local number, each where it is one."""
    parts = [*said[:2], None, None] if isinstance(said, list | tuple) else [said, None]
    return text(parts[0], 200), text(parts[1], 200), text(local, 60)
