"""Devices that all worked, stopped at once and keep their memory: a job that hangs, or waits on its hosts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..finding import Evidence, Finding
from . import thresholds as T

if TYPE_CHECKING:
    from ...capsules import Capsule


def held_idle(capsule: Capsule, watched: Iterable[Any]) -> Finding | None:
    """What a monitor shows of such an end; None where any device in use does otherwise, or memory is not on record.

    Args:
        capsule: the evidence.
        watched: keys of the series of utilisation, one a device.
    """
    ends = [end for key in watched if (end := _end(capsule, key.rank, key.side)) is not None]
    if not ends or any(since < 0 for since, _ in ends):
        return None
    since, held = min(each for each, _ in ends), sum(each for _, each in ends)
    devices = "The device" if len(ends) == 1 else f"All {len(ends)} devices"
    return Finding(
        confidence="undetermined",
        title=f"{devices} stopped and {'keeps its' if len(ends) == 1 else 'keep their'} memory",
        summary=f"{devices} worked and then stood idle for {since:,.0f} s up to the end of the record, with "
        f"{held / 2**30:,.1f} GiB still held: the job hangs, or its hosts do something long, such as a checkpoint.",
        evidence=(
            Evidence(name="idle at the end", value=round(since, 1), expected=f"< {T.IDLE_SECONDS:g}", unit="s"),
            Evidence(name="memory held", value=int(held), expected=0, unit="B", note="all devices"),
            Evidence(name="devices", value=len(ends)),
        ),
        next=("the stacks of all ranks (py-spy dump), and their logs and flight-recorder dumps: who waits for whom",),
    )


def _end(capsule: Capsule, rank: int, side: str | None) -> tuple[float, float] | None:
    """(seconds idle at the end, bytes held) of a device; -1 s where it ends otherwise; None where it was never used."""
    series = capsule.scalars("gpu_utilization", rank=rank, side=side)
    used = capsule.scalars("memory_device_used", rank=rank, side=side)
    if series.time is None:
        return None
    value, time = np.asarray(series.value, np.float64), np.asarray(series.time, np.float64)
    kept = np.isfinite(value) & np.isfinite(time)
    order = np.argsort(time[kept], kind="stable")
    value, time = value[kept][order], time[kept][order]
    busy = np.flatnonzero(value > T.UNUSED)
    if not len(busy):
        return None
    last, known = int(busy[-1]), np.isfinite(used.value)
    work = value[int(busy[0]) : last + 1]
    since = float(time[-1] - time[last])
    steady = np.mean(work > T.HIGH) >= T.STEADY and time[last] - time[busy[0]] >= T.IDLE_SECONDS
    if not known.any() or used.side != series.side or not steady or since < T.IDLE_SECONDS or value.max() > 1:
        return -1.0, 0.0
    held = float(used.value[known][-1])
    return (since, held) if held >= T.HELD * float(used.value[known].max()) else (-1.0, 0.0)
