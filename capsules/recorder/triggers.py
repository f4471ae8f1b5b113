"""When a step is worth keeping whole: non-finite values, a spike of the loss, and how often each may fire.

Not among them, because they are lawful: -Inf where attention scores or logits are masked, and gradients that overflow
in a step which the GradScaler then leaves out.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

from .tape import Row

# A spike is judged against the previous windows only, so it cannot fire while the run is younger than that.
HISTORY = 20
# Above the median of the previous HISTORY losses by six of their standard deviations and by half of that median, and
# by 5 % of the first losses, so that neither the noise of small batches nor the jitter of a loss near zero counts.
# The descent at the start of a run widens the deviation by itself.
DEVIATIONS = 6.0
RELATIVE = 0.5
OF_FIRST = 0.05

# A sample is odd where its loss lies this far beyond the worst of the windows before. Hard text does that too, now and
# then, so it is no trigger; but only the tokens tell the two apart, and without this they are gone.
ODD_WINDOWS = 32
ODD_HISTORY = 6
ODD_BEYOND = 1.2
MOST_ODD = 16

# After a trigger its kind stays quiet until this many windows were healthy, and for ever after so many of it.
HEALTHY_AGAIN = 20
MOST = 8


@dataclass(frozen=True)
class Trigger:
    """Why a step was kept whole; the fields are those of the manifest."""

    kind: str
    step: int
    rank: int
    signal: str | None = None
    value: float | None = None
    message: str | None = None

    @property
    def weight(self) -> int:
        """A later trigger of greater weight replaces an earlier one in the heartbeat: a crash outranks a spike."""
        return {"manual": 0, "spike": 1}.get(self.kind, 2)

    def fields(self) -> dict[str, Any]:
        """The fields that are known."""
        return {name: value for name, value in self.__dict__.items() if value is not None}


class Limits:
    """Keeps a kind of trigger from firing at every step once something is broken for good."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}
        self._healthy: dict[str, int] = {}

    def allow(self, kind: str) -> bool:
        """Whether ``kind`` may fire now; counts it as fired where it may."""
        quiet = self._healthy.get(kind, HEALTHY_AGAIN) < HEALTHY_AGAIN and kind in ("nonfinite", "spike")
        self._healthy[kind] = 0
        if quiet or self._count.get(kind, 0) >= MOST:
            return False
        self._count[kind] = self._count.get(kind, 0) + 1
        return True

    def healthy(self, kind: str) -> None:
        """A window passed in which ``kind`` had no cause."""
        self._healthy[kind] = self._healthy.get(kind, HEALTHY_AGAIN) + 1


class Spike:
    """Judges each loss against the ones before it."""

    def __init__(self) -> None:
        self._previous: deque[float] = deque(maxlen=HISTORY)
        self._first: float | None = None

    def threshold(self) -> float | None:
        """The loss above which the next window is a spike; None while there is too little history."""
        if len(self._previous) < HISTORY or self._first is None:
            return None
        base = median(self._previous)
        deviation = math.sqrt(sum((value - base) ** 2 for value in self._previous) / (HISTORY - 1))
        return base + max(DEVIATIONS * deviation, RELATIVE * abs(base), OF_FIRST * abs(self._first))

    def add(self, loss: float) -> float | None:
        """Take the next loss; returns the threshold where the loss lies above it."""
        threshold = self.threshold()
        if math.isfinite(loss):
            self._previous.append(loss)
            if self._first is None and len(self._previous) == HISTORY:
                self._first = median(self._previous)
        return threshold if threshold is not None and loss > threshold else None


class OddSample:
    """Judges the worst sample of each window against the worst of the windows before."""

    def __init__(self) -> None:
        self._worst: deque[float] = deque(maxlen=ODD_WINDOWS)
        self._found = 0

    def add(self, losses: list[float]) -> bool:
        """Take the sample losses of the next window; whether one of them is worth keeping the window for."""
        finite = [loss for loss in losses if math.isfinite(loss)]
        if not finite:
            return False
        worst = max(finite)
        known = len(self._worst) >= ODD_HISTORY
        odd = known and len(finite) > 1 and self._found < MOST_ODD and worst > ODD_BEYOND * max(self._worst)
        self._worst.append(worst)
        self._found += odd
        return odd


@dataclass(frozen=True)
class Interval:
    """The place where values went bad: the last tensor that was finite, and the first that was not."""

    first_bad: Row
    last_finite: Row | None
    backward: bool

    def message(self) -> str:
        """One line that names both ends."""
        start = "the inputs" if self.last_finite is None else _describe(self.last_finite)
        if self.backward and self.last_finite is None:
            start = "the loss"
        direction = "backward" if self.backward else "forward"
        return f"{direction}: last finite {start} → first bad {_describe(self.first_bad)}"


def first_bad(rows: list[Row], lawful: set[str], skip_gradients: bool) -> Interval | None:
    """The interval in which the first non-finite value of a window appeared, in the order of execution.

    Args:
        rows: the window's tensors in execution order, then autograd order, micro-batch by micro-batch.
        lawful: names that held -Inf in healthy windows, as masked scores do; they name no interval.
        skip_gradients: the scaler has left this step out, so its gradients may overflow.
    """
    cause = next((row for row in rows if row.bad and not (skip_gradients and row.role == "gradient")), None)
    if cause is None:
        return None
    last: Row | None = None
    backward = cause.role == "gradient"
    for row in rows:
        if row.micro != cause.micro or (row.role == "gradient") != backward:
            continue
        if row is cause or (not row.finite and row.name not in lawful):
            return Interval(row, last, backward)
        if row.finite:
            last = row
    return Interval(cause, last, backward)


def _describe(row: Row) -> str:
    what = row.name if row.role in ("loss", "logits") else f"{row.role} {row.name}"
    return f"{what} ({row.about['dtype']})"
