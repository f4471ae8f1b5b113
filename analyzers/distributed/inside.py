"""A call that every known rank has entered and none has left: only a device, or a rank unseen, can be missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ..finding import Evidence, Finding, Where
from . import thresholds as T
from .diagnosis import Diagnosis
from .unstated import on_record
from .waiting import Wait, oldest_in_flight
from .words import at_site, brief, call_words, last_step, named_ranks

if TYPE_CHECKING:
    from ...capsules import Capsule

UNTOLD: Final = "how many ranks the job has is not on record"
#: States of a call that has not ended: on its stream, and running on the device.
_SCHEDULED, _STARTED = 0, 1


def inside(capsule: Capsule, found: Diagnosis, wait: Wait) -> Finding:
    """No rank is missing: the call itself does not end. Where the ranks are not on record, one may be all the same."""
    call = call_words(found.calls, wait.row)
    reason = found.still.reason if found.still is not None else ""
    if not found.calls.groups[wait.group].whole:
        return _all_that_spoke(capsule, found, wait, call, reason)
    if held := _not_started(found, wait):
        return _of_devices(capsule, found, wait, held, reason)
    rows = [row for rank in wait.waiting if (row := found.calls.at(wait.group, rank, wait.seq)) is not None]
    equal = " with equal arguments" if all(on_record(found.calls, row) for row in rows) else ""
    return Finding(
        title=f"All ranks are in {call} and it does not end",
        summary=f"All ranks entered {call}{at_site(found.calls, wait.row)}{equal}, none left it, and "
        f"{reason}: no rank is missing, so network, device or driver are left.",
        confidence="undetermined",
        where=Where(step=last_step(capsule), order=wait.seq),
        evidence=(
            Evidence(name="entered_ranks", value=list(wait.waiting), expected=list(wait.waiting), note=call),
            Evidence(name="standstill", value=reason),
        ),
        next=(
            "look for NCCL_DEBUG=INFO lines, Xid errors in the kernel log, link errors (nvidia-smi nvlink -e, ibstat)",
            "run nccl-tests over the same ranks",
        ),
    )


def _all_that_spoke(capsule: Capsule, found: Diagnosis, wait: Wait, call: str, reason: str) -> Finding:
    """All ranks of which there is evidence are in one call; how many there are is not on record."""
    who, group = named_ranks(wait.waiting), found.calls.groups[wait.group]
    untold = UNTOLD if group.name == "0" else f"which ranks belong to {group} is not on record"
    others = _elsewhere(found, wait)
    also = "".join(f"; {named_ranks(ranks)} in {other}" for other, ranks in list(others.items())[:4])
    return Finding(
        title=f"{who.capitalize()} are in {call} and it does not end",
        summary=f"{who.capitalize()} entered {call}{at_site(found.calls, wait.row)}, none left it, and {reason}{also}. "
        f"{untold.capitalize()}: a rank that printed nothing may be missing; if there is none, network, device or "
        "driver are left.",
        confidence="undetermined",
        where=Where(step=last_step(capsule), order=wait.seq),
        evidence=(
            Evidence(name="waiting_ranks", value=list(wait.waiting), note=f"in {brief(call)}"),
            *(Evidence(name="waiting elsewhere", value=ranks, note=f"in {other}") for other, ranks in others.items()),
            Evidence(name="standstill", value=reason),
        ),
        next=(
            "see how many ranks the job has, and look at the log, the dump and the exit of those that are not named",
            "look for NCCL_DEBUG=INFO lines, Xid errors in the kernel log, link errors (nvidia-smi nvlink -e, ibstat)",
        ),
    )


def _elsewhere(found: Diagnosis, wait: Wait) -> dict[str, list[int]]:
    """Ranks whose watchdog gave up in another call, by that call in words."""
    calls, known = found.calls, set(wait.waiting)
    others: dict[str, list[int]] = {}
    for each in calls.timeouts:
        row = next((at for at in np.flatnonzero(calls.table.rank == each["rank"]) if calls.table.pending[at]), None)
        if each["rank"] not in known and row is not None:
            known.add(each["rank"])
            others.setdefault(call_words(calls, int(row)), []).append(each["rank"])
    return others


def _not_started(found: Diagnosis, wait: Wait) -> tuple[int, ...]:
    """Ranks whose device has not started a call that is the oldest in flight everywhere, where most devices have."""
    calls = found.calls
    heads = oldest_in_flight(calls)
    rows = {rank: calls.at(wait.group, rank, wait.seq) for rank in wait.waiting}
    if any(row is None or heads.get(rank) != (False, row) for rank, row in rows.items()):
        return ()
    ages = [
        calls.written[rank] - float(calls.table.created[row]) for rank, row in rows.items() if rank in calls.written
    ]
    if any(age < T.STANDSTILL_S for age in ages):
        return ()  # a dump of the moment in which the call was queued
    states = {rank: int(calls.table.state[row]) for rank, row in rows.items() if row is not None}
    held = tuple(rank for rank, state in states.items() if state == _SCHEDULED)
    started = [rank for rank, state in states.items() if state == _STARTED]
    return held if len(held) < len(started) else ()


def _of_devices(capsule: Capsule, found: Diagnosis, wait: Wait, held: tuple[int, ...], reason: str) -> Finding:
    """Every host has made the call, and the devices of a few ranks have not come to it."""
    call, who = call_words(found.calls, wait.row), named_ranks(held)
    at = {rank: found.calls.at(wait.group, rank, wait.seq) for rank in wait.waiting}
    started = [rank for rank, row in at.items() if row is not None and found.calls.table.state[row] == _STARTED]
    its, has, it = ("its device", "has", "it") if len(held) == 1 else ("their devices", "have", "them")
    return Finding(
        title=f"{who.capitalize()} queued {call}, and {its} {has} not started it",
        summary=f"All ranks made {call}{at_site(found.calls, wait.row)}; the devices of {named_ranks(started)} run it, "
        f"and that of {who} {has} not started it; {reason}. Something before it on the stream of {who} does not end.",
        confidence="likely",
        where=Where(step=last_step(capsule), rank=held[0], order=wait.seq),
        evidence=(
            Evidence(name="not_started_on", value=list(held), expected=[], note="made the call, device not in it"),
            Evidence(name="waiting_ranks", value=started, note=f"their devices run {brief(call)}"),
            Evidence(name="standstill", value=reason),
        ),
        cause=f"the device of {who} is held before {call}: by a kernel that does not end, or an event that never comes",
        next=(
            f"look at the device of {who}: py-spy dump, cuda-gdb or a trace, Xid errors and clocks (nvidia-smi -q)",
            f"find what {who} put on that stream before the call, and which events of other streams hold {it}",
        ),
        fix=(f"make the work before the call on {who} end: a kernel, a wait for another stream, a failing device",),
    )
