"""What the hooks of one window measured: rows in the order in which the tensors came into being.

On a CPU a norm is read at once, which costs nothing there; on a device it stays a tensor until ``read`` brings all
numbers of the window over in one transfer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor

from . import statistics
from .internals import version

# Loops that reuse one module thousands of times (recurrent cells) stop adding rows here; later tensors go unmeasured.
MOST_ROWS = 20_000


# The columns of a row whose tensor has not been looked at.
UNKNOWN: dict[str, Any] = {"dtype": "", "shape": (), "stride": (), "device": "", "numel": 0}


@dataclass(slots=True, eq=False)
class Row:
    """One measured tensor. ``norm``, ``counts`` and ``full`` may wait on a device until the tape is read."""

    name: str
    role: str
    about: dict[str, Any]
    micro: int
    call: int
    norm: float | Tensor = math.nan
    counts: Tensor | tuple[int, ...] | None = None
    full: statistics.Numbers | Tensor | None = None

    @classmethod
    def compiled(cls, name: str, micro: int, values: list[float]) -> Row:
        """A row from inside a compiled region: norm, largest value, number of elements, bytes of one.

        The norm is infinite for -Inf too, the largest value is not: together they tell a mask from an overflow.
        """
        norm, largest, numel, itemsize = values
        about = {"dtype": {2: "16 bit", 4: "float32", 8: "float64"}.get(int(itemsize), ""), "shape": (int(numel),)}
        row = cls(name, "activation", about | {"stride": None, "device": "", "numel": int(numel)}, micro, 0, norm)
        if not math.isfinite(norm):
            row.counts = (int(math.isnan(largest)), int(largest == math.inf), int(not math.isnan(largest)))
        return row

    @property
    def bad(self) -> bool:
        """Holds NaN or +Inf, or a gradient -Inf. A -Inf in an activation is how attention and logits are masked."""
        if self.full is not None:
            counts = cast("statistics.Numbers", self.full)
            return counts["nan"] > 0 or counts["posinf"] > 0 or (self.role == "gradient" and counts["neginf"] > 0)
        if self.counts is not None:
            nan, posinf, neginf = cast("tuple[int, ...]", self.counts)
            return nan > 0 or posinf > 0 or (self.role == "gradient" and neginf > 0)
        return not math.isfinite(float(self.norm))

    @property
    def finite(self) -> bool:
        """No element is NaN or infinite (a norm alone may overflow in float32: then the counts decide)."""
        if self.full is not None:
            numbers = cast("statistics.Numbers", self.full)
            return not any(numbers[name] for name in ("nan", "posinf", "neginf"))
        if self.counts is not None:
            return not any(cast("tuple[int, ...]", self.counts))
        return math.isfinite(float(self.norm))


class Tape:
    """Rows of the window being recorded, and the switches that every hook looks at first."""

    def __init__(self) -> None:
        self.on = False  # inside a recorded micro-batch, and not inside an evaluation within it
        self.everything = False  # full statistics of every tensor of this window
        self.micro = 0
        self.rows: list[Row] = []
        self.calls: dict[str, int] = {}
        self._last: Any = None
        self._last_row: Row | None = None
        self._last_version = -1

    def clear(self) -> None:
        """Forget the window."""
        self.rows = []
        self.begin(0)

    def begin(self, micro: int) -> None:
        """Start micro-batch ``micro`` of the window: call numbers count from 0 again."""
        self.micro = micro
        self.calls = {}
        self._last, self._last_row = None, None

    def count(self, name: str) -> int:
        """The number of this call of ``name`` in the micro-batch, from 0."""
        call = self.calls.get(name, 0)
        self.calls[name] = call + 1
        return call

    def seen(self, tensor: Tensor) -> Row | None:
        """The row of ``tensor`` when it was the last one measured and nothing wrote into it since.

        A block that returns what its last layer returned would otherwise be measured twice.
        """
        last = self._last
        if last is not None and last() is tensor and version(tensor) == self._last_version:
            return self._last_row
        return None

    def measure(self, name: str, role: str, tensor: Tensor, call: int, about: dict[str, Any] | None = None) -> Row:
        """Append a row for ``tensor``: its norm, and where that is not finite or ``everything`` is on, all of it."""
        values = statistics.local(tensor)
        row = Row(name, role, about or statistics.describe(values), self.micro, call)
        if statistics.at_hand(values):
            if self.everything:
                row.full = statistics.full(values)  # the norm is among them
            elif not math.isfinite(norm := statistics.norm_at_hand(values)):
                row.full = statistics.full(values)
                # From the first bad tensor on everything of this step is of interest, and on a CPU still at hand.
                self.everything = row.bad
            else:
                row.norm = norm
            if row.full is not None:
                row.norm = statistics.norm_of(cast("statistics.Numbers", row.full), values.numel())
        else:
            row.norm = statistics.norm(values)
            if self.everything:
                row.full = statistics.full(values)
            else:
                row.counts = statistics.nonfinite_counts(values)
        if len(self.rows) < MOST_ROWS:
            self.rows.append(row)
        self._last, self._last_row, self._last_version = ref(tensor), row, version(tensor)
        return row

    def reserve(self, name: str, role: str) -> Row:
        """Append a row to be measured later together with others; its place in the order is now."""
        row = Row(name, role, UNKNOWN, self.micro, self.count(name))
        if len(self.rows) < MOST_ROWS:
            self.rows.append(row)
        return row

    def read(self, extra: list[Tensor]) -> list[list[float]]:
        """Bring everything that waits on a device over, one transfer a device; returns the values of ``extra``."""
        waiting = [
            (row, field)
            for row in self.rows
            for field in ("norm", "counts", "full")
            if isinstance(getattr(row, field), Tensor)
        ]
        numbers = gather([*extra, *(getattr(row, field) for row, field in waiting)])
        for (row, field), values in zip(waiting, numbers[len(extra) :], strict=True):
            if field == "norm":
                row.norm = values[0]
            elif field == "counts":
                row.counts = tuple(int(value) for value in values)
            else:
                row.full = statistics.unpack(values)
        return numbers[: len(extra)]


def gather(tensors: list[Tensor]) -> list[list[float]]:
    """The values of small tensors as floats, with one transfer for each device they lie on."""
    results: list[list[float]] = [[]] * len(tensors)
    places: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(index)
    for indices in places.values():
        kinds: dict[tuple[torch.dtype, int], list[int]] = {}
        for index in indices:
            kinds.setdefault((tensors[index].dtype, tensors[index].numel()), []).append(index)
        order = [index for group in kinds.values() for index in group]
        packed = torch.cat(
            [
                torch.stack([tensors[i].detach().reshape(-1) for i in group]).double().view(-1)
                for group in kinds.values()
            ]
        ).tolist()
        at = 0
        for index in order:
            size = tensors[index].numel()
            results[index] = packed[at : at + size]
            at += size
    return results
