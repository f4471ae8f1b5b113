"""Rules of device memory, of the stage runtime: where it went, and what would fit.

``oom`` reads the failures and classifies each once for all rules; one module a theme; thresholds in ``thresholds``.
"""

from . import (
    capacity,
    checkpointing,
    eval_graph,
    fragmentation,
    leak,
    ledger,
    logged_tensors,
    long_tail,
    other_process,
    serving,
    thrash,
)

__all__ = [
    "capacity",
    "checkpointing",
    "eval_graph",
    "fragmentation",
    "leak",
    "ledger",
    "logged_tensors",
    "long_tail",
    "other_process",
    "serving",
    "thrash",
]
