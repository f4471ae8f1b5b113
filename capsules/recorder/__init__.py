"""Attaches to a PyTorch loop and keeps the evidence; importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .recorder import Recorder
    from .step import Step

__all__ = ["Recorder", "Step"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import recorder

        return getattr(recorder, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
