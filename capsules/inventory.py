"""What a capsule holds: answers to a rule's needs, and the inventory that ``show`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from .batches import BATCH_ARRAYS
from .damage import Damage
from .errors import EvidenceError
from .integrity import digest
from .limits import MAX_HASHED_AT_A_GLANCE
from .manifest import AttachedFile, Trigger
from .replayable import ReplayItem

if TYPE_CHECKING:
    from .batches import Batch
    from .reader import Capsule


class SeriesSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One series."""

    name: str
    rank: int
    side: str | None
    unit: str
    rows: int
    first_step: int
    last_step: int
    nonfinite: int


class StatsSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All statistics; ``roles`` maps a role to its rows."""

    rows: int
    full_rows: int
    names: int
    roles: dict[str, int]
    first_step: int | None
    last_step: int | None


class BatchesSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All micro-batches; ``arrays`` maps a name to the number of batches that have it."""

    count: int
    steps: list[int]
    arrays: dict[str, int]


class TensorsSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Full arrays of one group."""

    group: str
    count: int
    bytes: int


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a capsule holds, in numbers."""

    id: str
    title: str
    path: str
    status: str
    phase: str | None
    created: str | None
    trigger: Trigger | None
    ranks: list[int]
    scalars: list[SeriesSummary]
    stats: StatsSummary
    batches: BatchesSummary
    tensors: list[TensorsSummary]
    rng_steps: list[int]
    records: dict[str, int]
    files: list[AttachedFile]
    replay: list[ReplayItem]
    damage: list[Damage]
    digest: str | None


def has(capsule: Capsule, need: str) -> bool:
    """Whether one piece of evidence, without alternatives, is there."""
    family, _, rest = need.partition(".")
    match family:
        case "scalars":
            return any(not rest or key.name == rest for key in capsule.scalar_keys())
        case "stats":
            return len(capsule.stats(role=rest or None)) > 0
        case "batches":
            return any(_batch_has(batch, rest) for batch in capsule.batches())
        case "tensors":
            return len(capsule.tensors(rest or "*")) > 0
        case "records":
            stream, _, field = rest.partition(".")
            found = (capsule.columns(each) for each in ((stream,) if stream else capsule.record_streams()))
            return any(each.has(field) if field else len(each) > 0 for each in found)
        case "manifest":
            return not rest or _at(capsule.manifest.raw, rest.split(".")) not in (None, "", [], {})
        case "rng":
            return len(capsule.rng_steps()) > 0
        case "files":
            return any(not rest or file.kind == rest for file in capsule.files())
        case _:
            return False


def _batch_has(batch: Batch, name: str) -> bool:
    return not name or name in batch.arrays or (name not in BATCH_ARRAYS and getattr(batch, name, None) is not None)


def _at(value: Any, path: list[str]) -> Any:
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def take_inventory(capsule: Capsule) -> Inventory:
    """Read everything once and count it; a very large capsule goes without its digest, which reads every byte again."""
    try:
        digest_now = digest(capsule.path, MAX_HASHED_AT_A_GLANCE)
    except EvidenceError:  # damage() names the file
        digest_now = None
    return Inventory(
        id=capsule.id,
        title=capsule.title,
        path=str(capsule.path),
        status=capsule.status,
        phase=capsule.manifest.phase,
        created=capsule.manifest.created,
        trigger=capsule.trigger,
        ranks=list(capsule.ranks),
        scalars=_series(capsule),
        stats=_stats(capsule),
        batches=_batches(capsule),
        tensors=_tensors(capsule),
        rng_steps=list(capsule.rng_steps()),
        records={stream: len(capsule.columns(stream)) for stream in capsule.record_streams()},
        files=list(capsule.files()),
        replay=list(capsule.replay_items()),
        damage=list(capsule.damage()),
        digest=digest_now,
    )


def _series(capsule: Capsule) -> list[SeriesSummary]:
    found: list[SeriesSummary] = []
    for key in capsule.scalar_keys():
        series = capsule.scalars(key.name, rank=key.rank, side=key.side)
        found.append(
            SeriesSummary(
                name=key.name,
                rank=key.rank,
                side=key.side,
                unit=key.unit,
                rows=len(series),
                first_step=int(series.step[0]),
                last_step=int(series.step[-1]),
                nonfinite=int((~np.isfinite(series.value)).sum()),
            )
        )
    return found


def _stats(capsule: Capsule) -> StatsSummary:
    stats = capsule.stats()
    roles, counts = np.unique(stats.role.astype(np.str_), return_counts=True)
    return StatsSummary(
        rows=len(stats),
        full_rows=int(stats.full.sum()),
        names=len(set(stats.name.tolist())),
        roles=dict(zip(roles.tolist(), counts.tolist(), strict=True)),
        first_step=int(stats.step[0]) if len(stats) else None,
        last_step=int(stats.step[-1]) if len(stats) else None,
    )


def _batches(capsule: Capsule) -> BatchesSummary:
    batches = capsule.batches()
    arrays: dict[str, int] = {}
    for batch in batches:
        for name in batch.arrays:
            arrays[name] = arrays.get(name, 0) + 1
    return BatchesSummary(count=len(batches), steps=sorted({each.step for each in batches}), arrays=arrays)


def _tensors(capsule: Capsule) -> list[TensorsSummary]:
    groups: dict[str, tuple[int, int]] = {}
    for tensor in capsule.tensors():
        group = tensor.name.partition("/")[0]
        count, size = groups.get(group, (0, 0))
        groups[group] = count + 1, size + tensor.nbytes
    return [TensorsSummary(group=group, count=count, bytes=size) for group, (count, size) in groups.items()]
