"""Gradients before and after the other ranks' are added, and how long backward waits for those."""

from __future__ import annotations

import time
from collections.abc import Callable

from . import statistics
from .hooks import ModuleHooks
from .parameters import gradient_norms
from .window import Window


class Reduction:
    """Follows the reduction of gradients, be it by a wrapper in backward or by the loop after it.

    Args:
        hooks: of the model; they take the norms where a wrapper reduces.
    """

    def __init__(self, hooks: ModuleHooks) -> None:
        self.called: Callable[[], int] | None = None  # reductions called from Python; None where no ranks are beside
        self._hooks = hooks

    @property
    def sharded(self) -> bool:
        """Whether the parameters are shards, whose norm is whole only after a collective."""
        return any(map(statistics.is_shard, self._hooks.root.parameters()))

    def after_backward(self, window: Window) -> None:
        """Take the norms before a loop reduces by hand, and what a wrapper has waited after the last gradient."""
        hooks = self._hooks
        if hooks.last_gradient:
            window.reduction_wait += time.perf_counter() - hooks.last_gradient
            hooks.last_gradient = 0.0
        if self.called is not None and hooks.wrapper is None and not self.sharded:
            gradients = [parameter.grad for parameter in hooks.root.parameters() if parameter.grad is not None]
            window.local_norms = gradient_norms([each for each in gradients if statistics.is_readable(each)])
            window.unreduced = self.called()

    def before_step(self, window: Window) -> None:
        """Norms that nobody can have reduced since stand for nothing."""
        if self.called is not None and window.unreduced == self.called():
            window.local_norms = []
