"""The typed answers of the looks; the screen imports these, and nothing heavy with them."""

from __future__ import annotations

import msgspec

from ..columns import Columns


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """What views a capsule can fill: names of series, which evidence there is, and whether it still grows."""

    status: str
    ranks: tuple[int, ...]
    series: tuple[str, ...]
    has: dict[str, bool]
    trigger_step: int | None


class SeriesColumns(msgspec.Struct, frozen=True, kw_only=True):
    """One series cut to the screen; ``last`` is its newest value, ``at`` the value nearest the cursor's step."""

    name: str
    unit: str
    rank: int
    last: float
    last_step: int
    columns: Columns
    at: float | None = None
    at_step: int | None = None


class StepMark(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened at a step."""

    step: int
    sign: str
    words: str
