"""What the events of one trace say of time: device work, launches, waits, steps, data loading, memory.

Categories are those of Kineto of all years (capitalised until 2021) and of both vendors; NCCL and RCCL kernels are
communication, copies and fills are neither computation nor communication.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable
from typing import Any

from .events import Args, Event

COMPUTE, COMMUNICATION, COPY = 0, 1, 2

_CATEGORIES = {
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Operator": "cpu_op",
    "Runtime": "cuda_runtime",
    "cuda_driver": "cuda_runtime",
    "hip_runtime": "cuda_runtime",
    "xpu_runtime": "cuda_runtime",
    "privateuse1_runtime": "cuda_runtime",
    "mtia_runtime": "cuda_runtime",
    "concurrent_kernel": "kernel",
    "mtia_ccp_events": "kernel",
}
_COMMUNICATION = re.compile(
    r"^(?:nccl|rccl|msccl|mscclpp|hccl|oneccl)|\bnccl(?:Dev)?Kernel|ncclSym|cross_device_reduce|multimem_|nvshmem|"
    r"deep_ep::|(?:one|two)_?shot_all_?reduce",
    re.IGNORECASE,
)
_LAUNCH = re.compile(r"(?:cuda|cu|hip|hipExt|hipModule|hipExtModule)(?:Graph)?Launch(?!Host)\w*$|urEnqueueKernelLaunch")
_SYNC = re.compile(r"(?:cuda|cu|hip)\w*Synchronize$")
_COPIED = re.compile(r"^(?:Memcpy|Memset|CopyHost|CopyDevice|FillBuffer|hipMemcpy)", re.IGNORECASE)
_STEP = re.compile(r"ProfilerStep\s*#?(\d{1,15})$")
_DATA = re.compile(
    r"enumerate\(DataLoader\)|DataLoaderIter|data_?loader|\bdata_load|\b(?:get|next|load|fetch)_(?:next_)?batch|"
    r"\bnext_data|dataloader_next|\bread_batch|\bbatch_(?:load|fetch)",
    re.IGNORECASE,
)
_GLOO = re.compile(r"^(?:gloo|mpi|ucc):")
_RENDEZVOUS = re.compile(r"^(?:nccl|rccl):")
#: Names and collectives that are kept of one trace, and signs of a name.
_NAMES, _COLLECTIVES, _SIGNS = 20_000, 20_000, 300


class Timeline:
    """Collected from the events, in arrays: times in microseconds as the trace counts them."""

    def __init__(self) -> None:
        self.start, self.length = array("d"), array("d")  # device work
        self.kind, self.device, self.name, self.link = array("b"), array("q"), array("i"), array("q")
        self.call_start, self.call_link, self.call_launches = array("d"), array("q"), array("b")  # of the runtime
        self.sync_start, self.sync_length = array("d"), array("d")
        self.op_start, self.op_length, self.op_name, self.op_thread = array("d"), array("d"), array("i"), array("q")
        self.overhead_start, self.overhead_length = array("d"), array("d")
        self.gloo_start, self.gloo_length = array("d"), array("d")
        self.steps: dict[int, tuple[float, float, int]] = {}  # number → start, length, thread
        self.data: list[tuple[float, float, int]] = []
        self.loader = ""
        self.memory: dict[
            int, tuple[array[float], array[float], array[float]]
        ] = {}  # device → time, allocated, reserved
        self.collectives: list[tuple[float, float, Args]] = []
        self.names: list[str] = []
        self.first, self.last = math.inf, -math.inf
        self.events = 0
        self.stacks = False
        self.odd = 0
        self._ids: dict[str, int] = {}
        self._threads: dict[Any, int] = {}

    def add(self, events: Iterable[Event]) -> None:
        """Take some events more."""
        for event in events:
            self.events += 1
            if event.ph == "X":
                self._complete(event)
            elif event.ph == "i" and event.name == "[memory]":
                self._memory(event)

    def _complete(self, event: Event) -> None:
        """An event with a length."""
        start, length, category, name = event.ts, event.dur, event.cat, event.name
        if type(start) is not float and type(start) is not int:
            self.odd += 1
            return
        if type(length) is not float and type(length) is not int:
            length = 0.0
        if not (length >= 0 and abs(start) < 1e19 and length < 1e19):
            self.odd += 1
            return
        if type(category) is not str:
            return
        if type(name) is not str:
            name = str(name)
        category = _CATEGORIES.get(category, category)
        if category == "Trace":
            return
        args = event.args
        if category == "cpu_op" or category == "user_annotation":
            self._seen(start, length)
            if args is not None and args.call_stack is not None:
                self.stacks = True
            if not self._annotation(name, start, length, event.tid) and category == "cpu_op":
                self.op_start.append(start)
                self.op_length.append(length)
                self.op_name.append(self._id(name))
                self.op_thread.append(self._thread(event.tid))
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            self._seen(start, length)
            self._work(category, name, start, length, args)
        elif category == "cuda_runtime":
            self._seen(start, length)
            if _SYNC.match(name) is not None:
                self.sync_start.append(start)
                self.sync_length.append(length)
            else:
                self.call_start.append(start)
                self.call_link.append(_count(args.correlation if args is not None else None))
                self.call_launches.append(_LAUNCH.match(name) is not None)
        elif category == "overhead":
            self.overhead_start.append(start)
            self.overhead_length.append(length)
        elif category == "python_function":
            self.stacks = True

    def _seen(self, start: float, length: float) -> None:
        if start < self.first:
            self.first = start
        if start + length > self.last:
            self.last = start + length

    def _work(self, category: str, name: str, start: float, length: float, args: Args | None) -> None:
        kind = COPY
        if category == "kernel":
            kind = COMMUNICATION if _COMMUNICATION.search(name) else COPY if _COPIED.match(name) else COMPUTE
        self.start.append(start)
        self.length.append(length)
        self.kind.append(kind)
        self.name.append(self._id(name))
        self.device.append(_count(args.device if args is not None else None))
        self.link.append(_count(args.correlation if args is not None else None))
        if args is None or args.collective is None or kind != COMMUNICATION or len(self.collectives) >= _COLLECTIVES:
            return
        self.collectives.append((start, length, args))

    def _annotation(self, name: str, start: float, length: float, thread: Any) -> bool:
        """A range that a person, or torch on their behalf, named."""
        if (step := _STEP.match(name)) is not None:
            number = int(step[1])
            before = self.steps.get(number)
            if before is None or length > before[1]:
                self.steps[number] = (start, length, self._thread(thread))
            return True
        if _GLOO.match(name) is not None:
            self.gloo_start.append(start)
            self.gloo_length.append(length)
            return True
        if _DATA.search(name) is not None:
            self.data.append((start, length, self._thread(thread)))
            self.loader = self.loader or name[:_SIGNS]
            return True
        return _RENDEZVOUS.match(name) is not None

    def _memory(self, event: Event) -> None:
        args, time = event.args, event.ts
        if args is None or type(time) not in (int, float):
            return
        kind, device = args.device_type, args.device_id
        at = -1 if kind in (0, "0", None) else max(_count(device), 0)
        allocated, reserved = (
            float(each) if type(each) in (int, float) and each >= 0 else math.nan
            for each in (args.allocated, args.reserved)
        )
        if math.isnan(allocated):  # before 2021 only the change is told: not where it began
            return
        found = self.memory.setdefault(at, (array("d"), array("d"), array("d")))
        for column, value in zip(found, (time, allocated, reserved), strict=True):
            column.append(value)

    def _id(self, name: str) -> int:
        found = self._ids.get(name)
        if found is None:
            short = name[:_SIGNS]
            found = self._ids.get(short)
            if found is None:
                found = len(self.names) if len(self.names) < _NAMES else _NAMES - 1
                if found == len(self.names):
                    self.names.append(short)
                self._ids[short] = found
            if len(self._ids) < 4 * _NAMES:
                self._ids[name] = found
        return found

    def _thread(self, thread: Any) -> int:
        key = str(thread)
        return self._threads.setdefault(key, len(self._threads))


def _count(value: Any) -> int:
    """A number that tells things apart; −1 where there is none."""
    if type(value) is int:
        return value if -(2**62) < value < 2**62 else -1
    if type(value) is str and value.isdigit():
        return int(value[:18])
    return -1
