"""What an out-of-memory error says in words: CUDA and HIP (old and new wording), XPU, MPS; sizes in bytes."""

from __future__ import annotations

import re
from typing import Any, Final

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE: Final = r"(\d{1,15}(?:\.\d{1,9})?) ?((?:[KMGT]i?)?B|bytes)"
_PATTERNS: Final = tuple(
    (name, re.compile(pattern.replace("SIZE", _SIZE)))
    for name, pattern in (
        ("requested", r"[Tt]ried to allocate SIZE"),
        ("capacity", r"total capac[it]{1,3}y of SIZE"),
        ("capacity", r"SIZE total capacity"),
        ("capacity", r"max allowed: SIZE"),
        ("free", r"of which SIZE is free"),
        ("free", r"SIZE free\b"),
        ("own", r"this process has SIZE memory in use"),
        ("allowed", r"SIZE allowed;"),
        ("allocated", r"allocated memory SIZE is allocated by PyTorch"),
        ("allocated", r"SIZE already allocated"),
        ("allocated", r"MPS allocated: SIZE"),
        ("outside", r"other allocations: SIZE"),
        ("private_pools", r"SIZE allocated in private pools"),
        ("idle", r"SIZE is reserved by PyTorch but unallocated"),
        ("reserved", r"SIZE reserved in total by PyTorch"),
        ("cached", r"SIZE cached"),
    )
)
_DEVICE: Final = re.compile(r"\bGPU (\d{1,4})\b")
_OTHERS: Final = re.compile(rf"Process (\d{{1,10}}) has {_SIZE} memory in use")
#: Processes that are read from one message.
_MOST_OTHERS: Final = 64
#: Characters of a message that are read.
_LONGEST: Final = 4000


def sizes_said(text: str) -> dict[str, Any]:
    """The numbers of one out-of-memory message; what it does not say is absent.

    Returns:
        ``requested, free, allocated, reserved, capacity`` (bytes), ``own`` (all that this process has in use),
        ``allowed`` (a limit below the capacity), ``outside`` (of this process, not PyTorch's), ``private_pools``,
        ``device``, ``other_processes`` [{pid, bytes}]. GB is taken for GiB, as torch means it. The wording of torch up
        to 1.3 gives what is cached and not allocated; ``reserved`` is allocated and idle together in every case.
    """
    text = " ".join(text[:_LONGEST].split())
    found: dict[str, Any] = {}
    for name, pattern in _PATTERNS:
        if name not in found and (match := pattern.search(text)) is not None:
            found[name] = _bytes(match[1], match[2])
    idle, cached = found.pop("idle", None), found.pop("cached", None)
    allocated = found.get("allocated")
    if "reserved" not in found and allocated is not None:
        if idle is not None:
            found["reserved"] = allocated + idle
        elif cached is not None:
            found["reserved"] = cached if cached >= allocated else allocated + cached
    if "free" not in found and "outside" in found and "capacity" in found and allocated is not None:
        found["free"] = max(0, found["capacity"] - allocated - found["outside"])
    if (device := _DEVICE.search(text)) is not None:
        found["device"] = int(device[1])
    others = [{"pid": int(pid), "bytes": _bytes(size, unit)} for pid, size, unit in _OTHERS.findall(text)]
    if others:
        found["other_processes"] = others[:_MOST_OTHERS]
    return found


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit[0] if unit[0] in _UNITS else ""])
