"""What watchdogs print in logs, as far as it is of the same life of the job as the flight-recorder dumps beside it.

A log may be of an earlier attempt, or of another day. A dump says surely where its rank stood: where a log says of that
rank what cannot be, its words, those of the same call, and all older ones are of another life of the job.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..attempts import current_events
from . import thresholds as T

if TYPE_CHECKING:
    from ...capsules import Capsule

Record = dict[str, Any]


def words_of_watchdogs(capsule: Capsule, status: Sequence[Record]) -> tuple[Record, ...]:
    """Time-outs and states of the last attempt, without those of another life than the dumps'.

    Args:
        capsule: the evidence.
        status: records of ranks that state how far they came.
    """
    said = [each for each in current_events(capsule) if each.get("kind") in ("collective_timeout", "collective_status")]
    reached = {each["rank"]: each for each in status if each.get("dump") is True}
    strange = [each for each in said if each["rank"] in reached and _contradicts(each, reached[each["rank"]])]
    calls = {_call(each) for each in strange if each.get("seq") is not None}
    until = max((_time(each) for each in strange), default=-math.inf)
    return tuple(each for each in said if each not in strange and _call(each) not in calls and not _time(each) <= until)


def _contradicts(event: Record, state: Record) -> bool:
    """Whether a rank cannot have stood where its log says, when its dump was written for the same time-out."""
    enqueued, completed = state.get("last_seq") or {}, state.get("last_completed") or {}
    group = "0" if event.get("group") is None else str(event["group"])
    last, ended = enqueued.get(group), completed.get(group)
    if type(last) is not int:
        return False
    seq, queued, done = (event.get(name) for name in ("seq", "last_enqueued", "last_completed"))
    if any(type(each) is int and each > last for each in (seq, done)):
        return True
    if type(queued) is int and queued > last + T.APART:  # a host queues on while its dump is written
        return True
    return type(ended) is int and type(seq) is int and seq <= ended


def _call(event: Record) -> tuple[Any, Any]:
    return event.get("group"), event.get("seq")


def _time(event: Record) -> float:
    t = event.get("t")
    return float(t) if isinstance(t, int | float) else math.nan
