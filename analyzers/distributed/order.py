"""Groups entered in different orders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..finding import Evidence, Finding, Where
from ..registry import rule
from .diagnosis import Circle, Diagnosis, diagnosis
from .waiting import Wait
from .words import at_site, call_words, last_step, named_ranks

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "distributed/group-order",
    stage="distributed",
    needs=("records.collectives",),
    explained_by=("distributed/rank-died-first",),
    cases=("hang-in-collective",),
)
def group_order(capsule: Capsule) -> Iterator[Finding]:
    """Ranks enter process groups, or sends, in different orders and wait for each other in a circle.

    What it checks:
        Over all groups and sends, whether ranks that wait for each other wait for nobody else.

    Why it matters:
        Each rank waits in another group for one that waits for it. Nobody is missing and no call is wrong, so neither a
        time-out nor one group's sequence numbers show the fault.

    How it decides:
        Who waits for whom is a graph; a circle in it that nobody outside explains is the fault. The first call that
        holds each rank is named. Which order is the odd one is decided by all ranks that made both calls, or the calls
        of the same numbers in groups of the same purpose: three are needed. Otherwise all ranks of the circle are
        named, undetermined. A rank that skips a call and then waits in another group leaves the same traces: the rank
        is right, and the order is what to look at.

    Looks like it but is not:
        Ranks that wait for a rank which waits for nobody (distributed/missing-rank); a dump of a job that runs.

    What to try next:
        Print the order of calls of the named rank and of one that is not (the frames of the dump hold it).

    Fix:
        One order of the groups on all ranks; sends and receives of neighbours through batch_isend_irecv, or even ranks
        send first.
    """
    found = diagnosis(capsule)
    for circle in found.circles[:4]:
        yield _finding(capsule, found, circle)


def _finding(capsule: Capsule, found: Diagnosis, circle: Circle) -> Finding:
    calls, odd = found.calls, circle.deviating
    held = [(_words(found, wait), wait, ranks) for wait, ranks in circle.classes]
    waits = "; ".join(
        f"{named_ranks(ranks)} in {call}{at_site(calls, wait.row, direct=wait.direct)}"
        for call, wait, ranks in held[:4]
    )
    sends = all(wait.direct for _, wait, _ in held)
    groups = list(dict.fromkeys(str(calls.groups[wait.group]) for _, wait, _ in held))
    who = named_ranks(odd or circle.ranks)
    said = "" if odd else "; nothing on record says which order is meant"
    what = "sends and receives" if sends else "groups"
    return Finding(
        title=f"{who.capitalize()} {'enters' if len(odd) == 1 else 'enter'} {what} in another order"
        if odd
        else f"{who.capitalize()} wait for each other in a circle of {what}",
        summary=f"In a circle: {waits}" + (f"; {who} leave the order of the others" if odd else said) + ".",
        confidence="likely" if odd else "undetermined",
        where=Where(
            step=last_step(capsule),
            rank=odd[0] if odd else None,
            order=min((wait.seq for _, wait, _ in held), default=None),
        ),
        evidence=(
            Evidence(
                name="deviating_ranks", value=list(odd), note=f"by {circle.votes} ranks" if odd else "not decided"
            ),
            Evidence(name="ranks_in_the_circle", value=list(circle.ranks)),
            Evidence(name="groups", value=groups[:8]),
            *(
                Evidence(
                    name="first_call_held",
                    value=call,
                    note=f"{named_ranks(ranks)}; waits for {named_ranks(wait.absent)}"
                    + at_site(calls, wait.row, direct=wait.direct),
                )
                for call, wait, ranks in held[:6]
            ),
            *((Evidence(name="standstill", value=found.still.reason),) if found.still is not None else ()),
        ),
        cause=f"{who} makes the calls of several groups in an order of its own"
        if len(odd) == 1
        else f"{who} make them so",
        next=(f"compare the order of calls on {who} with that on another rank",),
        fix=("enter the groups in one order on all ranks",),
    )


def _words(found: Diagnosis, wait: Wait) -> str:
    if wait.row < 0:
        return f"call {wait.seq:,} of {found.calls.groups[wait.group]}"
    return call_words(found.calls, wait.row, direct=wait.direct)
