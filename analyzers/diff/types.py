"""What ``diff`` says of two runs: these types are the JSON of ``llmconsole.diff/1``."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ..stages import Stage

#: How two series part. ``start``: they differ from the first shared step on, and nothing says more.
Manner = Literal["none", "jump", "rounding", "data-noise", "constant-ratio", "start", "undetermined"]
#: What the whole comparison comes to: a manner, or a cause that stands before the series part.
Kind = Literal[Manner, "data", "setting", "tensor"]


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two runs."""

    id: str
    title: str
    path: str
    first_step: int | None
    last_step: int | None


class SeriesDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One series of both runs, compared at the steps they share.

    Attributes:
        shared: steps that both have.
        equal_before: shared steps before the first difference.
        step: the first shared step at which the values differ, None where they never do.
        resolution: size of the last digit of the coarser side there; differences below it cannot be seen.
        ratio: right over left, where that is what stays constant.
    """

    name: str
    unit: str = ""
    shared: int
    equal_before: int
    manner: Manner
    step: int | None = None
    left: float | None = None
    right: float | None = None
    relative: float | None = None
    resolution: float | None = None
    ratio: float | None = None
    note: str = ""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One shared step around the divergence."""

    step: int
    left: float
    right: float
    differs: bool


class BatchDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The first difference of the data: ``what`` is an array of the batch, its digest, or the sample ids."""

    step: int
    micro: int
    rank: int
    what: str
    left: Any = None
    right: Any = None
    at: tuple[int, ...] | None = None
    differing: int | None = None
    elements: int | None = None


class TensorDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor whose statistics differ by more than the dtype's rounding; ``left`` and ``right`` are its rms."""

    step: int
    rank: int
    order: int
    name: str
    role: str
    dtype_left: str
    dtype_right: str
    left: float
    right: float
    relative: float
    tolerance: float
    note: str = ""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A field of the manifest that differs; ``near`` is higher the likelier it bears on this divergence."""

    name: str
    left: Any
    right: Any
    near: int


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first place where the runs part."""

    step: int
    stage: Stage
    what: str
    name: str
    left: Any = None
    right: Any = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What kind of difference it is, in one sentence, and what to do next."""

    kind: Kind
    summary: str
    next: tuple[str, ...] = ()


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """``llmconsole.diff/1``."""

    format: Literal["llmconsole.diff/1"] = "llmconsole.diff/1"
    left: Side
    right: Side
    same: bool
    verdict: Verdict
    first_divergence: Divergence | None
    series: tuple[SeriesDifference, ...]
    around: tuple[Row, ...]
    batches: tuple[BatchDifference, ...]
    tensors: tuple[TensorDifference, ...]
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
