"""The memory of one rank: a ledger at the ends of a step's phases, and on CUDA the allocator's history at the peak.

Weights, gradients and optimizer states are counted exactly, storage by storage, shards as this rank holds them. On a
CUDA device the allocator's own numbers are beside them. The job's peak statistics are read and never reset: a phase in
which the high-water mark rose is the phase of the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from . import statistics
from .allocator import History, Keep
from .window import Window

#: Share by which the high-water mark rises before it is worth a record.
RECORD_RISE = 0.01


# Taken as they are: a thousand of them are looked at in a window that is due.
_PLAIN = (Tensor, nn.Parameter)


class HighWater:
    """The allocator's peak as it is seen from outside, at the ends of phases.

    A job may reset its statistics: the mark then falls, and rises are counted from there.
    """

    def __init__(self) -> None:
        self.mark = 0

    def rose(self, peak: int) -> float:
        """Share by which the mark rose since it was last seen; 0 where it did not, or where the job reset it."""
        before, self.mark = self.mark, peak
        return (peak - before) / before if 0 < before < peak else float(before == 0 < peak)


class MemoryLedger:
    """Follows the phases of each window.

    Args:
        root: the model.
        optimizers: those that step it, as far as they are known.
    """

    def __init__(self, root: nn.Module, optimizers: Callable[[], Iterable[Any]]) -> None:
        parameter = next(iter(root.parameters()), None)
        known = parameter is not None and not parameter.is_meta
        self.device = parameter.device if known and parameter is not None else torch.device("cpu")
        self.history: History | None = None
        self.phase = "forward"
        self._root = root
        self._optimizers = optimizers
        self._high = HighWater()
        self._start = 0  # bytes allocated when the window began
        self._records: dict[str, dict[str, Any]] = {}
        self._risen = 0.0
        self._weights: int | None = None
        self._states: int | None = None

    def keep_history(self, keep: Keep) -> None:
        """On CUDA, have the allocator remember its events; ``keep`` takes the snapshots that are made of them."""
        if self.device.type == "cuda":
            self.history = History(self.device, keep)

    def begin(self, window: Window) -> None:
        """A window begins."""
        self.phase = "forward"
        self._records, self._risen = {}, 0.0
        # Weights are counted where they lie sharded; states are made and changed by the optimizer only.
        self._weights = self._count_weights() if window.due else None
        self._states = self._states if window.due else None
        if self.device.type == "cuda":
            numbers = self._allocator()
            self._start = numbers.get("allocated", 0)
            self._high.rose(numbers.get("high", 0))

    def reached(self, window: Window, phase: str) -> None:
        """``phase`` has ended; called again for each micro-batch, of which the last one counts."""
        self.phase = {"forward": "backward", "backward": "optimizer"}.get(phase, "forward")
        numbers = self._allocator() if self.device.type == "cuda" else {}
        risen = self._high.rose(numbers.pop("high", 0)) if numbers else 0.0
        if risen >= RECORD_RISE:
            numbers["peak"] = self._high.mark
            self._risen = max(self._risen, risen)
        before = self._records.get(phase, {}).get("peak")
        if not window.due and risen < RECORD_RISE:
            return
        if self._weights is None:
            self._weights = self._count_weights()
        if phase == "optimizer" or self._states is None:
            self._states = self._count_states()
        record: dict[str, Any] = {"step": window.step, "phase": phase, "weights": self._weights}
        record |= {"gradients": self._gradients(), "optimizer": self._states, **numbers}
        if phase == "forward" and "allocated" in numbers:
            record["activations"] = max(0, numbers["allocated"] - self._start)
        if before is not None:
            record.setdefault("peak", before)
        self._records[phase] = record

    def take(self, window: Window) -> list[dict[str, Any]]:
        """The records of a window that has ended; where the peak rose, its snapshot is kept."""
        if self.history is not None:
            failure = self.history.last_failure
            if failure is not None and not any(event["kind"] == "oom" for event in window.events):
                window.event("oom", **self.failure(), message="the loop caught it")
            self.history.ended(window.step, self._high.mark, self._risen)
        records, self._records = list(self._records.values()), {}
        return records

    def failure(self, message: str = "") -> dict[str, Any]:
        """Fields of the event of a device that is out of memory: as the allocator told, else as the words say."""
        from ..importers.logs.out_of_memory import parsed

        found: dict[str, Any] = {"phase": self.phase}
        if self.device.type == "cuda":
            numbers = self._allocator()
            found |= {name: numbers[name] for name in ("allocated", "reserved", "capacity") if name in numbers}
            free, _ = torch.cuda.mem_get_info(self.device)
            found["free"] = free
        # The words are of the moment of the failure; what was asked above is of now, when some of it is free again.
        words = parsed(message) or {}
        found |= {name: value for name, value in words.items() if value is not None and name != "type"}
        if self.history is not None and self.history.last_failure is not None:
            found |= self.history.last_failure
            self.history.last_failure = None
        return found

    def close(self) -> None:
        """Leave the allocator as it was."""
        if self.history is not None:
            self.history.close()

    # -- what there is

    def _count_weights(self) -> int:
        return size_of((*self._root.parameters(), *self._root.buffers()), self.device)

    def _gradients(self) -> int:
        return size_of((each.grad for each in self._root.parameters() if each.grad is not None), self.device)

    def _count_states(self) -> int:
        found: list[Tensor] = []
        for optimizer in self._optimizers():
            for state in list(getattr(optimizer, "state", {}).values()):
                found += (each for each in _values(state) if isinstance(each, Tensor))
        return size_of(found, self.device)

    def _allocator(self) -> dict[str, int]:
        """Bytes by the names of the ledger; ``high`` is the high-water mark. Not every allocator knows all of them."""
        stats: Any = torch.cuda.memory.memory_stats_as_nested_dict(self.device)
        found: dict[str, int] = {}
        for name, key, kind in (
            ("allocated", "allocated_bytes", "current"),
            ("high", "allocated_bytes", "peak"),
            ("reserved", "reserved_bytes", "current"),
        ):
            value = stats.get(key, {}).get("all", {}).get(kind)
            if value is not None:
                found[name] = int(value)
        found["capacity"] = int(torch.cuda.get_device_properties(self.device).total_memory)
        return found


def size_of(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes on ``device`` of the distinct storages; of a sharded tensor the part that this rank holds."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if is_lazy(tensor):  # has no storage before its module runs
            continue
        local = tensor if type(tensor) in _PLAIN else statistics.local(tensor)
        if local.is_meta or local.device.type != device.type:
            continue
        storage = local.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _values(state: Any) -> list[Any]:
    """What an optimizer keeps for a parameter; some keep lists."""
    found: list[Any] = []
    for value in state.values() if isinstance(state, dict) else ():  # pyright: ignore[reportUnknownVariableType]
        found += value if isinstance(value, list | tuple) else [value]  # pyright: ignore[reportUnknownArgumentType]
    return found
