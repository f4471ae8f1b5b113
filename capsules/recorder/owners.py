"""Which optimizers step the model: those that were named, and any that turns out to hold its parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .hooks import ModuleHooks
from .window import Window


class Owners:
    """The optimizers of one model.

    Args:
        hooks: of the model.
        optimizers: those the user named; empty: any optimizer that holds a parameter of the model.
    """

    def __init__(self, hooks: ModuleHooks, optimizers: list[Any]) -> None:
        self.optimizers = optimizers
        self._hooks = hooks
        self._named = bool(optimizers)

    def hold(self, optimizer: Any, window: Window | None) -> bool:
        """Whether a step of ``optimizer`` is one of this model; it is then known from here on."""
        if any(optimizer is known for known in self.optimizers):
            return True
        if next(self._hooks.root.parameters(), None) is None and not self._named:
            return True  # no model was given: all that steps is the job's
        # One that was made later takes the place of a named one where it steps the same parameters.
        known = _parameters_of(self.optimizers) if self._named else self._hooks.parameters.keys()
        if not known & _parameters_of([optimizer]) and not self._stale(optimizer, window):
            return False
        self.optimizers.append(optimizer)
        return True

    def _stale(self, optimizer: Any, window: Window | None) -> bool:
        """Whether it was made for this model before the model was made anew: not one of its parameters, all its shapes.

        Only while no other optimizer is known, and in a window whose backward has reached the model.
        """
        if self.optimizers or window is None or not window.backwards:
            return False
        if not (window.gradients or self._hooks.pending):
            return False
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        trained = [parameter for parameter in self._hooks.root.parameters() if parameter.requires_grad]
        return bool(held) and _shapes(held) == _shapes(trained)


def _shapes(parameters: Iterable[Any]) -> list[tuple[int, ...]]:
    return sorted(tuple(parameter.shape) for parameter in parameters)


def _parameters_of(optimizers: list[Any]) -> set[int]:
    groups = [group for each in optimizers for group in getattr(each, "param_groups", ())]
    return {id(parameter) for group in groups for parameter in group["params"]}
