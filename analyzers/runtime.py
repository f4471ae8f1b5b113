"""Rules of the stage runtime that a log alone decides: how a job failed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from .attempts import current_events, past_events
from .call_sites import call_site
from .finding import Evidence, Finding, Where
from .memory.oom import is_device_failure, is_host_failure
from .registry import NotCaptured, rule
from .series import curve, segments
from .stopped import cancelled, message_of, short, stopped

if TYPE_CHECKING:
    from ..capsules import Capsule

#: Errors by which a launcher or a person says that something else ended the job.
SECONDARY: Final = frozenset(
    (
        *("ChildFailedError", "SystemExit", "KeyboardInterrupt", "CalledProcessError", "ProcessExitedException"),
        *("ProcessRaisedException", "SignalException", "BrokenPipeError", "RendezvousConnectionError"),
    )
)
#: What a rank says when another one is gone, or did not come: consequences of what happened elsewhere.
GAVE_UP: Final = re.compile(
    r"timed?[ -]?out|watchdog|heartbeat monitor|connection (?:was )?(?:closed|reset|refused)|broken pipe|peer closed"
    r"|closed by (?:peer|remote)|socket (?:closed|error|timeout)|recv(?:Value|Bytes)? failed|TCPStore"
    r"|remote (?:error|process|peer)|ncclRemoteError|ncclSystemError|communicator was aborted"
    r"|NCCL (?:error|operation).{0,80}(?:abort|remote)|op\.preamble"
    r"|Detected mismatch between collectives|collective operation|failed to pass monitoredBarrier",
    re.IGNORECASE,
)
#: Words by which a rank says that the process of another one is no more, and libraries by which ranks speak.
GONE: Final = re.compile(
    r"(?:closed|reset|aborted) by (?:remote )?peer|peer closed|broken pipe|ncclRemoteError|remote process",
    re.IGNORECASE,
)
_PEER: Final = re.compile(r"remote peer ([\w.-]{1,100})<\d")
_BETWEEN_RANKS: Final = re.compile(r"gloo|nccl|c10|TCPStore|process ?group|DistBackendError", re.IGNORECASE)
_LAUNCHED: Final = SECONDARY - {"KeyboardInterrupt", "SystemExit"}
#: How a launcher or a person ends a rank, in an exit.
_STOPPED: Final = re.compile(r"SIGTERM|SIGINT|SIGHUP|SIGUSR|exit code (?:-15|-2|143|130)\b")
#: Lines of a process's runtime, its watchdog or its launcher by which it ends without an exception.
_LAST_WORDS: Final = re.compile(
    r"\] Heartbeat monitor timed out|^Fatal Python error|^(?:Segmentation fault|Bus error)\b"
    r"|^exit code (?!-?(?:0|15|2|143|130)\b).{1,40}, local rank "
    r"|^srun: error: .{1,300}: (?:Segmentation fault|Bus error|Killed|Aborted|Illegal instruction)"
)
#: Lines of the communication library that are shown beside an error, and ranks with their ends.
_MOST_LINES, _MOST_EXITS = 3, 16
_MOST_NAMES = 8  # parameters in a sentence


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
        where there is no exception: exit codes and signals in a launcher's summary, lines by which a process ends, and
        a launcher that was told to end.
    Why it matters:
        Whoever reads only the curves sees a run that was fine and stopped. The error is the first thing to read, and
        of many ranks' errors only the first one is the reason.
    How it decides:
        The first error of its own, before those by which launchers repeat it and by which ranks say that another one is
        gone or did not come, after which its rank reported no step; without one the first rank with an exit code of its
        own, which the launcher or a scheduler did not end. Workers that outlive the launcher's SIGTERM are a warning: a
        healthy one ends at once. A launcher that was merely told to end, and a scheduler's limit, are remarks; that a
        machine failed is a warning. What an exception means is left open (undetermined), and so is what filled the
        memory of a host. A device that is out of memory, and what follows it, are the business of the rules memory/*.
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
    errors = _errors(capsule, last := _last_step(capsule))
    own = [each for each in errors if str(each.get("type") or "").rpartition(".")[2] not in SECONDARY]
    own = [each for each in own if not _of_its_watchdog(capsule, each)]
    if cancelled(capsule) and all(map(_follows, own)):
        own = []  # a communicator that goes with its job
    first = min(own, key=_place, default=None)
    if first is None:
        ended = _silent_end(capsule, errors) or _last_words(capsule, last) or stopped(capsule, last)
        if ended is not None:
            yield ended
        return
    if is_device_failure(first) or (_follows(first) and _of_two_sizes(capsule)):
        return
    if _lost(first):
        yield _silent_end(capsule, errors) or _lost_peer(capsule, first, len(own))
        return
    yield _host(first, len(own)) if is_host_failure(first) else _exception(capsule, first, len(own))


def _errors(capsule: Capsule, last: int | None) -> list[Mapping[str, Any]]:
    """Errors that nobody dealt with: no step came after them, or only those of other ranks, or their rank ended so."""
    found = [each for each in current_events(capsule) if each.get("kind") in ("exception", "oom")]
    raised = {rank for rank, end in _exits(capsule).items() if end.get("kind") == "exception"}
    latest = {_rank(each): each for each in found if _rank(each) in raised}
    final = {id(each) for each in (*latest.values(), *(each for each in found if each.get("uncaught") is True))}
    steps = [(_step(each), each) for each in found]
    return [each for step, each in steps if id(each) in final or last is None or step is None or step >= last]


def _of_its_watchdog(capsule: Capsule, error: Mapping[str, Any]) -> bool:
    """Whether a process only says that it was aborted, in a job in which watchdogs gave up: these abort it."""
    aborted = str(error.get("type")) == "Fatal Python error" and message_of(error).startswith("Aborted")
    return aborted and any(each.get("kind") == "collective_timeout" for each in current_events(capsule))


def _exits(capsule: Capsule) -> dict[int, Mapping[str, Any]]:
    """How each rank ended, as its launcher says."""
    return {each["rank"]: each["exit"] for each in capsule.records("ranks") if isinstance(each.get("exit"), dict)}


def _host(error: Mapping[str, Any], count: int) -> Finding:
    words = short(_words(error, "out of memory"), 440)
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
    words, unused = _words(error), _unused(capsule, error)
    lines = [
        str(each.get("message") or "")
        for each in current_events(capsule)
        if each.get("kind") == "log" and each.get("logger") == "nccl"
    ]
    reached, last = _step(error), _last_step(capsule)
    if reached is not None:
        when = f"after step {reached:,}"
    else:
        when = (
            "before the first reported step" if last is None else f"its file has no step before it; the last: {last:,}"
        )
    return Finding(
        confidence="undetermined",
        title="The job ended with an error",
        summary=f"{short(words, 440)} ({when}).{unused}",
        where=Where(step=reached, rank=_rank(error)),
        evidence=(
            Evidence(name="error", value=short(words, 600), expected="none"),
            *_raised_at(error),
            *(Evidence(name="before it", value=short(line, 300)) for line in lines[:_MOST_LINES]),
            Evidence(name="errors in the log", value=count, expected=0),
        ),
        next=("read the lines above the first error in the log of this rank",),
    )


def _words(error: Mapping[str, Any], unnamed: str = "an exception") -> str:
    """Type and message of an error, the type once: a message that is a whole line holds it."""
    kind, message = str(error.get("type") or unnamed), message_of(error)
    return message if f"{kind}:" in message[: len(kind) + 20] else f"{kind}: {message}"


def _unused(capsule: Capsule, error: Mapping[str, Any]) -> str:
    """What DDP lists of parameters without a gradient, at the end of a long message."""
    lists = [each for each in current_events(capsule) if each.get("kind") == "unused_parameters"]
    names = next((each.get("missing") for each in lists if each.get("rank") == error.get("rank")), None)
    if "did not receive grad" not in message_of(error) or not isinstance(names, list) or not names:
        return ""
    shown = ", ".join(map(str, names[:_MOST_NAMES]))
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return f" Without a gradient: {short(shown, 300)}{more}."


def _raised_at(error: Mapping[str, Any]) -> tuple[Evidence, ...]:
    """The line of the job that raised, and those that led there."""
    site = call_site(error)
    return (Evidence(name="raised at", value=site[0], note=" < ".join(site[1:4])),) if site else ()


def _silent_end(capsule: Capsule, errors: list[Mapping[str, Any]]) -> Finding | None:
    """The first rank that ended by itself and printed no error, as its launcher says; None where there is none."""
    exits = _exits(capsule)
    said = {_rank(each) for each in errors if str(each.get("type") or "").rpartition(".")[2] not in _LAUNCHED}
    own = {
        rank: end
        for rank, end in exits.items()
        if end.get("kind") in ("exception", "signal") and rank not in said and not _STOPPED.search(message_of(end))
    }
    heard = min((_time(exits[rank]) for rank in said if rank in exits), default=math.inf)
    own = own if min(map(_time, own.values()), default=math.inf) <= heard else {}
    if not own or cancelled(capsule):
        return None
    earliest = min(map(_time, own.values()))
    first = sorted(rank for rank, end in own.items() if _time(end) == earliest)
    words, one = message_of(own[first[0]]), len(first) == 1
    who = f"Rank {first[0]}" if one else f"{len(first)} ranks at once, rank {first[0]} among them,"
    others = f"; the launcher stopped {len(exits) - len(own)} others" if len(exits) > len(own) else ""
    return Finding(
        confidence="undetermined",
        title=f"{f'Rank {first[0]}' if one else 'Ranks'} ended and printed no error",
        summary=f"{who} ended first, with {words}, and the log holds no error of it{others}.",
        where=Where(step=_last_step(capsule), rank=first[0] if one else None),
        evidence=(
            Evidence(name="ended by themselves", value=sorted(own), expected=[], note=words),
            *(Evidence(name=f"rank {rank}", value=message_of(exits[rank])) for rank in sorted(exits)[:_MOST_EXITS]),
        ),
        next=("that rank's own error stream (torchrun --redirects 3 --log-dir), and the kernel's log of its host",),
    )


def _last_words(capsule: Capsule, last: int | None) -> Finding | None:
    """A process that ends with a line of its runtime, and no exception."""
    if cancelled(capsule):
        return None
    lines = [each for each in current_events(capsule) if each.get("kind") == "log"]
    lines = [each for each in lines if last is None or _step(each) is None or _step(each) >= last]
    first = next((each for each in lines if _LAST_WORDS.search(message_of(each)) is not None), None)
    return None if first is None else _exception(capsule, {**first, "type": "the process ended"}, 1)


def _lost(error: Mapping[str, Any]) -> bool:
    """Whether an error only says that the process of another rank is no more."""
    words = f"{error.get('type')}: {message_of(error)}"
    return GONE.search(words) is not None and _BETWEEN_RANKS.search(words) is not None


def _lost_peer(capsule: Capsule, error: Mapping[str, Any], count: int) -> Finding:
    """All that the log holds is a rank whose peer was gone: what ended the peer is not in it."""
    exits = _exits(capsule)
    ended_others = any("Sending process" in message_of(each) for each in current_events(capsule))
    rank, last = _rank(error), _last_step(capsule)
    words = short(_words(error), 440)
    alone = not ended_others and rank in exits and len(exits) == 1
    who = "A rank" if rank is None else f"Rank {rank}"
    why = (
        "The launcher names no other failure and had nobody left to stop: the other ranks of its node had ended "
        "before, without an error"
        if alone
        else f"What ended the other rank{_at_host(error)} is not in this log"
    )
    return Finding(
        confidence="undetermined",
        title=f"{who} lost its connection to another rank",
        summary=f"{who} says only that its peer was gone ({words}). {why}.",
        where=Where(step=_step(error) if _step(error) is not None else last),
        evidence=(
            Evidence(name="error", value=short(words, 600), expected="none", note="a consequence"),
            Evidence(name="errors in the log", value=count, expected=0),
            *((Evidence(name="ranks that failed", value=sorted(exits), note="of this launcher"),) if exits else ()),
        ),
        cause="a rank ended its loop before the others: fewer batches, an early return or exit" if alone else "",
        next=(
            "compare the number of batches and steps of the ranks: the first that ends closes its connections",
            "read the log of every other rank, and the kernel's log of its host, up to the end",
        ),
        fix=("give every rank the same number of steps, or join(): uneven inputs",) if alone else (),
    )


def _at_host(error: Mapping[str, Any]) -> str:
    """The machine of a peer that was lost, where NCCL names it: ``… closed by remote peer node03<43210>``."""
    found = _PEER.search(message_of(error))
    return f", on {found[1]}," if found is not None else ""


def _follows(error: Mapping[str, Any]) -> bool:
    """Whether an error speaks of another rank, which is gone or did not come."""
    return GAVE_UP.search(f"{error.get('type')}: {message_of(error)}") is not None


def _of_two_sizes(capsule: Capsule) -> bool:
    """Whether calls of two sizes met, as distributed/collective-mismatch tells."""
    return any(isinstance(each.get("received"), int) for each in current_events(capsule))


def _place(error: Mapping[str, Any]) -> tuple[bool, int, float, float, int]:
    """What comes first is the reason: by step, time, place in the log; what follows from another rank comes last."""
    order = error.get("order")
    printed = float(order) if isinstance(order, int) else math.inf
    return (_follows(error), _step(error) or 0, _time(error), printed, _rank(error) or 0)


def _last_step(capsule: Capsule) -> int | None:
    """The last training step that any rank reported; where attempts begin anew, in the last one."""
    ends: list[int] = []
    for key in capsule.scalar_keys():
        if key.name in ("loss", "grad_norm", "step_time") and key.side is None:
            stretches = segments(capsule, key.name, key.rank) if past_events(capsule) else ()
            found = stretches[-1] if stretches else curve(capsule, key.name, key.rank)
            ends += [int(found.step[-1])] if len(found) else []
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
