"""What a caching allocator did, event by event, and what it held at any instant of it.

The words are those of ``torch.cuda.memory._snapshot``: ``alloc``, then ``free_requested`` (the program gave the block
back) and ``free_completed`` (it can be used again); segments are what the allocator holds of the device. A history
begins with events that stand for what was there before the trace, so that a replay from nothing is right everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import msgspec
import numpy as np

from .errors import EvidenceError

Array = np.ndarray[Any, Any]
Mask = Array

ACTIONS: Final = (
    *("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap"),
    *("snapshot", "oom"),
)
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, SNAPSHOT, OOM = range(9)
CATEGORIES: Final = ("unknown", "parameter", "gradient", "optimizer", "activation", "communication", "kv_cache")

#: Sizes are rounded up to this; a block above 1 MiB keeps what is left of it up to 1 MiB, unless its segment expands.
ROUND: Final = 512
SMALL: Final = 1 << 20

_COLUMNS: Final = ("action", "address", "size", "block", "stream", "pool", "time_us", "stack")
_TYPES: Final = {"action": np.uint8, "pool": np.int16, "stack": np.int32}
_STACKS: Final = ("stack_starts", "stack_frames", "stack_category", "frame_text")


def whole_blocks(size: Array) -> Array:
    """Bytes that a request takes, int64[N]: whole multiples of 512, at least one."""
    return np.maximum(ROUND, -(-size // ROUND) * ROUND)


@dataclass(frozen=True, eq=False)
class Stacks:
    """Stack traces by number, innermost frame first; number 0 is the empty one.

    Attributes:
        frames: (function, file, line) of each frame; line 0 where it is not known.
        starts, members: the frames of stack ``s`` are ``members[starts[s] : starts[s + 1]]``.
        category: index into ``CATEGORIES`` for each stack.
    """

    frames: list[tuple[str, str, int]]
    starts: Array
    members: Array
    category: Array

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of(self, stack: int) -> list[tuple[str, str, int]]:
        """The frames of one stack; none for a number that there is not."""
        if not 0 <= stack < len(self):
            return []
        return [self.frames[at] for at in self.members[self.starts[stack] : self.starts[stack + 1]].tolist()]

    def category_of(self, stack: int) -> str:
        """What a stack allocates, as far as its frames tell."""
        return CATEGORIES[int(self.category[stack])] if 0 <= stack < len(self) else CATEGORIES[0]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks with their lives, in the order of birth; all int64[M].

    Attributes:
        address, size: where, and the bytes that it takes.
        stack, stream, pool: who asked for it, and where from.
        born, freed, gone: events at which it was handed out, given back, and usable again; ``len(history)`` for never.
    """

    address: Array
    size: Array
    stack: Array
    stream: Array
    pool: Array
    born: Array
    freed: Array
    gone: Array

    def __len__(self) -> int:
        return len(self.address)

    def where(self, keep: Array) -> Blocks:
        """The blocks for which ``keep`` (bool[M] or indices) holds."""
        return Blocks(**{name: getattr(self, name)[keep] for name in self.__dataclass_fields__})


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments that the allocator holds at an instant, by address, and the unused pieces of each.

    Attributes:
        start, end: addresses, int64[S].
        stream, pool, expandable: of each.
        free_start, free_size, free_segment: unused pieces, int64[F], and the segment that each lies in.
        blocks: what is handed out, by address.
        block_segment: the segment that each of ``blocks`` lies in, −1 for none.
    """

    start: Array
    end: Array
    stream: Array
    pool: Array
    expandable: Array
    free_start: Array
    free_size: Array
    free_segment: Array
    blocks: Blocks
    block_segment: Array


@dataclass(frozen=True, eq=False)
class History:
    """Events of one device in their order, as columns of N.

    Attributes:
        action: index into ``ACTIONS``.
        address: of the block or segment (64 bits, signed); of an ``oom`` the bytes that the device had free.
        size: bytes as recorded (what was asked for).
        block: bytes that an ``alloc`` takes; equal to ``size`` elsewhere.
        stream, pool, time_us: stream, number of the memory pool (0: the default one), Unix microseconds (0: unknown).
        stack: number in ``stacks``.
        prologue: how many of the first events stand for what was there before the trace.
        sound: the trace tells of allocations and of their ends, and agrees with the state it was saved with.
        device: number of the device.
        stacks: the stack traces.
    """

    action: Array
    address: Array
    size: Array
    block: Array
    stream: Array
    pool: Array
    time_us: Array
    stack: Array
    prologue: int
    sound: bool
    device: int
    stacks: Stacks

    def __len__(self) -> int:
        return len(self.action)

    @cached_property
    def blocks(self) -> Blocks:
        """Every block with its life."""
        born, freed, gone = _lives(self)
        return Blocks(
            address=self.address[born],
            size=self.block[born],
            stack=self.stack[born].astype(np.int64),
            stream=self.stream[born],
            pool=self.pool[born].astype(np.int64),
            born=born,
            freed=freed,
            gone=gone,
        )

    @cached_property
    def allocated(self) -> Array:
        """Bytes that the program holds after each event, float64[N]."""
        return self._sums(self.blocks.born, self.blocks.freed, self.blocks.size)

    @cached_property
    def reserved(self) -> Array:
        """Bytes that the allocator holds of the device after each event, float64[N]."""
        taken = np.isin(self.action, (SEGMENT_ALLOC, SEGMENT_MAP))
        given = np.isin(self.action, (SEGMENT_FREE, SEGMENT_UNMAP))
        change = np.where(taken, self.size, 0) - np.where(given, self.size, 0)
        return np.maximum(np.cumsum(change.astype(np.float64)), 0.0)

    def _sums(self, begin: Array, end: Array, size: Array) -> Array:
        change = np.bincount(begin, size, len(self) + 1) - np.bincount(end, size, len(self) + 1)
        return np.maximum(np.cumsum(change)[:-1], 0.0)

    @property
    def failures(self) -> Array:
        """Events at which an allocation failed."""
        return np.flatnonzero(self.action == OOM)

    @property
    def peak(self) -> int:
        """The event after which the program held most, −1 where there is none."""
        return int(self.allocated[self.prologue :].argmax()) + self.prologue if len(self) > self.prologue else self.end

    @property
    def end(self) -> int:
        """The last event."""
        return len(self) - 1

    @property
    def instant(self) -> int:
        """The event that matters: the last failure, else the peak."""
        failures = self.failures
        return int(failures[-1]) if len(failures) else self.peak

    def live(self, at: int) -> Blocks:
        """What the program holds after event ``at``."""
        blocks = self.blocks
        return blocks.where((blocks.born <= at) & (blocks.freed > at))

    def segments(self, at: int) -> Segments:
        """What the allocator holds after event ``at``, and which pieces of it nobody uses."""
        start, end, first, expandable = _segments(self, at)
        blocks = self.blocks
        blocks = blocks.where((blocks.born <= at) & (blocks.gone > at))
        blocks = blocks.where(np.argsort(blocks.address, kind="stable"))
        inside = np.searchsorted(start, blocks.address, side="right") - 1
        inside[inside >= 0] = np.where(blocks.address < end[inside], inside, -1)[inside >= 0] if len(start) else -1
        free_start, free_size, free_segment = _unused(
            start, end, expandable, blocks.where(inside >= 0), inside[inside >= 0]
        )
        return Segments(
            start=start,
            end=end,
            stream=self.stream[first],
            pool=self.pool[first].astype(np.int64),
            expandable=expandable,
            free_start=free_start,
            free_size=free_size,
            free_segment=free_segment,
            blocks=blocks,
            block_segment=inside,
        )

    def largest_free(self, at: int, stream: int | None = None, pool: int | None = None) -> int:
        """The largest unused piece after event ``at``: of one stream and pool where they are named; 0 for none."""
        found = self.segments(at)
        own = np.ones(len(found.free_size), np.bool_)
        if stream is not None:
            own &= found.stream[found.free_segment] == stream
        if pool is not None:
            own &= found.pool[found.free_segment] == pool
        return int(found.free_size[own].max(initial=0))

    def arrays(self) -> dict[str, Array]:
        """The columns and stacks as arrays to store, by name."""
        columns = {name: np.asarray(getattr(self, name), _TYPES.get(name, np.int64)) for name in _COLUMNS}
        return columns | {
            "stack_starts": self.stacks.starts.astype(np.int64),
            "stack_frames": self.stacks.members.astype(np.int32),
            "stack_category": self.stacks.category.astype(np.uint8),
            "frame_text": np.frombuffer(msgspec.json.encode(self.stacks.frames), np.uint8),
        }

    @classmethod
    def restored(cls, arrays: dict[str, Array], prologue: int, sound: bool, device: int) -> History:
        """A history from what ``arrays`` gave.

        Raises:
            EvidenceError: a column is missing, or something in it cannot be.
        """
        if missing := [name for name in (*_COLUMNS, *_STACKS) if name not in arrays]:
            raise EvidenceError(f"{missing[0]} is missing", "allocator")
        columns = {name: np.asarray(arrays[name], _TYPES.get(name, np.int64)) for name in _COLUMNS}
        if len({each.shape for each in columns.values()}) != 1 or columns["action"].ndim != 1:
            raise EvidenceError("columns of different lengths", "allocator")
        stacks = _restored_stacks(arrays)
        stack = columns["stack"]
        columns["stack"] = np.where((stack >= 0) & (stack < len(stacks)), stack, 0)
        for name in ("size", "block"):
            columns[name] = np.clip(columns[name], 0, 1 << 42)
        return cls(**columns, prologue=min(max(0, prologue), len(stack)), sound=sound, device=device, stacks=stacks)


def _restored_stacks(arrays: dict[str, Array]) -> Stacks:
    try:
        frames = msgspec.json.decode(arrays["frame_text"].tobytes(), type=list[tuple[str, str, int]])
    except msgspec.DecodeError as error:
        raise EvidenceError(f"the frames cannot be read ({error})", "allocator/frame_text") from None
    starts, members = arrays["stack_starts"].astype(np.int64), arrays["stack_frames"].astype(np.int64)
    category = arrays["stack_category"].astype(np.int64)
    fits = len(starts) == len(category) + 1 and len(starts) > 1 and starts[0] == 0 and starts[-1] == len(members)
    if not fits or (np.diff(starts) < 0).any() or ((members < 0) | (members >= len(frames))).any():
        raise EvidenceError("the stacks do not fit their frames", "allocator/stack_starts")
    return Stacks(frames, starts, members, np.where((category >= 0) & (category < len(CATEGORIES)), category, 0))


def by_address(history_action: Array, address: Array, actions: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Events of the given kinds by address and then by place.

    Returns:
        Their places (int64[K]), and whether each is the first and the last of its address (bool[K]).
    """
    at = np.flatnonzero(np.isin(history_action, actions))
    at = at[np.argsort(address[at], kind="stable")]
    where = address[at]
    other = where[1:] != where[:-1]
    return at, np.append(True, other)[: len(at)], np.append(other, True)[: len(at)]


def _lives(history: History) -> tuple[Array, Array, Array]:
    """Birth, end and release of every block, by birth. A second ``alloc`` at an address ends the block before it."""
    never = len(history)
    at, _, last = by_address(history.action, history.address, (ALLOC, FREE_REQUESTED, FREE_COMPLETED))
    action = history.action[at]
    after = np.where(last, never, np.append(at[1:], never)[: len(at)])
    kind = np.where(last, 255, np.append(action[1:], 255)[: len(at)])  # of the next event at the same address
    second = np.append(after[1:], never)[: len(at)]
    second_kind = np.append(kind[1:], 255)[: len(at)]
    # Where completions are not recorded at all, a block is usable once it is given back.
    pending = never if (action == FREE_COMPLETED).any() else None
    released = np.where(second_kind == 255, after if pending is None else never, second)
    gone = np.where(kind == FREE_REQUESTED, released, after)
    births = np.flatnonzero(action == ALLOC)
    births = births[np.argsort(at[births], kind="stable")]
    return at[births], after[births], gone[births]


def _segments(history: History, at: int) -> tuple[Array, Array, Array, Array]:
    """Segments after event ``at`` by address: start, end, the event that began each, and whether it expands."""
    action, address, size = history.action[: at + 1], history.address[: at + 1], history.size[: at + 1]
    place, _, last = by_address(action, address, (SEGMENT_ALLOC, SEGMENT_FREE))
    held = place[last & (action[place] == SEGMENT_ALLOC)]
    start, end, first = address[held], address[held] + size[held], held
    maps, unmaps = np.flatnonzero(action == SEGMENT_MAP), np.flatnonzero(action == SEGMENT_UNMAP)
    expandable = np.zeros(len(held), np.bool_)
    if len(maps):
        run_start, run_end = covered(address[maps], size[maps], address[unmaps], size[unmaps])
        ordered = maps[np.argsort(address[maps], kind="stable")]
        begun = ordered[np.searchsorted(address[ordered], run_start, side="right") - 1]
        start, end = np.concatenate([start, run_start]), np.concatenate([end, run_end])
        first = np.concatenate([first, begun])
        expandable = np.concatenate([expandable, np.ones(len(run_start), np.bool_)])
    order = np.argsort(start, kind="stable")
    start, end, first, expandable = start[order], end[order], first[order], expandable[order]
    # Segments that overlap cannot be; what lies behind the beginning of the next one is left to it.
    end = np.minimum(end, np.append(start[1:], np.iinfo(np.int64).max)[: len(start)])
    return start, end, first, expandable


def _unused(start: Array, end: Array, expandable: Array, blocks: Blocks, segment: Array) -> tuple[Array, Array, Array]:
    """Unused pieces of segments: address, size, segment. ``blocks`` lie in ``segment`` and are in order of address."""
    behind = np.minimum(blocks.address + blocks.size, end[segment])
    same = np.append(False, segment[1:] == segment[:-1])[: len(segment)]  # as the block before
    reached = np.append(0, np.maximum.accumulate(behind)[:-1])[: len(segment)] if len(segment) else behind
    before = np.where(same, reached, start[segment])
    last = start.copy()
    np.maximum.at(last, segment, behind)
    large_before = same & np.append(False, blocks.size[:-1] > SMALL)[: len(segment)]
    ends_large = np.zeros(len(start), np.bool_)
    ends_large[segment] = blocks.size > SMALL
    address = np.concatenate([before, last])
    size = np.concatenate([blocks.address - before, end - last])
    inside = np.concatenate([segment, np.arange(len(start))])
    # What is left of a large block up to 1 MiB stays with it: nobody else gets it.
    stays = np.concatenate([large_before, ends_large]) & (size <= SMALL) & ~expandable[inside]
    keep = (size > 0) & ~stays
    return address[keep], size[keep], inside[keep]


def covered(start: Array, size: Array, less_start: Array, less_size: Array) -> tuple[Array, Array]:
    """Runs of addresses that lie in more of the first ranges than of the second: their starts and ends, int64[R]."""
    edges = np.concatenate([start, start + size, less_start, less_start + less_size])
    sign = np.repeat([1, -1, -1, 1], [len(start), len(start), len(less_start), len(less_start)])
    places, inverse = np.unique(edges, return_inverse=True)
    inside = np.cumsum(np.bincount(inverse, sign, len(places))) > 0.5
    begins = inside & ~np.append(False, inside[:-1])[: len(inside)]
    ends = ~inside & np.append(False, inside[:-1])[: len(inside)]
    return places[begins], places[ends]
