"""Series as pixel columns, and the events that stand on their axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..columns import reduce_to_columns
from .capsules import opened
from .types import SeriesColumns, StepMark

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
) -> list[SeriesColumns]:
    """Series reduced to ``columns`` pixel columns, in the order asked for. A series not recorded is left out."""
    capsule = opened(path)
    found: list[SeriesColumns] = []
    for name in names:
        series = capsule.scalars(name, rank)
        if not len(series):
            continue
        nearest = None if cursor is None else int(np.abs(series.step - cursor).argmin())
        found.append(
            SeriesColumns(
                name=name,
                unit=series.unit,
                rank=series.rank,
                last=float(series.value[-1]),
                last_step=int(series.step[-1]),
                columns=reduce_to_columns(series.step, series.value, columns, start=start, stop=stop, log=log),
                at=None if nearest is None else float(series.value[nearest]),
                at_step=None if nearest is None else int(series.step[nearest]),
            )
        )
    return found


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
