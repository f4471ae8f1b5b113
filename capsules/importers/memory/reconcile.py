"""Joins the events of a trace with the state that was saved at its end: what was there before the trace began.

A trace is the end of a ring of events. A block that is given back and was never handed out was there before, and so was
one that the saved segments hold and no event speaks of; of segments the state before is the state at the end, less what
the trace took from the device, and with what it gave back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ...allocator import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Array,
    History,
    Stacks,
    by_address,
    covered,
    whole_blocks,
)
from .columns import Columns, Held

#: Share of blocks on which trace and saved state may differ before the trace is no account of the memory.
_DIFFER: Final = 0.02

Round = Callable[[Array], Array]


def history(trace: Columns, held: Held, device: int, rounded: Round, stacks: Stacks) -> History:
    """The history of one device.

    Args:
        trace: its events.
        held: its segments at the end; empty where they were not saved.
        device: its number.
        rounded: bytes that a request takes (int64[N] to int64[N]).
        stacks: the stack traces.
    """
    size = np.array(trace.size)
    block = np.where(trace.action == ALLOC, rounded(size), size)
    places, first, last = by_address(trace.action, trace.address, (ALLOC, FREE_REQUESTED, FREE_COMPLETED))
    kind, where = trace.action[places], trace.address[places]
    known = where[first]
    alive = places[last & (kind == ALLOC)]

    active = np.flatnonzero(held.block_state > 0)
    at_end = held.block_address[active]
    _, own, theirs = np.intersect1d(trace.address[alive], at_end, assume_unique=False, return_indices=True)
    block[alive[own]] = held.block_size[active[theirs]]

    before = places[first & (kind != ALLOC)]
    untouched = active[~np.isin(at_end, known)]
    begun = Columns(
        action=np.full(len(before) + len(untouched), ALLOC, np.uint8),
        address=np.concatenate([trace.address[before], held.block_address[untouched]]),
        size=np.concatenate([trace.size[before], held.block_requested[untouched]]),
        stream=np.concatenate([trace.stream[before], held.stream[held.of[untouched]]]),
        pool=np.concatenate([trace.pool[before], held.pool[held.of[untouched]]]),
        time_us=np.zeros(len(before) + len(untouched), np.int64),
        stack=np.concatenate([trace.stack[before], held.block_stack[untouched]]),
    )
    taken = np.concatenate([rounded(trace.size[before]), held.block_size[untouched]])
    waiting = untouched[held.block_state[untouched] == 2]
    given = Columns(
        action=np.full(len(waiting), FREE_REQUESTED, np.uint8),
        address=held.block_address[waiting],
        size=held.block_requested[waiting],
        stream=held.stream[held.of[waiting]],
        pool=held.pool[held.of[waiting]],
        time_us=np.zeros(len(waiting), np.int64),
        stack=held.block_stack[waiting],
    )
    earlier = _segments_before(trace, held)
    parts = (earlier, begun, given, trace)
    columns = {name: np.concatenate([getattr(each, name) for each in parts]) for name in Columns.__dataclass_fields__}
    columns["block"] = np.concatenate([earlier.size, taken, given.size, block])
    return History(
        **columns,
        prologue=len(earlier.action) + len(begun.action) + len(given.action),
        sound=_sound(trace, held, trace.address[alive], at_end, where[last & (kind != ALLOC)]),
        device=device,
        stacks=stacks,
    )


def _segments_before(trace: Columns, held: Held) -> Columns:
    """Events that stand for the segments that the allocator held before the trace."""
    places, first, last = by_address(trace.action, trace.address, (SEGMENT_ALLOC, SEGMENT_FREE))
    kind = trace.action[places]
    freed = places[first & (kind == SEGMENT_FREE)]
    made = trace.address[places[last & (kind == SEGMENT_ALLOC)]]
    fixed = np.flatnonzero(~held.expandable)
    fixed = fixed[~np.isin(held.address[fixed], np.concatenate([made, trace.address[freed]]))]
    maps, unmaps = np.flatnonzero(trace.action == SEGMENT_MAP), np.flatnonzero(trace.action == SEGMENT_UNMAP)
    grown = np.flatnonzero(held.expandable)
    start, end = covered(
        np.concatenate([held.address[grown], trace.address[unmaps]]),
        np.concatenate([held.size[grown], trace.size[unmaps]]),
        trace.address[maps],
        trace.size[maps],
    )
    # Stream and pool of a run of pages are those of the segment, or of the event, that lies nearest before its end.
    address = np.concatenate([held.address[grown], trace.address[unmaps]])
    order = np.argsort(address, kind="stable")
    near = order[np.searchsorted(address[order], end, side="left") - 1] if len(order) else order
    stream = np.concatenate([held.stream[grown], trace.stream[unmaps]])[near]
    pool = np.concatenate([held.pool[grown], trace.pool[unmaps]])[near]
    stack = np.concatenate([held.stack[grown], trace.stack[unmaps]])[near]
    return Columns(
        action=np.repeat(
            np.array([SEGMENT_ALLOC, SEGMENT_ALLOC, SEGMENT_MAP], np.uint8), [len(freed), len(fixed), len(start)]
        ),
        address=np.concatenate([trace.address[freed], held.address[fixed], start]),
        size=np.concatenate([trace.size[freed], held.size[fixed], end - start]),
        stream=np.concatenate([trace.stream[freed], held.stream[fixed], stream]),
        pool=np.concatenate([trace.pool[freed], held.pool[fixed], pool]),
        time_us=np.zeros(len(freed) + len(fixed) + len(start), np.int64),
        stack=np.concatenate([trace.stack[freed], held.stack[fixed], stack]),
    )


def _sound(trace: Columns, held: Held, alive: Array, at_end: Array, ended: Array) -> bool:
    """Whether the trace is an account of the memory: allocations with their ends, in agreement with what was saved."""
    requests = int((trace.action == ALLOC).sum())
    # An address that is handed out twice was given back in between: where no event says so, such events were skipped.
    if not requests or (len(alive) < requests and not np.isin(trace.action, (FREE_REQUESTED, FREE_COMPLETED)).any()):
        return False
    if not len(held.address):
        return True
    lost = len(alive) - len(np.intersect1d(alive, at_end))
    back = int(np.isin(at_end, ended).sum())
    return lost + back <= max(2, _DIFFER * (len(at_end) + len(alive)))


def rounding(settings: Any) -> Round:
    """How sizes of requests are rounded, by the settings in the file: to 512 B, or to parts of powers of two.

    ``roundup_power2_divisions`` gives, for sizes from 1 MiB × the key, into how many equal parts the way to the next
    power of two is divided; a request takes whole parts.
    """
    given = settings.get("roundup_power2_divisions") if type(settings) is dict else None
    parts = np.zeros(64, np.int64)
    for key, value in given.items() if type(given) is dict else ():
        if type(key) is str and key.isdigit() and len(key) < 12 and type(value) is int and 0 <= value <= 64:
            least = int(key).bit_length() - 1
            parts[20 + least if least > 0 else 0 :] = value
    if parts.max() < 2:
        return whole_blocks

    def divided(size: Array) -> Array:
        floor = np.int64(1) << np.floor(np.log2(np.maximum(size, 1))).astype(np.int64)
        count = parts[np.log2(floor).astype(np.int64)]
        part = np.maximum(floor // np.maximum(count, 1), 1)
        rounded = -(-size // part) * part
        return np.where((count > 1) & (size > 512 * count), rounded, whole_blocks(size))

    return divided
