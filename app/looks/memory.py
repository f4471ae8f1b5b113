"""The memory ledger of one step: what each phase holds, and how much of it nobody accounts for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...capsules import Capsule
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
    if not ledgers:
        return None
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
    )


def _ledgers(capsule: Capsule) -> Ledgers:
    found: Ledgers = {}
    for row in capsule.records("memory"):
        found.setdefault(row["rank"], {}).setdefault(row.get("step"), []).append(row)
    return {
        rank: dict(sorted(steps.items(), key=lambda each: (each[0] is not None, each[0] or 0)))
        for rank, steps in found.items()
    }


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
