"""Rules of device memory, of the stage runtime: where it went, and what would fit.

``oom`` reads the failures and classifies each once for all rules; one module a theme; thresholds in ``thresholds``.
"""

from . import (
    capacity,
    fragmentation,
    leak,
    ledger,
    logged_tensors,
    other_process,
    thrash,
)

__all__ = [
    "capacity",
    "fragmentation",
    "leak",
    "ledger",
    "logged_tensors",
    "other_process",
    "thrash",
]
