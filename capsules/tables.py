"""Scalars and statistics as columns: what ``Capsule.scalars`` and ``Capsule.stats`` return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from .limits import MAX_INT64

Array = np.ndarray[Any, Any]

Role = Literal[
    "input",
    "activation",
    "logits",
    "loss",
    "gradient",
    "parameter",
    "update",
    "moment1",
    "moment2",
    "communication_in",
    "communication_out",
]

Count = Annotated[int, Meta(ge=0, le=MAX_INT64)]
Small = Annotated[int, Meta(ge=0, le=2**31 - 1)]

#: Units of the standard scalars, used where the writer gives none.
UNITS: dict[str, str] = {
    "loss": "nats/token",
    "eval_loss": "nats/token",
    "tokens": "tokens",
    "step_time": "s",
    "data_time": "s",
    "memory_allocated": "B",
    "memory_reserved": "B",
    "memory_peak": "B",
    "memory_device_used": "B",
    "gpu_power": "W",
    "gpu_temperature": "°C",
    "throughput": "tokens/s",
}

COUNTS = ("numel", "nan", "posinf", "neginf", "zeros", "subnormals")
MEASURES = ("min", "max", "absmax", "absmean", "mean", "std", "rms")


class Name(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ``names.jsonl``: what the rows of an id are about."""

    id: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    table: Literal["scalars", "stats"]
    name: str
    unit: str = ""
    side: str | None = None
    role: str = ""
    dtype: str = ""
    shape: tuple[Count, ...] = ()
    stride: tuple[int, ...] | None = None
    device: str = ""


class StatRow(msgspec.Struct, kw_only=True):
    """One row given to ``CapsuleWriter.stats``; what was not measured is left out."""

    step: Count
    name: str
    role: Role
    order: Small | None = None
    dtype: str = ""
    shape: tuple[Count, ...] = ()
    stride: tuple[int, ...] | None = None
    device: str = ""
    numel: Count | None = None
    nan: Count | None = None
    posinf: Count | None = None
    neginf: Count | None = None
    zeros: Count | None = None
    subnormals: Count | None = None
    min: float | None = None
    max: float | None = None
    absmax: float | None = None
    absmean: float | None = None
    mean: float | None = None
    std: float | None = None
    rms: float | None = None
    micro: Small | None = None
    call: Small | None = None
    log2_histogram: dict[Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)], Count] | None = None


@dataclass(frozen=True)
class SeriesKey:
    """What identifies a series of a capsule."""

    name: str
    rank: int
    side: str | None
    unit: str


@dataclass(frozen=True)
class Series:
    """One scalar over steps, sorted by step; rows of one step stay in the order in which they were written.

    Attributes:
        step: int64[N], optimizer window.
        value: float64[N]; NaN and infinities are values, not gaps.
        time: float64[N] Unix seconds, or None where no time was written.
    """

    name: str
    rank: int
    step: Array
    value: Array
    time: Array | None
    unit: str
    side: str | None

    def __len__(self) -> int:
        return len(self.step)


#: One row of ``Stats``: what norm-only and full rows share; ``detail`` indexes the full rows, -1 where there is none.
COMPACT = np.dtype(
    [("id", "<i8"), ("step", "<i8"), ("rank", "<i4"), ("order", "<i4"), ("micro", "<i4"), ("call", "<i4")]
    + [("rms", "<f8"), ("detail", "<i8")]
)


class Stats:
    """Statistics of tensors, one row a tensor a step, sorted by (step, rank, order).

    Counts are int64, -1 where not measured; measures are float64, NaN where not measured. ``full`` tells full
    statistics from a row that holds only the norm, as ``rms``; in such a row NaN and Inf mean a non-finite tensor.
    """

    def __init__(self, rows: Array, details: Array, names: Mapping[int, Name], histograms: dict[Any, Any]) -> None:
        self._rows = rows
        self._details = details
        self._names = names
        self._histograms = histograms

    def __len__(self) -> int:
        return len(self._rows)

    def select(self, mask: Any) -> Stats:
        """The rows where ``mask`` (bool[N], or indices) holds."""
        return Stats(self._rows[mask], self._details, self._names, self._histograms)

    @property
    def step(self) -> Array:
        """int64[N]: optimizer window."""
        return self._rows["step"]

    @property
    def rank(self) -> Array:
        """int64[N]."""
        return self._rows["rank"].astype(np.int64)

    @property
    def order(self) -> Array:
        """int64[N]: execution order inside the step, backward after forward."""
        return self._rows["order"].astype(np.int64)

    @property
    def micro(self) -> Array:
        """int64[N]: micro-batch of the window, -1 where not known."""
        return self._rows["micro"].astype(np.int64)

    @property
    def call(self) -> Array:
        """int64[N]: how many times the module had run before in this micro-batch, -1 where not known."""
        return self._rows["call"].astype(np.int64)

    @property
    def full(self) -> Array:
        """bool[N]: full statistics, not only the norm."""
        return self._rows["detail"] >= 0

    @property
    def rms(self) -> Array:
        """float64[N]: root mean square of the elements."""
        return self._rows["rms"]

    @cached_property
    def numel(self) -> Array:
        """int64[N]: elements of the tensor."""
        known = self._named_numel
        return np.where(self.full & (self._detail("numel", -1) >= 0), self._detail("numel", -1), known)

    nan = property(lambda self: self._detail("nan", -1), doc="int64[N]: NaN elements.")
    posinf = property(lambda self: self._detail("posinf", -1), doc="int64[N]: elements that are +Inf.")
    neginf = property(lambda self: self._detail("neginf", -1), doc="int64[N]: elements that are -Inf.")
    zeros = property(lambda self: self._detail("zeros", -1), doc="int64[N]: elements that are zero.")
    subnormals = property(lambda self: self._detail("subnormals", -1), doc="int64[N]: subnormal elements.")
    min = property(lambda self: self._detail("min", np.nan), doc="float64[N], of the finite elements.")
    max = property(lambda self: self._detail("max", np.nan), doc="float64[N], of the finite elements.")
    absmax = property(lambda self: self._detail("absmax", np.nan), doc="float64[N], of the finite elements.")
    absmean = property(lambda self: self._detail("absmean", np.nan), doc="float64[N], of the finite elements.")
    mean = property(lambda self: self._detail("mean", np.nan), doc="float64[N], of the finite elements.")
    std = property(lambda self: self._detail("std", np.nan), doc="float64[N], of the finite elements.")

    @cached_property
    def name(self) -> Array:
        """object[N] of str: module or parameter path."""
        return self._named(lambda each: each.name)

    @cached_property
    def role(self) -> Array:
        """object[N] of str: activation, gradient, parameter …"""
        return self._named(lambda each: each.role)

    @cached_property
    def dtype(self) -> Array:
        """object[N] of str: the tensor's own dtype."""
        return self._named(lambda each: each.dtype)

    @cached_property
    def device(self) -> Array:
        """object[N] of str, empty where not known."""
        return self._named(lambda each: each.device)

    @cached_property
    def shape(self) -> list[tuple[int, ...]]:
        """N tuples."""
        return [self._names[each].shape for each in self._rows["id"].tolist()]

    @cached_property
    def stride(self) -> list[tuple[int, ...]]:
        """N tuples in elements, empty where not known."""
        return [self._names[each].stride or () for each in self._rows["id"].tolist()]

    @cached_property
    def log2_histogram(self) -> list[dict[int, int] | None]:
        """N mappings from the exponent e to the count of elements with 2^e <= |x| < 2^(e+1), or None."""
        keys = self._rows[["id", "step", "rank", "order", "micro", "call"]].tolist()
        return [self._histograms.get(each) for each in keys]

    @cached_property
    def nonfinite(self) -> Array:
        """bool[N]: the tensor held NaN or Inf, by its counts or, where there are none, by its norm."""
        counts = np.stack([self._detail(each, -1) for each in ("nan", "posinf", "neginf")])
        unknown = (counts < 0).any(axis=0)
        return (counts > 0).any(axis=0) | (unknown & ~np.isfinite(self.rms) & (~self.full | (counts < 0).all(axis=0)))

    def _detail(self, column: str, missing: float) -> Array:
        at = self._rows["detail"]
        values = np.full(len(at), missing, self._details.dtype[column])
        values[at >= 0] = self._details[column][at[at >= 0]]
        return values

    def _named(self, attribute: Any) -> Array:
        ids, inverse = np.unique(self._rows["id"], return_inverse=True)
        values = np.empty(len(ids), object)
        values[:] = [attribute(self._names[each]) for each in ids.tolist()]
        return values[inverse]

    @cached_property
    def _named_numel(self) -> Array:
        ids, inverse = np.unique(self._rows["id"], return_inverse=True)
        return np.array([numel(self._names[each].shape) for each in ids.tolist()], np.int64)[inverse]


def numel(shape: tuple[int, ...]) -> int:
    """Elements of a tensor of this shape; at most the largest int64."""
    product = 1
    for each in shape:
        product *= each
    return min(product, MAX_INT64)
