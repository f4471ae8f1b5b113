"""What the evidence on collectives does not cover."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding
from ..registry import rule
from .collectives import Calls
from .diagnosis import diagnosis
from .reading import calls
from .words import named_ranks

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "distributed/coverage",
    stage="distributed",
    kind="hygiene",
    severity="info",
    needs=("records.collectives|records.ranks.last_seq|records.events.last_enqueued",),
)
def coverage(capsule: Capsule) -> Iterator[Finding]:
    """Ranks, dumps or calls are absent, and what can then not be said.

    What it checks:
        The ranks of the job and of each group beside those of which there is evidence on collectives; and from where on
        the calls of each rank are on record.

    Why it matters:
        A rank without a dump is the first suspect of a hang, for a process that was killed leaves none; and what a ring
        has overwritten can neither accuse nor acquit.

    How it decides:
        Lists the ranks of the default group, of any group and of the declared world of which nothing speaks; says so
        where watchdogs gave up and nothing states how many ranks there are, and where what a rank left is older than
        what the others did, or could not be read. Info.

    Looks like it but is not:
        A rank whose dump has no entries: that is evidence that it waits for nothing.

    What to try next:
        Collect the missing dumps; set TORCH_FR_BUFFER_SIZE (TORCH_NCCL_TRACE_BUFFER_SIZE before torch 2.9) to 2000.

    Fix:
        Let all ranks write their dump to storage that outlives the node.
    """
    known = calls(capsule)
    expected = set(range(known.world)).union(*(group.ranks for group in known.groups))
    absent = sorted(expected - known.spoke)
    found = diagnosis(capsule)
    named = {rank for each in found.missing for rank in each.ranks}.union(*(each.ranks for each in found.partings))
    if old := sorted(found.state.outdated - named - known.broken):
        yield _outdated(known, old)
    if broken := sorted(known.broken - named - set(found.state.victims)):
        yield _broken(broken)
    if not absent and known.timeouts and not all(group.whole for group in known.groups):
        yield _untold(known)
    if not known.spoke or not absent:
        return
    groups = [group for group in known.groups if set(group.ranks) & set(absent)]
    dark = [group for group in groups if not set(group.ranks) & known.spoke]
    said = "no rank of theirs can be judged, nor can it be said that it is at fault or not"
    yield Finding(
        title=f"No evidence on the collectives of {named_ranks(absent)}",
        summary=f"No evidence of {named_ranks(absent)}: neither guilty nor cleared; "
        f"{len(known.spoke)} of {len(expected)} ranks left evidence on collectives.",
        confidence="confirmed",
        evidence=(
            Evidence(name="ranks_with_evidence", value=len(known.spoke), expected=len(expected)),
            Evidence(name="silent_ranks", value=absent[:64], expected=[], note="no evidence"),
            *((Evidence(name="silent_groups", value=[str(each) for each in dark[:16]], note=said),) if dark else ()),
            *_begin(known),
        ),
        cause="the dumps were not written, not collected, or the processes were killed",
        next=(f"look for the dumps and the exit status of {named_ranks(absent)}",),
        fix=("write the dumps of all ranks to storage that outlives the node",),
    )


def _outdated(known: Calls, old: list[int]) -> Finding:
    """Evidence of ranks that lack what the others have left: it was written earlier, and says nothing of the hang."""
    who, one = named_ranks(old), len(old) == 1
    dumps = ("the dump of" if one else "the dumps of") if known.dumped & set(old) else "the record of"
    newest = max(known.written.values(), default=0.0)
    ages = [newest - known.written[rank] for rank in old if rank in known.written]
    recorded = not known.dumped & set(old)  # by our own recorder, of one attempt; rows are written late
    compared = "shorter" if recorded else "older"
    since = "the last rows are lost" if recorded else "from an earlier moment, or an earlier attempt"
    return Finding(
        title=f"{dumps.capitalize()} {who} {'is' if one or 'record' in dumps else 'are'} {compared} than the others'",
        summary=f"{dumps.capitalize()} {who} {'lacks' if one or 'record' in dumps else 'lack'} calls that the other "
        f"ranks have left: {since}, and set aside. {who.capitalize()} "
        f"{'is' if one else 'are'} neither guilty nor cleared.",
        confidence="confirmed",
        evidence=(
            Evidence(name="outdated_ranks", value=old[:64], expected=[], note="set aside"),
            *((Evidence(name="older_by", value=round(max(ages), 1), expected=0, unit="s"),) if ages else ()),
        ),
        cause="a process that ends without a word leaves its last rows unwritten"
        if recorded
        else "files of several moments or attempts lie side by side",
        next=(f"see how {who} ended" if recorded else f"get what {who} left at the time of the other dumps",),
        fix=()
        if recorded
        else ("empty the folder of the dumps before each start, or give each attempt one of its own",),
    )


def _broken(ranks: list[int]) -> Finding:
    """Dumps of which entries could not be read, so that nothing tells how far their ranks came."""
    who = named_ranks(ranks)
    dumps = f"the dump{'s' if len(ranks) > 1 else ''} of {who}"
    return Finding(
        title=f"Entries of {dumps} could not be read",
        summary=f"Entries of {dumps} could not be read: how far {who} came is not on record, and "
        f"{'it is' if len(ranks) == 1 else 'they are'} neither guilty nor cleared.",
        confidence="confirmed",
        evidence=(Evidence(name="unreadable_ranks", value=ranks[:64], expected=[], note="entries lost"),),
        cause="the files were damaged, or written by a recorder of another kind",
        next=(f"get the dumps of {who} again, or their logs",),
    )


def _untold(known: Calls) -> Finding:
    """Nothing states which ranks there are."""
    return Finding(
        title="How many ranks the job has is not on record",
        summary=f"Watchdogs of {named_ranks(known.spoke)} gave up, and nothing here says how many ranks there are: one "
        "of which there is no word at all is neither guilty nor cleared.",
        confidence="confirmed",
        evidence=(Evidence(name="ranks_with_evidence", value=len(known.spoke), note="of an unknown number"),),
        cause="no line states the number of ranks, and no dump lists the members of the group",
        next=("log the number of ranks at the start, or write flight-recorder dumps: they list the members",),
    )


def _begin(known: Calls) -> tuple[Evidence, ...]:
    """From where on the calls of the largest group are on record, where not from the first."""
    if not len(known.table):
        return ()
    groups, counts = np.unique(known.table.group, return_counts=True)
    group = int(groups[counts.argmax()])
    first = int(known.table.seq[known.table.group == group].min())
    if first <= 1:
        return ()
    note = f"of {known.groups[group]}: calls before are not on record"
    return (Evidence(name="first_on_record", value=first, expected=1, note=note),)
