"""Layers of one step as a sheet: a row a tensor in execution order, its statistics, how near it is to overflow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ...analyzers.numerics.symptoms import first_nonfinite, unlawful
from .capsules import opened
from .sheets import BadTensor, Kind, LayerSheet

if TYPE_CHECKING:
    from ...capsules import Capsule
    from ...capsules.tables import Stats

#: Roles on each sheet.
ROLES: dict[Kind, tuple[str, ...]] = {
    "forward": ("input", "activation", "logits", "loss", "communication_in", "communication_out"),
    "backward": ("gradient",),
    "parameters": ("parameter",),
    "updates": ("update", "moment1", "moment2"),
}
#: dtype → largest number, smallest normal number (IEEE 754; OCP FP8 for the two last).
RANGES = {
    "float16": (65504.0, 2.0**-14),
    "bfloat16": (float.fromhex("0x1.fep127"), 2.0**-126),
    "float32": (float.fromhex("0x1.fffffep127"), 2.0**-126),
    "float64": (float.fromhex("0x1.fffffffffffffp1023"), 2.0**-1022),
    "float8_e4m3fn": (448.0, 2.0**-6),
    "float8_e5m2": (57344.0, 2.0**-14),
}
#: Binades of room below which a level begins: within 2 ×, 8 ×, 64 ×, 1,024 × of the largest number.
LEVELS = ((1.0, 4), (3.0, 3), (6.0, 2), (10.0, 1))
MOST_ROWS = 6_000

_FLOATS = ("absmax", "rms", "min", "max", "mean", "std")
_COUNTS = ("nan", "posinf", "neginf")


@dataclass(eq=False)
class _Index:
    """What is found once a capsule: rows by role, recorded steps, the first bad tensor."""

    capsule: Capsule

    @cached_property
    def by_role(self) -> dict[str, Stats]:
        """Rows of each role, sorted by step."""
        roles = [role for roles in ROLES.values() for role in roles]
        found = {role: self.capsule.stats(role=role) for role in roles}
        return {role: stats for role, stats in found.items() if len(stats)}

    @cached_property
    def steps(self) -> dict[Kind, Any]:
        """int64: recorded steps of each kind."""
        return {kind: self._steps(roles, only_full=False) for kind, roles in ROLES.items()}

    @cached_property
    def full_steps(self) -> dict[Kind, Any]:
        """int64: steps of each kind with full statistics."""
        return {kind: self._steps(roles, only_full=True) for kind, roles in ROLES.items()}

    def _steps(self, roles: tuple[str, ...], *, only_full: bool) -> Any:
        parts = [stats.step[stats.full] if only_full else stats.step for stats in self._of(roles)]
        return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)

    def _of(self, roles: tuple[str, ...]) -> list[Stats]:
        return [self.by_role[role] for role in roles if role in self.by_role]

    @cached_property
    def first_bad(self) -> BadTensor | None:
        """The first tensor of all that is not finite."""
        stats = self.capsule.stats()
        row = first_nonfinite(self.capsule, stats)
        if row is None:
            return None
        kinds: list[Kind] = [kind for kind, roles in ROLES.items() if stats.role[row] in roles]
        if not kinds:
            return None
        return BadTensor(
            kind=kinds[0],
            step=int(stats.step[row]),
            rank=int(stats.rank[row]),
            micro=int(stats.micro[row]),
            name=str(stats.name[row]),
        )

    def rows(self, kind: Kind, step: int, rank: int) -> list[Stats]:
        """The rows of one step and rank, a part a role."""
        found: list[Stats] = []
        for stats in self._of(ROLES[kind]):
            begin, end = np.searchsorted(stats.step, [step, step + 1])
            part = stats.select(np.arange(begin, end))
            found.append(part.select(part.rank == rank))
        return [part for part in found if len(part)]


@lru_cache(maxsize=4)
def _index_of(capsule: Capsule) -> _Index:
    return _Index(capsule)


def layers(
    path: str,
    kind: Kind = "forward",
    step: float | None = None,
    by: int = 0,
    full: int = 0,
    rank: int | None = None,
    micro: int | None = None,
) -> LayerSheet:
    """The sheet of one step.

    Args:
        path: the capsule.
        kind: which pass or set of tensors.
        step: the recorded step nearest to it; without it the step of the first bad tensor, of the trigger, or the
            last one with full statistics.
        by: recorded steps to go from there.
        full: ±1: from there to the next or previous step with full statistics.
        rank: the rank of the first bad tensor or of the trigger where it is None, else the lowest.
        micro: micro-batch, where a step has several; the first bad tensor's, else the first.
    """
    capsule = opened(path)
    index = _index_of(capsule)
    steps, full_steps = index.steps[kind], index.full_steps[kind]
    bad, trigger = index.first_bad, capsule.trigger
    if not len(steps):
        return LayerSheet(kind=kind, step=None, ranks=capsule.ranks, first_bad=bad)
    if step is None or (step <= 0 < steps[0]):  # step 0 stands for what was wrong before anything was recorded
        fallback = full_steps[-1] if len(full_steps) else steps[-1]
        step = bad.step if bad else trigger.step if trigger and trigger.step is not None else fallback
    if rank is None:
        rank = bad.rank if bad else trigger.rank if trigger and trigger.rank is not None else min(capsule.ranks)
    position = int(np.abs(steps - step).argmin())
    if full:
        ahead = full_steps[full_steps > steps[position]] if full > 0 else full_steps[full_steps < steps[position]]
        if len(ahead):
            position = int(np.searchsorted(steps, ahead[0] if full > 0 else ahead[-1]))
    position = min(max(position + by, 0), len(steps) - 1)
    at = int(steps[position])
    parts = index.rows(kind, at, rank)
    micros = tuple(sorted({int(each) for part in parts for each in part.micro}))
    if micro not in micros:
        micro = bad.micro if bad and bad.step == at and bad.micro in micros else micros[0] if micros else 0
    parts = [part for each in parts if len(part := each.select(each.micro == micro))]
    before = index.rows(kind, int(steps[position - 1]), rank) if position else []
    earlier, later = full_steps[full_steps < at], full_steps[full_steps > at]
    return LayerSheet(
        kind=kind,
        step=at,
        rank=rank,
        ranks=capsule.ranks,
        micro=micro,
        micros=micros,
        steps=len(steps),
        position=position,
        full=any(bool(part.full.any()) for part in parts),
        full_before=int(earlier[-1]) if len(earlier) else None,
        full_after=int(later[0]) if len(later) else None,
        total=sum(map(len, parts)),
        first_bad=bad,
        **_columns(capsule, parts, before),
    )


def _columns(capsule: Capsule, parts: list[Stats], before: list[Stats]) -> dict[str, Any]:
    """The lists of a sheet, in execution order."""
    if not parts:
        return {}
    order = np.argsort(np.concatenate([part.order for part in parts]), kind="stable")[:MOST_ROWS]

    def column(values: list[Any]) -> Any:
        return np.concatenate(values)[order]

    text = {name: column([getattr(part, name) for part in parts]).tolist() for name in ("name", "role", "dtype")}
    shapes = [shape for part in parts for shape in part.shape]
    calls = column([part.call for part in parts]).tolist()
    floats = {name: column([getattr(part, name) for part in parts]) for name in _FLOATS}
    counts = {name: column([getattr(part, name) for part in parts]) for name in _COUNTS}
    numel = column([part.numel for part in parts])
    room, level = headroom(text["dtype"], floats["absmax"], floats["rms"])
    seen = {
        key: value
        for part in before
        for key, value in zip(
            zip(part.name.tolist(), part.role.tolist(), part.call.tolist(), strict=True), part.rms.tolist(), strict=True
        )
    }
    keys = zip(text["name"], text["role"], calls, strict=True)
    names = [f"{name} #{call}" if call > 0 else name for name, call in zip(text["name"], calls, strict=True)]
    return {
        **text,
        "name": names,
        "shape": [" × ".join(map(str, shapes[each])) for each in order],
        "numel": numel.tolist(),
        **{name: values.tolist() for name, values in (*floats.items(), *counts.items())},
        "rms_before": [seen.get(key, float("nan")) for key in keys],
        "zeros": _share(column([part.zeros for part in parts]), numel),
        "subnormals": _share(column([part.subnormals for part in parts]), numel),
        "room": room.tolist(),
        "level": level.tolist(),
        "bad": np.flatnonzero(column([unlawful(capsule, part) for part in parts])).tolist(),
    }


def headroom(dtypes: list[str], absmax: Any, rms: Any) -> tuple[Any, Any]:
    """(room in binades, level) of each tensor, as ``LayerSheet`` describes them; the rms stands in for absmax."""
    size = np.where(np.isnan(absmax), rms, absmax)
    unknown = (float("nan"), float("nan"))
    largest, normal = (np.array([RANGES.get(each, unknown)[end] for each in dtypes]) for end in (0, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        room = np.log2(largest) - np.log2(size)
    level = np.zeros(len(size), np.int64)
    for limit, value in reversed(LEVELS):
        level[room < limit] = value
    level[absmax < normal] = -1  # the rms says nothing about the largest element at this end
    level[size == 0] = -2
    level[~np.isfinite(size) | np.isnan(largest)] = -3
    return np.where(level == -3, np.nan, room), level


def _share(counts: Any, numel: Any) -> list[float]:
    return np.where((counts < 0) | (numel <= 0), np.nan, counts / np.maximum(numel, 1)).tolist()
