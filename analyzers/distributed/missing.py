"""Ranks that others wait for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..finding import Confidence, Evidence, Finding, Where
from ..registry import NotJudged, rule
from .collectives import UNKNOWN
from .diagnosis import Diagnosis, Missing, diagnosis
from .inside import UNTOLD, inside
from .pairs import held_by_pairs, pair_that_does_not_end
from .standstill import of_a_moment
from .waiting import Wait
from .words import at_site, brief, call_words, last_step, named_ranks

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "distributed/missing-rank",
    stage="distributed",
    needs=("records.collectives|records.ranks.last_seq|records.events.last_enqueued|records.events.timeout_s",),
    explained_by=(
        "distributed/rank-died-first",
        "distributed/uneven-steps",
        "distributed/collective-mismatch",
        "distributed/rank-conditional",
        "distributed/group-order",
    ),
    cases=("hang-in-collective",),
)
def missing_rank(capsule: Capsule) -> Iterator[Finding]:
    """A rank is not in the collective that the others wait in.

    What it checks:
        For each group and number, which members entered the call and which did not, from flight-recorder dumps, the
        recorder's stream, or what watchdogs print; over all groups and sends, who waits for whom.

    Why it matters:
        In a hang every rank waits, and the loudest logs are the victims'. Only the rank that others wait for and that
        itself waits for nobody is worth looking at.

    How it decides:
        A rank waits for the members that have not entered a call which it entered and did not leave, and for the other
        side of a send that is not posted. Who is waited for and waits for nobody is missing; an empty list of calls on
        such a rank is the fault and not health. The first call that it lacks is named, collectives before sends; where
        call sites tell that it skipped one earlier among equal calls, that one. Undetermined where as many ranks lack
        the call as made it (two ranks), and where only ranks without evidence are left, or with older evidence alone.
        A watchdog of a single rank, where nothing tells of others, leaves it undetermined, too, and so do watchdogs of
        some ranks in one call where nothing states how many ranks there are. Time-outs after which training went on are
        a remark; words in a log that a dump of the same rank contradicts are of another life of the job and left out.
        Each rank is held by its oldest call alone, also by ranks that are in it behind an older one. Where most ranks
        wait in a call that all are in, nobody is missing; where the devices of most of them have started it, the ranks
        whose devices have not are named.
        Dumps of some ranks alone, in which ranks wait for others without a dump, are left undetermined: silence would
        read as health. That the job stands still must be on record: a watchdog, a time-out that passed, a rank that
        died, dumps written a time-out after the call began. Other dumps count unless every rank has its newest call in
        flight and none is more than 3 calls behind; written in less than half of the time-out they leave it
        undetermined.

    Looks like it but is not:
        Later pipeline stages and other groups, which wait for a rank that waits: victims, and named as such. Dumps that
        a person asked for while the job runs. A dump older than those of the others, which lacks calls that they
        finished. A call that a minority makes (distributed/rank-conditional).

    What to try next:
        Look at the stack of the missing rank (py-spy dump), its log and its kernel log; look what it did with its last
        batch. Do not raise the time-out.

    Fix:
        Repair what keeps that rank away: its data loader, an exception that was swallowed, a device that failed, a call
        under a condition.
    """
    found = diagnosis(capsule)
    alone = _of_one_rank(found)
    if held_by_pairs(found):  # one of two sizes is a mismatch
        if (pair := pair_that_does_not_end(capsule, found)) is not None:
            yield pair
        return
    for each in () if alone else found.missing[:4]:
        yield _finding(capsule, found, each) if each.ranks else _silent(capsule, found, each)
    if found.missing and not alone:
        return
    yield from _of_barrier(capsule, found)
    if alone:
        yield from _alone(capsule, found)
    elif found.calls.past and not found.calls.timeouts:
        yield _past(found.calls.past)
    if found.all_inside is not None:
        yield inside(capsule, found, found.all_inside)
    elif (wait := _unseen(found)) is not None and not of_a_moment(capsule, found.calls, found.state):
        yield _incomplete(capsule, found, wait)
    elif found.still is None and found.state.waits and not found.partings:
        lacking = "of some there is no dump" if _unseen(found) is not None else "a time-out would"
        raise NotJudged(f"ranks are a few calls apart, and nothing says that the job stands still: {lacking}")


def _finding(capsule: Capsule, found: Diagnosis, missing: Missing) -> Finding:
    calls, wait, ranks = found.calls, missing.wait, missing.ranks
    row = missing.skipped if missing.skipped != UNKNOWN else wait.row
    call = _words(found, wait, row)
    site = at_site(calls, row, direct=wait.direct)
    who = named_ranks(ranks)
    behind = named_ranks(missing.slow) if missing.slow else ""
    early = found.still is not None and found.still.open
    confidence: Confidence = "likely" if missing.decided and not early else "undetermined"
    evidence = [
        Evidence(name="missing_ranks", value=list(ranks), expected=[], note=f"not in {brief(call)}"),
        Evidence(name="waiting_ranks", value=list(wait.waiting), note="entered it and did not leave it"),
        Evidence(name="sequence_number", value=wait.seq, note="first call that is missing"),
        Evidence(name="group_ranks", value=list(calls.groups[wait.group].ranks), note=str(calls.groups[wait.group])),
    ]
    if wait.silent:
        note = "no evidence: may be missing, too"
        evidence.insert(1, Evidence(name="silent_ranks", value=list(wait.silent), note=note))
    if wait.row != UNKNOWN and not wait.direct:
        evidence.append(Evidence(name="call", value=str(calls.call(row)), note=site.strip(" ()")))
    if not wait.direct:
        for rank in ranks[:4]:
            reached = calls.reached.get((wait.group, rank))
            value = reached.enqueued if reached is not None else 0
            evidence.append(Evidence(name="last_enqueued", value=value, expected=wait.seq, note=f"rank {rank}"))
    if missing.late:
        note = "after the first rank had entered the call; the others had given up by then"
        evidence.append(Evidence(name="entered_late", value=round(missing.late, 3), unit="s", note=note))
    if missing.skipped != UNKNOWN:
        last = f"later calls pair up one further, until call {wait.seq:,} finds no partner"
        evidence.append(Evidence(name="skipped_calls", value=missing.length, expected=0, note=last))
    for rank, (own, furthest) in sorted(missing.slow.items())[:4]:
        note = f"rank {rank} entered as many calls as the others, and its device finished fewer"
        evidence.append(Evidence(name="last_completed", value=own, expected=furthest, note=note))
    held = {int(rank) for table in (calls.table, calls.direct) for rank in table.rank[table.pending]}
    if victims := sorted((held | set(found.state.victims)) - {*wait.waiting, *ranks}):
        note = "have calls in flight behind those, or wait for a rank that waits: not at fault"
        evidence.append(Evidence(name="downstream_victims", value=victims, note=note))
    if found.still is not None:
        evidence.append(Evidence(name="standstill", value=found.still.reason))
    verb = "skipped" if missing.skipped != UNKNOWN else "did not enter" if not wait.direct else "did not answer"
    verb = f"entered {missing.late:,.3g} s late, after the others had given up," if missing.late else verb
    waiting = f"{named_ranks(wait.waiting)} {'waits' if len(wait.waiting) == 1 else 'wait'} in it"
    also = f"; {behind} entered it and completed less than the others, too" if behind else ""
    undecided = "; the job may as well run, with a slow rank" if early else ""
    unseen = named_ranks(wait.silent) if wait.silent else ""
    they = "it" if len(wait.silent) == 1 else "they"
    then = " of that moment" if found.state.outdated & set(wait.silent) else ""
    also += f"; of {unseen} there is no evidence{then}: {they} may be missing, too" if unseen else ""
    undecided = (
        undecided if missing.decided else "; whether that call is missing there or one too many here is not decided"
    )
    return Finding(
        title=f"{who.capitalize()} {verb} {call}" + (f"; {unseen} left no evidence{then}" if unseen else ""),
        summary=f"{who.capitalize()} {verb} {call}{site}, and {waiting}{also}{undecided}.",
        confidence=confidence,
        where=Where(step=last_step(capsule), rank=ranks[0] if confidence == "likely" else None, order=wait.seq),
        evidence=tuple(evidence),
        cause=f"{who} stopped, or took another path, before {call}",
        next=(
            f"look at the stack and the log of {who} (py-spy dump --pid …), not at those of the ranks that wait",
            "see whether it died, reads data, holds the interpreter's lock, or its device failed",
        )
        + ((f"get the evidence of {unseen}, too: {they} may be just as guilty",) if unseen else ())
        + (() if missing.decided else ("record call sites (TORCH_NCCL_TRACE_CPP_STACK, frames) and a third rank",)),
        fix=("make every rank of the group enter the call; leave the time-out as it is",),
    )


def _words(found: Diagnosis, wait: Wait, row: int) -> str:
    if row == UNKNOWN:
        return f"call {wait.seq:,} of {found.calls.groups[wait.group]}"
    return call_words(found.calls, row, direct=wait.direct)


def _silent(capsule: Capsule, found: Diagnosis, missing: Missing) -> Finding:
    """All ranks of which there is evidence are in the call; only others can be missing."""
    wait = missing.wait
    call = _words(found, wait, wait.row)
    who, site = named_ranks(wait.silent), at_site(found.calls, wait.row, direct=wait.direct)
    waiting = f"{named_ranks(wait.waiting).capitalize()} {'waits' if len(wait.waiting) == 1 else 'wait'}"
    more = "" if found.calls.groups[wait.group].whole else f", or a rank that left no trace at all: {UNTOLD}"
    then = " of that moment" if found.state.outdated & set(wait.silent) else ""
    return Finding(
        title=f"Every rank with evidence{then} waits in {call}",
        summary=f"{waiting} in {call}{site}; only {who} can be missing, of which there is no evidence{then}{more}.",
        confidence="undetermined",
        where=Where(step=last_step(capsule), order=wait.seq),
        evidence=(
            Evidence(name="silent_ranks", value=list(wait.silent), expected=[], note=f"no evidence{then}"),
            Evidence(name="waiting_ranks", value=list(wait.waiting), note=f"in {brief(call)}"),
        ),
        next=(f"find the dump, the log and the exit status of {who}: a process that was killed leaves no dump",),
    )


def _unseen(found: Diagnosis) -> Wait | None:
    """The first call in which ranks wait for members without a dump, where nothing else is known of their job."""
    if found.still is not None or found.partings or found.state.culprits or not found.calls.dumped:
        return None
    return next((each for each in found.state.waits if each.silent and not each.absent), None)


def _incomplete(capsule: Capsule, found: Diagnosis, wait: Wait) -> Finding:
    """Dumps of some ranks alone show calls in flight, and what these wait for lies in the other ranks' dumps."""
    calls = found.calls
    unseen = [each for each in found.state.waits if each.silent and not each.absent]
    held = sorted({rank for each in unseen for rank in each.waiting})
    silent = sorted({rank for each in unseen for rank in each.silent})
    # A rank that left no dump may wait itself: all of them are needed, and not those alone that are waited for.
    absent = sorted(set(range(calls.world)).union(silent) - calls.spoke)
    call, who = _words(found, wait, wait.row), named_ranks(absent)
    then = " of that moment" if found.state.outdated & set(silent) else ""
    have = "1 rank has calls" if len(held) == 1 else f"{len(held):,} ranks have calls"
    return Finding(
        title=f"{have} in flight that wait for {named_ranks(silent)}, of which there is no dump{then}",
        summary=f"{have} in flight that wait for {named_ranks(silent)}: get the dumps of {who}. Without them it is "
        f"not decided whether the job hangs, nor where; the oldest is {call}"
        f"{at_site(calls, wait.row, direct=wait.direct)}.",
        severity="warning",
        confidence="undetermined",
        where=Where(step=last_step(capsule), order=wait.seq),
        evidence=(
            Evidence(name="silent_ranks", value=absent[:64], expected=[], note="no dump"),
            Evidence(name="waiting_ranks", value=held, note="have calls in flight"),
            Evidence(name="oldest call", value=brief(call), note=str(calls.groups[wait.group])),
        ),
        next=(f"get the dumps of {who} and analyze all dumps together",),
    )


def _of_one_rank(found: Diagnosis) -> bool:
    """Whether all evidence is the words of one rank's watchdog, and nothing tells which other ranks there are."""
    one = len(found.calls.spoke) == 1 and not found.calls.dumped and not found.all_inside
    return one and not any(group.whole and len(group.ranks) > 1 for group in found.calls.groups)


def _past(timeouts: tuple[dict[str, Any], ...]) -> Finding:
    """Time-outs of an earlier attempt, after which training went on."""
    step = max((each["step"] for each in timeouts if type(each.get("step")) is int), default=None)
    last = [each for each in timeouts if each.get("step") == step]
    ranks = sorted({each["rank"] for each in last})
    op, seq = last[0].get("op"), last[0].get("seq")
    call = f"{op or 'a collective'}{f' {seq:,}' if type(seq) is int else ''}"
    who = named_ranks(ranks).capitalize()
    at = "" if step is None else f" after step {step:,}"
    return Finding(
        title="An earlier attempt hung, and training went on after it",
        summary=f"{who} waited in {call} until the watchdog gave up{at}. Training went on in another attempt.",
        severity="info",
        kind="hygiene",
        confidence="undetermined",
        where=Where(step=step, order=seq if type(seq) is int else None),
        evidence=(Evidence(name="waiting_ranks", value=ranks, note=call),),
        next=("the flight-recorder dumps of that attempt tell who was missing, should it come again",),
    )


def _alone(capsule: Capsule, found: Diagnosis) -> Iterator[Finding]:
    """The watchdog of one rank gave up, and of no other rank there is a word: often only its log is here."""
    given_up = [each for each in found.calls.timeouts if each.get("op") not in (None, "monitored_barrier")]
    if not given_up or any(isinstance(each.get("missing"), list) for each in found.calls.timeouts):
        return
    event = given_up[0]
    rank, seq = event["rank"], event.get("seq")
    call = f"{event['op']}{f' {seq:,}' if type(seq) is int else ''}"
    yield Finding(
        title=f"Rank {rank} waited in {call} until its watchdog gave up",
        summary=f"Rank {rank} waited in {call} until its watchdog gave up; of no other rank there is evidence here, "
        "so nothing tells which one did not come.",
        confidence="undetermined",
        where=Where(step=last_step(capsule, event), order=seq if type(seq) is int else None),
        evidence=(
            Evidence(name="waiting_ranks", value=[rank], note=call),
            Evidence(name="timeout", value=event.get("timeout_s"), unit="s"),
        ),
        next=("the logs, or the flight-recorder dumps, of the other ranks (TORCH_FR_BUFFER_SIZE=2000)",),
    )


def _of_barrier(capsule: Capsule, found: Diagnosis) -> Iterator[Finding]:
    """A monitored barrier names the ranks that did not come."""
    named = [
        (event, ranks)
        for event in found.calls.timeouts
        if isinstance(event.get("missing"), list)
        and (ranks := [each for each in event["missing"] if type(each) is int])
    ]
    if not named:
        return
    event, ranks = named[0]
    who = named_ranks(ranks)
    yield Finding(
        title=f"{who.capitalize()} did not reach the barrier",
        summary=f"{who.capitalize()} did not reach the monitored barrier that rank {event['rank']} waited in.",
        where=Where(step=last_step(capsule, event), rank=ranks[0]),
        evidence=(
            Evidence(name="missing_ranks", value=ranks, expected=[]),
            Evidence(name="waiting_ranks", value=sorted({each["rank"] for each, _ in named})),
            Evidence(name="timeout", value=event.get("timeout_s"), unit="s"),
        ),
        cause=f"{who} stopped, or took another path, before the barrier",
        next=(f"look at the stack and the log of {who}",),
        fix=("make every rank reach the barrier",),
    )
