"""Devices that stand idle, in traces and in the logs of monitors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..finding import Evidence, Finding, Where
from ..registry import NotCaptured, NotJudged, rule
from . import thresholds as T
from .held import held_idle
from .traced import Traced, coverage, kind, traced

if TYPE_CHECKING:
    from ...capsules import Capsule
    from ...capsules.tables import Series


@rule(
    "performance/gpu-idle",
    stage="runtime",
    severity="warning",
    needs=("records.profile.window_ms|scalars.gpu_utilization",),
    explained_by=(
        "performance/input-bound",
        "performance/launch-bound",
        "performance/communication-bound",
        "distributed/straggler",
    ),
    cases=("utilisation-saw-tooth",),
)
def gpu_idle(capsule: Capsule) -> Iterator[Finding]:
    """The device stands idle for half of the time or more, and nothing else explains it.

    What it checks:
        The steps of traces; where there are none, the utilisation that a monitor logged.

    Why it matters:
        Half of the device is paid for and not used.

    How it decides:
        A trace: the device has nothing to do for 50 % of the judged steps' time and for 25 % of the median step, though
        it neither waits for data nor for launches. A monitor: the utilisation is below 50 % in the mean over 60 s or
        more, without the idle beginning and end and the times at which the device's memory is empty; a device that was
        never used, or hardly beside busy ones, is not the job's. Devices that all worked for 60 s or more, 90 % of it
        above 80 %, and then stand at 0 for 60 s up to the end of the record with their memory held are said, too: a
        device in a call that does not end counts as busy, one whose host stopped does not. Where it swings between
        below 20 % and above 80 %, that is said: something else takes turns with the computation. What that is stays
        open (undetermined).

    Looks like it but is not:
        Start-up, evaluation between steps, a job that has ended and gave its memory back; the profiler's own time;
        waiting in a collective, which counts as busy; a device of somebody else.

    What to try next:
        A trace of a few steps (torch.profiler with CPU and CUDA, schedule and prof.step()): it shows what the host does
        while the device waits.

    Fix:
        That of what the trace shows: synchronisations (.item(), printing, checkpoints, metrics) out of the step, input
        prepared earlier, or a larger batch.
    """
    reason: NotJudged | None = None
    try:
        found = traced(capsule)
    except NotJudged as error:
        found, reason = {}, error
    idle = [each for each in found.values() if "idle" in each.bottlenecks]
    if idle:
        yield _in_trace(capsule, max(idle, key=lambda each: each.share("idle_ms")), found)
        return
    if found:
        return
    watched = [key for key in capsule.scalar_keys() if key.name == "gpu_utilization"]
    if not watched and reason is not None:
        raise reason
    spans = [span for key in watched if (span := _span(capsule, key.rank, key.side)) is not None]
    if not spans:
        raise NotCaptured(f"utilisation with times over {T.IDLE_SECONDS:g} s or more, of a device that the job uses")
    if (stopped := held_idle(capsule, watched)) is not None:
        yield stopped
    if any(each.mean >= T.UTILIZATION for each in spans):  # a device that is hardly touched is not the job's
        spans = [each for each in spans if each.mean >= T.UNUSED]
    worst = min(spans, key=lambda each: each.mean)
    if worst.mean < T.UTILIZATION:
        yield _in_monitor(capsule, worst, spans)


def _in_trace(capsule: Capsule, each: Traced, found: dict[int, Traced]) -> Finding:
    waits = each.share("idle_sync_ms")
    return Finding(
        confidence="undetermined",
        kind=kind(capsule),
        title="The device stands idle",
        summary=(
            f"The device has nothing to do for {each.share('idle_ms'):.0%} of the time of {each.where_from()}, and the "
            "trace shows no data loading and no launches that would explain it."
        ),
        where=Where(step=each.steps[0], rank=each.rank),
        evidence=(
            Evidence(name="idle", value=round(each.share("idle_ms"), 4), expected=f"< {T.IDLE}", unit="of the step"),
            *(
                [Evidence(name="idle while the host waits for the device", value=round(waits, 4), unit="of the step")]
                if math.isfinite(waits)
                else []
            ),
            *(one for one in each.evidence() if one.name != "idle"),
            *coverage(capsule, found),
        ),
        next=("the host's thread in the trace, in the longest gap of the device: what does it do there?",),
    )


class _Span:
    """What a monitor saw of one device while it was in use."""

    def __init__(self, rank: int, side: str | None, value: NDArray[np.float64], time: NDArray[np.float64]) -> None:
        self.name = f"Device {rank}" + (f" of {side}" if side else "")
        steps = np.diff(time, append=time[-1] + (time[-1] - time[-2]))
        steps = np.minimum(steps, T.BREAK * np.median(steps))  # a sample stands for no night after it
        self.rank, self.value, self.seconds = rank, value, float(steps[:-1].sum())
        self.mean = float(np.average(value, weights=np.maximum(steps, 1e-9)))

    @property
    def teeth(self) -> int:
        """How often the utilisation rose from low to high."""
        level = np.where(self.value > T.HIGH, 1, np.where(self.value < T.LOW, -1, 0))
        level = level[level != 0]
        return int(((level[1:] == 1) & (level[:-1] == -1)).sum())


def _span(capsule: Capsule, rank: int, side: str | None) -> _Span | None:
    """The utilisation of one device from its first to its last use; None where it is too short, or never used."""
    series = capsule.scalars("gpu_utilization", rank=rank, side=side)
    if series.time is None:
        return None
    value, time = np.asarray(series.value, np.float64), np.asarray(series.time, np.float64)
    kept = np.isfinite(value) & np.isfinite(time) & ~_deserted(capsule, series)
    order = np.argsort(time[kept], kind="stable")
    value, time = value[kept][order], time[kept][order]
    used = np.flatnonzero(value > T.UNUSED)
    if not len(used):
        return None
    value, time = value[used[0] : used[-1] + 1], time[used[0] : used[-1] + 1]
    if len(value) < T.IDLE_SAMPLES or time[-1] - time[0] < T.IDLE_SECONDS or value.max() > 1:
        return None
    return _Span(rank, side, value, time)


def _deserted(capsule: Capsule, watched: Series) -> NDArray[np.bool_]:
    """bool[N]: samples at which nothing lies in the device's memory, so that no job is there: between two of them."""
    used = capsule.scalars("memory_device_used", rank=watched.rank, side=watched.side)
    known = np.isfinite(used.value)
    if not known.any() or used.side != watched.side:
        return np.zeros(len(watched), np.bool_)
    held = np.interp(watched.step, used.step[known], used.value[known])
    return held < T.DESERTED * held.max(initial=0.0)


def _in_monitor(capsule: Capsule, span: _Span, spans: list[_Span]) -> Finding:
    most = max(each.mean for each in spans)
    alike = len(spans) > 1 and most < T.UTILIZATION  # none stands out: what holds them back is common to all
    share = f"{span.mean:.0%}" if f"{span.mean:.0%}" == f"{most:.0%}" else f"{span.mean:.0%} to {most:.0%}"
    who = f"All {len(spans)} devices are in use {share}" if alike else f"{span.name} is in use {span.mean:.0%}"
    others = len(spans) - 1
    note = (
        f"{len(spans)} devices in use"
        if alike
        else f"{others} other{'s' if others != 1 else ''} in use up to {most:.0%}"
    )
    teeth = span.teeth >= T.TEETH
    shape = f"; it swings from below {T.LOW:.0%} to above {T.HIGH:.0%} {span.teeth} times" if teeth else ""
    return Finding(
        confidence="undetermined",
        kind=kind(capsule),
        title=f"{'The devices are' if alike else 'The device is'} {'used by turns' if teeth else 'hardly used'}",
        summary=f"{who} of the time over {span.seconds:,.0f} s{shape}.",
        where=Where(rank=None if alike else span.rank),
        evidence=(
            Evidence(name="gpu_utilization", value=round(span.mean, 4), expected=f"≥ {T.UTILIZATION}", note="mean"),
            Evidence(name="watched for", value=round(span.seconds, 1), unit="s", note=note if others else ""),
            Evidence(name="rises from low to high", value=span.teeth, expected=f"< {T.TEETH}"),
        ),
        next=("a trace of a few steps: torch.profiler with CPU and CUDA, schedule and prof.step()",),
    )
