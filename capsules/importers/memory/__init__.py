"""CUDA memory snapshots as allocations, segments and out-of-memory events.

``torch.cuda.memory._dump_snapshot`` pickles a mapping of segments (the state at that moment) and of traces (what each
device's allocator did before, the last so many events). Source of the fields: its documentation, and that of
``_record_memory_history``. Files of all versions hold plain data, and nothing else is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from ...allocator import History
from ...collector import collector_still
from ...errors import EvidenceError
from ...limits import GIB
from ...plain_pickle import GROWTH, integer, load_plain, looks_like_pickle, text, top_level_keys
from ..run import Run
from ..source import Source
from . import columns
from .evidence import write
from .frames import StackTable
from .reconcile import history, rounding

FORMAT = "CUDA memory snapshot"
#: What the original is, where it is kept in the capsule.
KIND = "snapshot"

#: Bytes of a file, once decompressed, beyond which it is not looked at.
_MOST_BYTES = 64 * GIB
_MOST_DEVICES = 64
#: Keys of the outermost mapping of some version; any of the first two comes first or second.
_KEYS = ("segments", "device_traces", "traces", "allocator_settings", "external_annotations", "host_segments")
_SIGNS = (b"total_size", b"allocated_size", b"device_traces", b"segment_type")
#: A number at the end of a name, before which no other number stands, may be a rank: a date has several.
_NUMBER = re.compile(
    r"^(\D*(?<!step)(?<!iter)(?<!iteration)(?<!epoch)[_\-.])(\d{1,5})((?:\.pickle|\.pkl).*|)$", re.IGNORECASE
)
_NAMED_RANK = re.compile(r"(?:^|[^a-z])rank[_\-.]?(\d{1,6})(?!\d)", re.IGNORECASE)


def sniff(source: Source) -> bool:
    """Whether the head is that of a pickle with the keys of a snapshot, or of a list of segments (torch before 2.0)."""
    if not looks_like_pickle(source.head):
        return False
    keys = top_level_keys(source.head)
    signs = sum(sign in source.head for sign in _SIGNS)
    if not keys:
        return signs >= 2
    return any(key in _KEYS for key in keys) and (signs > 0 or len(set(keys) & set(_KEYS)) > 1)


def rank_in_name(path: Path) -> int | None:
    """The rank in a file's name, None where there is none.

    ``rank3_memory_snapshot.pickle`` says it. A bare number (``snapshot_3.pickle``) counts steps or snapshots as often:
    it is a rank where the files beside it are numbered 0, 1 and so on, some of which may be lost.
    """
    if (said := _NAMED_RANK.search(path.name)) is not None:
        return int(said[1])
    if (found := _NUMBER.match(path.name)) is None:
        return None
    head, number, tail = found[1], int(found[2]), found[3]
    numbered = (
        all(path.with_name(f"{head}{each:0{digits}}{tail}").exists() for each in {0, 1} - {number})
        for digits in (1, len(found[2]))
    )
    return number if any(numbered) else None


def span(source: Source) -> tuple[int | None, int | None, int | None, str]:
    """Rank, first and last step, run: a snapshot is one moment of a rank, and a second one of it is another story."""
    return rank_in_name(source.path), 0, 0, ""


def read(source: Source, out: Run) -> None:
    """Write what the allocator of each device did and held.

    Raises:
        EvidenceError: the file is no pickle of plain data, is too large for the memory there is, or no snapshot.
    """
    where = str(source.path)
    with collector_still():  # from the first container to the last: millions are alive, none of them garbage
        data: Any = load_plain(source.read(_MOST_BYTES, GROWTH), where)
        try:
            devices = _devices(data, out.note, where)
            _say_what_else(data, out)
        finally:
            del data  # before anything else is made: it takes most of the memory
    found = [_accounted(each(), out.note) for each in devices]
    named = rank_in_name(source.path) is not None
    if named and len(found) > 1:
        found.sort(key=lambda each: -float(each.reserved.max(initial=0)))
        others = ", ".join(str(each.device) for each in found[1:6])
        out.note(f"the file is of one rank and of several devices; of device {others} nothing was kept")
        found = found[:1]
    several = len(found) > 1
    for each in found:
        write(each, out, rank=each.device if several else out.rank, devices=len(found))


def histories(data: Any, note: columns.Note, where: str = "") -> list[History]:
    """What each device's allocator did, by device; devices of which a snapshot says nothing are left out.

    Args:
        data: the mapping of ``torch.cuda.memory._snapshot()``, or its list of segments.
        note: takes a sentence about the file, and how often it holds.
        where: the file, for the error's line.

    Raises:
        EvidenceError: it is no snapshot.
    """
    return [_accounted(each(), note) for each in _devices(data, note, where)]


def _devices(data: Any, note: columns.Note, where: str) -> list[Callable[[], History]]:
    """What makes the history of each device, out of columns that hold nothing of ``data`` any more."""
    whole = {"segments": data} if type(data) is list else data
    if type(whole) is not dict:
        raise EvidenceError(f"holds a {type(data).__name__}, expected the mapping of a memory snapshot", where)
    snapshot = cast("dict[Any, Any]", whole)
    segments, traces = snapshot.get("segments"), snapshot.get("device_traces", snapshot.get("traces"))
    if type(segments) is not list and type(traces) is not list:
        raise EvidenceError("holds neither segments nor traces of a memory snapshot", where)
    for name, value in (("segments", segments), ("device_traces", traces)):
        if value is not None and type(value) is not list:
            note(f"{name} is no list, and cannot be read", 1)
    listed: list[Any] = segments if type(segments) is list else []
    by_device: list[Any] = traces if type(traces) is list else []
    held = {integer(each.get("device")) or 0 for each in listed if type(each) is dict}
    traced = {at for at, trace in enumerate(by_device[:_MOST_DEVICES]) if type(trace) is list and trace}
    devices = sorted(each for each in held | traced if 0 <= each < _MOST_DEVICES)
    if not devices:
        raise EvidenceError("is a memory snapshot in which no device holds anything", where)
    found: list[Callable[[], History]] = []
    for device in devices:
        stacks, pools = StackTable(), columns.Pools()
        trace = columns.events(by_device[device] if device in traced else [], stacks, pools, note)
        at_end = columns.segments(listed, device, stacks, pools, note)
        if not len(trace.action) and not len(at_end.address):
            continue
        rounded = rounding(snapshot.get("allocator_settings"))
        found.append(partial(history, trace, at_end, device, rounded, stacks.stacks()))
        if stacks.unreadable:
            note("frames cannot be read, and are taken as unknown in events", stacks.unreadable)
        if stacks.left_out:
            note("more stack traces than are kept apart; the rest are one", stacks.left_out)
    if not found:
        raise EvidenceError("is a memory snapshot of which nothing can be read", where)
    return found


def _accounted(found: History, note: columns.Note) -> History:
    if len(found) == found.prologue:
        note(f"device {found.device}: no trace was recorded, only what was held at the end", 1)
    elif not found.sound:
        note(f"device {found.device}: the trace does not account for what was held at its end: it leaves events out", 1)
    return found


def _say_what_else(data: Any, out: Run) -> None:
    if type(data) is not dict:
        return
    snapshot = cast("dict[Any, Any]", data)
    settings = snapshot.get("allocator_settings")
    if type(settings) is dict:
        said = {
            name: value if type(value) in (int, float, bool) else text(value, 400)
            for name in ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments", "max_split_size")
            if (value := settings.get(name)) not in (None, "")
        }
        out.manifest({"config": {"allocator": said}})
    pinned = snapshot.get("host_segments")
    if type(pinned) is list and pinned:
        out.note("segments of pinned host memory are not judged", len(cast("list[Any]", pinned)))
    known = {*_KEYS, "host_traces", "graph_capture_record_stream_reuse"}
    if unknown := [str(key)[:40] for key in list(snapshot)[:100] if key not in known]:
        out.note(f"fields that are not read: {', '.join(unknown[:8])}")
