"""Rules of the stage distributed: what ranks did together, and which of them did not."""

from . import (
    buffers,
    coverage,
    data,
    deaths,
    gradients,
    mismatch,
    missing,
    order,
    paths,
    replicas,
    scaling,
    speed,
    steps,
    timeouts,
)

__all__ = [
    "buffers",
    "coverage",
    "data",
    "deaths",
    "gradients",
    "mismatch",
    "missing",
    "order",
    "paths",
    "replicas",
    "scaling",
    "speed",
    "steps",
    "timeouts",
]
