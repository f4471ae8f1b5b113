"""Traces in Kineto's format, put together event by event: times in milliseconds, as a timeline is drawn."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

BASE = 1_790_857_026_000_000_000
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"


class KinetoTrace:
    """One trace of one device."""

    def __init__(self, rank: int | None = None, world: int = 1, **header: Any) -> None:
        self.header: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H100", "totalGlobalMem": 80 * 2**30}],
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": BASE,
            **header,
        }
        if rank is not None:
            self.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world}
        self.events: list[dict[str, Any]] = []
        self._links = 0

    def add(self, cat: str, name: str, start: float, length: float, tid: Any = 1, **args: Any) -> KinetoTrace:
        """Any event with a length, in milliseconds."""
        event = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start * 1e3, "dur": length * 1e3}
        self.events.append({**event, "args": args})
        return self

    def step(self, number: int, start: float, length: float) -> KinetoTrace:
        return self.add("user_annotation", f"ProfilerStep#{number}", start, length)

    def kernel(
        self,
        start: float,
        length: float,
        name: str = "gemm",
        *,
        launched: float | None = None,
        device: int = 0,
        **args: Any,
    ) -> KinetoTrace:
        """Work of the device, and the call that launched it: by default 0.01 ms before it begins."""
        self._links += 1
        called = start - 0.01 if launched is None else launched
        self.add("cuda_runtime", "cudaLaunchKernel", called, 0.005, correlation=self._links)
        return self.add("kernel", name, start, length, 7, device=device, stream=7, correlation=self._links, **args)

    def data(self, start: float, length: float, tid: Any = 1) -> KinetoTrace:
        name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
        return self.add("user_annotation", name, start, length, tid)

    def text(self) -> str:
        return json.dumps({**self.header, "traceEvents": self.events, "traceName": "made by a test"}, indent=2)

    def write(self, path: Path) -> Path:
        text = self.text().encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path
