"""Ranks that make another call than the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import rule
from . import thresholds as T
from .alignment import Parting
from .collectives import Calls
from .diagnosis import Diagnosis, Missing, diagnosis
from .fingerprints import fingerprint_finding
from .pairs import held_by_pairs, pair_of_two_sizes
from .signatures import same_count
from .sizes import size_finding
from .words import at_site, call_words, last_step, named_ranks

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Different calls of one number that are listed.
_MOST_SIDES = 8
_NEEDS = ("records.collectives|records.events.other_rank|records.events.last_enqueued|records.events.received",)


@rule(
    "distributed/collective-mismatch",
    stage="distributed",
    needs=_NEEDS,
    explained_by=("distributed/uneven-steps", "distributed/rank-conditional"),
    cases=("hang-in-collective",),
)
def collective_mismatch(capsule: Capsule) -> Iterator[Finding]:
    """Ranks call different collectives where they should call the same one.

    What it checks:
        Operation, dtype and sizes of the calls of each group, aligned over its ranks; the fingerprints that
        TORCH_DISTRIBUTED_DEBUG=DETAIL prints; and Gloo's error that more bytes came than a call awaits.

    Why it matters:
        Ranks that call different things hang, fail, or, where the sizes happen to fit, exchange numbers that belong to
        different tensors.

    How it decides:
        The first number at which the calls of a group differ; the minority there deviates. Its further calls are
        compared with the majority's after one call is replaced, after some are skipped, added or exchanged, and the
        edit after which most agrees is named, once. Three ranks are needed to outvote one; in smaller groups the other
        groups of the same purpose decide. Else undetermined, with both sides; and so where only Gloo's error is left,
        since the rank that it ends is the one that received, and where a send and its receive of one number move
        different data and do not end. Warning where the calls ended and only
        their spelling or the arrangement of equally many elements differs.

    Looks like it but is not:
        Sizes that differ legally: all-to-all, uneven gathers and scatters given as lists, the ranks of a rooted call
        without input or output. Numbers that are shifted by one after a single skipped call. Sends and receives under
        way.

    What to try next:
        Compare the code that leads to the named line on the named rank with that of the others: what differs in its
        batch, its configuration, its version. `llmconsole shrink` writes a script of two ranks with that one call.

    Fix:
        Make the call, its dtype and its sizes the same on all ranks; where data decides, let all ranks take the
        decision together.
    """
    found = diagnosis(capsule)
    said = False
    for parting in found.partings[:8]:
        if not conditional(found, parting):
            said = True
            yield _parting(capsule, found, parting)
    for added in found.added[:4]:
        if not conditional_end(found, added):
            said = True
            yield added_finding(capsule, found, added)
    last = () if said else (fingerprint_finding, _by_size, _by_pair)
    if (finding := next((each for of in last if (each := of(capsule, found)) is not None), None)) is not None:
        yield finding


@rule(
    "distributed/rank-conditional",
    stage="distributed",
    needs=("records.collectives.frames",),
    explained_by=("distributed/uneven-steps", "distributed/rank-died-first"),
    cases=("hang-in-collective",),
)
def rank_conditional(capsule: Capsule) -> Iterator[Finding]:
    """A collective is called by some ranks only, under a condition.

    What it checks:
        Calls that a minority of a group makes in addition to what all make, and the lines they come from.

    Why it matters:
        A barrier or a reduction under `if rank == 0`, in an evaluation that one rank runs, or in a branch that depends
        on data waits for ranks that will never come.

    How it decides:
        Alignment finds a call that fewer than half of the ranks make, and its line calls nothing on any other rank of
        the group, though their frames are on record; the ranks are such as a condition picks: the first of the group,
        or several.

    Looks like it but is not:
        A call that all but one make: distributed/missing-rank. One more round of a call that all make, as of a rank
        with one more batch, and an added call of a single rank in the middle: distributed/collective-mismatch.

    What to try next:
        Look at the branch around the named line.

    Fix:
        Take the call out of the branch, or let all ranks of its group take the branch.
    """
    found = diagnosis(capsule)
    for parting in found.partings[:8]:
        if conditional(found, parting):
            yield _conditional(capsule, found, parting.ranks, parting.theirs, parting.group, parting.others)
    for added in found.added[:4]:
        wait = added.wait
        if conditional_end(found, added):
            yield _conditional(capsule, found, wait.waiting, wait.row, wait.group, wait.absent)


def _by_size(capsule: Capsule, found: Diagnosis) -> Finding | None:
    """What Gloo's error says, where no call on record says more."""
    return None if found.partings or found.added or found.state.waits or found.circles else size_finding(capsule)


def _by_pair(capsule: Capsule, found: Diagnosis) -> Finding | None:
    """What a send and its receive say, where ranks wait for nobody but their two sides."""
    return pair_of_two_sizes(capsule, found) if held_by_pairs(found) else None


def conditional(found: Diagnosis, parting: Parting) -> bool:
    """Whether a parting is a call that rank 0 alone makes, or a few ranks, from a line that is theirs alone."""
    if parting.decided == "none" or parting.ended or not _chosen(found, parting.group, parting.ranks):
        return False
    # One call of each side is all that a blocking back end leaves: an added call looks like another one.
    added = parting.edit == "added" or (parting.edit in ("op", "dtype", "shape") and not parting.run)
    return added and new_site(found, parting.group, parting.ranks, parting.theirs)


def _chosen(found: Diagnosis, group: int, ranks: tuple[int, ...]) -> bool:
    """Whether ranks are such as a condition picks: the first of the group, or several."""
    return len(ranks) > 1 or min(ranks) in (0, found.calls.groups[group].ranks[0])


def conditional_end(found: Diagnosis, added: Missing) -> bool:
    """The same of a call at the end, after which nothing can tell an added call from one round more."""
    wait = added.wait
    return _chosen(found, wait.group, wait.waiting) and new_site(found, wait.group, wait.waiting, wait.row)


def new_site(found: Diagnosis, group: int, ranks: tuple[int, ...], row: int) -> bool:
    """Whether a call comes from a line from which none of the group's other ranks calls, as far as frames tell."""
    calls = found.calls
    own = calls.frame(row) if row >= 0 else None
    if own is None:
        return False
    rows = np.flatnonzero(calls.table.group == group).tolist()
    others = {calls.frame(each) for each in rows if int(calls.table.rank[each]) not in ranks} - {None}
    return bool(others) and own not in others


def _conditional(
    capsule: Capsule, found: Diagnosis, ranks: tuple[int, ...], row: int, group: int, others: tuple[int, ...]
) -> Finding:
    calls = found.calls
    who, call, site = named_ranks(ranks), call_words(calls, row), calls.frame(row)
    makes = "makes" if len(ranks) == 1 else "make"
    return Finding(
        title=f"Only {who} {'calls' if len(ranks) == 1 else 'call'} {call}",
        summary=f"Only {who} of {len(calls.groups[group].ranks)} ranks {makes} {call}, "
        f"from {site}, a line from which no other rank calls anything.",
        where=Where(step=_step(capsule, found, row), rank=ranks[0], order=int(calls.table.seq[row])),
        evidence=(
            Evidence(name="calling_ranks", value=list(ranks), expected=list(calls.groups[group].ranks), note=call),
            Evidence(name="call", value=str(calls.call(row))),
            Evidence(name="call_site", value=site, note=" < ".join(calls.site(row)[1:4])),
            Evidence(name="other_ranks", value=list(others)[:64], note="never call from that line"),
            *_standstill(found),
        ),
        cause=f"the call stands under a condition that holds on {who} alone",
        next=(f"look at the branch around {site}",),
        fix=("take the call out of the branch, or let every rank of the group take it",),
    )


def _parting(capsule: Capsule, found: Diagnosis, parting: Parting) -> Finding:
    calls = found.calls
    group, who, most = calls.groups[parting.group], named_ranks(parting.ranks), named_ranks(parting.others)
    theirs = calls.call(parting.theirs) if parting.theirs >= 0 else None
    common = calls.call(parting.common) if parting.common >= 0 else None
    number = f"call {parting.seq:,} of {group}"
    several = f" {parting.length} calls" if parting.length > 1 else ""
    does = {
        "skipped": f"skipped{several or f' {common}'}",
        "added": f"made{several or f' {theirs}'} in addition",
        "exchanged": f"made{several} in another order",
    }.get(parting.edit, f"called {theirs}")
    undecided = parting.decided == "none"
    site = at_site(calls, parting.common if parting.edit == "skipped" else parting.theirs)
    differ = {"op": "another operation", "dtype": "another dtype", "shape": "another size"}.get(parting.edit, does)
    sides = _sides(calls, parting)
    if undecided:
        title = f"{named_ranks((*parting.ranks, *parting.others)).capitalize()} differ at {number}"
        summary = f"At {number} {_in_words(calls, sides)}; {_open(sides)} nothing says which is right."
    else:
        title = f"{who.capitalize()} {does} at {number}"
        title = f"{who.capitalize()} made {differ} at {number}" if parting.edit in ("op", "dtype", "shape") else title
        summary = (
            f"At {number} {who} {does}{site}, where {most} called {common}"
            f"{at_site(calls, parting.common) if parting.edit != 'skipped' else ''}."
        )
    evidence = [
        Evidence(name="deviating_ranks", value=list(parting.ranks), note="not decided" if undecided else parting.edit),
        Evidence(name="agreeing_ranks", value=list(parting.others)[:64], note=f"decided by: {parting.decided}"),
        Evidence(name="sequence_number", value=parting.seq, note=str(group)),
        Evidence(name="call", value=str(theirs), expected=str(common), note=site.strip(" ()")),
        *(
            Evidence(name=f"call of {named_ranks(ranks)}", value=each, expected=str(common))
            for each, (ranks, _) in (list(sides.items())[:_MOST_SIDES] if len(sides) > 2 else ())
        ),
    ]
    if parting.edit in ("skipped", "added", "exchanged"):
        evidence.append(
            Evidence(name=f"{parting.edit}_calls", value=parting.length, expected=0, note=f"{parting.run} agree after")
        )
    if further := found.also.get(parting):
        names = [str(calls.groups[each]) for each in further[:8]]
        evidence.append(Evidence(name="groups_part_later", value=names, note="follow from the first"))
    mild = parting.ended and (parting.edit == "op" or _same_count(found, parting))
    if parting.ended:
        note = "the calls ended nevertheless" + ("" if mild else ": ranks went on with what belongs to other tensors")
        evidence.append(Evidence(name="ended", value=True, expected=False, note=note))
    evidence.extend(_standstill(found))
    sure = parting.decided == "majority" and not mild
    return Finding(
        title=title,
        summary=summary,
        severity="warning" if mild else None,
        confidence="undetermined" if undecided else "confirmed" if sure else "likely",
        where=Where(
            step=_step(capsule, found, parting.theirs, parting.common),
            rank=None if undecided else parting.ranks[0],
            order=parting.seq,
        ),
        evidence=tuple(evidence),
        cause=f"{who} took another path through the program than {most}",
        next=(
            f"compare what leads to this call on {who} and on rank {parting.others[0]}: batch, branch, version",
            "a script of two ranks with that one call: llmconsole shrink CAPSULE",
        )
        + (("record a third rank, or the calls from the start",) if undecided and len(sides) == 2 else ())
        + (("see whether the ranks pad to one size: each side has its own",) if undecided and len(sides) > 2 else ()),
        fix=(_fix(parting, who, undecided=undecided),),
    )


def _sides(calls: Calls, parting: Parting) -> dict[str, tuple[list[int], int]]:
    """What was called under the number of a parting: the ranks of each call, and the row of the first of them."""
    found: dict[str, tuple[list[int], int]] = {}
    for rank in (*parting.ranks, *parting.others):
        if (row := calls.at(parting.group, rank, parting.seq)) is not None:
            found.setdefault(str(calls.call(row)), ([], row))[0].append(rank)
    return found if len(found) == 2 else dict(sorted(found.items(), key=lambda each: each[1][0]))


def _in_words(calls: Calls, sides: dict[str, tuple[list[int], int]]) -> str:
    """Who called what, side by side."""
    said = [f"{named_ranks(ranks)} called {call}{at_site(calls, row)}" for call, (ranks, row) in sides.items()]
    if len({at_site(calls, row) for _, row in sides.values()}) == 1 and len(said) > 2:
        (site,) = {at_site(calls, row) for _, row in sides.values()}
        said = [f"{named_ranks(ranks)} called {call}" for call, (ranks, _) in sides.items()]
        said[0] += site
    more = f", and so on ({len(said):,} different calls)" if len(said) > _MOST_SIDES else ""
    shown = said[:_MOST_SIDES]
    return " and ".join(shown) if len(shown) == 2 else ", ".join(shown) + more


def _open(sides: dict[str, tuple[list[int], int]]) -> str:
    """Why nothing decides between the sides."""
    sizes = [len(ranks) for ranks, _ in sides.values()]
    if len(sides) > 2:
        return f"of {len(sides):,} different calls"
    if sum(sizes) < T.DECIDING_RANKS:
        return "with so few ranks"
    return f"with {sizes[0]} ranks against {sizes[-1]}" if len(set(sizes)) == 1 else "without the ranks not seen"


def _fix(parting: Parting, who: str, *, undecided: bool) -> str:
    """What to change, by what the ranks did otherwise."""
    if undecided:
        return "make the same calls, with the same dtype and sizes, on both sides"
    those, them = ("these calls", "them") if parting.length > 1 else ("the call", "it")
    return {
        "skipped": f"let {who} make {those}, too, or let no rank of the group do so",
        "added": f"leave {those} out on {who}, or let every rank of the group make {them}",
        "exchanged": "make the calls in one order on all ranks of the group",
        "op": "make the same operation on all ranks of the group",
        "dtype": f"give {who} the dtype of the others: cast before the call, or set one precision for all ranks",
        "shape": f"give {who} the size of the others: pad to a common size, or exchange the sizes before the call",
    }[parting.edit]


def _same_count(found: Diagnosis, parting: Parting) -> bool:
    """Whether only the arrangement of equally many elements differs."""
    if parting.edit != "shape" or min(parting.theirs, parting.common) < 0:
        return False
    return same_count(found.calls.call(parting.theirs), found.calls.call(parting.common))


def added_finding(capsule: Capsule, found: Diagnosis, added: Missing) -> Finding:
    """A minority makes a call at the end that most ranks never make, from a line that all know."""
    calls, wait = found.calls, added.wait
    who, most = named_ranks(wait.waiting), named_ranks(wait.absent)
    call = call_words(calls, wait.row) if wait.row >= 0 else f"call {wait.seq:,} of {calls.groups[wait.group]}"
    return Finding(
        title=f"{who.capitalize()} made one call more: {call}",
        summary=f"{who.capitalize()} waits in {call}{at_site(calls, wait.row)}, which {most} never made: "
        "most ranks end before it.",
        where=Where(step=last_step(capsule), rank=wait.waiting[0], order=wait.seq),
        evidence=(
            Evidence(name="deviating_ranks", value=list(wait.waiting), note="added"),
            Evidence(name="agreeing_ranks", value=list(wait.absent)[:64], note="decided by: majority"),
            Evidence(name="sequence_number", value=wait.seq, note=str(calls.groups[wait.group])),
            *_standstill(found),
        ),
        confidence="undetermined" if found.still is not None and found.still.open else "likely",
        cause=f"{who} goes on where the other ranks have ended: one batch or one round more",
        next=("compare the number of steps and samples of the ranks",),
        fix=("give every rank the same number of steps",),
    )


def _standstill(found: Diagnosis) -> tuple[Evidence, ...]:
    return (Evidence(name="standstill", value=found.still.reason),) if found.still is not None else ()


def _step(capsule: Capsule, found: Diagnosis, *rows: int) -> int | None:
    """The earliest step of the calls; a rank that skips one is a step ahead."""
    calls = found.calls
    records = [calls.record(int(calls.table.record[row])) for row in rows if row >= 0 and calls.table.record[row] >= 0]
    steps = [each["step"] for each in records if type(each.get("step")) is int]
    return min(steps) if steps else last_step(capsule)
