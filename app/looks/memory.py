"""The memory ledger of one step: what each phase holds, what nobody accounts for, and what the configuration needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...analyzers.memory.configuration import plan
from ...analyzers.memory.ledger import COMPUTED
from ...analyzers.reference.memory_model import estimate
from ...capsules import Capsule
from ..numbers import size
from .kept import kept
from .types import MemoryLedger, MemoryPhase

#: Parts of what is allocated, in the order in which they are stacked.
PARTS = ("weights", "gradients", "optimizer", "activations", "communication", "transient", "kv_cache")

Rows = list[dict[str, Any]]
Ledgers = dict[int, dict[int | None, Rows]]  # rank → step → records in file order


def memory(path: str, rank: int | None = None, step: int | None = None, by: int = 0) -> MemoryLedger | None:
    """The ledger of one rank at one step, or None where there is none.

    Args:
        path: the capsule.
        rank: default the lowest that has a ledger.
        step: the nearest one with a ledger is taken; default the one at which most was allocated.
        by: move on from there by as many steps with a ledger.
    """
    ledgers = kept(path, "memory", _ledgers)
    computed, reading = kept(path, "memory computed", _computed)
    if not ledgers:
        if computed is None:
            return None
        return MemoryLedger(
            rank=0, ranks=(0,), step=None, place=0, count=0, peak_step=None, phases=(), computed=computed,
            reading=reading,
        )  # fmt: skip
    ranks = tuple(sorted(ledgers))
    chosen = rank if rank in ledgers else ranks[0]
    steps = list(ledgers[chosen])
    numbered = [each for each in steps if each is not None]
    peak = max(steps, key=lambda each: max(map(_height, ledgers[chosen][each])))
    at = peak if step is None or not numbered else min(numbered, key=lambda each: abs(each - step))
    at = steps[min(max(steps.index(at) + by, 0), len(steps) - 1)]
    return MemoryLedger(
        rank=chosen,
        ranks=ranks,
        step=at,
        place=steps.index(at),
        count=len(steps),
        peak_step=peak,
        phases=tuple(_phase(each) for each in ledgers[chosen][at]),
        computed=computed,
        reading=reading,
    )


def _ledgers(capsule: Capsule) -> Ledgers:
    found: Ledgers = {}
    for row in capsule.records("memory"):
        found.setdefault(row["rank"], {}).setdefault(row.get("step"), []).append(row)
    return {
        rank: dict(sorted(steps.items(), key=lambda each: (each[0] is not None, each[0] or 0)))
        for rank, steps in found.items()
    }


def _computed(capsule: Capsule) -> tuple[MemoryPhase | None, str]:
    """The peak by the memory model, between the readings that the configuration admits, and what it leaves open."""
    planned = plan(capsule)
    estimates = [estimate(shape, job) for shape, job in planned.readings]
    if not estimates:
        return None, ""
    terms = {name: [float(getattr(each, name)) for each in estimates] for name in COMPUTED}
    parts = {name: round((min(each) + max(each)) / 2) for name, each in terms.items()}
    low, high = min(each.peak for each in estimates), max(each.peak for each in estimates)
    words = f"between {size(low)} and {size(high)}, as {', '.join(planned.open)} may be" if high > 1.01 * low else ""
    phase = MemoryPhase(
        phase="computed", parts={name: count for name, count in parts.items() if count}, unaccounted=None,
        fragmentation=None, allocated=None, reserved=None, peak=None, capacity=None, largest_free_block=None,
    )  # fmt: skip
    return phase, words


def _phase(row: Mapping[str, Any]) -> MemoryPhase:
    parts = {name: row[name] for name in PARTS if row.get(name)}
    allocated = row.get("allocated")
    return MemoryPhase(
        phase=str(row.get("phase") or "(no phase)"),
        parts=parts,
        unaccounted=None if allocated is None else allocated - sum(parts.values()),
        fragmentation=row.get("fragmentation"),
        allocated=allocated,
        reserved=row.get("reserved"),
        peak=row.get("peak"),
        capacity=row.get("capacity"),
        largest_free_block=row.get("largest_free_block"),
    )


def _height(row: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes by which the highest phase is chosen: the measured peak, and among equals what is allocated."""
    held = row.get("allocated") or sum(row.get(name) or 0 for name in PARTS)
    return row.get("peak") or held, held
