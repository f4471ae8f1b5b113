"""The capsule that the snapshot of a simulated job is imported to."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import import_files

from benchmarks.caching_allocator import CachingAllocator


def save(path: Path, snapshot: Any) -> Path:
    """Write a snapshot as torch does."""
    with path.open("wb") as file:
        pickle.dump(snapshot, file)
    return path


def imported(tmp_path: Path, snapshot: Any, *beside: Path, name: str = "snapshot.pickle") -> Capsule:
    """The capsule of a snapshot, or of a simulated device's, and of files beside it."""
    if isinstance(snapshot, CachingAllocator):
        snapshot = snapshot.snapshot()
    found = import_files([save(tmp_path / name, snapshot), *beside], tmp_path / "imported", attach=False)
    return Capsule.open(found)
