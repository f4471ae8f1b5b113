"""Methods of one object that several threads call, one call at a time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Locked(Protocol):
    """What has such methods; the lock is one that its own thread may take again."""

    lock: threading.RLock | Any


S = TypeVar("S", bound=Locked)
P = ParamSpec("P")
R = TypeVar("R")


def alone(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let a thread run the method while no other runs one of the same object."""

    @functools.wraps(method)
    def locked(self: S, *arguments: P.args, **keywords: P.kwargs) -> R:
        with self.lock:
            return method(self, *arguments, **keywords)

    return locked
