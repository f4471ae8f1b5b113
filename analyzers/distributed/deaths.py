"""A rank that died before the others began to wait."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ...capsules import underway
from ...capsules.layout import rank_directory
from ..attempts import current_events
from ..call_sites import call_site
from ..finding import Evidence, Finding, Where
from ..registry import rule
from ..runtime import GONE, SECONDARY
from . import thresholds as T
from .diagnosis import Diagnosis, diagnosis
from .sizes import size_events
from .standstill import GAVE_UP, STOPPED, last_exits
from .words import last_step, named_ranks

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Log lines by which a process or its device ends without an exception.
_FATAL_LINE: Final = re.compile(
    r"CUDA error|out of memory|device-side assert|uncorrectable ECC|\bXid\b|SIGSEGV|Segmentation fault|SIGKILL"
    r"|oom[-_ ]kill|Killed process|illegal memory access|unspecified launch failure|Bus error|SIGBUS",
    re.IGNORECASE,
)
#: How a process ends that aborts itself, as one does whose watchdog gave up.
_ABORTED: Final = re.compile(r"SIGABRT|exit code (?:-6|134)\b")


@dataclass(frozen=True)
class Death:
    """How one rank ended by itself: kind (oom, exception, signal), words, Unix seconds where known, step, call site.

    ``silent``: it left no word, and is known by what others say.
    """

    rank: int
    kind: str
    words: str
    t: float | None
    step: int | None
    site: tuple[str, ...] = ()
    silent: bool = False


@rule(
    "distributed/rank-died-first",
    stage="distributed",
    needs=("records.ranks.exit|records.events.type|records.events.requested|records.events.level",),
    explained_by=("memory/capacity", "memory/fragmentation", "memory/leak", "memory/other-process"),
    cases=("hang-in-collective",),
)
def rank_died_first(capsule: Capsule) -> Iterator[Finding]:
    """One rank ran out of memory, raised or was killed, and the others' time-outs only follow.

    What it checks:
        How each rank ended, its exceptions and out-of-memory errors, beside time-outs, closed connections and calls in
        which others wait.

    Why it matters:
        A job of many ranks ends with as many errors. All but one say that a peer is gone, or that a call did not end.

    How it decides:
        A rank has an end of its own (out of memory, an exception that is no time-out and no closed connection, a signal
        other than the launcher's), most other ranks have none, and these wait for it, timed out, or lost their
        connection. Of several the earliest is named. An end later than the first time-out is none, nor is one a day
        before the calls that dumps show in flight: a log of another day may lie beside them; nor an exception of a rank
        that timed out in the same call as most others, which then did not wait for it.

    Looks like it but is not:
        The same exception on all ranks; a rank that its watchdog or the launcher ended; a job that a person stopped.

    What to try next:
        Read that rank's log from its last good step to its end.

    Fix:
        Repair what ended that rank; let one rank's error end the job at once (torchrun does, with
        TORCH_NCCL_ASYNC_ERROR_HANDLING on).
    """
    found = diagnosis(capsule)
    aborted = {each["rank"] for each in found.calls.timeouts}
    # A rank whose call did not match another's says so in its exception; its exit code is no further end.
    unequal = {rank for each in found.calls.mismatches for rank in (each["rank"], each.get("other_rank"))}
    aborted |= (gone := _answered(capsule) | {rank for rank in unequal if type(rank) is int})
    if met := size_events(capsule):  # Gloo ends the rank that receives; where it is not told, it may be any
        untold = any(each.get("told") is False for each in met)
        aborted |= set(last_exits(capsule)) if untold else {each["rank"] for each in met}
    deaths = _deaths(capsule, aborted, gone)
    if not deaths:
        return
    exits = last_exits(capsule)
    known = found.calls.spoke | set(exits) | set(capsule.ranks) | {each.rank for each in deaths}
    affected = _affected(capsule, found, exits, {each.rank for each in deaths})
    gave_up = min(
        (each for each in (_first_timeout(found), _first_lost(exits, gone)) if each is not None), default=None
    )
    since = _in_flight_since(found)
    own = [each for each in deaths if each.t is None or gave_up is None or each.t <= gave_up + T.CLOCK_S]
    own = [each for each in own if each.t is None or each.t >= since - T.DUMPED_LATER_S]
    entered = _entered_with_others(found)
    own = [
        each for each in own if each.kind != "exception" or each.rank not in entered or _FATAL_LINE.search(each.words)
    ]
    everyone = len(known | set(range(found.calls.world)))
    if not own or not affected or 2 * len({each.rank for each in own}) > max(2, everyone):
        return
    first = min(own, key=lambda each: (each.t is None, each.t or 0.0, each.rank))
    if first.kind != "oom" and (found.circles or any(not each.ended for each in found.partings)):
        return  # Gloo ends a rank, and mostly an innocent one, where calls of two sizes meet
    also = sorted({each.rank for each in own} - {first.rank})
    words = {"oom": "ran out of memory", "signal": "was killed", "exception": "raised"}[first.kind]
    shown, at = first.words[:160], f" at {first.site[0]}" if first.site else ""
    # Where two sizes meet Gloo ends a rank before its call is on record; of two ranks nobody is left to show that, and
    # of more the place of its journal that a file system lost would have.
    unsure = first.silent and (len(known) < T.DECIDING_RANKS or _last_calls_lost(capsule, first.rank))
    open_ = ", or it was ended where its call met another one" if unsure else ""
    evidence = [
        Evidence(name=f"rank_{first.rank}_ended", value=first.kind, expected="ok", note=first.words[:300]),
        Evidence(name="affected_ranks", value=sorted(affected), note="; ".join(sorted(set(affected.values())))[:300]),
    ]
    if first.t is not None and gave_up is not None:
        note = "from that end to the first time-out"
        evidence.append(Evidence(name="seconds_before", value=round(gave_up - first.t, 3), unit="s", note=note))
    if first.site:
        evidence.append(Evidence(name="raised_at", value=first.site[0], note=" < ".join(first.site[1:4])))
    if also:
        evidence.append(Evidence(name="other_ends", value=also, note="later, or of unknown time"))
    yield Finding(
        title=f"Rank {first.rank} " + ("ended without a word" if unsure else f"{words} first"),
        summary=f"Rank {first.rank} {words} ({shown}){at}; {named_ranks(affected)} only waited for it or lost it"
        f"{open_}.",
        confidence="undetermined" if unsure else "likely",
        where=Where(
            step=first.step if first.step is not None else last_step(capsule), rank=None if unsure else first.rank
        ),
        evidence=tuple(evidence),
        cause=f"rank {first.rank} {words}; what the other ranks say follows from it",
        next=(f"read the log of rank {first.rank} up to its end",),
        fix=(f"repair what ended rank {first.rank}",),
    )


def _deaths(capsule: Capsule, gave_up: set[int], gone: set[int]) -> list[Death]:
    """Ends of ranks that are no answer to another rank's end, one a rank, the earliest first in time.

    The ranks in ``gave_up`` abort their own processes; those in ``gone`` say in exceptions that another one is gone.
    """
    found: dict[int, Death] = {}

    exits = last_exits(capsule)
    ends = {rank: end["t"] for rank, end in exits.items() if isinstance(end.get("t"), int | float)}

    def take(rank: int, kind: str, words: str, t: Any, step: Any, site: tuple[str, ...] = ()) -> None:
        if GAVE_UP.search(words) is not None or (kind == "signal" and rank in gave_up and _ABORTED.search(words)):
            return
        alone = rank in ends and all(ends[rank] < end for other, end in ends.items() if other != rank)
        if STOPPED.search(words) is not None and not (kind == "signal" and alone and len(ends) > 1):
            return  # a launcher or a person ended it, and more than it
        moment = float(t) if isinstance(t, int | float) and t == t else None
        death = Death(rank, kind, words or kind, moment, step if type(step) is int else None, site)
        known = found.get(rank)
        if known is None or (known.kind == "exception" and kind == "oom"):
            found[rank] = death
        elif known.t is None and moment is not None:
            found[rank] = replace(known, t=moment, step=known.step if known.step is not None else death.step)

    for event in current_events(capsule):
        kind, rank, step = event.get("kind"), event["rank"], event.get("step")
        message = str(event.get("message") or "")
        if event.get("told") is False:
            continue  # its log does not say which of several ranks it is of
        if kind == "oom":
            take(rank, "oom", message or "out of memory", event.get("t"), step, call_site(event))
        elif kind == "exception" and str(event.get("type")).rpartition(".")[2] not in SECONDARY:
            name = str(event.get("type") or "exception")
            out = "OutOfMemory" in name or "out of memory" in message
            words = f"{name}: {message}".rstrip(": ")
            take(rank, "oom" if out else "exception", words, event.get("t"), step, call_site(event))
        elif kind == "log" and event.get("level") in ("error", "critical", "fatal") and _FATAL_LINE.search(message):
            out = "out of memory" in message.lower() or "oom" in message.lower()
            take(rank, "oom" if out else "signal", message, event.get("t"), step)
    for rank, end in exits.items():
        kind, message = end.get("kind"), str(end.get("message") or "")
        if kind == "exception" and rank in gone and message.startswith("exit code"):
            continue  # its exception has said why
        if kind in ("oom", "exception", "signal") and not message.startswith(tuple(SECONDARY)):
            take(rank, kind, message or str(kind), end.get("t"), None)
        elif kind == "ok" and message:  # an error that the job dealt with, in which it ended all the same
            take(rank, "exception", message, end.get("t"), None)
    if (silent := _silently(capsule)) is not None and silent[0] not in found:
        found[silent[0]] = Death(silent[0], "signal", silent[1], None, None, silent=True)
    return list(found.values())


def _answered(capsule: Capsule) -> set[int]:
    """Ranks all of whose exceptions say that another one is gone or did not come."""
    said: dict[int, bool] = {}
    for each in current_events(capsule):
        if each.get("kind") == "exception" and each.get("told") is not False:
            follows = GAVE_UP.search(f"{each.get('type')}: {each.get('message')}") is not None
            said[each["rank"]] = said.get(each["rank"], True) and follows
    return {rank for rank, follows in said.items() if follows}


def _silently(capsule: Capsule) -> tuple[int, str] | None:
    """The one rank without a word of its end, where all others have one and lost a connection: it was killed."""
    exits = last_exits(capsule)
    spoke = {each["rank"] for each in capsule.records("ranks")}
    without = spoke - set(exits)
    said = [(rank, str(each.get("message") or "")) for rank, each in sorted(exits.items())]
    lost = [(rank, words) for rank, words in said if GONE.search(words) is not None]
    if len(without) != 1 or not lost:
        return None
    return without.pop(), f"its process left no word of its end, and to rank {lost[0][0]} its side was gone"


def _last_calls_lost(capsule: Capsule, rank: int) -> bool:
    """Whether the calls that a rank wrote before it made them are there and cannot be read."""
    journal = f"{rank_directory(rank)}/{underway.RELATIVE}"
    return any(each.where.startswith(journal) for each in capsule.damage())


def _affected(capsule: Capsule, found: Diagnosis, exits: dict[int, dict[str, Any]], died: set[int]) -> dict[int, str]:
    """Ranks that wait for a dead one, gave up, or lost a connection, with how that shows."""
    affected: dict[int, str] = {}
    for event in current_events(capsule):
        if event.get("kind") == "exception" and GAVE_UP.search(f"{event.get('type')}: {event.get('message')}"):
            affected[event["rank"]] = "raised for a peer that was gone or a call that did not end"
    for rank, end in exits.items():
        if end.get("kind") == "hang":
            affected[rank] = "hung"
        elif end.get("kind") in ("exception", "signal", "ok") and GAVE_UP.search(str(end.get("message") or "")):
            affected[rank] = "raised for a peer that was gone or a call that did not end"
    for event in found.calls.timeouts:
        affected[event["rank"]] = "timed out in a collective"
    for wait in found.state.waits:
        if died & {*wait.absent, *wait.silent}:
            affected |= dict.fromkeys(wait.waiting, "waits in a call that the dead rank has not entered")
    return {rank: how for rank, how in affected.items() if rank not in died}


def _entered_with_others(found: Diagnosis) -> set[int]:
    """Ranks that timed out in the call in which most others did: these did not wait for them."""
    calls: dict[tuple[Any, Any], set[int]] = {}
    for each in found.calls.timeouts:
        if type(each.get("seq")) is int:
            calls.setdefault((each.get("group"), each["seq"]), set()).add(each["rank"])
    most = max(calls.values(), key=len, default=set[int]())
    return most if len(most) > 1 else set()


def _in_flight_since(found: Diagnosis) -> float:
    """When the first call was entered that dumps show in flight, Unix seconds; -inf where there are none."""
    created = found.calls.table.created[found.calls.table.pending]
    created = created[np.isfinite(created)]
    return float(created.min()) if found.calls.dumped and len(created) else -np.inf


def _first_lost(exits: dict[int, dict[str, Any]], gone: set[int]) -> float | None:
    """When the first rank ended that says only that another one was gone, Unix seconds; None where no time is known."""
    times = [exits[rank]["t"] for rank in gone if rank in exits and isinstance(exits[rank].get("t"), int | float)]
    return min(times, default=None)


def _first_timeout(found: Diagnosis) -> float | None:
    times = [each["t"] for each in found.calls.timeouts if isinstance(each.get("t"), int | float)]
    return min(times, default=None)
