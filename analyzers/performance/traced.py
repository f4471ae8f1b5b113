"""What traces say of each rank: the judged steps added up, and which bottlenecks that shows.

Every rule of the family reads the same table, so that no two of them judge the same millisecond differently.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..finding import Evidence, Kind
from ..registry import NotCaptured, NotJudged
from . import thresholds as T

if TYPE_CHECKING:
    from ...capsules import Capsule

Bottleneck = Literal["input", "communication", "launch", "idle", "compute"]

_PARTS = ("compute_ms", "communication_ms", "copy_ms", "idle_ms", "idle_data_ms", "idle_gaps_ms", "idle_sync_ms")


@dataclass(frozen=True)
class Traced:
    """The judged steps of one rank, in milliseconds all together.

    Attributes:
        rank: of the job.
        steps: numbers of the judged steps, ascending.
        left_out: how many steps were warm-up, or measured the profiler.
        window: their length; the sum of compute, communication (what no computation hides), copy and idle.
        medians: part → its share of the median step: what one long step alone shows bounds none.
        kernels: how many ran; 0 where the trace does not say.
        stacks: the profiler recorded Python's stacks, which slows the host.
        loader: what the trace calls the wait for data.
        top: operation → (milliseconds, calls), the longest first.
        busy: share of the time from the device's first to its last work in the whole trace; NaN where it is not told.
    """

    rank: int
    steps: tuple[int, ...]
    left_out: int
    window: float
    parts: Mapping[str, float]
    medians: Mapping[str, float]
    kernels: int
    stacks: bool
    loader: str
    top: Mapping[str, tuple[float, int]]
    busy: float

    def share(self, part: str) -> float:
        """The share of the time that a part takes; NaN where the trace does not tell."""
        return self.parts.get(part, math.nan) / self.window

    @property
    def kernel_us(self) -> float:
        """Mean length of a kernel in microseconds."""
        spent = self.parts.get("compute_ms", 0.0) + self.parts.get("communication_ms", 0.0)
        return 1e3 * spent / self.kernels if self.kernels else math.nan

    @property
    def bottlenecks(self) -> tuple[Bottleneck, ...]:
        """What this rank alone shows, what comes first in a step first."""
        found: list[Bottleneck] = []
        if self.share("idle_data_ms") >= T.INPUT and self.medians["idle_data_ms"] >= T.INPUT_MEDIAN:
            found.append("input")
        if self._takes("communication_ms", T.COMMUNICATION):
            found.append("communication")
        gaps = self.share("idle_gaps_ms") if self._takes("idle_gaps_ms", T.GAPS) else 0.0
        many = self.kernels >= T.GAP_KERNELS * len(self.steps)
        if gaps >= T.GAPS and many and self.kernel_us <= T.SHORT_KERNEL and "input" not in found:
            found.append("launch")
        if self._takes("idle_ms", T.IDLE) and not {"input", "launch"} & set(found):
            found.append("idle")
        if self.share("compute_ms") >= T.COMPUTE:
            found.append("compute")
        return tuple(found)

    def _takes(self, part: str, share: float) -> bool:
        """Whether a part takes such a share of the time, and no long step alone makes it so."""
        return self.share(part) >= share and self.medians[part] >= T.TYPICAL * share

    def evidence(self) -> tuple[Evidence, ...]:
        """Where the time goes, part by part."""
        names = {"compute_ms": "computing", "communication_ms": "communication not hidden", "copy_ms": "copying"}
        names["idle_ms"] = "idle"
        found = tuple(
            Evidence(name=name, value=round(self.share(part), 4), unit="of the step")
            for part, name in names.items()
            if math.isfinite(self.share(part))
        )
        if not math.isfinite(self.busy):
            return found
        note = "of the whole trace, copies too, as profilers show it: what comes before and after is left out"
        return (*found, Evidence(name="busy from first to last work", value=round(self.busy, 4), note=note))

    def where_from(self) -> str:
        """Which steps these are, for a summary."""
        first, last = self.steps[0], self.steps[-1]
        named = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        return named + (f" ({self.left_out} left out: warm-up)" if self.left_out else "")


def traced(capsule: Capsule) -> dict[int, Traced]:
    """The judged steps of every rank whose trace shows a device.

    Raises:
        NotCaptured: no trace shows a device's work.
        NotJudged: the traces mark no steps, or only such as measure the profiler.
    """
    rows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    unmarked = overhead = torn = False
    for record in capsule.records("profile"):
        window, compute = _ms(record.get("window_ms")), _ms(record.get("compute_ms"))
        if not window > 0 or not math.isfinite(compute) or not _device(record):
            continue
        if not isinstance(record.get("step"), int):
            unmarked = True
        elif _ms(record.get("lost")) > T.LOST:
            torn = True
        elif _ms(record.get("overhead_ms")) > T.OVERHEAD * window:
            overhead = True
        else:
            rows[record["rank"]].append(record)
    found = {rank: _added(rank, each) for rank, each in sorted(rows.items())}
    settled = {rank: each for rank, each in found.items() if each.steps[-1] >= T.SETTLED or len(each.steps) > 1}
    if settled:
        return settled
    if found:
        raise NotJudged("a trace of later steps: the first one of a job is warm-up")
    if torn:
        raise NotJudged("a whole trace: of this one the device's work or its launches are torn off")
    if overhead:
        raise NotJudged("a trace in which the profiler itself takes little time (fewer recorded details, later steps)")
    if unmarked:
        raise NotJudged(
            "a trace that marks its steps (torch.profiler.schedule and prof.step()): in the whole of one, "
            "initialisation and warm-up cannot be told from idling"
        )
    raise NotCaptured("a trace with device work (ProfilerActivity.CUDA): those here are of a CPU alone")


def coverage(capsule: Capsule, found: Mapping[int, Traced]) -> tuple[Evidence, ...]:
    """How many ranks the traces are of, where the job has more."""
    world = world_size(capsule)
    if world is None or world <= len(found):
        return ()
    note = "what the others did is not known"
    return (Evidence(name="ranks with a trace", value=len(found), expected=world, note=note),)


def world_size(capsule: Capsule) -> int | None:
    """How many ranks the job has, where the manifest says so."""
    run = capsule.manifest.run
    return run.world_size if run is not None and run.world_size else None


def kind(capsule: Capsule) -> Kind | None:
    """Slowness is hygiene where something failed: it is not what ended the job."""
    trigger = capsule.manifest.trigger
    failed = trigger is not None and trigger.kind not in (None, "imported", "manual")
    failed = failed or any(each.get("kind") in ("exception", "oom") for each in capsule.records("events"))
    return "hygiene" if failed else None


def hottest(rank: Traced) -> Iterator[Evidence]:
    """The operations that take most of the time."""
    for name, (spent, calls) in list(rank.top.items())[: T.SHOWN]:
        note = f"{calls:,} calls, {spent / len(rank.steps):.3g} ms a step"
        yield Evidence(name=f"{name[: T.SIGNS]}", value=round(spent, 3), unit="ms", note=note)


def _device(record: Mapping[str, Any]) -> bool:
    """Whether a device did anything in this window, or the record does not count its kernels."""
    return record.get("kernels") != 0 or _ms(record.get("compute_ms")) > 0


def _added(rank: int, records: list[dict[str, Any]]) -> Traced:
    records = sorted({each["step"]: each for each in records}.values(), key=lambda each: each["step"])
    kept = _warm(records)
    parts = {name: _sum([_part(each, name) for each in kept]) for name in _PARTS}
    medians = {
        name: float(np.median([_part(each, name) / float(each["window_ms"]) for each in kept])) for name in _PARTS
    }
    top: dict[str, tuple[float, int]] = {}
    for record in kept:
        for each in record.get("top") or ():
            if isinstance(each, dict) and isinstance(each.get("name"), str) and _ms(each.get("ms")) >= 0:
                spent, calls = top.get(each["name"], (0.0, 0))
                top[each["name"]] = (spent + _ms(each["ms"]), calls + int(each.get("calls") or 0))
    profilers = [each.get("profiler") for each in kept]
    return Traced(
        rank=rank,
        steps=tuple(each["step"] for each in kept),
        left_out=len(records) - len(kept),
        window=math.fsum(float(each["window_ms"]) for each in kept),
        parts={name: value for name, value in parts.items() if math.isfinite(value)},
        medians=medians,
        kernels=sum(int(each.get("kernels") or 0) for each in kept),
        stacks=any(isinstance(each, dict) and each.get("with_stack") is True for each in profilers),
        loader=next((str(each["loader"]) for each in kept if each.get("loader")), ""),
        busy=_ms(kept[0].get("busy_first_to_last")),
        top=dict(sorted(top.items(), key=lambda each: -each[1][0])),
    )


def _warm(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the steps at the beginning that take much longer than those after them: compilation, caches, threads."""
    kept = records
    while len(kept) > 1:
        rest = float(np.median([float(each["window_ms"]) for each in kept[1:]]))
        if float(kept[0]["window_ms"]) <= T.WARM_UP * rest:
            break
        kept = kept[1:]
    return kept


def _part(record: Mapping[str, Any], name: str) -> float:
    """A part of a window, derived where the record gives it in another form; NaN where it cannot be."""
    value, window = _ms(record.get(name)), _ms(record.get("window_ms"))
    if math.isfinite(value):
        return min(value, window)
    busy = sum(each for part in ("compute_ms", "communication_ms", "copy_ms") if (each := _ms(record.get(part))) >= 0)
    if name == "idle_ms":
        return max(0.0, window - busy)
    if name == "idle_data_ms" and math.isfinite(data := _ms(record.get("data_ms"))):
        return min(data, _part(record, "idle_ms"))
    return math.nan


def _sum(values: list[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


def _ms(value: Any) -> float:
    """A time that can be one; NaN otherwise."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    return float(value) if usable else math.nan
