"""Rules of the stage runtime that a log alone decides: how a job failed."""

from __future__ import annotations

import math
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
#: Lines of the communication library that are shown beside an error.
_MOST_LINES = 3


@rule(
    "runtime/job-failed",
    stage="runtime",
    severity="warning",
    needs=("records.events.type",),
    explained_by=(
        "data/token-out-of-vocabulary",
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
        Exceptions in an imported log after which no training step was reported, and a host that ran out of memory.
    Why it matters:
        Whoever reads only the curves sees a run that was fine and stopped. The error is the first thing to read, and
        of many ranks' errors only the first one is the reason.
    How it decides:
        The first error of its own, before those by which launchers repeat it, at or after the last reported step. What
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
    if first is None or is_device_failure(first):
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
    rank = event.get("rank")
    return rank if isinstance(rank, int) else None


def _time(event: Mapping[str, Any]) -> float:
    time = event.get("t")
    return float(time) if isinstance(time, int | float) and math.isfinite(time) else math.inf


def _short(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"
