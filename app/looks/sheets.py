"""The typed answers of the looks at layers and batches; the screen imports these, and nothing heavy with them."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["forward", "backward", "parameters", "updates"]


class BadTensor(msgspec.Struct, frozen=True, kw_only=True):
    """The first tensor of the capsule that holds NaN or Inf unlawfully, and the sheet it is on."""

    kind: Kind
    step: int
    rank: int
    micro: int
    name: str


class LayerSheet(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the tensors of one step, in the order of execution; lists have one entry a tensor.

    Attributes:
        step: the recorded step nearest to the one asked for; None where nothing of this kind was recorded.
        position: place of ``step`` among the ``steps`` recorded ones, from 0.
        full: whether any row has more than its norm.
        full_before: nearest earlier step with full statistics; ``full_after`` the nearest later one.
        total: rows of this step; more than are here where there are very many.
        absmax: of the finite elements; NaN, as in every list of floats, is "not measured".
        rms_before: rms of the same tensor at the recorded step before.
        zeros: share of elements that are zero; ``subnormals`` likewise.
        nan: count, −1 where not counted; ``posinf`` and ``neginf`` likewise.
        room: log2(largest number of the dtype / absmax), in binades; from the rms where there is no absmax.
        level: 0 (far from both ends) to 4 (within a factor of 2 of the largest), −1 below the smallest normal
            number, −2 all zero, −3 dtype or size unknown.
        bad: rows that hold NaN or Inf where none should be.
    """

    kind: Kind
    step: int | None
    rank: int = 0
    ranks: tuple[int, ...] = ()
    micro: int = 0
    micros: tuple[int, ...] = ()
    steps: int = 0
    position: int = 0
    full: bool = False
    full_before: int | None = None
    full_after: int | None = None
    total: int = 0
    first_bad: BadTensor | None = None
    name: list[str] = []
    role: list[str] = []
    dtype: list[str] = []
    shape: list[str] = []
    numel: list[int] = []
    absmax: list[float] = []
    rms: list[float] = []
    rms_before: list[float] = []
    min: list[float] = []
    max: list[float] = []
    mean: list[float] = []
    std: list[float] = []
    zeros: list[float] = []
    subnormals: list[float] = []
    nan: list[int] = []
    posinf: list[int] = []
    neginf: list[int] = []
    room: list[float] = []
    level: list[int] = []
    bad: list[int] = []
