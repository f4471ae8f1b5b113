"""Scalars and statistics as columns: what ``Capsule.scalars`` and ``Capsule.stats`` return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from .limits import MAX_DIMENSIONS, MAX_INT64

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
Shape = Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMENSIONS)]
Stride = Annotated[tuple[int, ...], Meta(max_length=MAX_DIMENSIONS)]
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
    shape: Shape = ()
    stride: Stride | None = None
    device: str = ""


class StatRow(msgspec.Struct, kw_only=True):
    """One row given to ``CapsuleWriter.stats``; what was not measured is left out."""

    step: Count
    name: str
    role: Role
    order: Small | None = None
    dtype: str = ""
    shape: Shape = ()
    stride: Stride | None = None
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
        written: int64[N], grows in the order in which the rows were written: where a resumed run repeats steps, it
            tells the stretches apart.
    """

    name: str
    rank: int
    step: Array
    value: Array
    time: Array | None
    unit: str
    side: str | None
    written: Array

    def __len__(self) -> int:
        return len(self.step)


#: One row of ``Stats``: what norm-only and full rows share; ``detail`` indexes the full rows, -1 where there is none.
COMPACT = np.dtype(
    [
        *((name, "<i8") for name in ("id", "step", "detail")),
        *((name, "<i4") for name in ("rank", "order", "micro", "call")),
        ("rms", "<f8"),
    ]
)


#: One bin of one histogram; all but the last two fields tell which row of ``Stats`` it belongs to.
BINS = np.dtype(
    [
        *((name, "<i8") for name in ("id", "step")),
        *((name, "<i4") for name in ("rank", "order", "micro", "call", "exponent")),
        ("count", "<i8"),
    ]
)


class _Detail:
    """A column that only full rows have."""

    def __init__(self, missing: float, doc: str) -> None:
        self._missing = missing
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, stats: Stats, owner: type[Stats]) -> Array:
        return stats.detail(self._name, self._missing)


class Stats:
    """Statistics of tensors, one row a tensor a step, sorted by (step, rank, order).

    Counts are int64, -1 where not measured; measures are float64, NaN where not measured. ``full`` tells full
    statistics from a row that holds only the norm, as ``rms``; in such a row NaN and Inf mean a non-finite tensor.
    """

    def __init__(self, rows: Array, details: Array, bins: Array, names: Mapping[int, Name]) -> None:
        self._rows = rows
        self._details = details
        self._bins = bins
        self._names = names

    def __len__(self) -> int:
        return len(self._rows)

    def select(self, mask: Any) -> Stats:
        """The rows where ``mask`` (bool[N], or indices) holds."""
        return Stats(self._rows[mask], self._details, self._bins, self._names)

    def where(self, rank: int | None, role: str | None, name: str | None, step: int | range | None) -> Stats:
        """The rows that pass every filter that is given; see ``Capsule.stats``."""
        if rank is None and role is None and name is None and step is None:
            return self
        keep = np.ones(len(self), np.bool_)
        if rank is not None:
            keep &= self._rows["rank"] == rank
        if isinstance(step, range):
            at = self._rows["step"] - step.start
            keep &= (at % step.step == 0) & (at // step.step >= 0) & (at // step.step < len(step))
        elif step is not None:
            keep &= self._rows["step"] == step
        if role is not None or name is not None:
            ids = [
                identity
                for identity, each in self._names.items()
                if role in (None, each.role) and (name is None or each.name == name or fnmatchcase(each.name, name))
            ]
            keep &= np.isin(self._rows["id"], ids)
        return self.select(keep)

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
        """int64[N]: elements of the tensor, from its shape where they were not counted."""
        counted = self.detail("numel", -1)
        return np.where(counted >= 0, counted, self._of_names(lambda name: numel(name.shape), np.int64))

    nan = _Detail(-1, "int64[N]: NaN elements.")
    posinf = _Detail(-1, "int64[N]: elements that are +Inf.")
    neginf = _Detail(-1, "int64[N]: elements that are -Inf.")
    zeros = _Detail(-1, "int64[N]: elements that are zero.")
    subnormals = _Detail(-1, "int64[N]: subnormal elements.")
    min = _Detail(np.nan, "float64[N], of the finite elements.")
    max = _Detail(np.nan, "float64[N], of the finite elements.")
    absmax = _Detail(np.nan, "float64[N], of the finite elements.")
    absmean = _Detail(np.nan, "float64[N], of the finite elements.")
    mean = _Detail(np.nan, "float64[N], of the finite elements.")
    std = _Detail(np.nan, "float64[N], of the finite elements.")

    @cached_property
    def name(self) -> Array:
        """object[N] of str: module or parameter path."""
        return self._of_names(lambda name: name.name)

    @cached_property
    def role(self) -> Array:
        """object[N] of str: activation, gradient, parameter and so on."""
        return self._of_names(lambda name: name.role)

    @cached_property
    def dtype(self) -> Array:
        """object[N] of str: the tensor's own dtype."""
        return self._of_names(lambda name: name.dtype)

    @cached_property
    def device(self) -> Array:
        """object[N] of str, empty where not known."""
        return self._of_names(lambda name: name.device)

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
        found: dict[tuple[int, ...], dict[int, int]] = {}
        for *key, exponent, count in self._bins.tolist():
            found.setdefault(tuple(key), {})[exponent] = count
        rows = self._rows[["id", "step", "rank", "order", "micro", "call"]]
        return [found.get(each) for each in rows.tolist()]

    @cached_property
    def nonfinite(self) -> Array:
        """bool[N]: the tensor held NaN or Inf, by its counts or, where there are none, by its norm."""
        counts = np.stack([self.nan, self.posinf, self.neginf])
        by_norm = np.where(self.full, np.isinf(self.rms), ~np.isfinite(self.rms))  # NaN in a full row: not measured
        return (counts > 0).any(axis=0) | ((counts < 0).all(axis=0) & by_norm)

    def detail(self, column: str, missing: float) -> Array:
        """One column of the full rows, ``missing`` in rows that hold only the norm."""
        at = self._rows["detail"]
        values = np.full(len(at), missing, self._details.dtype[column])
        values[at >= 0] = self._details[column][at[at >= 0]]
        return values

    def _of_names(self, attribute: Callable[[Name], Any], dtype: Any = object) -> Array:
        ids, inverse = np.unique(self._rows["id"], return_inverse=True)
        values = np.empty(len(ids), dtype)
        values[:] = [attribute(self._names[each]) for each in ids.tolist()]
        return values[inverse]


def numel(shape: tuple[int, ...]) -> int:
    """Elements of a tensor of this shape; at most the largest int64."""
    product = 1
    for each in shape:
        product *= each
    return min(product, MAX_INT64)
