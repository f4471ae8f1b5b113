"""Events and segments of a snapshot as columns of numbers, whatever the file holds in their places."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, cast

import numpy as np

from ...allocator import ACTIONS, OOM, SNAPSHOT, Array
from ...plain_pickle import integer, text
from .frames import StackTable

#: Bytes of one block or segment beyond which an event is damaged: no device has so much.
MOST_BYTES: Final = 1 << 42
_MOST_TIME: Final = 1 << 53
_OTHER: Final = 255
#: Events of which one field after the other is read: all of them at once would leave the processor's cache each time.
_PIECE: Final = 2048
#: What older files call an action, and what they mean.
_CODES: Final = {name: code for code, name in enumerate(ACTIONS)} | {"free": ACTIONS.index("free_completed")}
_ACTIVE: Final = "active_allocated"
_PENDING: Final = ("active_pending_free", "active_awaiting_free")

Note = Callable[[str, int], None]


@dataclass
class Columns:
    """Events as columns; see ``History``. Addresses of 64 bits are signed, so that high ones are negative."""

    action: Array
    address: Array
    size: Array
    stream: Array
    pool: Array
    time_us: Array
    stack: Array

    def where(self, keep: Array) -> Columns:
        """The events for which ``keep`` (bool[N] or indices) holds."""
        return Columns(**{name: getattr(self, name)[keep] for name in self.__dataclass_fields__})


@dataclass(frozen=True)
class Held:
    """Segments at the end as columns of S, and their blocks as columns of B; ``of`` is a block's segment."""

    address: Array
    size: Array
    stream: Array
    pool: Array
    expandable: Array
    stack: Array
    of: Array
    block_address: Array
    block_size: Array
    block_requested: Array
    block_state: Array  # 0 unused, 1 allocated, 2 given back and still in use by another stream
    block_stack: Array


class Pools:
    """Numbers of memory pools: 0 is the default one, the others come as they are met."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {(0, 0): 0, (): 0}

    def number(self, pool: Any) -> int:
        """The number of a pool's id, a pair; 0 where it is none."""
        if type(pool) not in (tuple, list):
            return 0
        key = tuple(number for each in pool[:4] if (number := integer(each)) is not None)
        return self._numbers.setdefault(key, len(self._numbers) - 1) if len(self._numbers) < 30_000 else 1


def events(trace: Sequence[Any], stacks: StackTable, pools: Pools, note: Note) -> Columns:
    """The events of one device in their order. What is no event of a kind that is known is counted in a note."""
    try:
        found = _columns(trace, stacks, pools)
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError):
        lost: Counter[str] = Counter()
        kept = [each for event in trace if (each := _cleaned(event, lost)) is not None]
        if len(kept) < len(trace):
            note("events that are damaged were left out", len(trace) - len(kept))
        for name, times in lost.items():
            note(f"{name} cannot be read, and is taken as 0 in events", times)
        found = _columns(kept, stacks, pools)
        trace = kept
    other = found.action == _OTHER
    if other.any():
        names = Counter(str(trace[at].get("action"))[:40] for at in np.flatnonzero(other).tolist())
        for name, times in names.most_common(8):
            note(f"events of the kind {name} tell nothing of memory and were left out", times)
    wrong = ~other & ((found.size < 0) | (found.size > MOST_BYTES))
    if wrong.any():
        note("events of an impossible size were left out", int(wrong.sum()))
    found.time_us = np.where((found.time_us > 0) & (found.time_us < _MOST_TIME), found.time_us, 0)
    return found.where(~(other | wrong)) if (other | wrong).any() else found


def _columns(trace: Sequence[Any], stacks: StackTable, pools: Pools) -> Columns:
    """Raises whatever a field of the wrong type makes Python or NumPy raise."""
    pieces = [_piece(trace[at : at + _PIECE], stacks, pools) for at in range(0, len(trace) or 1, _PIECE)]
    return Columns(
        **{name: np.concatenate([getattr(each, name) for each in pieces]) for name in Columns.__dataclass_fields__}
    )


def _piece(trace: Sequence[Any], stacks: StackTable, pools: Pools) -> Columns:
    """The columns of a few events, which are read field by field."""
    count = len(trace)
    try:
        action = np.fromiter(map(_CODES.__getitem__, map(itemgetter("action"), trace)), np.uint8, count)
    except KeyError:  # a kind that is not known
        action = np.fromiter((_CODES.get(event["action"], _OTHER) for event in trace), np.uint8, count)
    address, size = _integers(trace, "addr"), _integers(trace, "size")
    for name, column, last in (("addr", address, SNAPSHOT), ("size", size, OOM)):
        if not all(name in trace[at] for at in np.flatnonzero((column == 0) & (action <= last)).tolist()):
            raise KeyError(name)  # absent is not 0
    failures = np.flatnonzero(action == OOM)
    address[failures] = [trace[at].get("device_free", 0) for at in failures.tolist()]
    try:
        frames = list(map(itemgetter("frames"), trace))
    except KeyError:
        frames = [event.get("frames") for event in trace]
    # Lists of frames may be shared: each is looked at once.
    lists = dict(zip(map(id, frames), frames, strict=True))
    numbers = dict(zip(lists, stacks.numbers(list(lists.values())), strict=True))
    if odd := {key for key, value in lists.items() if numbers[key] == 0 and _no_frames(value)}:
        stacks.unreadable += sum(id(each) in odd for each in frames)
    pool = np.zeros(count, np.int16)
    if any("pool_id" in event for event in (*trace[:1], *trace[-1:])):
        pool = np.fromiter((pools.number(event.get("pool_id")) for event in trace), np.int16, count)
    return Columns(
        action=action,
        address=address,
        size=size,
        stream=_integers(trace, "stream"),
        pool=pool,
        time_us=_integers(trace, "time_us"),
        stack=np.fromiter(map(numbers.__getitem__, map(id, frames)), np.int32, count),
    )


def _no_frames(value: Any) -> bool:
    """Whether something stands in the place of frames that is no list of them."""
    if type(value) is not list:
        return value is not None
    return bool(value) and type(cast("list[Any]", value)[0]) is not dict


def _integers(trace: Sequence[Any], name: str) -> Array:
    """A field of every event, int64[N]; 0 where it is absent.

    Raises:
        TypeError, OverflowError: something is no integer of 64 bits with a sign.
    """
    try:
        found: list[Any] = list(map(itemgetter(name), trace))
    except KeyError:
        found = [event.get(name, 0) for event in trace]
    return np.frombuffer(array("q", found), np.int64) if found else np.zeros(0, np.int64)  # NumPy would cut fractions


def _cleaned(event: Any, lost: Counter[str]) -> dict[str, Any] | None:
    """An event of which every field is of its type, None where one that it needs cannot be had.

    ``lost`` counts the others that cannot be read, by name.
    """
    if type(event) is not dict:
        return None
    fields = cast("dict[Any, Any]", event)
    action = text(fields.get("action"), 100)
    name = "device_free" if action == "oom" else "addr"
    absent = None if action in _CODES else 0
    size, address = integer(fields.get("size", absent)), integer(fields.get(name, absent))
    if action is None or size is None or address is None:
        return None
    for other in ("stream", "time_us"):
        if other in fields and integer(fields[other]) is None:
            lost[other] += 1
    return {
        "action": action,
        "addr": 0,
        name: _signed(fields.get(name)),
        "size": size if -(1 << 63) <= size < 1 << 63 else -1,  # counted among the impossible ones
        "stream": _signed(fields.get("stream")),
        "time_us": _signed(fields.get("time_us")),
        "frames": fields.get("frames"),
        "pool_id": fields.get("pool_id"),
    }


def _signed(value: Any) -> int:
    """64 bits with a sign: of what needs the 64th bit the same bits, so that high addresses are negative."""
    found = integer(value) or 0
    return found - (1 << 64) if found >= 1 << 63 else max(found, -(1 << 63))


def segments(listed: Sequence[Any], device: int, stacks: StackTable, pools: Pools, note: Note) -> Held:
    """The segments of one device and their blocks, at the end of the trace."""
    rows: list[tuple[int, ...]] = []
    blocks: list[tuple[int, ...]] = []
    for segment in listed:
        if type(segment) is not dict or (integer(segment.get("device")) or 0) != device:
            continue
        address, size = _place(segment.get("address")), _size(segment.get("total_size"))
        if address is None or size is None:
            note("segments that are damaged were left out", 1)
            continue
        pool = pools.number(segment.get("segment_pool_id"))
        expandable = segment.get("is_expandable") is True
        stack = stacks.number(segment.get("frames"))
        rows.append((address, size, _signed(segment.get("stream")), pool, expandable, stack))
        inside = segment.get("blocks")
        at = address
        for block in cast("list[Any]", inside) if type(inside) is list else ():
            taken = _size(block.get("size")) if type(block) is dict else None
            if taken is None:
                note("blocks that are damaged were left out", 1)
                continue
            place = _place(block.get("address"))
            frames, requested = block.get("frames"), _size(block.get("requested_size"))
            history = block.get("history")  # torch before 2.0
            if frames is None and type(history) is list and history and type(history[0]) is dict:
                frames, requested = history[0].get("frames"), _size(history[0].get("real_size"))
            state = block.get("state")
            state = 1 if state == _ACTIVE else 2 if state in _PENDING else 0
            at = at if place is None else place
            asked = taken if requested is None else requested
            blocks.append((len(rows) - 1, at, taken, asked, state, stacks.number(frames)))
            at += taken
    by_segment = np.array(rows, np.int64).reshape(-1, 6).T
    by_block = np.array(blocks, np.int64).reshape(-1, 6).T
    address, size, stream, pool, expandable, stack = by_segment
    return Held(address, size, stream, pool, expandable.astype(np.bool_), stack, *by_block)


def _place(value: Any) -> int | None:
    """A signed address that leaves room behind it."""
    found = integer(value)
    if found is None or not -(1 << 62) <= (found := found - (1 << 64) if found >= 1 << 63 else found) < 1 << 62:
        return None
    return found


def _size(value: Any) -> int | None:
    found = integer(value)
    return found if found is not None and 0 <= found <= MOST_BYTES else None
