"""What says that a job stands still, since ranks a few calls apart are what every running job looks like.

A watchdog that gave up, the recorder's own one, a call older than its time-out, a rank that died while others are in a
call. A flight-recorder dump is written for a time-out or on demand: it speaks of a standstill unless each rank has its
newest call in flight and all lie within a few calls of each other, which is a job that runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..attempts import current_events
from ..runtime import GAVE_UP
from . import thresholds as T
from .collectives import Calls
from .waiting import Waiting, newest_in_flight
from .words import named_ranks

if TYPE_CHECKING:
    from ...capsules import Capsule

#: What a rank says that the launcher, the scheduler or a person ended.
STOPPED: Final = re.compile(r"SIGTERM|signal 15|KeyboardInterrupt|SIGINT|SIGUSR|SIGHUP", re.IGNORECASE)
#: Ends of a process that others wait for in vain.
_ENDED = ("ok", "oom", "exception", "signal")
#: Triggers by which a person, or the scheduler, asked for the evidence.
_ON_DEMAND = ("signal", "manual")


@dataclass(frozen=True)
class Standstill:
    """Why a job is taken to stand still; ``sure`` unless only the existence of dumps says it.

    ``open`` where the dumps were written long before a time-out: the job may as well run, with a slow rank.
    """

    reason: str
    sure: bool
    open: bool = False


def standstill(capsule: Capsule, calls: Calls, state: Waiting, conflict: bool = False) -> Standstill | None:
    """The strongest sign that the job stands still, None where it may as well run.

    Args:
        capsule: the evidence.
        calls: the calls of all ranks.
        state: who waits for whom.
        conflict: ranks made calls that cannot all end, so that dumps show no running job.
    """
    if calls.timeouts:
        gave_up = sorted({each["rank"] for each in calls.timeouts})
        return Standstill(f"the watchdog of {named_ranks(gave_up)} gave up", sure=True)
    trigger = capsule.trigger
    exits = last_exits(capsule)
    hung = sorted(rank for rank, each in exits.items() if each.get("kind") == "hang")
    if (trigger is not None and trigger.kind == "hang") or hung:
        return Standstill("the recorder's watchdog saw no progress", sure=True)
    age, limit = _age(calls, state)
    in_time = T.IN_TIME * limit <= age <= limit + T.WRITTEN_WITHIN_S
    written = f"the dumps were written {age:,.0f} s after it began, with a time-out of {limit:,.0f} s"
    if not state.waits and not conflict:
        return Standstill(written, sure=True) if in_time else None
    newest = _newest(capsule, calls, exits)
    if (overdue := _overdue(calls, state, newest, over=bool(exits))) is not None:
        return Standstill(overdue, sure=True)
    held = {rank for wait in state.waits for rank in wait.waiting}
    if lost := sorted(held & _lost(capsule, exits)):
        return Standstill(f"{named_ranks(lost)} gave up in a call that did not end", sure=True)
    ended = {
        rank
        for rank, each in exits.items()
        if each.get("kind") in _ENDED and STOPPED.search(str(each.get("message") or "")) is None
    }
    if gone := sorted(ended & {*state.culprits, *_absent(state)} - held):
        return Standstill(f"{named_ranks(gone)} ended while others were in a call", sure=True)
    if in_time:
        return Standstill(written, sure=True)
    asked_for = trigger is not None and trigger.kind in _ON_DEMAND
    if calls.dumped and not asked_for and (conflict or not _runs(calls, state)):
        if 0 <= age < T.TOO_EARLY * limit:
            if not conflict and (age < T.CLOCK_S or _all_in_flight(calls, state)):
                return None  # dumps of a moment, or hosts that run ahead of their devices by whole steps
            early = f"the dumps were written {age:,.3g} s after it began, long before a time-out of {limit:,.0f} s"
            return Standstill(early, sure=False, open=True)
        return Standstill("the dumps were written, as they are for a time-out", sure=False)
    return None


def _age(calls: Calls, state: Waiting) -> tuple[float, float]:
    """Seconds from the first call in which somebody waits to the newest dump, and that call's time-out; NaN unknown.

    Where nobody waits for anybody, the first call in flight counts: all may be in one that does not end.
    """
    tables = [(calls.direct if each.direct else calls.table, each.row) for each in state.waits if each.row >= 0]
    if not state.waits:
        both = (calls.table, calls.direct)
        tables = [(table, row) for table in both for row in np.flatnonzero(table.pending).tolist()]
    began = [float(table.created[row]) for table, row in tables]
    known = [at for at, moment in enumerate(began) if np.isfinite(moment)]
    if not known or not calls.written:
        return np.nan, T.NCCL_TIMEOUT_S
    first = min(known, key=lambda at: began[at])
    table, row = tables[first]
    limit = float(table.timeout[row])
    limit = limit if np.isfinite(limit) and limit > 0 else T.NCCL_TIMEOUT_S
    return max(calls.written.values()) - began[first], limit


def of_a_moment(capsule: Capsule, calls: Calls, state: Waiting) -> bool:
    """Whether the evidence was asked for, or written long before a time-out: the job may well run."""
    trigger = capsule.trigger
    age, limit = _age(calls, state)
    return (trigger is not None and trigger.kind in _ON_DEMAND) or 0 <= age < T.TOO_EARLY * limit


def last_exits(capsule: Capsule) -> dict[int, dict[str, Any]]:
    """How each rank ended, as its last record says; only of ranks of which it is known."""
    found: dict[int, dict[str, Any]] = {}
    for record in capsule.records("ranks"):
        if isinstance(record.get("exit"), dict):
            found[record["rank"]] = record["exit"]
    return found


def _lost(capsule: Capsule, exits: dict[int, dict[str, Any]]) -> set[int]:
    """Ranks that ended because a call timed out or a peer was gone."""
    said = [
        (rank, str(each.get("message"))) for rank, each in exits.items() if each.get("kind") in ("exception", "signal")
    ]
    said += [
        (each["rank"], f"{each.get('type')}: {each.get('message')}")
        for each in current_events(capsule)
        if each.get("kind") == "exception"
    ]
    return {rank for rank, words in said if GAVE_UP.search(words) is not None}


def _absent(state: Waiting) -> set[int]:
    return {rank for wait in state.waits for rank in (*wait.absent, *wait.silent)}


def _newest(capsule: Capsule, calls: Calls, exits: dict[int, dict[str, Any]]) -> float:
    """The latest moment on record, Unix seconds; NaN where no time is."""
    times = [calls.table.created, calls.table.ended, calls.direct.created, calls.direct.ended]
    times.append(np.array([each.get("t") for each in exits.values()], np.float64))
    told = [each.get("t") for each in capsule.records("events")]
    times.append(np.array([each if isinstance(each, int | float) else None for each in told], np.float64))
    known = np.concatenate(times)
    known = known[np.isfinite(known)]
    return float(known.max()) if len(known) else np.nan


def _overdue(calls: Calls, state: Waiting, newest: float, *, over: bool) -> str | None:
    """The first wait that is older than its time-out, or than anything before it in a job that was then killed."""
    for wait in state.waits:
        if wait.row < 0 or not wait.absent:
            continue
        table = calls.direct if wait.direct else calls.table
        age = newest - float(table.created[wait.row])
        limit = float(table.timeout[wait.row])
        limit = limit if np.isfinite(limit) and limit > 0 else T.NCCL_TIMEOUT_S
        if age >= limit:
            return f"a call was {age:,.0f} s old, with a time-out of {limit:,.0f} s"
        rows = calls.table.group == wait.group
        lasted = (calls.table.ended - calls.table.created)[rows]
        lasted = lasted[np.isfinite(lasted)]
        own = calls.table.ended[calls.table.rank == int(table.rank[wait.row])]
        went_on = len(own) and float(np.nanmax(np.append(own, -np.inf))) > newest - age / 2
        if (
            over
            and len(lasted)
            and not went_on
            and age >= max(T.STANDSTILL_S, T.STANDSTILL_FACTOR * float(lasted.max()))
        ):
            return f"a call was {age:,.0f} s old, where the longest before took {float(lasted.max()):.3g} s"
    return None


def _all_in_flight(calls: Calls, state: Waiting) -> bool:
    concerned = {rank for wait in state.waits for rank in (*wait.absent, *wait.waiting)}
    return concerned <= newest_in_flight(calls)


def _runs(calls: Calls, state: Waiting) -> bool:
    """Whether what the dumps show is a job that runs: all ranks in flight, and none far behind."""
    if not _all_in_flight(calls, state):
        return False
    for wait in state.waits:
        if wait.direct:
            continue
        numbers = [calls.reached[wait.group, rank].enqueued for rank in wait.waiting]
        behind = [
            calls.reached[wait.group, rank].enqueued for rank in wait.absent if (wait.group, rank) in calls.reached
        ]
        if not behind or max(numbers) - min(behind) > T.APART:
            return False
    return not state.circles
