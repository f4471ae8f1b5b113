"""Functions of other packages replaced by wrappers for a while, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


class Replaced:
    """What was replaced, so that it can be put back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, wrap: Callable[[Function], Function]) -> None:
        """Put ``wrap(original)`` in the place of ``owner.name``, where there is one."""
        original = vars(owner).get(name) if isinstance(owner, type) else getattr(owner, name, None)
        if original is None:
            return
        replacement = functools.wraps(original)(wrap(original))
        setattr(owner, name, replacement)

        def undo() -> None:
            # Where someone has wrapped ours since, theirs must stay; ours then only passes the call on.
            if getattr(owner, name) is replacement:
                setattr(owner, name, original)

        self._undo.append(undo)

    def put_back(self) -> None:
        """Put every original back, the last first."""
        while self._undo:
            self._undo.pop()()
