"""From the timeline to ``profile`` records: one window a step, or one for the whole trace.

A step begins where the profiler marks it on the host, but not before the device has ended the step before, and ends
when the host has and the device has done what the step launched. So windows follow one another without a hole, however
far the host runs ahead. (TensorBoard's plug-in cuts a trace in the same way.)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .intervals import Spans, both, gaps, total, union, within
from .timeline import COMMUNICATION, COMPUTE, COPY, Timeline

#: Idle time in gaps up to this long, in microseconds, passes between kernels, not in a wait of its own.
SHORT_GAP: Final = 1000.0
#: Share of the busiest device's kernels below which another one is no device of the job.
_FEW: Final = 0.05
#: Operations that a record lists, and host operations whose own time is taken apart.
_TOP, _MOST_OPS = 10, 400_000


@dataclass(frozen=True)
class Window:
    """One step, or (``step`` None) the whole; in microseconds."""

    step: int | None
    begin: float
    end: float
    thread: int | None = None


class Measured:
    """A timeline as arrays that are sorted once and asked for each window."""

    def __init__(self, timeline: Timeline) -> None:
        self._of = timeline
        self.start: NDArray[np.float64] = np.array(timeline.start)
        self.length: NDArray[np.float64] = np.array(timeline.length)
        self._kind: NDArray[np.int8] = np.array(timeline.kind)
        self._name: NDArray[np.int32] = np.array(timeline.name)
        device = _named(np.array(timeline.device, np.int64))
        numbers, pieces = np.unique(
            device[self._kind != COPY] if (self._kind != COPY).any() else device, return_counts=True
        )
        # A few kernels elsewhere (a context on device 0, a copy between two) make no second device.
        self.devices: list[int] = numbers[pieces >= _FEW * pieces.max(initial=0)].tolist()
        self._spans = {
            (number, kind): self._covered((device == number) & (self._kind == kind))
            for number in self.devices
            for kind in (COMPUTE, COMMUNICATION, COPY)
        }
        self._sync = union(timeline.sync_start, timeline.sync_length)
        self._overhead = union(timeline.overhead_start, timeline.overhead_length)
        self._gloo = union(timeline.gloo_start, timeline.gloo_length)
        called = np.array(timeline.call_start)
        self._launches = np.sort(called[np.array(timeline.call_launches, bool)])
        self._own = _own_times(timeline) if not len(self.start) else None

    def _covered(self, chosen: NDArray[np.bool_]) -> Spans:
        return union(self.start[chosen], self.length[chosen])

    def windows(self) -> list[Window]:
        """The steps that are whole, else one window: from the first to the last work of the device (or the host)."""
        steps = sorted((number, *where) for number, where in self._of.steps.items())
        if not steps:
            if len(self.start):
                return [Window(None, float(self.start.min()), float((self.start + self.length).max()))]
            return [Window(None, self._of.first, self._of.last)] if self._of.last > self._of.first else []
        steps.sort(key=lambda each: each[1])
        begins = np.array([each[1] for each in steps])
        ends = np.array([each[1] + each[2] for each in steps])
        if len(self.start):
            step = np.searchsorted(begins, self._launched(), side="right") - 1
            for at in range(len(steps)):
                work = step == at
                if work.any() and at < len(steps) - 1:
                    ends[at] = max(ends[at], float((self.start + self.length)[work].max()))
                elif work.any():  # after the last step the profiler itself may launch something
                    own = work & (self._launched() <= steps[at][1] + steps[at][2])
                    ends[at] = max(ends[at], float((self.start + self.length)[own].max(initial=-np.inf)))
        begins = np.maximum(begins, np.concatenate([[-np.inf], np.maximum.accumulate(ends)[:-1]]))
        found = [
            Window(each[0], begin, end, each[3])
            for each, begin, end in zip(steps, begins.tolist(), ends.tolist(), strict=True)
            if end > begin
        ]
        # The profiler opens one step more when the loop has ended already: nothing happens in it.
        if len(found) > 1 and not self._happens(found[-1]):
            found.pop()
        return found

    def _happens(self, window: Window) -> bool:
        """Whether the device begins anything in a window, or on a host alone an operation."""
        begun = self.start if len(self.start) else np.array(self._of.op_start)
        return bool(((begun >= window.begin) & (begun < window.end)).any())

    def _launched(self) -> NDArray[np.float64]:
        """When the host asked for each piece of the device's work; where no call is known, when it began."""
        called, links = np.array(self._of.call_start), np.array(self._of.call_link)
        order = np.argsort(links, kind="stable")
        links, called = links[order], called[order]
        wanted = np.array(self._of.link)
        if not len(links):
            return self.start
        at = np.minimum(np.searchsorted(links, wanted), len(links) - 1)
        return np.where((links[at] == wanted) & (wanted > 0), called[at], self.start)

    def utilization(self) -> float | None:
        """Share of the time from the device's first to its last work (copies too) in which it has some.

        What profilers show as utilisation: it leaves out what comes before the first work and after the last.
        """
        shares: list[float] = []
        for device in self.devices:
            busy = _joined(self._spans[device, COMPUTE], self._spans[device, COMMUNICATION])
            busy = _joined(busy, self._spans[device, COPY])
            if len(busy):
                shares.append(total(busy) / max(float(busy[-1, 1] - busy[0, 0]), 1e-9))
        return float(np.mean(shares)) if shares else None

    def lost(self, window: Window) -> float | None:
        """Share of a window's launches whose device work is not in the trace, or of its work without its launch.

        The larger one; None where nothing links them.
        """
        called, links = np.array(self._of.call_start), np.array(self._of.call_link)
        work = np.array(self._of.link)
        launches = np.array(self._of.call_launches, bool) & (links > 0)
        if not launches.any() or not (work > 0).any():
            return 1.0 if launches.any() or (work > 0).any() else None
        asked = launches & (called >= window.begin) & (called < window.end)
        done = (work > 0) & (self._kind != COPY) & (self.start >= window.begin) & (self.start < window.end)
        shares = [float((~np.isin(links[asked], work)).mean())] if asked.any() else []
        shares += [float((~np.isin(work[done], links)).mean())] if done.any() else []
        return max(shares, default=1.0)

    def record(self, window: Window) -> dict[str, Any]:
        """The ``profile`` record of a window, times in milliseconds."""
        data = self._data(window)
        found: dict[str, Any] = {
            "step": window.step,
            "window_ms": (window.end - window.begin) / 1e3,
            "data_ms": total(data) / 1e3 if data is not None else None,
            "loader": self._of.loader or None,
            "sync_ms": total(self._within(self._sync, window)) / 1e3 if len(self._sync) else None,
            "overhead_ms": total(self._within(self._overhead, window)) / 1e3 if len(self._overhead) else None,
            "top": self._top(window),
        }
        if not len(self.start):
            if len(self._gloo):
                found["communication_ms"] = total(self._within(self._gloo, window)) / 1e3
            return found
        parts: dict[str, float] = defaultdict(float)
        for device in self.devices:
            for name, value in self._device(device, window, data).items():
                parts[name] += value / len(self.devices) / 1e3
        low, high = np.searchsorted(self._launches, [window.begin, window.end])
        begun = (self.start >= window.begin) & (self.start < window.end) & (self._kind != COPY)
        found |= parts
        found |= {"kernels": int(begun.sum()), "launches": int(high - low), "devices": len(self.devices)}
        return found

    def _device(self, device: int, window: Window, data: Spans | None) -> dict[str, float]:
        """Where the time of one device went, in microseconds."""
        compute, communication, copy = (
            self._within(self._spans[device, kind], window) for kind in (COMPUTE, COMMUNICATION, COPY)
        )
        busy = _joined(compute, communication)
        idle = gaps(_joined(busy, copy), window.begin, window.end)
        waits = both(idle, self._sync)
        loading = both(idle, data) if data is not None else None
        long = idle[(idle[:, 1] - idle[:, 0]) > SHORT_GAP]
        found = {
            "compute_ms": total(compute),
            "communication_total_ms": total(communication),
            "communication_ms": total(communication) - total(both(communication, compute)),
            "copy_ms": total(copy) - total(both(copy, busy)),
            "busy_ms": total(busy),
            "idle_ms": total(idle),
            "idle_sync_ms": total(waits),
            "idle_gaps_ms": total(idle) - total(long),
        }
        return found if loading is None else found | {"idle_data_ms": total(loading)}

    def _data(self, window: Window) -> Spans | None:
        """Where the thread of the step loads data; None where nothing in the whole trace says so."""
        own = [each for each in self._of.data if window.thread is None or each[2] == window.thread]
        if not own:
            return None
        return self._within(union([each[0] for each in own], [each[1] for each in own]), window)

    @staticmethod
    def _within(spans: Spans, window: Window) -> Spans:
        return within(spans, window.begin, window.end)

    def _top(self, window: Window) -> list[dict[str, Any]] | None:
        """The operations that took most time: kernels, or on a host alone its operations without what they call."""
        if self._own is not None:
            start, length, name = self._own
        else:
            start, length, name = self.start, self.length, self._name
        inside = (start >= window.begin) & (start < window.end)
        if not inside.any():
            return None
        spent = np.bincount(name[inside], weights=length[inside])
        calls = np.bincount(name[inside])
        order = np.argsort(-spent, kind="stable")[:_TOP]
        return [
            {"name": self._of.names[at], "ms": float(spent[at]) / 1e3, "calls": int(calls[at])}
            for at in order.tolist()
            if spent[at] > 0
        ]


def _named(device: NDArray[np.int64]) -> NDArray[np.int64]:
    """The device of each piece of work; what names none (−1) ran where most did."""
    named = device[device >= 0]
    if not len(named) or len(named) == len(device):
        return device
    numbers, pieces = np.unique(named, return_counts=True)
    return np.where(device >= 0, device, numbers[pieces.argmax()])


def _joined(left: Spans, right: Spans) -> Spans:
    spans = np.concatenate([left, right])
    return union(spans[:, 0], spans[:, 1] - spans[:, 0])


def _own_times(timeline: Timeline) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int32]] | None:
    """Start, time without what it calls, and name of each operation of the host; None where there are too many."""
    if not 0 < len(timeline.op_start) <= _MOST_OPS:
        return None
    start, length = np.array(timeline.op_start), np.array(timeline.op_length)
    thread, own = np.array(timeline.op_thread), np.array(timeline.op_length)
    begins, ends, threads = start.tolist(), (start + length).tolist(), thread.tolist()
    open_: list[int] = []
    for at in np.lexsort((-length, start, thread)).tolist():
        while open_ and (threads[open_[-1]] != threads[at] or ends[open_[-1]] <= begins[at]):
            open_.pop()
        if open_:
            own[open_[-1]] -= length[at]
        open_.append(at)
    return start, np.maximum(own, 0.0), np.array(timeline.op_name)
