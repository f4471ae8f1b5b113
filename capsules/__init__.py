"""The failure capsule: what a broken job leaves behind, written so that a killed writer loses nothing.

Names are loaded on first use, so that importing the package costs no NumPy, HDF5 or torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batches import Batch, Tensor
    from .errors import EvidenceError
    from .reader import Capsule
    from .recorder import Recorder
    from .tables import Series, SeriesKey, Stats
    from .writer import CapsuleWriter

_HOMES = {
    "Batch": "batches",
    "Capsule": "reader",
    "CapsuleWriter": "writer",
    "EvidenceError": "errors",
    "Recorder": "recorder",
    "Series": "tables",
    "SeriesKey": "tables",
    "Stats": "tables",
    "Tensor": "batches",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    return value


__all__ = ["Batch", "Capsule", "CapsuleWriter", "EvidenceError", "Recorder", "Series", "SeriesKey", "Stats", "Tensor"]
