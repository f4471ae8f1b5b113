"""A history of allocations as evidence of a capsule: the events as arrays, and what was held when it mattered."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ...allocator import CATEGORIES, Array, Blocks, History
from ..run import Run

#: Points that are kept of a curve over events: each part of it by its first, lowest and highest one.
_PARTS: Final = 4096
#: Stacks that get a record of live blocks; the rest is one record a category.
_MOST_STACKS: Final = 1000
#: Segments and blocks that get a record.
_MOST_SEGMENTS, _MOST_BLOCKS, _BLOCKS_WITH_FRAMES, _BLOCK_FRAMES = 20_000, 200_000, 500, 6
#: Failures that get an event: a job that catches them and tries again can leave thousands.
_MOST_FAILURES: Final = 100
_PARTS_OF_LEDGER: Final = {
    "parameter": "weights",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "activation": "activations",
    "communication": "communication",
    "kv_cache": "kv_cache",
}


def write(history: History, out: Run, rank: int, devices: int = 1) -> None:
    """Write the evidence of one device under a rank, which is none where one process uses several ``devices``.

    ``tensors allocator/*`` are the columns of ``History``; ``allocations`` is what was live at the last failure, else
    at the peak; ``segments`` what was held at the end; ``memory_allocated`` and ``memory_reserved`` go over the number
    of the event, with the side ``allocator``, since those numbers are no steps.
    """
    named = {"prologue": history.prologue, "sound": history.sound, "number": history.device, "devices": devices}
    for name, array in history.arrays().items():
        out.tensor(f"allocator/{name}", array, rank, **named)
    _curves(history, out, rank)
    for at in history.failures[-_MOST_FAILURES:].tolist():
        _failure(history, at, out, rank, told=devices == 1)
    at = history.instant
    live = history.live(at)
    _allocations(history, live, at, out, rank)
    _ledger(history, live, at, out, rank)
    _segments(history, out, rank)


def seconds(history: History, at: int) -> float | None:
    """Unix seconds of an event; None where they were not recorded."""
    return history.time_us[at] / 1e6 if history.time_us[at] > 0 else None


def phase(history: History, at: int) -> str | None:
    """In which phase of a step an event happened, as far as its stack tells."""
    category = history.stacks.category_of(int(history.stack[at]))
    return {"gradient": "backward", "optimizer": "optimizer", "activation": "forward"}.get(category)


def _curves(history: History, out: Run, rank: int) -> None:
    first = history.prologue
    count = len(history) - first
    if not count:
        return
    time = np.where(history.time_us[first:] > 0, history.time_us[first:] / 1e6, np.nan)
    for name, values in (("memory_allocated", history.allocated), ("memory_reserved", history.reserved)):
        kept = thinned(values[first:])
        out.scalars(name, kept, values[first:][kept], time[kept], unit="bytes", side="allocator", rank=rank)


def thinned(values: Array) -> Array:
    """Indices of so many points that a curve looks the same: of equal parts the first, lowest, highest; the last."""
    if len(values) <= 4 * _PARTS:
        return np.arange(len(values))
    width = -(-len(values) // _PARTS)
    whole = len(values) // width * width
    parts = values[:whole].reshape(-1, width)
    start = np.arange(len(parts)) * width
    picked = (start, start + parts.argmin(axis=1), start + parts.argmax(axis=1), np.arange(whole, len(values)))
    return np.unique(np.concatenate(picked))


def _failure(history: History, at: int, out: Run, rank: int, told: bool) -> None:
    stream, pool = int(history.stream[at]), int(history.pool[at])
    requested, free = int(history.size[at]), max(0, int(history.address[at]))
    reserved = int(history.reserved[at])  # of a file without segments nothing is known but the events
    out.event(
        "oom",
        rank=rank,
        t=seconds(history, at),
        type="OutOfMemoryError",
        message=f"the allocator was asked for {requested:,} bytes while the device had {free:,} free",
        requested=requested,
        free=free,
        allocated=int(history.allocated[at]) if reserved else None,
        reserved=reserved or None,
        largest_free_block=history.largest_free(at, stream, pool) if reserved else None,
        device=history.device,
        told=None if told else False,
        phase=phase(history, at),
        event=at - history.prologue,
        frames=frames(history, int(history.stack[at])),
    )


def frames(history: History, stack: int, most: int = 24) -> list[dict[str, Any]] | None:
    """The frames of a stack as records hold them; None for an empty one."""
    found = [{"name": name, "file": file, "line": line} for name, file, line in history.stacks.of(stack)[:most]]
    return found or None


def _allocations(history: History, live: Blocks, at: int, out: Run, rank: int) -> None:
    # Without stacks, blocks of one size stand for what one line of code makes.
    key = np.where(live.stack > 0, live.stack << 44, live.size)
    _, first, which, count = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    stacks = live.stack[first]
    size = np.bincount(which, live.size.astype(np.float64), len(stacks)).astype(np.int64)
    order = np.argsort(-size, kind="stable")
    t = seconds(history, at)
    for place in order[:_MOST_STACKS].tolist():
        stack = int(stacks[place])
        out.record(
            "allocations",
            {
                "action": "live",
                "size": int(size[place]),
                "count": int(count[place]),
                "category": history.stacks.category_of(stack),
                "frames": frames(history, stack),
                "t": t,
            },
            rank,
        )
    rest = order[_MOST_STACKS:]
    category = history.stacks.category[stacks[rest]]
    for code in np.unique(category).tolist():
        own = rest[category == code]
        total = {"size": int(size[own].sum()), "count": int(count[own].sum()), "category": CATEGORIES[code], "t": t}
        out.record("allocations", {"action": "live", **total, "stacks": len(own)}, rank)


def _ledger(history: History, live: Blocks, at: int, out: Run, rank: int) -> None:
    if not len(live) and at < 0:
        return
    category = history.stacks.category[live.stack]
    size = np.bincount(category, live.size.astype(np.float64), len(CATEGORIES)).astype(np.int64)
    parts = {
        part: int(size[CATEGORIES.index(name)])
        for name, part in _PARTS_OF_LEDGER.items()
        if size[CATEGORIES.index(name)]
    }
    allocated, reserved = int(history.allocated[at]), int(history.reserved[at])
    out.record(
        "memory",
        {
            "phase": phase(history, at),
            **parts,
            "allocated": allocated,
            "reserved": reserved or None,
            # At a failure the parts are those of the failure, of which an earlier peak says nothing.
            "peak": allocated if at in history.failures else int(history.allocated.max(initial=0)),
            "fragmentation": max(0, reserved - allocated) if reserved else None,
            "largest_free_block": history.largest_free(at) if reserved else None,
            "t": seconds(history, at),
        },
        rank,
    )


def _segments(history: History, out: Run, rank: int) -> None:
    if history.end < 0:
        return
    found = history.segments(history.end)
    blocks = found.blocks
    listed = len(blocks) + len(found.free_size) <= _MOST_BLOCKS
    with_frames = len(blocks) <= _BLOCKS_WITH_FRAMES
    pending = blocks.freed <= history.end
    pieces: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    for at in range(len(blocks)) if listed else ():
        block: dict[str, Any] = {"size": int(blocks.size[at]), "state": "pending" if pending[at] else "allocated"}
        stack = int(blocks.stack[at])
        if with_frames and stack:
            block["frames"] = frames(history, stack, _BLOCK_FRAMES)
        elif stack:
            block["stack"] = stack
        pieces.setdefault(int(found.block_segment[at]), []).append((int(blocks.address[at]), block))
    for start, size, segment in zip(
        found.free_start.tolist(), found.free_size.tolist(), found.free_segment.tolist(), strict=True
    ):
        if listed:
            pieces.setdefault(segment, []).append((start, {"size": size, "state": "inactive"}))
    inside = found.block_segment >= 0
    each = found.block_segment[inside]
    active = np.bincount(each, blocks.size[inside].astype(np.float64), len(found.start))
    used = np.bincount(each, np.where(pending, 0, blocks.size)[inside].astype(np.float64), len(found.start))
    for at in range(min(len(found.start), _MOST_SEGMENTS)):
        record = {
            "address": int(found.start[at]),
            "total": int(found.end[at] - found.start[at]),
            "allocated": int(used[at]),
            "active": int(active[at]),
            "stream": int(found.stream[at]),
            "pool": int(found.pool[at]),
            "expandable": bool(found.expandable[at]),
            "blocks": [block for _, block in sorted(pieces.get(at, ()), key=lambda piece: piece[0])] or None,
        }
        out.record("segments", record, rank)
    if len(found.start) > _MOST_SEGMENTS:
        out.note("more segments than are listed", len(found.start) - _MOST_SEGMENTS)
