"""What would fit: changes of a configuration one at a time, with the peak that the memory model predicts for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..finding import Evidence
from ..reference.memory_job import Job, Shape
from ..reference.memory_model import estimate
from .configuration import Plan
from .oom import Failure, gib
from .thresholds import FAR_BELOW, MODEL_ERROR, ROOM_LEFT, USUAL_RANKS

Reading = tuple[Shape, Job]


@dataclass(frozen=True)
class Change:
    """One thing changed, and the highest peak over the readings of the configuration."""

    words: str
    peak: float
    fits: bool


@dataclass(frozen=True)
class Fitting:
    """The peak as it is configured, the bytes that there are for it, and what fits."""

    budget: float
    configured: float
    changes: tuple[Change, ...]
    silent: str = ""

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """The configured peak, and one row for each change."""
        if self.silent:
            return ()
        limit = f"≤ {self.budget:,.0f}"
        return (
            Evidence(
                name="computed peak", value=round(self.configured), expected=limit, unit="B", note="as configured"
            ),
            *(
                Evidence(
                    name=f"with {each.words}",
                    value=round(each.peak),
                    expected=limit,
                    unit="B",
                    note=self._note(each),
                )
                for each in self.changes
            ),
        )

    def _note(self, change: Change) -> str:
        if not change.fits:
            return "does not fit"
        return "fits" if change.peak <= (1 - MODEL_ERROR) * self.budget else "fits barely, less than the model may err"

    @property
    def words(self) -> str:
        """One sentence."""
        if self.silent:
            return self.silent
        fitting = [f"{each.words} ({gib(each.peak)})" for each in self.changes if each.fits]
        needs = f"By computation, good to about 10 %, it needs {gib(self.configured)} as configured"
        if not fitting:
            return f"{needs}, and none of the usual changes makes it fit."
        return f"{needs}; what would fit: {'; '.join(fitting)}."


def fitting(planned: Plan, failure: Failure) -> Fitting:
    """Try the usual changes on the configuration of a job that ran out of memory.

    A share of the device is left free, since no allocator fills it. Where the configuration explains far less than what
    was in use at the failure, nothing is proposed: something holds memory that is not in the configuration.
    """
    device = failure.capacity
    if not planned.readings:
        return Fitting(0.0, 0.0, (), f"What would fit cannot be computed: {planned.lacking}.")
    if device is None:
        return Fitting(0.0, 0.0, (), "What would fit cannot be computed: the size of the device is not stated.")
    device = min(device, failure.allowed or device)
    taken = (failure.held_by_others or 0) + (failure.not_accounted or 0)
    budget = max(0.0, device - taken) * (1 - ROOM_LEFT)
    configured = _highest(planned, lambda shape, job: (shape, job))
    needed = (failure.allocated or 0) + (failure.requested or 0)
    if configured < FAR_BELOW * needed:
        words = (
            f"The configuration needs {gib(configured)} by computation, {gib(needed)} were wanted: something holds "
            "memory that is not in the configuration."
        )
        return Fitting(budget, configured, (), words)
    changes = list(_changes(planned, budget))
    if not any(each.fits for each in changes):
        changes += _pairs(planned, budget)
    return Fitting(budget, configured, tuple(changes))


def _changes(planned: Plan, budget: float) -> Iterator[Change]:
    job = planned.readings[0][1]

    def change(words: str, make: Callable[[Shape, Job], Reading]) -> Change:
        peak = _highest(planned, make)
        return Change(words, peak, peak <= budget)

    for rows in _halves(job.batch, 1):
        found = change(f"a micro-batch of {rows}", lambda s, j, n=rows: (s, j.changed(batch=n, accumulating=True)))
        if found.fits or rows == 1:
            yield found
            break
    for length in _halves(job.length, 128):
        found = change(f"rows of {length} tokens", lambda s, j, n=length: (s, j.changed(length=n)))
        if found.fits or length < 256:
            yield found
            break
    if any(each.checkpointing != "full" for _, each in planned.readings):
        yield change("activation checkpointing", lambda s, j: (s, j.changed(checkpointing="full")))
    if any(each.attention == "materialised" for each, _ in planned.readings):
        yield change("fused attention", lambda s, j: (s.changed(attention="fused"), j))
    if any(each.precision == "fp32" for _, each in planned.readings):
        yield change("bf16 autocast", lambda s, j: (s, j.changed(precision="autocast")))
    if job.optimizer == "adamw":
        yield change("8-bit optimizer states", lambda s, j: (s, j.changed(optimizer="adamw8bit")))
    if job.stage < 3:
        yield change(_sharded_words(job), _sharded)


def _pairs(planned: Plan, budget: float) -> Iterator[Change]:
    """Several things at once, from the cheapest on, up to the first that fits."""
    sharded = _sharded_words(planned.readings[0][1])
    pairs: tuple[tuple[str, Callable[[Shape, Job], Reading]], ...] = (
        ("activation checkpointing and a micro-batch of 1", _smallest),
        (f"activation checkpointing and {sharded}", lambda s, j: _sharded(s, j.changed(checkpointing="full"))),
        (f"a micro-batch of 1, activation checkpointing and {sharded}", lambda s, j: _sharded(*_smallest(s, j))),
    )
    for words, make in pairs:
        peak = _highest(planned, make)
        yield Change(words, peak, peak <= budget)
        if peak <= budget:
            return


def _smallest(shape: Shape, job: Job) -> Reading:
    return shape, job.changed(checkpointing="full", batch=1, accumulating=True)


def _sharded(shape: Shape, job: Job) -> Reading:
    return shape, job.changed(stage=3, data_parallel=max(job.data_parallel, USUAL_RANKS), buckets=False)


def _sharded_words(job: Job) -> str:
    return f"weights, gradients and states sharded over {max(job.data_parallel, USUAL_RANKS)} ranks"


def _halves(start: int, least: int) -> Iterator[int]:
    while start // 2 >= least:
        start //= 2
        yield start


def _highest(planned: Plan, make: Callable[[Shape, Job], Reading]) -> float:
    return max(estimate(*make(shape, job)).peak for shape, job in planned.readings)
