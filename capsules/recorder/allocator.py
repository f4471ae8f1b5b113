"""The history of the CUDA allocator, through functions of torch without a public name, and when it is worth a file."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

#: Events of the allocator that are kept (each with its Python stack); a large step has some ten thousand.
ENTRIES = 60_000
#: Environment variable with another number of them; 0 keeps no history.
ENTRIES_VARIABLE = "LLMCONSOLE_ALLOCATOR_HISTORY"
#: Share by which the high-water mark rises before it is worth another snapshot.
SNAPSHOT_RISE = 0.10
#: Windows that may still be warm-up, and snapshots of the peak and of failures that are kept of one run.
WARM_UP, MOST_PEAKS, MOST_FAILURES = 2, 3, 2

Keep = Callable[[Path], Any]


class History:
    """The events of the CUDA allocator, in a ring of bounded length, and snapshots of it when they matter.

    Where the job keeps a history of its own it is used and left as it is. An observer in the allocator makes the
    snapshot of a failure before the stack unwinds and frees what held the memory.
    """

    def __init__(self, device: torch.device, keep: Keep) -> None:
        self.last_failure: dict[str, Any] | None = None
        self._device = device
        self._keep = keep
        self._peaks = self._failures = 0
        self._snapshot_mark = 0
        self._windows = 0
        self._ours = False
        entries = os.environ.get(ENTRIES_VARIABLE, "")
        self._entries = int(entries) if entries.isdecimal() else ENTRIES
        self.on = self._entries > 0
        if self.on:
            self._begin()

    def _begin(self) -> None:
        enabled: Any = getattr(torch._C, "_cuda_isHistoryEnabled", None)
        if enabled is None or not enabled():
            torch.cuda.memory._record_memory_history(
                enabled="all", context="alloc", stacks="python", max_entries=self._entries
            )
            self._ours = True
        attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None:
            this = weakref.ref(self)  # an observer cannot be taken off again

            def observe(device: int, asked: int, limit: int, free: int) -> None:
                it = this()
                if it is not None and it.on:
                    it.failed(device, asked, free)

            attach(observe)

    def failed(self, device: int, asked: int, free: int) -> None:
        """The allocator is about to raise; nothing may be raised from here."""
        try:
            stats: Any = torch.cuda.memory.memory_stats_as_nested_dict(device)
            self.last_failure = {
                "requested": asked,
                "free": free,
                "device": device,
                "allocated": stats.get("allocated_bytes", {}).get("all", {}).get("current"),
                "reserved": stats.get("reserved_bytes", {}).get("all", {}).get("current"),
            }
            if self._failures < MOST_FAILURES:
                self._failures += 1
                self.snapshot(f"oom-{self._failures}")
        except Exception:
            self.on = False

    def ended(self, step: int, mark: int, risen: float) -> None:
        """A window has ended; the first one behind the warm-up is a peak, and each that is much higher."""
        self._windows += 1
        if not self.on or self._windows <= WARM_UP or self._peaks >= MOST_PEAKS:
            return
        if mark > self._snapshot_mark * (1 + SNAPSHOT_RISE) and (risen > 0 or not self._peaks):
            self._peaks += 1
            self._snapshot_mark = mark
            self.snapshot(f"peak-step-{step}")

    def snapshot(self, name: str) -> None:
        """Write what the allocator holds and remembers, and hand the file on."""
        with tempfile.TemporaryDirectory(prefix="llmconsole-") as folder:
            path = Path(folder) / f"memory-{name}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))
            self._keep(path)

    def close(self) -> None:
        """End the history that was begun here."""
        if self.on and self._ours:
            torch.cuda.memory._record_memory_history(enabled=None)
        self.on = False
