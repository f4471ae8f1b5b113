"""Which ranks train on one batch, which hold the same parameters, and which stand at one stage of a pipeline.

A job of plain data parallelism has a batch a rank and the same parameters on all. Where the manifest, its mesh, the
configuration or the names of process groups say more, ranks have coordinates along the other axes.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Words in the name of a group, or of a dimension of a mesh, by what they are an axis of.
_WORDS: Mapping[str, frozenset[str]] = {
    "data": frozenset(("dp", "data", "ddp", "fsdp", "hsdp", "replicate", "replica", "shard", "zero", "batch")),
    "tensor": frozenset(("tp", "tensor")),
    "context": frozenset(("cp", "context", "sp", "sequence", "seq", "ulysses", "ring")),
    "pipeline": frozenset(("pp", "pipe", "pipeline", "stage")),
    "expert": frozenset(("ep", "expert", "experts", "moe")),
}
#: Endings by which configurations call the number of ranks along an axis.
_SIZE = re.compile(
    r"(?:ulysses_)?(tp|tensor|pp|pipe|pipeline|cp|context|sequence|ep|expert|sp)"
    r"(?:_model)?(?:_parallel)?(?:_(?:size|degree))?"
)
#: Axes along which ranks share a batch; along the first and the last they hold different parameters.
SHARING = ("tensor", "context", "pipeline")
#: More ranks than any job has; the number comes from a file.
MOST_RANKS = 1 << 20
_CONFIG_DEPTH, _CONFIG_KEYS = 4, 4096


@dataclass(frozen=True)
class Layout:
    """Where each rank stands.

    ``batch`` maps a rank to the number of the share of the data that it trains on; ``place`` to its coordinates along
    tensor, context and pipeline axes. ``known`` is true where the job says so, false where plain data parallelism is
    assumed. ``odd`` holds groups of some of the ranks whose purpose nothing tells.
    """

    world: int
    batch: Mapping[int, int]
    place: Mapping[int, Mapping[str, int]]
    known: bool = False
    experts: bool = False
    odd: frozenset[frozenset[int]] = field(default_factory=lambda: frozenset[frozenset[int]]())

    def shares_batch(self, one: int, other: int) -> bool:
        """Whether two ranks train on the same rows by design."""
        return self.batch.get(one, one) == self.batch.get(other, other) and one in self.batch and other in self.batch

    def parameters(self, rank: int) -> tuple[int, int]:
        """Ranks of equal values hold the same parameters (where nothing shards them): (tensor, pipeline)."""
        place = self.place.get(rank, {})
        return place.get("tensor", 0), place.get("pipeline", 0)

    def stage(self, rank: int) -> int:
        """The stage of the pipeline, 0 where there is none."""
        return self.place.get(rank, {}).get("pipeline", 0)

    def has(self, axis: str) -> bool:
        """Whether there is more than one coordinate along an axis."""
        return len({place.get(axis, 0) for place in self.place.values()}) > 1


def layout(capsule: Capsule) -> Layout | None:
    """The layout of a job, None where what is known of it contradicts itself (sizes that do not divide the ranks)."""
    world = world_size(capsule)
    if world > MOST_RANKS:
        return None
    groups, odd = _groups(capsule, world)
    sizes = _sizes(capsule)
    mesh = _mesh(capsule)
    if mesh is not None and math.prod(size for _, size in mesh) == world:
        return _of_mesh(mesh, world, odd)
    if any(axis in groups for axis in (*SHARING, "model")):
        return _of_groups(groups, world, odd)
    data = _declared(capsule)
    shared = math.prod(sizes.get(axis, 1) for axis in SHARING)
    if world % shared or (data is not None and data * shared != world and data != world):
        return None
    if data is None and shared == 1 and not _reduces(capsule) and _sends(capsule):
        return None  # stages of a pipeline of which nothing tells
    ordered = [
        ("pipeline", sizes.get("pipeline", 1)),
        ("data", world // shared),
        ("context", sizes.get("context", 1)),
        ("tensor", sizes.get("tensor", 1)),
    ]
    known = (data is not None and data > 1) or shared > 1 or _reduces(capsule)
    return _of_mesh(ordered, world, odd, known, sizes.get("expert", 1) > 1 or "expert" in groups)


def _sends(capsule: Capsule) -> bool:
    direct, _ = capsule.columns("collectives").combinations("p2p")
    return any(each is True for (each,) in direct)


def world_size(capsule: Capsule) -> int:
    """How many ranks the job has, at least those that left evidence."""
    run = capsule.manifest.run
    stated = run.world_size if run is not None and run.world_size else 0
    spoken = {each["rank"] for each in capsule.records("ranks") if isinstance(each.get("rank"), int)}
    return max(stated, *(rank + 1 for rank in (*capsule.ranks, *spoken)), 1)


def hosts(capsule: Capsule) -> dict[int, str]:
    """The host of each rank that names one."""
    found: dict[int, str] = {}
    for record in capsule.records("ranks"):
        if isinstance(record.get("host"), str) and record["host"]:
            found[record["rank"]] = record["host"]
    return found


@dataclass(frozen=True)
class Shards:
    """Whether ranks of data parallelism hold only a part of each parameter, gradient, or optimizer state."""

    parameters: bool
    gradients: bool
    optimizer: bool
    told: bool


def shards(capsule: Capsule) -> Shards:
    """How parameters and gradients are divided among the ranks, as far as manifest and series tell."""
    if any(key.name == "grad_norm_shard" for key in capsule.scalar_keys()):
        return Shards(True, True, True, told=True)
    return declared_shards(capsule)


def declared_shards(capsule: Capsule) -> Shards:
    """The same by the manifest alone: the recorder, which sees shards, takes checksums of whole tensors only."""
    training = capsule.manifest.training
    sharding = training.sharding if training is not None else None
    if sharding is None or (not sharding.kind and sharding.stage is None):
        return Shards(False, False, False, told=False)
    kind = re.sub(r"[^a-z0-9]", "", (sharding.kind or "zero").lower())
    if kind in ("none", "no", "ddp", "noshard", "replicate", "dataparallel"):
        return Shards(False, False, False, told=True)
    stage = sharding.stage
    if stage is None and (number := re.search(r"(?:zero|stage)([0-3])", kind)):
        stage = int(number[1])
    if stage is not None and ("zero" in kind or "deepspeed" in kind or "stage" in kind or "distributed" in kind):
        return Shards(stage >= 3, stage >= 2, stage >= 1, told=True)
    if "distributedoptimizer" in kind:
        return Shards(False, True, True, told=True)
    return Shards(True, True, True, told=True)


def axis_of(name: str) -> str | None:
    """What a group or a dimension is an axis of, by the words in its name; None where none or several say it."""
    words = set(re.findall(r"[a-z]+", name.lower()))
    axes = [axis for axis, known in _WORDS.items() if words & known]
    if not axes and words & {"model", "mp"}:
        return "model"
    return axes[0] if len(axes) == 1 else None


def _of_mesh(
    mesh: list[tuple[str, int]], world: int, odd: frozenset[frozenset[int]], known: bool = True, experts: bool = False
) -> Layout:
    """Row-major coordinates; the convention of torch's DeviceMesh, Megatron-Core and DeepSpeed: tensor is innermost."""
    positions = np.unravel_index(np.arange(world), [size for _, size in mesh])
    batch: dict[int, int] = {}
    place: dict[int, dict[str, int]] = {}
    numbers: dict[tuple[int, ...], int] = {}
    for rank in range(world):
        own: dict[str, int] = {}
        shares: list[int] = []
        for (axis, size), position in zip(mesh, positions, strict=True):
            at = int(position[rank])
            if axis in SHARING:
                own[axis] = own.get(axis, 0) * size + at
            else:
                shares.append(at)
        batch[rank] = numbers.setdefault(tuple(shares), len(numbers))
        place[rank] = own
    return Layout(world, batch, place, known, experts or any(axis == "expert" for axis, _ in mesh), odd)


def _of_groups(groups: Mapping[str, set[tuple[int, ...]]], world: int, odd: frozenset[frozenset[int]]) -> Layout:
    batch = {rank: rank for rank in range(world)}
    place: dict[int, dict[str, int]] = {rank: {} for rank in range(world)}

    def root(rank: int) -> int:
        while batch[rank] != rank:
            rank = batch[rank]
        return rank

    for axis in (*SHARING, "model"):
        for ranks in groups.get(axis, ()):
            for at, rank in enumerate(ranks):
                if axis != "model":
                    place[rank][axis] = at
                elif not any(each in groups for each in ("tensor", "pipeline")):  # it is the product of these two
                    place[rank]["tensor"] = at
                batch[root(rank)] = root(ranks[0])
    return Layout(world, {rank: root(rank) for rank in batch}, place, True, "expert" in groups, odd)


def _groups(capsule: Capsule, world: int) -> tuple[dict[str, set[tuple[int, ...]]], frozenset[frozenset[int]]]:
    """Groups of some ranks by axis, and those whose name says nothing."""
    seen: dict[tuple[int, ...], str] = {}
    known: set[tuple[Any, ...]] = set()
    # A group is read once, and not at each of its calls.
    for group, description, ranks in capsule.columns("collectives").combinations("group", "group_desc", "group_ranks")[
        0
    ]:
        key = (group, description, len(ranks), ranks[0], ranks[-1]) if ranks else ()
        if key in known:
            continue
        known.add(key)
        if ranks and (len(ranks) < world or description):
            ordered = tuple(sorted({rank for rank in ranks if rank < world}))
            if ordered not in seen or not seen[ordered]:
                seen[ordered] = f"{description or ''} {group or ''}".strip()
    by_axis: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    odd: set[frozenset[int]] = set()
    for ranks, name in seen.items():
        axis = axis_of(name)
        if axis is not None and len(ranks) > 1:
            by_axis[axis].add(ranks)
        elif 1 < len(ranks) < world and not any(words & set(re.findall(r"[a-z]+", name.lower())) for words in _ALL):
            odd.add(frozenset(ranks))
    return by_axis, frozenset(odd)


_ALL = tuple(_WORDS.values())


def _mesh(capsule: Capsule) -> list[tuple[str, int]] | None:
    """Dimensions of the mesh in the manifest, outermost first: ``{name: size}``, or names and sizes in two lists."""
    placement: Any = capsule.manifest.placement
    mesh: Any = cast("dict[str, Any]", placement).get("mesh") if isinstance(placement, dict) else None
    if not isinstance(mesh, dict):
        return None
    given = cast("dict[str, Any]", mesh)
    names: Any = next((given[key] for key in ("names", "dims", "dim_names", "mesh_dim_names") if key in given), None)
    sizes: Any = next((given[key] for key in ("shape", "sizes") if key in given), None)
    pairs: list[tuple[Any, Any]]
    if isinstance(names, list) and isinstance(sizes, list):
        if len(cast("list[Any]", names)) != len(cast("list[Any]", sizes)):
            return None
        pairs = list(zip(cast("list[Any]", names), cast("list[Any]", sizes), strict=True))
    else:
        pairs = list(given.items())
    found: list[tuple[str, int]] = []
    for name, size in pairs:
        axis = axis_of(name) if isinstance(name, str) else None
        if axis is None or type(size) is not int or not 0 < size <= 1 << 20:
            return None
        found.append(("tensor" if axis == "model" else axis, size))
    return found or None


def _sizes(capsule: Capsule) -> dict[str, int]:
    """Ranks along each axis, from the manifest's own fields and from the configuration."""
    found: dict[str, int] = {}
    for key, value in _pairs(capsule.manifest.config):
        named = _SIZE.fullmatch(key.lower())
        if named is not None and type(value) is int and 1 < value <= 1 << 20:
            found.setdefault(cast("str", axis_of(named[1])), value)
    training = capsule.manifest.training
    if training is not None:
        for axis, size in (("tensor", training.tensor_parallel), ("pipeline", training.pipeline_parallel)):
            if size:
                found[axis] = size
    raw: Any = capsule.manifest.raw.get("training")
    for axis in ("context", "expert"):
        size: Any = cast("dict[str, Any]", raw).get(f"{axis}_parallel") if isinstance(raw, dict) else None
        if type(size) is int and size > 0:
            found[axis] = size
    return found


def _pairs(config: Any) -> Iterator[tuple[str, Any]]:
    pending: list[tuple[Any, int]] = [(config, 0)]
    left = _CONFIG_KEYS
    while pending and left > 0:
        value, depth = pending.pop()
        if isinstance(value, dict) and depth < _CONFIG_DEPTH:
            for key, inner in cast("dict[Any, Any]", value).items():
                left -= 1
                if isinstance(inner, dict):
                    pending.append((inner, depth + 1))
                elif isinstance(key, str):
                    yield key, inner


def _declared(capsule: Capsule) -> int | None:
    training = capsule.manifest.training
    return training.data_parallel if training is not None and training.data_parallel else None


def _reduces(capsule: Capsule) -> bool:
    """Whether the recorder saw gradients before and after a reduction, as only data parallelism has them."""
    return sum(key.name == "grad_norm_local" for key in capsule.scalar_keys()) > 1
