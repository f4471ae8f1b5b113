"""What this machine offers for debugging, asked piece by piece; runs in the worker, since torch is imported here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_DRIVER = Path("/proc/driver/nvidia/version")


def device_facts() -> dict[str, Any]:
    """torch, devices and whether they can be used, driver, cuDNN, NCCL; what is not there is None."""
    import torch

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "built_for": torch.version.cuda or getattr(torch.version, "hip", None),
        "devices": [],
        "problem": None,
        "driver": _driver(),
        "cudnn": None,
        "nccl": None,
    }
    if facts["built_for"] is None:
        return facts
    try:
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                # A device that is listed can still be out of order or in exclusive use: let it compute something.
                total = float(torch.ones(64, device=f"cuda:{index}").sum().item())
                memory = torch.cuda.get_device_properties(index).total_memory / 2**30
                facts["devices"].append(f"{torch.cuda.get_device_name(index)} ({memory:.0f} GiB)")
                if total != 64.0:
                    facts["problem"] = f"cuda:{index} added 64 ones to {total}"
        facts["cudnn"] = torch.backends.cudnn.version()
        from torch.cuda import nccl

        facts["nccl"] = ".".join(map(str, nccl.version())) if facts["devices"] else None
    except Exception as error:  # whatever a broken driver raises is what we are here to report
        facts["problem"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return facts


def container() -> str | None:
    """The kind of container this process runs in, or None."""
    for mark, kind in ((Path("/.dockerenv"), "docker"), (Path("/run/.containerenv"), "podman")):
        if mark.exists():
            return kind
    try:
        groups = Path("/proc/1/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"kubepods|docker|containerd|lxc|slurm", groups)
    return found.group() if found else None


def _driver() -> str | None:
    try:
        first = _DRIVER.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        return None
    found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", first)
    return found.group() if found else first.strip()
