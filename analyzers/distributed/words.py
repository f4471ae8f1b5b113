"""How ranks, calls and places are put into words, the same in every rule of the family."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..attempts import current_events, past_events
from . import thresholds as T
from .collectives import Calls
from .signatures import family

if TYPE_CHECKING:
    from ...capsules import Capsule


def named_ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 9 and 14``, ``ranks 0 to 7, 12``; long lists are cut."""
    ordered = sorted(set(ranks))
    if not ordered:
        return "no rank"
    parts: list[str] = []
    start = last = ordered[0]
    for rank in [*ordered[1:], None]:
        if rank is not None and rank == last + 1:
            last = rank
            continue
        parts.extend(
            [str(start)] if start == last else [str(start), str(last)] if last == start + 1 else [f"{start} to {last}"]
        )
        start = last = rank if rank is not None else last
    if len(parts) > T.LISTED:
        return f"{len(ordered):,} ranks ({', '.join(parts[: T.LISTED])}, …)"
    joined = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
    return f"rank{'s' if len(ordered) > 1 else ''} {joined}"


def call_words(calls: Calls, row: int, *, direct: bool = False) -> str:
    """One call: operation, number, group, as ``all_reduce 57 of the default group``."""
    table = calls.direct if direct else calls.table
    call = calls.signatures[int(table.signature[row])]
    group = calls.groups[int(table.group[row])]
    if direct:
        rank, peer = int(table.rank[row]), int(table.peer[row])
        towards = f"{rank} to {peer}" if call.family == "send" else f"{peer} to {rank}"
        return f"{call.family} from {towards} in {group}"
    name = call.op if call.parts else family(call.op)
    return f"{name} {int(table.seq[row]):,} of {group}"


def brief(call: str) -> str:
    """A call in words, without the name of its group, which is as wide as a column."""
    return call.partition(" of ")[0].partition(" in ")[0]


def at_site(calls: Calls, row: int, *, direct: bool = False) -> str:
    """`` (train.py:44 in step)``, nothing where no frames are on record."""
    frame = calls.frame(row, calls.direct if direct else calls.table) if row >= 0 else None
    return f" ({frame})" if frame else ""


def last_step(capsule: Capsule, record: dict[str, Any] | None = None) -> int | None:
    """The step of a record; else the last one on record, since a job that hangs does so at its end.

    Where attempts follow one another and steps begin anew, it is that of the last one's end.
    """
    step = record.get("step") if record else None
    if type(step) is int:
        return step
    if past_events(capsule):
        ends = [each["step"] for each in current_events(capsule) if _an_end(each) and type(each.get("step")) is int]
        if ends:
            return max(ends)
    trigger = capsule.trigger
    if trigger is not None and trigger.step is not None:
        return trigger.step
    steps = [each["steps"] for each in capsule.records("ranks") if type(each.get("steps")) is int]
    told = [each["step"] for each in capsule.records("events") if type(each.get("step")) is int]
    known = [*steps, *told, *([capsule.last_step] if capsule.last_step is not None else [])]
    return max(known, default=None)


def _an_end(event: dict[str, Any]) -> bool:
    return event.get("kind") in ("collective_timeout", "exception", "oom")
