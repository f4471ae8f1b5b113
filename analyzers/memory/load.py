"""The requests of a server over time: that it ran out, and who was running when it did."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from .oom import failures
from .pages import pools
from .records import number, whole
from .thresholds import MOMENTS, PREEMPTED, SERVED

if TYPE_CHECKING:
    from ...capsules import Capsule

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Pressure:
    """That a server ran out, and when (Unix seconds, NaN where unknown): a failure, refusals, or preemptions.

    ``preempted`` is the share of the requests that were.
    """

    words: str
    t: float
    phase: str | None
    preempted: float


@dataclass(frozen=True)
class Requests:
    """Columns of the requests that say when they arrived; a time that is not known is infinite."""

    arrival: Array
    first: Array
    finished: Array
    prompt: Array
    output: Array
    limited: Array
    names: tuple[str | None, ...]

    def at(self, t: float) -> Requests:
        """Those that were there at a time."""
        there = np.flatnonzero((self.arrival <= t) & (self.finished > t))
        columns = (self.arrival, self.first, self.finished, self.prompt, self.output, self.limited)
        return Requests(*(each[there] for each in columns), names=tuple(self.names[at] for at in there.tolist()))

    def moments(self) -> Array:
        """Times of arrival, so many of them that looking at each is cheap."""
        times = np.unique(self.arrival)
        return times[:: max(1, len(times) // MOMENTS)]

    def prefilling(self, t: float) -> int:
        """Prompt tokens of those that have arrived and have no first token yet."""
        return int(self.prompt[(self.arrival <= t) & (self.first > t) & (self.finished > t)].sum())

    def __len__(self) -> int:
        return len(self.arrival)


_REQUESTS: WeakKeyDictionary[Capsule, Requests] = WeakKeyDictionary()


def requests(capsule: Capsule) -> Requests:
    """The requests of a capsule."""
    if capsule not in _REQUESTS:
        rows = [each for each in capsule.records("requests") if number(each.get("arrival")) is not None]
        positions = capsule.manifest.model.max_positions if capsule.manifest.model is not None else None
        limits = [whole(each.get("max_tokens")) for each in rows]
        _REQUESTS[capsule] = Requests(
            arrival=np.array([float(each["arrival"]) for each in rows]),
            first=np.array([_late(each.get("first_token")) for each in rows]),
            finished=np.array([_late(each.get("finished")) for each in rows]),
            prompt=np.array([whole(each.get("prompt_tokens")) or 0 for each in rows], np.int64),
            output=np.array([whole(each.get("output_tokens")) or 0 for each in rows], np.int64),
            # A limit as long as the context is none.
            limited=np.array([limit is not None and limit < (positions or math.inf) for limit in limits], bool),
            names=tuple(str(each["id"]) if each.get("id") is not None else None for each in rows),
        )
    return _REQUESTS[capsule]


def running(capsule: Capsule, t: float) -> Requests | None:
    """The requests that were there at a time; where it is not known, at the time when most were."""
    known = requests(capsule)
    if not len(known):
        return None
    if math.isnan(t):
        moments = known.moments().tolist()
        t = max(moments, key=lambda at: int(((known.arrival <= at) & (known.finished > at)).sum()))
    there = known.at(t)
    return there if len(there) else None


def pressure(capsule: Capsule) -> Pressure | None:
    """The first sign that a server ran out of memory; None where nothing says so."""
    rows = capsule.records("requests")
    counts = [whole(each.get("preemptions")) or 0 for each in rows]
    preempted = sum(count > 0 for count in counts) / len(counts) if len(counts) >= SERVED else 0.0
    for failure in failures(capsule):
        phase = failure.phase or _phase(capsule)
        if phase is None or phase.split("_")[0] in ("prefill", "decode", "generation"):
            return Pressure("The device ran out of memory", _time(failure.t), phase, preempted)
    rejects = [t for pool in pools(capsule) for t in pool.rejects]
    if rejects:
        return Pressure(f"{len(rejects)} requests were refused pages", _time(rejects[0]), None, preempted)
    if preempted > PREEMPTED:
        hit = [_time(number(each.get("arrival"))) for each, count in zip(rows, counts, strict=True) if count]
        return Pressure(f"{preempted:.0%} of the requests were preempted", float(np.median(hit)), None, preempted)
    return None


def prefilled(capsule: Capsule, t: float) -> tuple[int | None, float]:
    """Prompt tokens at work at a time, and the median of other moments; None where it is not the most there was."""
    for pool in pools(capsule):
        if len(pool.admitted) >= SERVED:
            steps = sorted(pool.admitted)
            before = [step for step in steps if math.isnan(t) or pool.at.get(step, -math.inf) <= t]
            if not before:
                continue
            tokens = pool.admitted[before[-1]]
            others = [pool.admitted[step] for step in steps if step != before[-1]]
            return (tokens if tokens >= max(others) else None), float(np.median(others))
    known = requests(capsule)
    if len(known) < SERVED:
        return None, 0.0
    found = np.array([known.prefilling(at) for at in known.moments().tolist()])
    tokens = int(found.max()) if math.isnan(t) else known.prefilling(t)
    return (tokens if tokens >= found.max() else None), float(np.median(found))


def _phase(capsule: Capsule) -> str | None:
    """The phase of the highest memory record, where a failure does not say its own."""
    best = max(capsule.records("memory"), key=lambda each: whole(each.get("peak")) or 0, default=None)
    return str(best["phase"]) if best is not None and best.get("phase") else None


def _time(t: float | None) -> float:
    return math.nan if t is None else t


def _late(value: Any) -> float:
    found = number(value)
    return math.inf if found is None else found
