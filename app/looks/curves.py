"""Series as pixel columns, and the events that stand on their axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..columns import reduce_to_columns
from .capsules import opened
from .types import SeriesColumns, StepMark

if TYPE_CHECKING:
    from ...capsules import Series

#: Signs of the events a timeline marks; other kinds happen every step and would be a carpet.
_EVENTS = {
    "checkpoint_saved": ("C", "checkpoint saved"),
    "checkpoint_loaded": ("L", "checkpoint loaded"),
    "mixture_changed": ("M", "data mixture changed"),
    "context_length_changed": ("X", "context length changed"),
    "eval_begin": ("E", "evaluation"),
    "weights_updated": ("W", "weights updated"),
    "optimizer_step_skipped": ("s", "optimizer step skipped"),
    "exception": ("!", "exception"),
    "oom": ("!", "out of memory"),
}
_MOST_MARKS = 2_000


def curves(
    path: str,
    names: Sequence[str],
    columns: int,
    start: float | None = None,
    stop: float | None = None,
    log: bool = False,
    rank: int | None = None,
    cursor: float | None = None,
    beside: str = "",
) -> list[SeriesColumns]:
    """Series reduced to ``columns`` pixel columns, in the order asked for. A series not recorded is left out.

    Args:
        path: a capsule.
        names: of series.
        columns: how many for each.
        start: first step; the first recorded one where None, of both runs.
        stop: one past the last step, likewise.
        log: for a logarithmic axis.
        rank: whose; the lowest rank that has the series where None.
        cursor: step at which values are read.
        beside: another capsule; each series of it follows the one of ``path``, over the same steps.
    """
    runs = [opened(each) for each in (path, beside) if each]
    found: list[SeriesColumns] = []
    for name in names:
        both = [(at > 0, series) for at, run in enumerate(runs) if len(series := run.scalars(name, rank))]
        if not both:
            continue
        left = min(int(series.step.min()) for _, series in both) if start is None else start
        right = max(int(series.step.max()) for _, series in both) + 1 if stop is None else stop
        found += [_cut(name, series, columns, left, right, log, cursor, other) for other, series in both]
    return found


def _cut(
    name: str, series: Series, columns: int, start: float, stop: float, log: bool, cursor: float | None, other: bool
) -> SeriesColumns:
    nearest = None if cursor is None else int(np.abs(series.step - cursor).argmin())
    return SeriesColumns(
        name=name,
        unit=series.unit,
        rank=series.rank,
        last=float(series.value[-1]),
        last_step=int(series.step[-1]),
        columns=reduce_to_columns(series.step, series.value, columns, start=start, stop=stop, log=log),
        at=None if nearest is None else float(series.value[nearest]),
        at_step=None if nearest is None else int(series.step[nearest]),
        beside=other,
    )


def marks(path: str) -> list[StepMark]:
    """The trigger and the events worth a mark, by step."""
    capsule = opened(path)
    found = [
        StepMark(step=int(event["step"]), sign=sign, words=words)
        for event in capsule.records("events")
        if event.get("step") is not None and (known := _EVENTS.get(str(event.get("kind"))))
        for sign, words in (known,)
    ]
    if capsule.trigger is not None and capsule.trigger.step is not None:
        words = f"trigger: {capsule.trigger.kind or 'unknown'}"
        found.append(StepMark(step=capsule.trigger.step, sign="▲", words=words))
    return sorted(found[-_MOST_MARKS:], key=lambda each: each.step)
