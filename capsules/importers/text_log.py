"""Text logs."""

from __future__ import annotations

from .run import Run
from .source import Source

FORMAT = "training log"


def sniff(source: Source) -> bool:
    """Not yet."""
    return False


def read(source: Source, out: Run) -> None:
    """Not yet."""
