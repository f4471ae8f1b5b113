"""The parts of torch without a public name that the recorder relies on, in one place to look at when torch changes."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def inside_backward() -> bool:
    """Whether this thread runs a backward pass now; a forward hook that sees one is part of a recomputation."""
    return torch._C._current_graph_task_id() != -1


def version(tensor: Tensor) -> int:
    """Counts the writes into a tensor's storage; -1 where torch does not (tensors of inference mode)."""
    return -1 if tensor.is_inference() else tensor._version


def is_view(tensor: Tensor) -> bool:
    """Whether a tensor is made of another's storage, and counts the writes into all of that."""
    return tensor._base is not None


def caller(depth: int) -> FrameType:
    """The frame so many calls outside of the function that asks; taking it costs nothing, unlike ``inspect.stack``."""
    return sys._getframe(depth + 1)


def stands_in(tensor: Tensor) -> bool:
    """Whether a tensor has no values to read: it stands for others inside a function transform, or for a tracer's."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # pyright: ignore
        return True
    return type(tensor) is not Tensor and isinstance(tensor, FakeTensor)


def fused_norms(tensors: list[Tensor]) -> list[Tensor]:
    """‖tensor‖₂ of tensors of one dtype on one device, fused, accumulated in float32 or wider."""
    if tensors[0].dtype in (torch.float32, torch.float64):
        return list(torch._foreach_norm(tensors))
    return list(torch._foreach_norm(tensors, 2, torch.float32))


def default_store() -> Any:
    """The key-value store behind the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def wrapper_at_work(root: torch.nn.Module) -> torch.nn.Module | None:
    """The DistributedDataParallel around a module whose forward it is calling now."""
    wrapper = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    return wrapper if wrapper is not None and wrapper.module is root else None


def process_groups() -> list[Any]:
    """Every process group that this rank has made and not destroyed."""
    from torch.distributed.distributed_c10d import _world

    return list(_world.pg_map)


def sequence_number(group: Any) -> int:
    """How many operations this rank has enqueued in a process group; 0 where its back end does not count."""
    try:
        return group._get_sequence_number_for_group()
    except Exception:
        return 0


def flight_record(entries: bool = True) -> bytes | None:
    """What torch's flight recorder holds: a pickle of plain data with Python frames, or None where there is none.

    Args:
        entries: without them only the numbers of the last collectives of each group, which cost microseconds.
    """
    from torch._C import _distributed_c10d  # pyright: ignore

    dump: Any = getattr(_distributed_c10d, "_dump_fr_trace", None)
    if dump is None:
        return None
    if not entries:
        return dump(False, False)
    # To name frames of compiled code torch looks for an attribute _inductor of itself, which imports a thousand
    # modules where nobody has used the compiler yet; and then there is no such frame.
    if "_inductor" in vars(torch):
        return dump(True, True)
    torch._inductor = None  # pyright: ignore
    try:
        return dump(True, True)
    finally:
        del torch._inductor
