"""Where the time of requests goes: components by quantile, and slices by how many slow requests they hold.

Quantiles interpolate linearly between the two nearest order statistics (type 7 of Hyndman and Fan, numpy's default).
A quantile is told only where at least one request lies beyond it on average: 20 requests for p95, 100 for p99.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...capsules import Capsule
from .kept import kept
from .types import Latency, LatencyComponent, LatencySlice

Measure = Literal["ttft", "e2e"]

CONVENTION = "linear quantiles (type 7)"

#: Components of the time to first token, in the order in which a request passes them.
COMPONENTS = ("network", "queue", "tokenize", "transfer", "install", "prefill", "sample")

#: Fields whose values are slices; the counts are slices by whether they are above zero.
_FIELDS = (
    "tenant", "worker", "gpu", "rack", "network_path", "compile_bucket", "priority", "cold", "weight_version",
)  # fmt: skip
_COUNTS = ("cached_tokens", "preemptions", "migrations", "retries")

#: Requests on each side below which a slice is not judged.
FEWEST = 30

#: Chance that an interval misses; shared among all slices (Bonferroni) where one is called apart.
_ALPHA = 0.05


@dataclass(frozen=True)
class _Requests:
    records: Sequence[Mapping[str, Any]]
    total: NDArray[np.float64]  # [N] seconds


def latency(path: str, measure: Measure = "ttft") -> Latency | None:
    """Components and slices of the time to first token or of the whole request; None where no request has it."""
    return kept(path, f"latency-{measure}", lambda capsule: _latency(capsule, measure))


def _latency(capsule: Capsule, measure: Measure) -> Latency | None:
    found = [(record, time) for record in capsule.records("requests") if (time := _total(record, measure)) is not None]
    if not found:
        return None
    requests = _Requests([record for record, _ in found], np.array([time for _, time in found]))
    slow = float(np.quantile(requests.total, 0.95)) if len(found) >= 20 else None
    slices, few = _slices(requests, slow) if slow is not None else ((), 0)
    notes = [CONVENTION, *_clocks(requests.records)]
    if slow is None:
        notes.append("fewer than 20 requests: no slices")
    elif few:
        notes.append(f"{few:,} slices with fewer than {FEWEST} requests on a side are not judged")
    return Latency(
        measure=measure,
        requests=len(found),
        total=_quantiles(measure, requests.total),
        components=tuple(_components(requests, measure)),
        slow=slow,
        slices=slices,
        note="; ".join(notes),
    )


def _components(requests: _Requests, measure: Measure) -> list[LatencyComponent]:
    """Every component that was measured, decoding for the whole request, and what none of them covers."""
    values = {name: _column(requests.records, name) for name in COMPONENTS}
    if measure == "e2e":
        values["decode"] = requests.total - np.array([_total(each, "ttft") or math.nan for each in requests.records])
    values = {name: each for name, each in values.items() if np.isfinite(each).any()}
    rows = [_quantiles(name, each) for name, each in values.items()]
    if values:
        table = np.stack(list(values.values()))  # [components, requests]
        covered = np.where(np.isfinite(table).any(axis=0), np.nansum(table, axis=0), math.nan)
        rows.append(_quantiles("not covered", requests.total - covered))
    return rows


def _quantiles(name: str, values: NDArray[np.float64]) -> LatencyComponent:
    values = values[np.isfinite(values)]
    count = len(values)

    def at(share: float) -> float | None:
        enough = count * (1 - share) >= 1 - 1e-9
        return float(np.quantile(values, share)) if enough else None

    return LatencyComponent(name=name, requests=count, p50=at(0.5), p95=at(0.95), p99=at(0.99))


def _slices(requests: _Requests, slow: float) -> tuple[tuple[LatencySlice, ...], int]:
    """Slices by how many more slow requests they hold than their size explains, and how many were too small."""
    late = requests.total > slow
    count, all_late = len(late), int(late.sum())
    members = _members(requests.records)
    judged = {name: each for name, each in members.items() if FEWEST <= len(each) <= count - FEWEST}
    found: list[tuple[float, LatencySlice]] = []
    for name, each in judged.items():
        inside, here = len(each), int(late[each].sum())
        low, high = wilson(here, inside)
        elsewhere = (all_late - here) / (count - inside)
        row = LatencySlice(
            name=name,
            requests=inside,
            slow=here,
            share=here / inside,
            low=low,
            high=high,
            elsewhere=elsewhere,
            held=here / all_late if all_late else 0.0,
            apart=wilson(here, inside, _ALPHA / len(judged))[0] > elsewhere,
        )
        found.append((here - all_late * inside / count, row))
    found.sort(key=lambda each: -each[0])
    return tuple(row for _, row in found), sum(len(each) < FEWEST for each in members.values())


def _members(records: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Slice → indices of its requests."""
    members: dict[str, list[int]] = {}
    for index, record in enumerate(records):
        for field in _FIELDS:
            if (value := record.get(field)) is not None:
                members.setdefault(f"{field}={value}", []).append(index)
        for field in _COUNTS:
            if (value := record.get(field)) is not None:
                members.setdefault(f"{field}>0" if value > 0 else f"{field}=0", []).append(index)
    return members


def wilson(hits: int, count: int, alpha: float = _ALPHA) -> tuple[float, float]:
    """Wilson's score interval of a share of ``hits`` in ``count``, which misses with the chance ``alpha``."""
    z = NormalDist().inv_cdf(1 - alpha / 2)
    share, z2 = hits / count, z * z
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = z / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def _total(record: Mapping[str, Any], measure: Measure) -> float | None:
    """Seconds of a request: as measured, else from its events."""
    measured = _seconds(record.get(measure))
    if measured is not None:
        return measured
    start, end = record.get("arrival"), record.get("first_token" if measure == "ttft" else "finished")
    return end - start if start is not None and end is not None and math.isfinite(end - start) else None


def _column(records: Sequence[Mapping[str, Any]], name: str) -> NDArray[np.float64]:
    return np.array([value if (value := _seconds(each.get(name))) is not None else math.nan for each in records])


def _seconds(value: Any) -> float | None:
    """An interval in seconds, given as a number or with its clock."""
    if isinstance(value, Mapping):
        value = value.get("value")
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _clocks(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning where intervals were taken on several clocks, so that they do not add up."""
    clocks = {
        str(value["clock"])
        for record in records
        for name in (*COMPONENTS, "ttft", "e2e")
        if isinstance(value := record.get(name), Mapping) and value.get("clock")
    }
    return (
        [f"taken on several clocks ({', '.join(sorted(clocks))}), so they need not add up"] if len(clocks) > 1 else []
    )
