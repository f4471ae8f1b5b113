"""How the ranks share the work, as far as the model shows it: data parallelism, shards, the mesh."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from .hooks import ModuleHooks

Facts = dict[str, dict[str, Any]]


def facts(hooks: ModuleHooks) -> Facts:
    """The manifest's ``training.data_parallel``, ``training.sharding`` and ``placement.mesh``; only what is sure.

    Args:
        hooks: of the model, which know what it is wrapped in.
    """
    wrapper: Any = hooks.wrapper
    if wrapper is not None and type(wrapper).__name__ == "DistributedDataParallel":
        return {"training": {"data_parallel": wrapper.process_group.size()}}
    flat = next((m for m in (wrapper, *hooks.root.modules()) if type(m).__name__ == "FullyShardedDataParallel"), None)
    if flat is not None:
        return {"training": _flat(flat)}
    if any(getattr(parameter, "_fsdp_flattened", False) for parameter in hooks.root.parameters()):
        return {"training": {"sharding": {"kind": "fsdp"}}}
    return _sharded(hooks.root)


def _flat(module: Any) -> dict[str, Any]:
    """FSDP of the first generation, by its strategy."""
    strategy = str(getattr(module, "sharding_strategy", "")).rpartition(".")[2]
    if strategy == "NO_SHARD":
        return {"data_parallel": module.process_group.size()}
    stage = 2 if "GRAD_OP" in strategy or strategy == "_HYBRID_SHARD_ZERO2" else 3
    return {"sharding": {"kind": "fsdp", "stage": stage}}


def _sharded(root: nn.Module) -> Facts:
    """DTensors: shards of parameters along the dimensions of a mesh."""
    found: Facts = {}
    for parameter in root.parameters():
        mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", None)
        if mesh is None or placements is None:
            continue
        names = mesh.mesh_dim_names
        if any(each.is_shard() for each in placements) and type(root).__name__.startswith("FSDP"):
            found["training"] = {"sharding": {"kind": "fsdp2"}}
        if names is not None and len(names) > 1 and math.prod(mesh.shape) > 1:
            found["placement"] = {"mesh": {"names": list(names), "shape": list(mesh.shape)}}
        return found
    return found
