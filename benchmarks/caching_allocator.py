"""A small model of a device's caching allocator: runs a workload and leaves the snapshot that torch would have left.

Written from the documented behaviour of torch's CUDA allocator, for tests and benchmarks on machines without a device:
sizes are rounded to 512 B; up to 1 MiB come out of segments of 2 MiB, up to 10 MiB out of segments of 20 MiB, more out
of segments of a multiple of 2 MiB; the best fit is taken and split where more than 1 MiB (small pool and expandable
segments: 512 B) is left; neighbours that are free join; before it fails it gives back whole unused segments. So a
fragmented heap, a leak or a failure is the outcome of a pattern of allocations, and is never written down by hand.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ROUND, SMALL = 512, MIB
SMALL_SEGMENT, LARGE_SEGMENT, LARGE_FROM, LARGE_ROUND = 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB
#: Pages of expandable segments, by pool.
PAGES = {"small": 2 * MIB, "large": 20 * MIB}
#: Address room of an expandable segment.
RANGE = 1 << 40

Frames = list[dict[str, Any]]


class OutOfMemory(Exception):
    """An allocation failed; the event is in the trace."""


def stack(*frames: str) -> Frames:
    """Frames from ``name file:line``, innermost first."""
    found: Frames = []
    for frame in frames:
        name, _, place = frame.partition(" ")
        filename, _, line = place.rpartition(":")
        found.append({"filename": filename, "line": int(line), "name": name})
    return found


class _Segment:
    def __init__(self, address: int, size: int, pool: str, stream: int, frames: Frames, expandable: bool) -> None:
        self.address, self.size, self.pool, self.stream = address, size, pool, stream
        self.frames, self.expandable = frames, expandable
        self.first: _Block | None = None


class _Block:
    __slots__ = ("address", "after", "before", "frames", "pending", "requested", "segment", "size", "used")

    def __init__(self, segment: _Segment, address: int, size: int) -> None:
        self.segment, self.address, self.size = segment, address, size
        self.used = self.pending = False
        self.requested = 0
        self.frames: Frames = []
        self.before: _Block | None = None
        self.after: _Block | None = None


class CachingAllocator:
    """One device.

    Args:
        capacity: bytes of the device.
        elsewhere: bytes that contexts and other processes hold.
        expandable: use expandable segments.
        entries: events that the trace keeps, the last ones; None keeps all.
        recording: whether events are recorded from the start; ``record`` begins later.
        start_us: Unix microseconds of the first event.
        own_stacks: each event gets a list of frames of its own, as torch writes them.
    """

    def __init__(
        self,
        capacity: int,
        *,
        elsewhere: int = 0,
        expandable: bool = False,
        entries: int | None = None,
        recording: bool = True,
        device: int = 0,
        start_us: int = 1_790_000_000_000_000,
        own_stacks: bool = False,
    ) -> None:
        self.capacity, self.elsewhere, self.expandable = capacity, elsewhere, expandable
        self.recording, self.device, self.own_stacks = recording, device, own_stacks
        self.now_us = start_us
        self.reserved = self.allocated = 0
        self.events: list[dict[str, Any]] = []
        self._entries = entries
        self._free: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        self._blocks: dict[int, _Block] = {}  # by address, used or not
        self._segments: dict[int, _Segment] = {}
        self._next = 0x7F0000000000

    # -- what a program does

    def malloc(self, size: int, frames: Frames | None = None, stream: int = 0) -> int:
        """The address of a new block.

        Raises:
            OutOfMemory: neither the cache nor the device has it.
        """
        frames = frames or []
        wanted = max(ROUND, -(-size // ROUND) * ROUND)
        pool = "small" if wanted <= SMALL else "large"
        block = self._fit(pool, stream, wanted) or self._new(pool, stream, wanted, frames)
        if block is None:
            self.release()
            block = self._new(pool, stream, wanted, frames)
        if block is None:
            free = self.capacity - self.elsewhere - self.reserved
            self._event("oom", size=wanted, device_free=free, stream=stream, frames=frames)
            raise OutOfMemory(f"tried to allocate {size}")
        left = block.size - wanted
        if left > SMALL or (left >= ROUND and (pool == "small" or block.segment.expandable)):
            rest = _Block(block.segment, block.address + wanted, left)
            block.size = wanted
            rest.before, rest.after = block, block.after
            if block.after is not None:
                block.after.before = rest
            block.after = rest
            self._cache(rest)
        block.used, block.requested, block.frames = True, size, frames
        self.allocated += block.size
        self._event("alloc", addr=block.address, size=size, stream=stream, frames=frames)
        return block.address

    def free(self, address: int, frames: Frames | None = None, later: bool = False) -> None:
        """Give a block back; ``later``: another stream still uses it, and ``complete`` ends that."""
        block = self._blocks[address]
        frames = block.frames if frames is None else frames
        self.allocated -= block.size
        self._event("free_requested", addr=address, size=block.requested, stream=block.segment.stream, frames=frames)
        block.pending = True
        if not later:
            self.complete(address)

    def complete(self, address: int) -> None:
        """End what another stream did with a block that was given back."""
        block = self._blocks[address]
        at = {"addr": address, "size": block.requested, "stream": block.segment.stream, "frames": block.frames}
        self._event("free_completed", **at)
        block.used = block.pending = False
        block.requested, block.frames = 0, []
        for near in (block.before, block.after):
            if near is not None and not near.used:
                self._uncache(near)
                first, second = (near, block) if near.address < block.address else (block, near)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                del self._blocks[second.address]
                block = first
        self._cache(block)

    def holds(self, address: int) -> bool:
        """Whether a block at an address is handed out."""
        return address in self._blocks and self._blocks[address].used

    def release(self) -> None:
        """Give unused segments back to the device, and unused pages at the ends of expandable ones."""
        for segment in list(self._segments.values()):
            last = segment.first
            while last is not None and last.after is not None:
                last = last.after
            if last is None or last.used:
                continue
            if not segment.expandable:
                if last is segment.first:
                    self._uncache(last)
                    del self._blocks[last.address], self._segments[segment.address]
                    self.reserved -= segment.size
                    at = {"addr": segment.address, "size": segment.size, "stream": segment.stream}
                    self._event("segment_free", **at, frames=segment.frames)
                continue
            page = PAGES[segment.pool]
            size = last.size // page * page
            if size:
                self._uncache(last)
                last.size -= size
                segment.size -= size
                self.reserved -= size
                self._event("segment_unmap", addr=last.address + last.size, size=size, stream=segment.stream, frames=[])
                if last.size:
                    self._cache(last)
                else:
                    del self._blocks[last.address]
                    if last.before is None:
                        segment.first = None
                    else:
                        last.before.after = None

    def tick(self, microseconds: int) -> None:
        """Let time pass."""
        self.now_us += microseconds

    def record(self) -> None:
        """Begin to record events."""
        self.recording = True

    # -- what torch.cuda.memory._snapshot() returns

    def snapshot(self) -> dict[str, Any]:
        """Segments, the trace of this device, and the rest of the documented mapping."""
        trace = self.events if self._entries is None else self.events[-self._entries :]
        return {
            "segments": [self._described(each) for _, each in sorted(self._segments.items())],
            "device_traces": [[]] * self.device + [list(trace)],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "",
                "max_split_size": -1,
                "garbage_collection_threshold": 0.0,
                "expandable_segments": self.expandable,
                "pinned_num_register_threads": 1,
                "release_lock_on_cudamalloc": False,
                "pinned_use_cuda_host_register": False,
                "roundup_power2_divisions": {"1": 0},
            },
            "external_annotations": [],
        }

    def _described(self, segment: _Segment) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        block = segment.first
        while block is not None:
            state = "inactive"
            if block.used:
                state = "active_pending_free" if block.pending else "active_allocated"
            blocks.append(
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested,
                    "state": state,
                    "frames": block.frames if block.used and self.recording else [],
                }
            )
            block = block.after
        held = [each for each in blocks if each["state"] != "inactive"]
        return {
            "device": self.device,
            "address": segment.address,
            "total_size": segment.size,
            "allocated_size": sum(each["size"] for each in held if each["state"] == "active_allocated"),
            "active_size": sum(each["size"] for each in held),
            "requested_size": sum(each["requested_size"] for each in held),
            "stream": segment.stream,
            "segment_type": segment.pool,
            "segment_pool_id": (0, 0),
            "is_expandable": segment.expandable,
            "frames": segment.frames if self.recording else [],
            "blocks": blocks,
        }

    # -- inside

    def _fit(self, pool: str, stream: int, wanted: int) -> _Block | None:
        cached = self._free[pool, stream]
        at = bisect.bisect_left(cached, (wanted, 0))
        if at == len(cached):
            return None
        return self._blocks[cached.pop(at)[1]]

    def _new(self, pool: str, stream: int, wanted: int, frames: Frames) -> _Block | None:
        if self.expandable:
            return self._grow(pool, stream, wanted, frames)
        if wanted <= SMALL:
            size = SMALL_SEGMENT
        else:
            size = LARGE_SEGMENT if wanted < LARGE_FROM else -(-wanted // LARGE_ROUND) * LARGE_ROUND
        if self.reserved + size + self.elsewhere > self.capacity:
            return None
        segment = _Segment(self._next, size, pool, stream, frames, expandable=False)
        self._next += -(-size // LARGE_ROUND) * LARGE_ROUND + LARGE_ROUND
        block = segment.first = self._blocks[segment.address] = _Block(segment, segment.address, size)
        self._segments[segment.address] = segment
        self.reserved += size
        self._event("segment_alloc", addr=segment.address, size=size, stream=stream, frames=frames)
        return block

    def _grow(self, pool: str, stream: int, wanted: int, frames: Frames) -> _Block | None:
        """Map pages behind the last block of the pool's expandable segment, which a free one there takes part in."""
        found = (each for each in self._segments.values() if (each.pool, each.stream) == (pool, stream))
        segment = next(found, None)
        if segment is None:
            segment = _Segment(self._next, 0, pool, stream, frames, expandable=True)
            self._next += RANGE
            self._segments[segment.address] = segment
        last = segment.first
        while last is not None and last.after is not None:
            last = last.after
        spare = last.size if last is not None and not last.used else 0
        size = -(-(wanted - spare) // PAGES[pool]) * PAGES[pool]
        if self.reserved + size + self.elsewhere > self.capacity:
            return None
        address = segment.address + segment.size
        self.reserved += size
        segment.size += size
        self._event("segment_map", addr=address, size=size, stream=stream, frames=frames)
        if last is not None and spare:
            self._uncache(last)
            last.size += size
            return last
        block = self._blocks[address] = _Block(segment, address, size)
        block.before = last
        if last is None:
            segment.first = block
        else:
            last.after = block
        return block

    def _cache(self, block: _Block) -> None:
        self._blocks[block.address] = block
        bisect.insort(self._free[block.segment.pool, block.segment.stream], (block.size, block.address))

    def _uncache(self, block: _Block) -> None:
        cached = self._free[block.segment.pool, block.segment.stream]
        del cached[bisect.bisect_left(cached, (block.size, block.address))]

    def _event(self, action: str, **fields: Any) -> None:
        self.now_us += 3
        if self.recording:
            if self.own_stacks:
                fields["frames"] = list(fields["frames"])
            self.events.append({"action": action, **fields, "time_us": self.now_us, "compile_context": "N/A"})


def largest_free(snapshot: dict[str, Any]) -> int:
    """The largest unused block, straight from the segments."""
    blocks: Iterable[dict[str, Any]] = (block for each in snapshot["segments"] for block in each["blocks"])
    return max((each["size"] for each in blocks if each["state"] == "inactive"), default=0)


def devices(*allocators: CachingAllocator) -> dict[str, Any]:
    """One snapshot of several devices, as one process that uses them writes it."""
    each = [allocator.snapshot() for allocator in allocators]
    traces: list[Sequence[Any]] = [[] for _ in range(max(allocator.device for allocator in allocators) + 1)]
    for allocator, found in zip(allocators, each, strict=True):
        traces[allocator.device] = found["device_traces"][allocator.device]
    return {**each[0], "segments": [one for found in each for one in found["segments"]], "device_traces": traces}
