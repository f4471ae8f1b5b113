"""Which events belong to the last attempt of a job: a log may hold several, and so may the logs of its ranks.

An importer says of the events of a log that holds several attempts whether another one followed (``past``). A log
without steps of its own cannot tell; there a call that had begun before such an attempt ended belongs to it, too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from ..capsules import Capsule

Event = dict[str, Any]

#: Seconds by which ranks may differ in when they say the same thing.
_SLACK_S = 2.0
_EVENTS: WeakKeyDictionary[Capsule, tuple[tuple[Event, ...], tuple[Event, ...]]] = WeakKeyDictionary()


def current_events(capsule: Capsule) -> tuple[Event, ...]:
    """The events of the last attempt, and all that speak of no attempt's end."""
    return _parted(capsule)[0]


def past_events(capsule: Capsule) -> tuple[Event, ...]:
    """Events by which earlier attempts ended."""
    return _parted(capsule)[1]


def _parted(capsule: Capsule) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    if capsule not in _EVENTS:
        events = capsule.records("events")
        until = max((_time(each) for each in events if each.get("past") is True), default=-math.inf)
        past = [_past(each, until) for each in events]
        _EVENTS[capsule] = (
            tuple(each for each, over in zip(events, past, strict=True) if not over),
            tuple(each for each, over in zip(events, past, strict=True) if over),
        )
    return _EVENTS[capsule]


def _past(event: Event, until: float) -> bool:
    if (told := event.get("past")) is not None:
        return told is True
    if event.get("kind") not in ("collective_timeout", "collective_status") or not math.isfinite(until):
        return False
    t, ran = event.get("t"), event.get("ran_s")
    began = t - (ran if isinstance(ran, int | float) else 0.0) if isinstance(t, int | float) else math.inf
    return began <= until + _SLACK_S


def _time(event: Event) -> float:
    t = event.get("t")
    return float(t) if isinstance(t, int | float) and math.isfinite(t) else -math.inf
