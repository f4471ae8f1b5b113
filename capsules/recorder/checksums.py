"""Digests of parameters, buffers and random states, by which replicas on other ranks can be compared.

A digest covers every element: type, shape, a sample of up to a thousand elements in order, and the sum of all the bits
as integers, which wraps and so is exact in any order. A pass over the memory costs less than statistics do, and on a
device nothing but the sample and the sum is copied. Equal digests mean equal tensors unless elements were exchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from . import statistics
from .hooks import clean_name
from .ring import Micro, RandomState

#: Elements of a tensor that are taken in order.
SAMPLE = 1024
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Record = dict[str, Any]


def whole(tensor: Tensor) -> Tensor | None:
    """The tensor where this rank holds all of it, as a replica does; None for a shard, or what cannot be read.

    A DTensor is whole where it is replicated along every dimension of its mesh. Libraries that shard plain tensors mark
    them: Megatron its tensor-parallel and expert parameters, DeepSpeed what stage 3 has taken apart.
    """
    placements = getattr(tensor, "placements", None)
    if placements is not None and not all(each.is_replicate() for each in placements):
        return None
    if getattr(tensor, "_fsdp_flattened", False):
        return None
    if getattr(tensor, "tensor_model_parallel", False) or not getattr(tensor, "allreduce", True):
        return None
    if hasattr(tensor, "ds_id") and hasattr(tensor, "ds_tensor"):
        return None
    local = statistics.local(tensor)
    dense = local.layout is torch.strided and not local.is_meta and not local.is_quantized
    return local if dense and local.numel() else None


def of_model(root: nn.Module, step: int) -> list[Record]:
    """Records of the parameters and buffers that this rank holds whole.

    Args:
        root: the model.
        step: after which they were taken.
    """
    found: list[tuple[str, str, Tensor]] = []
    for kind, named in (("parameter", root.named_parameters()), ("buffer", root.named_buffers())):
        found += [(clean_name(name), kind, local) for name, local in _whole(named)]
    return [
        {"step": step, "name": name, "kind": kind, "sha256": digest}
        for (name, kind, _), digest in zip(found, digests([tensor for *_, tensor in found]), strict=True)
    ]


def _whole(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in named:
        local = whole(tensor)
        if local is not None:
            yield name, local


def of_random(micro: Micro, step: int) -> list[Record]:
    """Records of the states in which a micro-batch began."""
    state: RandomState | None = micro.random
    if state is None:
        return []
    parts: dict[str, bytes] = {"torch": state.torch.numpy().tobytes(), "python": repr(state.python).encode()}
    if state.numpy is not None:
        parts["numpy"] = repr([each.tobytes() if hasattr(each, "tobytes") else each for each in state.numpy]).encode()
    if state.cuda:
        parts["cuda"] = state.cuda[0].numpy().tobytes()
    return [
        {"step": step, "name": name, "kind": "rng", "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in parts.items()
    ]


@torch.no_grad()
def digests(tensors: list[Tensor]) -> list[str]:
    """One digest a tensor; one transfer a device."""
    found = [""] * len(tensors)
    places: dict[torch.device, list[int]] = {}
    for at, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(at)
    for indices in places.values():
        pieces = [_words(tensors[at]) for at in indices]
        host = torch.cat(pieces).cpu()
        for at, piece in zip(indices, host.split([len(piece) for piece in pieces]), strict=True):
            header = f"{tensors[at].dtype} {tuple(tensors[at].shape)} ".encode()
            found[at] = hashlib.sha256(header + piece.numpy().tobytes()).hexdigest()
    return found


def _words(tensor: Tensor) -> Tensor:
    """The sample and the sum, int64 [at most SAMPLE + 2], on the tensor's device."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.contiguous().view(-1)
    each = 8 // flat.element_size()
    bits = flat.view(_WORDS[flat.element_size()])
    ends = len(flat) - len(flat) % each
    head = flat[:ends]
    if head.storage_offset() * flat.element_size() % 8:
        head = head.clone()  # eight bytes are read at once
    total = head.view(torch.int64).sum().view(1)
    tail = bits[ends:].sum(dtype=torch.int64).view(1)
    sample = bits[:: max(1, -(-len(bits) // SAMPLE))].to(torch.int64)
    return torch.cat((sample, total, tail))
