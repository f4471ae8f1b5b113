"""What two manifests state differently, the likeliest to bear on the divergence first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from .types import Kind, Setting

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Parts of a manifest that describe the job, not the recording, with how near they are to what it computes.
_PARTS = {
    "training": 60,
    "tokenizer": 50,
    "identity": 50,
    "model": 50,
    "config": 40,
    "run": 30,
    "placement": 20,
    "environment": 20,
}
#: Fields that differ between any two runs.
_OWN = frozenset({"run.id", "run.name", "run.host", "run.restart", "run.command", "config.wandb_summary"})
_LIBRARIES = (
    *("torch", "transformers", "accelerate", "deepspeed", "megatron-core", "flash-attn", "flash_attn", "trl", "peft"),
    *("transformer-engine", "transformer_engine", "triton", "xformers", "bitsandbytes", "lightning", "liger-kernel"),
    *("nvidia-cudnn-cu12", "nvidia-cublas-cu12", "nvidia-nccl-cu12", "tokenizers", "datasets", "numpy", "unsloth"),
)
_LIBRARY, _HARDWARE = 45, 35
#: Words by kind of difference; a field whose name has one of them is nearer.
_NEAR: dict[Kind, tuple[str, ...]] = {
    "data": ("data", "seed", "tokenizer", "template", "pack", "shuffle", "batch", "max_length", "sampl", "mask"),
    "setting": ("lr", "learning_rate", "schedule", "warmup", "weight_decay", "steps", "batch"),
    "rounding": (
        "precision",
        "dtype",
        "torch",
        "cuda",
        "cudnn",
        "gpu",
        "driver",
        "tf32",
        "flash",
        "determin",
        "triton",
    ),
    "data-noise": ("seed", "data", "shuffle", "sampl"),
    "start": ("seed", "identity", "checkpoint", "model", "transformers", "torch", "precision", "dtype"),
    "constant-ratio": ("accum", "reduction", "world_size", "parallel", "batch", "transformers", "trl", "accelerate"),
    "jump": (
        "lr",
        "optim",
        "precision",
        "shard",
        "zero",
        "offload",
        "scale",
        "clip",
        "grad_norm",
        "parallel",
        "deepspeed",
    ),
    "tensor": ("precision", "dtype", "attn", "attention", "rope", "flash", "torch", "transformers", "triton"),
}
_BONUS, _ONE_SIDED = 50, 20
_MOST, _MOST_LEAVES = 500, 50_000
_LONGEST = 200


def different_settings(left: Capsule, right: Capsule, kind: Kind) -> tuple[Setting, ...]:
    """Fields of the manifests that differ, nearest first; a field that one side leaves out counts where it says much.

    Args:
        left: one run.
        right: the other.
        kind: what kind of difference the runs show, which decides what is near.
    """
    mine, theirs = dict(_leaves(left)), dict(_leaves(right))
    found: list[Setting] = []
    for name in [*mine, *(each for each in theirs if each not in mine)]:
        first, second = mine.get(name), theirs.get(name)
        if first == second or name in _OWN or not _both_tell(name, left, right):
            continue
        near = _nearness(name, kind) - (_ONE_SIDED if first is None or second is None else 0)
        found.append(Setting(name=name, left=_short(first), right=_short(second), near=near))
    return tuple(sorted(found, key=lambda each: (-each.near, each.name))[:_MOST])


def _nearness(name: str, kind: Kind) -> int:
    part = name.partition(".")[0]
    near = _PARTS[part]
    if name.startswith("environment.packages."):
        near = _LIBRARY if name.removeprefix("environment.packages.").lower() in _LIBRARIES else 10
    elif part == "environment":
        near = _HARDWARE
    lower = name.lower()
    return near + (_BONUS if any(word in lower for word in _NEAR.get(kind, ())) else 0)


def _both_tell(name: str, left: Capsule, right: Capsule) -> bool:
    """Whether both manifests have the part; what only one of them records at all is no difference of the jobs."""
    parts = name.split(".")
    places = (left.manifest.raw, right.manifest.raw)
    depth = 2 if name.startswith("environment.packages.") else 1
    for part in parts[:depth]:
        if not all(isinstance(place, dict) and part in place for place in places):
            return False
        places = (places[0][part], places[1][part])
    return True


def _leaves(capsule: Capsule) -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every leaf of the parts that describe the job."""
    left = _MOST_LEAVES
    for part in _PARTS:
        for name, value in _walk(capsule.manifest.raw.get(part), part):
            left -= 1
            if left < 0:
                return
            yield name, value


def _walk(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in cast("dict[str, Any]", value).items():
            yield from _walk(each, f"{name}.{key}")
    elif value is not None:
        yield name, value


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _LONGEST else value[:_LONGEST] + "…"
    if isinstance(value, list):
        return value if len(cast("list[Any]", value)) <= 20 else f"{len(cast('list[Any]', value))} entries"
    return value
