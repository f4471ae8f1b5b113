"""Traces of torch's profiler (Kineto, Chrome's JSON): where the time of each step went, on CUDA, ROCm or a CPU."""

from __future__ import annotations

import ast
import json
import math
import re
from typing import Any, cast

import numpy as np

from ...dtypes import torch_name
from ...errors import EvidenceError
from ...limits import MIB
from ..logs.collectives import op_name
from ..placement import placed
from ..run import Run
from ..source import Source
from .events import Args, Trace
from .timeline import Timeline
from .windows import Measured, Window

FORMAT = "Kineto trace"
KIND = "trace"

_SIGN = re.compile(
    rb'"traceEvents"\s*:\s*\[|"schemaVersion"\s*:[^{}]{0,400}'
    rb'"(?:deviceProperties|distributedInfo|trace_id|record_shapes|with_stack|profile_memory|baseTimeNanoseconds)"'
)
_BARE = re.compile(rb'\s*\[\s*\{[^{}]{0,400}"ph"\s*:\s*"[XBEiMsfbenC]"')
_STEP = re.compile(rb'"ProfilerStep\s*#?(\d{1,15})"')
_INFO = re.compile(rb'"distributedInfo"\s*:\s*(\{.{0,4000})', re.DOTALL)
_RANK = re.compile(rb'"rank"\s*:\s*(\d{1,9})\b')
_SIZE = re.compile(rb'"world_size"\s*:\s*(\d{1,9})\b')
_DEVICE = re.compile(rb'"deviceProperties"\s*:\s*\[\s*\{[^{}]{0,80}"name"\s*:\s*"([^"]{0,200})"')
_RANKED = re.compile(r"(?:^|[^a-z])rank[_\-.]?(\d{1,6})(?!\d)", re.IGNORECASE)
#: Events of one trace that are read; each takes some forty bytes while the trace is.
_MOST_EVENTS = 30_000_000
#: Bytes of a trace that are looked at for its steps, to group files.
_GLANCED = 128 * MIB
#: From here on a time cannot be microseconds since 1970.
_NANOSECONDS = 1e17
#: Unix seconds between which a time is one.
_TIMES = (1.2e9, 4.2e9)
#: Switches of the profiler that cost the host time.
_SWITCHES = ("with_stack", "record_shapes", "profile_memory", "with_flops", "with_modules")


def sniff(source: Source) -> bool:
    """Whether a Chrome trace begins here."""
    return _SIGN.search(source.head) is not None or _BARE.match(source.head) is not None


def span(source: Source) -> tuple[int | None, int | None, int | None, str]:
    """Rank, first and last step, and what all traces of the run share; reads no more than a part of the file."""
    info, device = _INFO.search(source.head), _DEVICE.search(source.head)
    rank, size = (pattern.search(info[1]) if info is not None else None for pattern in (_RANK, _SIZE))
    steps: list[int] = []
    seen, rest = 0, b""
    for chunk in source.chunks():
        steps += [int(each) for each in set(_STEP.findall(rest + chunk))]
        rest, seen = chunk[-64:], seen + len(chunk)
        if seen > _GLANCED:
            break
    run = b", ".join([b"of " + size[1] if size else b"alone", device[1] if device else b"no device"])
    return (
        int(rank[1]) if rank else None,
        min(steps, default=None),
        max(steps, default=None),
        run.decode("utf-8", "replace"),
    )


def read(source: Source, out: Run) -> None:
    """Write ``profile``, ``ranks``, ``collectives`` and the allocator's series.

    Raises:
        EvidenceError: there is no array of events.
    """
    trace, timeline = Trace(source), Timeline()
    for events in trace.pieces():
        timeline.add(events)
        if timeline.events >= _MOST_EVENTS:
            out.note(f"more than {_MOST_EVENTS:,} events; the first are read")
            break
    if trace.torn or source.cut:
        source.ends_early(f"{timeline.events:,} events were read")
    if timeline.odd:
        out.note("events without a usable time were left out", timeline.odd)
    header = trace.header
    rank, world = _place(header, source, out)
    clock = _Clock(header, timeline, out)
    measured = Measured(timeline)
    windows = measured.windows()
    if not windows:
        raise EvidenceError("holds no event with a length", str(source.path))
    profiler = {name: bool(header[name]) for name in _SWITCHES if name in header}
    if timeline.stacks:
        profiler["with_stack"] = True
    records = [{**measured.record(each), "t": clock.unix(each.begin), "profiler": profiler} for each in windows]
    busy = measured.utilization()
    for record, window in zip(records, windows, strict=True):
        record["busy_first_to_last"] = busy
        if trace.torn and (lost := measured.lost(window)) is not None:
            record["lost"] = lost
        out.record("profile", record, rank)
    _summary(out, rank, records)
    _collectives(out, rank, timeline, clock)
    _memory(out, rank, timeline, clock)
    if not timeline.steps:
        out.note("no ProfilerStep: the whole trace is one window, initialisation and warm-up included")
    if not len(measured.start):
        out.note("the trace holds no device work: it is of a CPU alone, or CUDA was not recorded")
    if world is not None and world > 1:
        out.note(f"rank {rank} of {world:,}: what other ranks did is in their own traces")


def _place(header: dict[str, Any], source: Source, out: Run) -> tuple[int, int | None]:
    """The rank of the trace and the job's size; states what the header tells of the job and its devices."""
    info = _mapping(header.get("distributedInfo"))
    rank, world = _count(info.get("rank")), _count(info.get("world_size"))
    if rank is None and _RANKED.search(source.path.name) is None:
        out.note("neither the trace nor its name tells a rank: it counts as rank 0")
    rank = out.rank if rank is None else rank
    run = {"world_size": world, "backend": info["backend"] if isinstance(info.get("backend"), str) else None}
    out.manifest({"run": run})
    devices = header.get("deviceProperties")
    if isinstance(devices, str):
        devices = _literal(devices)
    first = _mapping(devices[0]) if isinstance(devices, list) and devices else {}
    name = first.get("name")
    if isinstance(name, str):
        out.manifest({"environment": {"gpu": name[:200]}})
        placed(out, rank, name=name[:200], memory=_count(first.get("totalGlobalMem")))
    if isinstance(version := info.get("nccl_version"), str):
        out.manifest({"environment": {"nccl": version[:40]}})
    return rank, world


class _Clock:
    """Turns the trace's times into Unix seconds where that is known."""

    def __init__(self, header: dict[str, Any], timeline: Timeline, out: Run) -> None:
        base = header.get("baseTimeNanoseconds")
        self._offset = base / 1e9 if isinstance(base, int | float) and abs(base) < 2**63 else 0.0
        if timeline.first > _NANOSECONDS:
            out.note("times are in nanoseconds")
            _rescale(timeline)
        if timeline.first * 1e-6 > _TIMES[0]:
            self._offset = 0.0  # counted since 1970 already

    def unix(self, time: float) -> float | None:
        """Unix seconds of a time in microseconds."""
        found = self._offset + time * 1e-6
        return found if _TIMES[0] < found < _TIMES[1] else None


def _rescale(timeline: Timeline) -> None:
    """Nanoseconds to microseconds, in place."""
    for name, column in vars(timeline).items():
        if name.endswith(("start", "length")):
            for at, value in enumerate(column):
                column[at] = value / 1e3
    timeline.steps = {number: (a / 1e3, b / 1e3, thread) for number, (a, b, thread) in timeline.steps.items()}
    timeline.data = [(a / 1e3, b / 1e3, thread) for a, b, thread in timeline.data]
    timeline.collectives = [(a / 1e3, b / 1e3, args) for a, b, args in timeline.collectives]
    timeline.first, timeline.last = timeline.first / 1e3, timeline.last / 1e3
    for times, _, _ in timeline.memory.values():
        for at, value in enumerate(times):
            times[at] = value / 1e3


def _summary(out: Run, rank: int, records: list[dict[str, Any]]) -> None:
    """Means a step of what every window tells."""
    if records[0]["step"] is None:
        return
    summary: dict[str, Any] = {}
    for name in ("compute_ms", "communication_ms", "data_ms"):
        values = [each[name] for each in records if each.get(name) is not None]
        if len(values) == len(records):
            summary[name] = math.fsum(values) / len(values)
    if summary:
        out.record("ranks", summary, rank)


def _collectives(out: Run, rank: int, timeline: Timeline, clock: _Clock) -> None:
    """What the kernels of communication tell of their collective; the number in its group is not among it."""
    for order, (start, length, args) in enumerate(sorted(timeline.collectives, key=lambda each: each[0])):
        if not isinstance(args.collective, str):
            continue
        sizes = [[[size]] if (size := _count(each)) is not None else None for each in (args.numel_in, args.numel_out)]
        record = {
            "group": args.group if isinstance(args.group, str | int) else None,
            "group_desc": args.group_desc if isinstance(args.group_desc, str) else None,
            "group_ranks": _ranks(args),
            "order": order,
            "op": op_name(args.collective[:80]),
            "dtype": torch_name(args.dtype[:40]) if isinstance(args.dtype, str) else None,
            "shapes_in": sizes[0],
            "shapes_out": sizes[1],
            "state": "completed",
            "t_started": clock.unix(start),
            "t_completed": clock.unix(start + length),
        }
        out.record("collectives", record, rank)


def _ranks(args: Args) -> list[int] | None:
    """The ranks of a group, written as a list's text; None where it is elided (``[0, 1, ..., 7]``)."""
    found = args.group_ranks
    if isinstance(found, str):
        found = None if "..." in found else _literal(found)
    if not isinstance(found, list) or not 0 < len(found) <= 65_536:
        return None
    ranks = [_count(each) for each in cast("list[Any]", found)]
    return None if any(each is None for each in ranks) else sorted(each for each in ranks if each is not None)


def _memory(out: Run, rank: int, timeline: Timeline, clock: _Clock) -> None:
    """Bytes allocated and reserved after each event of the allocator, of each device (−1 is the host)."""
    several = sum(device >= 0 for device in timeline.memory) > 1
    for device, (times, *series) in sorted(timeline.memory.items()):
        order = np.argsort(np.array(times), kind="stable")
        seconds = [clock.unix(times[at]) for at in order.tolist()]
        known = None if None in seconds else np.array(seconds, np.float64)
        for name, column in zip(("memory_allocated", "memory_reserved"), series, strict=True):
            values = np.array(column)[order]
            if device < 0:
                if name == "memory_reserved":
                    continue
                name = f"{name} (cpu)"
            kept = np.isfinite(values)
            where = np.flatnonzero(kept)
            stamps = known[kept] if known is not None else None
            out.scalars(name, where, values[kept], stamps, "B", None, device if several and device >= 0 else rank)


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = _literal(value)
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _literal(text: str) -> Any:
    """A list or an object that was written as text, in JSON's or Python's spelling; None where it is none."""
    if len(text) > MIB:
        return None
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def _count(value: Any) -> int | None:
    if isinstance(value, str) and value.isdigit():
        value = int(value[:18])
    return value if type(value) is int and 0 <= value < 2**62 else None


__all__ = ["FORMAT", "KIND", "Window", "read", "sniff", "span"]
