"""Readers of the lines that training programs print, composed: a log mixes several of them.

A reader is one module with ``FORMAT`` (the program's name), ``SIGN`` (a regular expression over bytes that tells its
lines from all others), ``NEEDED`` (bytes that each of those lines has) and ``Lines``, a class with ``marks``, ``open``
and ``take(line)``. It is listed here, once.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Protocol, cast

from .log import Log, Reader

#: Asked in this order; the first that takes a line keeps it.
MODULES = (
    "megatron",
    "resilience",
    "torchtitan",
    "objects",
    "hf_stdout",
    "llm_c",
    "olmo",
    "composer",
    "nanogpt",
    "deepspeed",
    "memory_summary",
    "device_tables",
    "incidents",
    "checkpoints",
    "arguments",
    "pairs",
    "skips",
    "world",
)


class Program(Protocol):
    """One module of this package."""

    @property
    def FORMAT(self) -> str:
        """The program's name; empty for lines that many programs print."""
        ...

    @property
    def SIGN(self) -> bytes:
        """Regular expression that is found in a log of this program; empty where no line is certain."""
        ...

    @property
    def NEEDED(self) -> bytes:
        """Bytes that every line has in which the sign is found; empty where there are none."""
        ...

    def Lines(self, log: Log) -> Reader:
        """A reader for one log."""
        ...


@cache
def programs() -> tuple[Program, ...]:
    """Every reader's module, in the order in which they are asked."""
    return tuple(cast("Program", import_module(f".{name}", __name__)) for name in MODULES)


__all__ = ["Log", "Program", "Reader", "programs"]
