"""Tables made from a capsule's records, made once and kept as long as the capsule is open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ...capsules import Capsule
from .capsules import opened

Table = TypeVar("Table")

_tables: WeakKeyDictionary[Capsule, dict[str, Any]] = WeakKeyDictionary()


def kept(path: str, name: str, make: Callable[[Capsule], Table]) -> Table:
    """The table ``name`` of a capsule, made by ``make`` where it is not there yet.

    Raises:
        EvidenceError: the capsule cannot be read.
    """
    capsule = opened(path)
    tables = _tables.setdefault(capsule, {})
    if name not in tables:
        tables[name] = make(capsule)
    return tables[name]
