"""A job that was stopped from outside: by a scheduler, or by a signal to its launcher."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from .attempts import current_events
from .finding import Evidence, Finding, Where

if TYPE_CHECKING:
    from ..capsules import Capsule

#: How a scheduler says that it ends the job, why, and which reason is a fault.
_CANCELLED: Final = re.compile(r"\bCANCELLED (?:AT|DUE)|DUE TO (?:TIME LIMIT|PREEMPTION)")
_REASON: Final = re.compile(r"DUE TO ([A-Z][A-Z ]{1,40}[A-Z])")
_FAILED: Final = re.compile(r"DUE TO NODE FAIL")
#: What torch's launcher says when it is told to end, and when a worker did not end when it was told to.
_TOLD_TO_END: Final = re.compile(r"Received (?:Signals\.)?(\w{1,12}) death signal")
_FORCED: Final = re.compile(r"Unable to shutdown process (\d{1,18}) via .{1,40}forcefully exiting")
#: Processes that are named.
_MOST = 16


def cancelled(capsule: Capsule) -> str:
    """The line in which a scheduler says that it ends the job; empty where there is none."""
    lines = (message_of(each) for each in current_events(capsule) if each.get("kind") == "log")
    return next((line for line in lines if _CANCELLED.search(line)), "")


def stopped(capsule: Capsule, last: int | None) -> Finding | None:
    """A launcher that was told to end, by a person or a program, and workers that did not end when it told them."""
    if line := cancelled(capsule):
        return _ended_by_scheduler(line, last)
    said = [(message_of(each), each.get("step")) for each in current_events(capsule) if each.get("kind") == "log"]
    told, at = next(
        ((found, at) for line, at in said if (found := _TOLD_TO_END.search(line)) is not None), (None, None)
    )
    if told is None:
        return None
    lines, last = [line for line, _ in said], at if isinstance(at, int) else last
    forced = sorted({int(found[1]) for line in lines if (found := _FORCED.search(line)) is not None})
    reach = "" if last is None else f" after step {last:,}"
    named = f"process {', '.join(map(str, forced[:_MOST]))}" if forced else ""
    held = f"{len(forced):,} worker{'' if len(forced) == 1 else 's'}"
    hung = f"; {held} did not end when told to and had to be killed: in a call that does not end, or still saving"
    return Finding(
        title=f"The job was stopped from outside, and {held} hung" if forced else "The job was stopped from outside",
        summary=f"The launcher received signal {told[1]}{reach}{hung if forced else ''}. Who sent it and why is not in "
        "the log.",
        severity=None if forced else "info",
        kind=None if forced else "hygiene",
        confidence="undetermined",
        where=Where(step=last),
        evidence=(
            Evidence(name="signal to the launcher", value=told[1], expected="none"),
            Evidence(name="workers that had to be killed", value=len(forced), expected=0, note=named),
        ),
        next=(
            ("record the calls of all ranks (Recorder with hang_after, or flight recorder): who waits for whom",)
            if forced
            else ()
        )
        + ("ask whoever can stop the job: the scheduler's accounting, a time limit, a watcher, a person",),
    )


def _ended_by_scheduler(line: str, last: int | None) -> Finding:
    """A scheduler that ended the job, and the reason that it gives: a limit, a person, or a machine that failed."""
    found = _REASON.search(line)
    why = found[1].lower() if found is not None else "no reason: a person or a program cancelled it"
    failed = _FAILED.search(line) is not None
    ahead = "save a checkpoint before the limit (a signal some minutes ahead: --signal), or ask for more time"
    return Finding(
        title="The scheduler ended the job",
        summary=f"The scheduler ended the job{'' if last is None else f' after step {last:,}'}: {why}.",
        severity=None if failed else "info",
        kind=None if failed else "hygiene",
        confidence="undetermined",
        where=Where(step=last),
        evidence=(Evidence(name="scheduler", value=short(line, 300), expected="none"),),
        next=("look at the machine: its kernel's log, and what the scheduler says of it",) if failed else (ahead,),
    )


def message_of(said: Mapping[str, Any]) -> str:
    """What an event, an error or an exit says."""
    return str(said.get("message") or "")


def short(text: str, most: int) -> str:
    """A text in one line of at most so many signs."""
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"
