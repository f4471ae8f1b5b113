"""Time-outs that were enlarged over a fault that waiting does not cure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import rule
from . import thresholds as T
from .collectives import Calls
from .diagnosis import Diagnosis, diagnosis
from .words import named_ranks

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "distributed/timeout-raised",
    stage="distributed",
    kind="hygiene",
    severity="warning",
    needs=("records.collectives.timeout_s|records.events.timeout_s",),
    cases=("hang-in-collective",),
)
def timeout_raised(capsule: Capsule) -> Iterator[Finding]:
    """A time-out was enlarged while ranks differ in their calls.

    What it checks:
        The time-out of the calls that hang beside the default, where another rule of this family found that ranks make
        different calls, or that one is missing.

    Why it matters:
        A longer time-out delays the message by as much and cures nothing; each hang then costs so many machine hours
        more.

    How it decides:
        The time-out of a hanging call is above the job's own default (`default_timeout_s`); where that is not on
        record, above torch's: 600 s with NCCL, 1,800 s with Gloo or where the back end is not known.

    Looks like it but is not:
        A long time-out in a job whose ranks agree, for a slow checkpoint, say; one that was made shorter.

    What to try next:
        Find the difference that the other finding names.

    Fix:
        Set the time-out back and repair the difference.
    """
    found = diagnosis(capsule)
    if not (found.partings or found.missing or found.added or found.circles):
        return
    raised = _raised(capsule, found)
    if raised is None:
        return
    timeout, default, told, ranks = raised
    yield Finding(
        title=f"The time-out was enlarged to {timeout:,.0f} s while ranks differ",
        summary=f"Calls of {named_ranks(ranks)} have a time-out of {timeout:,.0f} s, {told} {default:,.0f} s; "
        "ranks differ in their calls, which waiting does not cure.",
        where=Where(rank=ranks[0]),
        evidence=(Evidence(name="timeout", value=timeout, expected=default, unit="s", note=told),),
        cause="the time-out was raised instead of finding the rank that differs",
        next=("look at the finding on the calls themselves",),
        fix=("set the time-out back to its default",),
    )


def _raised(capsule: Capsule, found: Diagnosis) -> tuple[float, float, str, list[int]] | None:
    """(time-out, default, where the default is from, ranks) of the longest time-out above its default."""
    run = capsule.manifest.run
    backend = str(run.backend or "").lower() if run is not None else ""
    nccl = "nccl" in backend or (bool(found.calls.timeouts) and "gloo" not in backend)
    known = T.NCCL_TIMEOUT_S if nccl else T.GLOO_TIMEOUT_S
    best: tuple[float, float, str, list[int]] | None = None
    for number, rank in _concerned(found.calls):
        record = found.calls.record(number)
        timeout, own = record.get("timeout_s"), record.get("default_timeout_s")
        if not isinstance(timeout, int | float) or not np.isfinite(timeout):
            continue
        told = "the job's default is" if own else "torch's default is"
        default = float(own) if isinstance(own, int | float) and np.isfinite(own) and own > 0 else known
        if timeout > default and (best is None or timeout > best[0]):
            best = float(timeout), default, told, [rank]
        elif best is not None and timeout == best[0] and rank not in best[3]:
            best[3].append(rank)
    return best


def _concerned(calls: Calls) -> Iterator[tuple[int, int]]:
    """Records of the calls that have not ended, or of the last one of each rank where all have."""
    rows = np.flatnonzero(calls.table.pending)
    if not len(rows) and len(calls.table):
        rows = np.flatnonzero(np.append(calls.table.rank[1:] != calls.table.rank[:-1], True))
    for row in rows.tolist():
        if calls.table.record[row] >= 0:
            yield int(calls.table.record[row]), int(calls.table.rank[row])
