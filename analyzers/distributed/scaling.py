"""More ranks that are no faster: what part of the added work is lost, and to what."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import NotCaptured, rule
from . import thresholds as T

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "distributed/scaling",
    stage="distributed",
    severity="warning",
    needs=("records.scaling.throughput",),
    explained_by=("distributed/straggler",),
    cases=("more-gpus-slower",),
)
def scaling(capsule: Capsule) -> Iterator[Finding]:
    """More ranks are hardly faster, or slower.

    What it checks:
        Throughput of the whole job over the number of ranks, with the global batch, and where known the share of a
        step that goes to communication.

    Why it matters:
        At half the efficiency every second device is bought for nothing; below one over the number of ranks, one device
        alone would be done earlier.

    How it decides:
        Efficiency is the throughput over that of the smallest job, divided by the ratio of their ranks. Below 0.7 it is
        a finding. The cause is likely where the global batch did not grow with the ranks (each computes less and
        communicates as much), or communication takes 30 % of a step or more; else undetermined. Undetermined too where
        the throughputs are all within 10 % of each other: they may be numbers of one rank.

    Looks like it but is not:
        Throughput a rank, which is level when scaling is perfect; a job that is limited by one data source, which the
        time waiting for data shows; single measurements of a cold job (the median of several counts).

    What to try next:
        A step without the reduction (no_sync): if it is as fast as on one rank, communication is the reason. The same
        micro-batch a rank at 1, 2, 4 and 8 ranks.

    Fix:
        Keep the micro-batch a rank and let the global batch grow, or accumulate with no_sync; overlap and larger
        buckets; sharding within the node; a faster path between the devices.
    """
    measured = _measured(capsule)
    if len(measured) < 2:
        raise NotCaptured("throughput at two numbers of ranks")
    smallest = min(measured)
    base, base_batch = measured[smallest]
    efficiency = {world: value / base / (world / smallest) for world, (value, _) in sorted(measured.items())}
    low = [world for world, each in efficiency.items() if each < T.EFFICIENT]
    if not low:
        return
    worst = min(low, key=lambda world: efficiency[world])
    throughput, batch = measured[worst]
    values = [value for value, _ in measured.values()]
    level = max(values) / min(values) - 1 <= T.LEVEL
    share = _communication(capsule)
    fixed = base_batch is not None and batch is not None and batch < T.GROWN * base_batch * worst / smallest
    causes: list[str] = []
    if fixed:
        causes.append("the global batch did not grow with the ranks: each computes less and communicates as much")
    if share is not None and share >= T.COMMUNICATING:
        causes.append(f"communication takes {share:.0%} of a step")
    slower = throughput < base
    ranks = f"{worst} ranks" if worst != 1 else "1 rank"
    yield Finding(
        confidence="likely" if causes and not level else "undetermined",
        title="More ranks are slower" if slower else "More ranks are hardly faster",
        summary=(
            f"{ranks} reach {throughput:,.4g} tokens/s and {smallest} {base:,.4g}: an efficiency of "
            f"{efficiency[worst]:.0%}."
            + (" All are within 10 % of each other: they may be numbers of one rank." if level else "")
            + (f" {causes[0][:1].upper()}{causes[0][1:]}." if causes and not level else "")
        ),
        where=Where(),
        evidence=(
            *(
                Evidence(
                    name=f"efficiency at {world}",
                    value=each,
                    expected=f"≥ {T.EFFICIENT:g}",
                    note=f"{measured[world][0]:,.6g} tokens/s"
                    + (f", global batch {measured[world][1]:g}" if measured[world][1] is not None else ""),
                )
                for world, each in list(efficiency.items())[: T.RANKS_SHOWN]
            ),
            *(
                [Evidence(name="share of communication", value=share, expected=f"< {T.COMMUNICATING:g}")]
                if share is not None
                else []
            ),
        ),
        cause="; ".join(causes) or None,
        next=(
            "a step without the reduction (no_sync) on as many ranks",
            *(("record compute_ms and communication_ms of each rank",) if share is None else ()),
        ),
        fix=("the same micro-batch on each rank, or accumulation without synchronising; overlap; a faster path",),
    )


def _measured(capsule: Capsule) -> dict[int, tuple[float, float | None]]:
    """Ranks → (median throughput in tokens/s, global batch of the measurements, None where it is not known)."""
    rows: dict[int, list[float]] = defaultdict(list)
    batches: dict[int, list[int]] = defaultdict(list)
    for record in capsule.records("scaling"):
        world, throughput = record.get("world_size"), record.get("throughput")
        if world and throughput is not None and math.isfinite(throughput) and throughput > 0:
            rows[world].append(throughput)
            if record.get("global_batch"):
                batches[world].append(record["global_batch"])
    return {
        world: (float(np.median(each)), float(np.median(batches[world])) if batches[world] else None)
        for world, each in rows.items()
    }


def _communication(capsule: Capsule) -> float | None:
    """Median over the ranks of the share of a step inside collectives."""
    shares: Mapping[int, float] = {
        record["rank"]: communication / (compute + communication)
        for record in (*capsule.records("profile"), *capsule.records("ranks"))
        if (compute := record.get("compute_ms")) is not None
        and (communication := record.get("communication_ms")) is not None
        and compute >= 0
        and communication >= 0
        and compute + communication > 0
    }
    return float(np.median(list(shares.values()))) if shares else None
