"""The list of capsules, and what one of them holds. Keeps capsules open between looks, until they change."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

from ...capsules import Capsule
from ..imports import open_evidence, stamp_of_job
from ..listing import Lister, Listing, last_write, stamp_of
from .types import Contents

#: Capsules kept open between looks; a capsule that changed is opened again.
_KEPT = 4

_listers: dict[str, Lister] = {}
_open: OrderedDict[str, tuple[object, Capsule]] = OrderedDict()

#: Evidence that views ask for, by the names that rules use too.
_EVIDENCE = (
    "stats",
    "batches.input_ids",
    "records.memory",
    "scalars.memory_allocated",
    "records.allocations",
    "records.segments",
    "records.ranks",
    "records.collectives",
    "records.requests",
)


def listing(directory: str, known: str = "", budget: float | None = None) -> Listing | None:
    """The capsules of a directory, or None where nothing changed since version ``known``; see ``Lister.listing``."""
    lister = _listers.get(directory)
    if lister is None:
        lister = _listers[directory] = Lister(Path(directory))
    found = lister.listing(budget)
    return None if found.version == known else found


def contents(path: str, known: str = "") -> Contents | None:
    """What a capsule holds, by view, or None where nothing was written since version ``known``."""
    stamp = _stamp(path)
    version = repr(stamp)
    if known == version:
        return None
    capsule = opened(path)
    return Contents(
        status=capsule.status,
        ranks=capsule.ranks,
        series=tuple(dict.fromkeys(key.name for key in capsule.scalar_keys())),
        has={name: capsule.has(name) for name in _EVIDENCE},
        trigger_step=capsule.trigger.step if capsule.trigger else None,
        world_size=(run.world_size or 0) if (run := capsule.manifest.run) is not None else 0,
        changed=last_write(stamp),
        version=version,
    )


def opened(path: str) -> Capsule:
    """A capsule, or the one that a raw file is imported to, kept open until it changes.

    Raises:
        EvidenceError: it cannot be read.
    """
    stamp = _stamp(path)
    if path in _open and _open[path][0] == stamp and stamp is not None:
        _open.move_to_end(path)
        return _open[path][1]
    capsule = open_evidence(os.fspath(path))
    _open[path] = (stamp, capsule)
    while len(_open) > _KEPT:
        _open.popitem(last=False)
    return capsule


def _stamp(path: str) -> tuple[object, ...] | None:
    """What tells of a change: of a capsule, or of a raw file."""
    return stamp_of_job(path) or stamp_of(Path(path))
