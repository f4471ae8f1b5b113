"""The parts of torch without a public name that the recorder relies on, in one place to look at when torch changes."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def inside_backward() -> bool:
    """Whether this thread runs a backward pass now; a forward hook that sees one is part of a recomputation."""
    return torch._C._current_graph_task_id() != -1


def version(tensor: Tensor) -> int:
    """Counts the writes into a tensor's storage; -1 where torch does not (tensors of inference mode)."""
    return -1 if tensor.is_inference() else tensor._version


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor only stands for others inside a function transform (vmap, grad), and has no values to read."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore


def fused_norms(tensors: list[Tensor]) -> list[Tensor]:
    """‖tensor‖₂ of tensors of one dtype on one device, fused, accumulated in float32 or wider."""
    if tensors[0].dtype in (torch.float32, torch.float64):
        return list(torch._foreach_norm(tensors))
    return list(torch._foreach_norm(tensors, 2, torch.float32))


def default_store() -> Any:
    """The key-value store behind the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
