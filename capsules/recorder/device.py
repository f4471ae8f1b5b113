"""Memory and load of the device as scalars, where there is a device and where its driver answers."""

from __future__ import annotations

import time
from typing import Any

import torch

# The driver takes a millisecond to answer; asked more often than this it would cost more than it tells.
NVML_EVERY = 1.0


class DeviceScalars:
    """Reads the caching allocator at every step, and the driver (through pynvml) at most once a second."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle: Any = None
        self._nvml: Any = None
        self._asked = 0.0
        if device.type == "cuda":
            self._open()

    def _open(self) -> None:
        try:
            import pynvml  # pyright: ignore[reportMissingImports]  # an extra
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            # By identity: the driver's numbering knows nothing of CUDA_VISIBLE_DEVICES.
            uuid = str(torch.cuda.get_device_properties(self._device).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
            self._nvml = pynvml
        except Exception:  # every NVML failure is a class of its own, and without it there are just fewer scalars
            self._handle = None

    def read(self) -> dict[str, float]:
        """Bytes, share of time busy (0 to 1), W and °C by their standard names; empty on a CPU."""
        if self._device.type != "cuda":
            return {}
        stats = torch.cuda.memory_stats(self._device)
        found = {
            "memory_allocated": stats.get("allocated_bytes.all.current"),
            "memory_reserved": stats.get("reserved_bytes.all.current"),
            "memory_peak": stats.get("allocated_bytes.all.peak"),
            "alloc_retries": stats.get("num_alloc_retries"),
        }
        now = time.monotonic()
        if self._handle is not None and now - self._asked >= NVML_EVERY:
            self._asked = now
            found |= self._ask()
        return {name: float(value) for name, value in found.items() if value is not None}

    def _ask(self) -> dict[str, float]:
        nvml, handle = self._nvml, self._handle
        found: dict[str, float] = {}
        for name, read in (
            ("gpu_utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            ("gpu_power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            ("gpu_temperature", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            ("memory_device_used", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
        ):
            try:
                found[name] = read()
            except Exception:  # not every device measures everything
                continue
        return found
