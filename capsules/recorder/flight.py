"""Torch's flight recorder: what was asked of process groups from anywhere, C++ included, with numbers and stacks.

It is on by default for NCCL and Gloo and holds the last 2,000 operations. Reading it changes nothing.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
from dataclasses import dataclass, field
from typing import Any

from .internals import flight_record, process_groups

#: Back ends that torch's flight recorder follows.
_RECORDED = ("gloo", "nccl", "xccl")
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}


@dataclass(frozen=True)
class Group:
    """One process group, under its name in the whole job."""

    name: str
    description: str | None
    ranks: list[int]  # global, in the order of the ranks inside
    backend: str
    timeout: float | None
    default_timeout: float | None
    recorded: bool  # by the flight recorder

    @property
    def gloo(self) -> bool:
        """Whether the host does the work, in threads."""
        return "gloo" in self.backend

    def global_rank(self, inside: int) -> int | None:
        """The global rank of a rank inside the group; None where there is none."""
        return self.ranks[inside] if 0 <= inside < len(self.ranks) else None


class Groups:
    """The process groups by name; those that were destroyed stay known."""

    def __init__(self) -> None:
        self._known: dict[str, Group] = {}
        sizes = [os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")]
        self.recorded = "0" not in sizes and read(entries=False) is not None  # whether there is a flight recorder

    def of(self, group: Any) -> Group:
        """What is known of a group object."""
        name = str(group.group_name)
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = self._about(name, group)
        return known

    def named(self, name: str) -> Group | None:
        """The group of that name, where this rank has made it."""
        if name not in self._known:
            for group in process_groups():
                self.of(group)
        return self._known.get(name)

    def _about(self, name: str, group: Any) -> Group:
        import torch.distributed as distributed

        backend = str(distributed.get_backend_config(group))
        recorded = self.recorded and any(each in backend for each in _RECORDED)
        ranks = list(distributed.get_process_group_ranks(group))
        described = getattr(group, "group_desc", None)
        return Group(name, described or None, ranks, backend, _timeout(group), default_timeout(backend), recorded)


def _timeout(group: Any) -> float | None:
    for device in group._device_types:
        try:
            return group._get_backend(device).options._timeout.total_seconds()
        except Exception:  # a back end without options
            continue
    return None


def default_timeout(backend: str) -> float | None:
    """Seconds after which torch gives up on a collective of a back end, where nobody says otherwise."""
    from torch.distributed import constants

    nccl = getattr(constants, "default_pg_nccl_timeout", None)
    chosen = nccl if "nccl" in backend and nccl is not None else getattr(constants, "default_pg_timeout", None)
    return None if chosen is None else chosen.total_seconds()


@dataclass
class Record:
    """The flight recorder as it was read: entries as torch names their fields, and the last numbers by local id."""

    entries: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    status: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        raise pickle.UnpicklingError("the flight recorder holds plain data only")


def read(entries: bool = True) -> Record | None:
    """The flight recorder now; None where this torch has none."""
    dumped = flight_record(entries)
    if dumped is None:
        return None
    collecting = gc.isenabled()
    gc.disable()  # tens of thousands of objects, none of them garbage: looking for some would take three times as long
    try:
        found = _Plain(io.BytesIO(dumped)).load()
    finally:
        if collecting:
            gc.enable()
    return Record(found.get("entries") or [], found.get("pg_status") or {})


def op_of(entry: dict[str, Any]) -> str:
    """The operation of an entry without its back end and without the ranks of a pair."""
    return str(entry.get("profiling_name", "")).partition(":")[2].partition(" ")[0]


def dtypes_of(names: list[str]) -> list[str]:
    """Torch's public names for those of C++."""
    return [_DTYPES.get(name, name.lower()) for name in names]
