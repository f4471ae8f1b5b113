"""The stages of the ladder, in the order in which evidence is narrowed down."""

from __future__ import annotations

from typing import Literal

Stage = Literal["capture", "data", "objective", "numerics", "distributed", "kernel", "runtime", "application"]

STAGES: tuple[Stage, ...] = (
    "capture",
    "data",
    "objective",
    "numerics",
    "distributed",
    "kernel",
    "runtime",
    "application",
)
