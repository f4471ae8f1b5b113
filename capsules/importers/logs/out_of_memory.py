"""Out of memory in the words of every allocator: torch on CUDA, ROCm, XPU, NPU and MPS, the host, and its OOM killer.

Of each text the bytes that it states are taken; what it does not state stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .log import count, size

#: What is in every line that this module reads.
SIGN = re.compile(
    r"out of memory|OutOfMemory|[Cc]an't allocate memory: you tried|not enough memory: you tried"
    r"|Unable to allocate [\d.]+ [KMGT]?i?B|oom[-_]kill|OOM[- ]?[Kk]ill|OOM when allocating"
    r"|Out of memory: Kill|[Oo]ut of memory (?:while trying|allocating)"
)
_UNIT = r"([KMGT]?i?B|bytes)"
_DEVICE = re.compile(
    r"(?:CUDA|HIP|XPU|NPU|MPS backend|MUSA|GPU|MLU|HPU) out of memory\b.{0,400}?[Tt]ried to allocate ([\d.]+) " + _UNIT
)
#: Without a number it must be an error: programs warn of running out of memory, and advise against it.
_PLAIN = re.compile(
    r"Error: (?:CUDA|HIP|XPU|NPU) (?:error: )?out of memory|(?:CUDA|HIP) error: out of memory"
    r"|OOM when allocating tensor with shape.{1,300}GPU"
)
#: A text that explains such an error, in quotation marks and without the numbers that each real one has.
_QUOTED = re.compile(
    r"(?:^|\s)['\"`‘“](?:\w{1,40}Error: )?\w{2,12} out of memory\. Tried to allocate [\d.]+ \w{1,5}\.?['\"`’”]"
)
#: ``host:pid:thread [device] NCCL WARN …``
_NCCL = re.compile(r"(?:\[(\d{1,3})\] )?NCCL WARN .{0,80}[Ff]ailure.{0,20}out of memory")
_XLA = re.compile(r"[Oo]ut of memory (?:while trying to allocate|allocating) (\d{1,18}) bytes")
_TOTAL = re.compile(r"(?:GPU|XPU|NPU|Device) ?(\d{1,6}) has a total capac[it]+y of ([\d.]+) " + _UNIT)
_FREE = re.compile(r"of which ([\d.]+) " + _UNIT + " is free")
_ALLOCATED = re.compile(r"allocated memory ([\d.]+) " + _UNIT + " is allocated by PyTorch")
_POOLS = re.compile(r"([\d.]{1,20}) " + _UNIT + " allocated in private pools")
_IDLE = re.compile(r"([\d.]{1,20}) " + _UNIT + " is reserved by PyTorch but unallocated")
_OTHERS = re.compile(r"Process (\d{1,18}) has ([\d.]+) " + _UNIT + " memory in use")
_OWN = re.compile(r"this process has ([\d.]+) " + _UNIT + " memory in use")
#: ``(GPU 5; 23.70 GiB total capacity; 22.00 GiB already allocated; …)``: what each number is called.
_LISTED = re.compile(r"\((?:GPU|XPU|NPU|MLU) {1,4}(\d{1,6});([^()]{1,600}(?:\([^()]{0,80}\)[^()]{0,200})?)\)?")
_ITEM = re.compile(r"([\d.]{1,20}) " + _UNIT + r" ([a-z ]{3,30})")
_CALLED = {
    "total capacity": "capacity",
    "already allocated": "allocated",
    "free": "free",
    "reserved in total by": "reserved",
    "cached": "reserved",
    "reserved": "reserved",
}
_MPS = re.compile(
    r"MPS allocated: ([\d.]+) "
    + _UNIT
    + r", other allocations: ([\d.]+) "
    + _UNIT
    + r", max allowed: ([\d.]+) "
    + _UNIT
)
_HOST = re.compile(r"(?:can't allocate memory|not enough memory): you tried to allocate (\d{1,18}) bytes")
_ARRAY = re.compile(r"Unable to allocate ([\d.]+) ([KMGT]?i?B) for an array")
_KILLED = re.compile(
    r"(?:(?:[Oo]ut of memory|oom-kill): ?(?:Killed|Kill) process|Killed process) (\d{1,18}),? ?\(([^()]{1,200})\)"
)
_ANON = re.compile(r"anon-rss:(\d{1,18})kB")
_SCHEDULER = re.compile(
    r"[Dd]etected \d+ oom[-_ ]kill event|killed by the cgroup out-of-memory handler|\bOOMKilled\b"
    r"|node running low on memory"
)
#: Functions in whose frames an allocation belongs to a phase, innermost first.
_PHASES = (
    ("optimizer", ("/optim/", "/optimizer/"), ("step", "_init_group", "optimizer_step", "_single_tensor_adamw")),
    ("backward", ("_tensor.py", "autograd/"), ("backward", "_engine_run_backward", "grad")),
    ("eval", (), ("evaluate", "evaluation_loop", "evaluation_step", "validate", "validation_step", "prediction_step")),
    ("forward", (), ("forward", "_call_impl", "training_step", "compute_loss")),
)


def parsed(text: str) -> dict[str, Any] | None:
    """Fields of an ``oom`` event of what a line says, sizes in bytes; None where it speaks of no such thing.

    ``where`` is ``host`` where it is the machine's memory that ran out, not a device's.
    """
    if SIGN.search(text) is None or _QUOTED.search(text) is not None:
        return None
    if (device := _DEVICE.search(text)) is not None:
        return _of_device(text, size(device[1], device[2]))
    if (xla := _XLA.search(text)) is not None:
        return {"requested": count(xla[1])}
    if (host := _HOST.search(text)) is not None:
        return {"requested": count(host[1]), "where": "host"}
    if (array := _ARRAY.search(text)) is not None:
        return {"requested": size(array[1], array[2]), "where": "host"}
    if (killed := _KILLED.search(text)) is not None:
        anonymous = _ANON.search(text)
        allocated = count(anonymous[1]) if anonymous else None
        return {
            "where": "host",
            "type": "OOM killer",
            "pid": count(killed[1]),
            "process": killed[2],
            "allocated": allocated * 1024 if allocated is not None else None,
        }
    if _SCHEDULER.search(text) is not None:
        return {"where": "host", "type": "OOM killer"}
    if (nccl := _NCCL.search(text)) is not None:
        return {"phase": "communication", "device": count(nccl[1]) if nccl[1] else None}
    return {} if _PLAIN.search(text) is not None else None


def phase_of(frames: Sequence[dict[str, Any]]) -> str | None:
    """The phase of a step in which a stack (innermost first) was, by the functions of torch and of trainers in it."""
    for frame in frames:
        name, file = str(frame.get("name", "")), str(frame.get("file", ""))
        for phase, files, functions in _PHASES:
            if name in functions and (not files or any(part in file for part in files)):
                return _evaluated(frames) or phase if phase == "forward" else phase
    return None


def _evaluated(frames: Sequence[dict[str, Any]]) -> str | None:
    """A forward pass inside an evaluation is the evaluation's."""
    return "eval" if any(frame.get("name") in _PHASES[2][2] for frame in frames) else None


def _of_device(text: str, requested: int | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"requested": requested}
    if (mps := _MPS.search(text)) is not None:
        allocated, others, allowed = (size(mps[at], mps[at + 1]) for at in (1, 3, 5))
        entry |= {"allocated": allocated, "capacity": allowed, "other_allocations": others}
        if allocated is not None and others is not None and allowed is not None:
            entry["free"] = max(0, allowed - allocated - others)
        return entry
    if (listed := _LISTED.search(text)) is not None:
        entry["device"] = count(listed[1])
        for number, unit, name in _ITEM.findall(listed[2]):
            if (called := _CALLED.get(name.strip())) is not None:
                entry.setdefault(called, size(number, unit))
        allocated, reserved = entry.get("allocated"), entry.get("reserved")
        if allocated is not None and reserved is not None and reserved < allocated:
            entry["reserved"] = allocated + reserved  # "cached" of torch before 1.4 leaves out what is allocated
        return entry
    if (total := _TOTAL.search(text)) is not None:
        entry |= {"device": count(total[1]), "capacity": size(total[2], total[3])}
    entry["free"] = _bytes(_FREE, text)
    entry["allocated"], idle = _bytes(_ALLOCATED, text), _bytes(_IDLE, text)
    if entry["allocated"] is not None and idle is not None:
        entry["reserved"] = entry["allocated"] + idle
    entry["private_pools"] = _bytes(_POOLS, text)
    entry["process_used"] = _possible(_bytes(_OWN, text), entry.get("capacity"))
    others = [
        {"pid": count(pid), "bytes": used}
        for pid, number, unit in _OTHERS.findall(text)
        if (used := _possible(size(number, unit), entry.get("capacity"))) is not None
    ]
    entry["other_processes"] = others or None
    return entry


def _bytes(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return size(found[1], found[2]) if found else None


def _possible(used: int | None, capacity: int | None) -> int | None:
    """A process's share, unless it exceeds the device: torch prints 17179869184.00 GiB where the driver tells none."""
    return None if used is None or (capacity is not None and used > capacity) else used
