"""Who is on a device, as an out-of-memory text lists them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .records import mappings, whole
from .thresholds import PRINTED


@dataclass(frozen=True)
class Other:
    """Another process on the device."""

    pid: int | None
    bytes: int


def sorted_out(
    said: Mapping[str, Any], reserved: int | None, capacity: int | None, free: int | None
) -> tuple[int | None, tuple[Other, ...]]:
    """(what this process has, what others have) of the processes that a text lists.

    In a container a process does not know its own number as the driver does, and is listed as another one: where the
    list and this process's memory together exceed what is in use, the least one that has room for it is this one.
    """
    own, others = whole(said.get("process_used")), tuple(_others(said.get("other_processes")))
    if own is not None or reserved is None or capacity is None or free is None:
        return own, others
    if sum(each.bytes for each in others) + reserved <= capacity - free + PRINTED:
        return own, others
    mine = min((each for each in others if each.bytes >= reserved - PRINTED), key=lambda each: each.bytes, default=None)
    return (own, others) if mine is None else (mine.bytes, tuple(each for each in others if each is not mine))


def _others(value: Any) -> Iterator[Other]:
    for _, each in zip(range(64), mappings(value), strict=False):
        size = whole(each.get("bytes"))
        if size is not None:
            yield Other(whole(each.get("pid")), size)
