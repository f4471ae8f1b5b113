"""Rules of the stage runtime that a log alone decides: how a job failed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from .finding import Evidence, Finding, Where
from .memory.oom import is_device_failure, is_host_failure
from .registry import NotCaptured, rule
from .series import curve

if TYPE_CHECKING:
    from ..capsules import Capsule

#: Errors by which a launcher or a person says that something else ended the job.
SECONDARY: Final = frozenset(
    (
        *("ChildFailedError", "SystemExit", "KeyboardInterrupt", "CalledProcessError", "ProcessExitedException"),
        *("ProcessRaisedException", "SignalException", "BrokenPipeError", "RendezvousConnectionError"),
    )
)
_LAUNCHED: Final = SECONDARY - {"KeyboardInterrupt", "SystemExit"}
#: How a launcher or a person ends a rank, in an exit, and how a scheduler says that it ends the job.
_STOPPED: Final = re.compile(r"SIGTERM|SIGINT|SIGHUP|SIGUSR|exit code (?:-15|-2|143|130)\b")
_CANCELLED: Final = re.compile(r"\bCANCELLED (?:AT|DUE)|DUE TO (?:TIME LIMIT|PREEMPTION)")
#: Lines of a process's runtime, its watchdog or its launcher by which it ends without an exception.
_LAST_WORDS: Final = re.compile(
    r"\] Heartbeat monitor timed out|^Fatal Python error|^(?:Segmentation fault|Bus error)\b"
    r"|^srun: error: .{1,300}: (?:Segmentation fault|Bus error|Killed|Aborted|Illegal instruction)"
)
#: Lines of the communication library that are shown beside an error, and ranks with their ends.
_MOST_LINES, _MOST_EXITS = 3, 16


@rule(
    "runtime/job-failed",
    stage="runtime",
    severity="warning",
    needs=("records.events.type|records.events.level|records.ranks.exit",),
    explained_by=(
        "data/token-out-of-vocabulary",
        "distributed/collective-mismatch",
        "distributed/group-order",
        "distributed/missing-rank",
        "distributed/rank-conditional",
        "distributed/rank-died-first",
        "distributed/uneven-steps",
        "memory/capacity",
        "memory/fragmentation",
        "memory/other-process",
        "numerics/first-nonfinite",
        "numerics/fp16-overflow",
        "numerics/loss-nonfinite",
        "objective/loss-hidden",
    ),
)
def job_failed(capsule: Capsule) -> Iterator[Finding]:
    """The job ended with an error that its log holds.

    What it checks:
        Exceptions in an imported log after which no training step was reported, a host that ran out of memory, and
        where there is no exception: exit codes and signals in a launcher's summary, and lines by which a process ends.
    Why it matters:
        Whoever reads only the curves sees a run that was fine and stopped. The error is the first thing to read, and
        of many ranks' errors only the first one is the reason.
    How it decides:
        The first error of its own, before those by which launchers repeat it, at or after the last reported step;
        without one the first rank with an exit code of its own, which the launcher or a scheduler did not end. What
        an exception means is left open (undetermined), and so is what filled the memory of a host. A device that is
        out of memory is the business of the rules memory/*: this rule is quiet about it, and about what follows it.
    Looks like it but is not:
        A traceback that was caught, after which training goes on; an interrupt from the keyboard, a time limit, a
        signal by which a scheduler stops a job; warnings; a device that is out of memory.
    What to try next:
        Read the lines above the error in the log of the rank that is named, not of the launcher.
    Fix:
        That of the error. The host's memory: fewer loader workers, smaller queues and shards, a larger limit.
    """
    if capsule.manifest.trigger is None or capsule.manifest.trigger.kind != "imported":
        raise NotCaptured("a log that was imported: a recording says itself how it ended")
    last = _last_step(capsule)
    errors = [
        each
        for each in capsule.records("events")
        if each.get("kind") in ("exception", "oom") and (last is None or _step(each) is None or _step(each) >= last)
    ]
    own = [each for each in errors if str(each.get("type") or "").rpartition(".")[2] not in SECONDARY]
    first = min(own, key=lambda each: (_step(each) or 0, _time(each), _rank(each) or 0), default=None)
    if first is None:
        ended = _silent_end(capsule, errors) or _last_words(capsule, last)
        if ended is not None:
            yield ended
        return
    if is_device_failure(first):
        return
    yield _host(first, len(own)) if is_host_failure(first) else _exception(capsule, first, len(own))


def _host(error: Mapping[str, Any], count: int) -> Finding:
    words = _short(f"{error.get('type') or 'out of memory'}: {error.get('message') or ''}", 440)
    sizes = [(name, error[name]) for name in ("requested", "allocated") if isinstance(error.get(name), int)]
    return Finding(
        confidence="undetermined",
        title="The host's memory ran out",
        summary=f"{words} (the host's memory, not a device's).",
        where=Where(step=_step(error), rank=_rank(error)),
        evidence=(
            Evidence(name="error", value=words, expected="none"),
            *(Evidence(name=name, value=size, unit="B") for name, size in sizes),
            Evidence(name="errors in the log", value=count, expected=0),
        ),
        next=("plot the resident size of the process and of its loader workers over time, beside the limit",),
        fix=("fewer loader workers, smaller queues and shards, or a larger limit",),
    )


def _exception(capsule: Capsule, error: Mapping[str, Any], count: int) -> Finding:
    kind, message = str(error.get("type") or "an exception"), str(error.get("message") or "")
    lines = [
        str(each.get("message") or "")
        for each in capsule.records("events")
        if each.get("kind") == "log" and each.get("logger") == "nccl"
    ]
    reached, last = _step(error), _last_step(capsule)
    if reached is not None:
        when = f"after step {reached:,}"
    else:
        when = "before the first reported step" if last is None else f"its file names no step; others reach {last:,}"
    return Finding(
        confidence="undetermined",
        title="The job ended with an error",
        summary=f"{_short(f'{kind}: {message}', 440)} ({when}).",
        where=Where(step=reached, rank=_rank(error)),
        evidence=(
            Evidence(name="error", value=_short(f"{kind}: {message}", 600), expected="none"),
            *(Evidence(name="before it", value=_short(line, 300)) for line in lines[:_MOST_LINES]),
            Evidence(name="errors in the log", value=count, expected=0),
        ),
        next=("read the lines above the first error in the log of this rank",),
    )


def _silent_end(capsule: Capsule, errors: list[dict[str, Any]]) -> Finding | None:
    """The first rank that ended by itself and printed no error, as its launcher says; None where there is none."""
    exits = {each["rank"]: each["exit"] for each in capsule.records("ranks") if isinstance(each.get("exit"), dict)}
    said = {_rank(each) for each in errors if str(each.get("type") or "").rpartition(".")[2] not in _LAUNCHED}
    own = {
        rank: end
        for rank, end in exits.items()
        if end.get("kind") in ("exception", "signal") and rank not in said and not _STOPPED.search(_message(end))
    }
    stopped = any(_CANCELLED.search(_message(each)) for each in capsule.records("events") if each.get("kind") == "log")
    if not own or stopped:
        return None
    earliest = min(map(_time, own.values()))
    first = sorted(rank for rank, end in own.items() if _time(end) == earliest)
    words, one = _message(own[first[0]]), len(first) == 1
    who = f"Rank {first[0]}" if one else f"{len(first)} ranks at once, rank {first[0]} among them,"
    others = f"; the launcher stopped {len(exits) - len(own)} others" if len(exits) > len(own) else ""
    return Finding(
        confidence="undetermined",
        title=f"{f'Rank {first[0]}' if one else 'Ranks'} ended and printed no error",
        summary=f"{who} ended first, with {words}, and the log holds no error of it{others}.",
        where=Where(step=_last_step(capsule), rank=first[0] if one else None),
        evidence=(
            Evidence(name="ended by themselves", value=sorted(own), expected=[], note=words),
            *(Evidence(name=f"rank {rank}", value=_message(exits[rank])) for rank in sorted(exits)[:_MOST_EXITS]),
        ),
        next=("that rank's own error stream (torchrun --redirects 3 --log-dir), and the kernel's log of its host",),
    )


def _last_words(capsule: Capsule, last: int | None) -> Finding | None:
    """A process that ends with a line of its runtime, and no exception."""
    lines = [each for each in capsule.records("events") if each.get("kind") == "log"]
    if any(_CANCELLED.search(_message(each)) for each in lines):
        return None
    lines = [each for each in lines if last is None or _step(each) is None or _step(each) >= last]
    first = next((each for each in lines if _LAST_WORDS.search(_message(each)) is not None), None)
    return None if first is None else _exception(capsule, {**first, "type": "the process ended"}, 1)


def _message(said: Mapping[str, Any]) -> str:
    return str(said.get("message") or "")


def _last_step(capsule: Capsule) -> int | None:
    """The last training step that any rank reported."""
    ends = [
        int(found.step[-1])
        for key in capsule.scalar_keys()
        if key.name in ("loss", "grad_norm", "step_time") and key.side is None
        if len(found := curve(capsule, key.name, key.rank))
    ]
    return max(ends, default=None)


def _step(event: Mapping[str, Any]) -> Any:
    step = event.get("step")
    return step if isinstance(step, int) else None


def _rank(event: Mapping[str, Any]) -> int | None:
    """The rank that an event is of; None where its log does not say which of several ranks printed it."""
    rank = event.get("rank")
    return rank if isinstance(rank, int) and event.get("told") is not False else None


def _time(event: Mapping[str, Any]) -> float:
    time = event.get("t")
    return float(time) if isinstance(time, int | float) and math.isfinite(time) else math.inf


def _short(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"
