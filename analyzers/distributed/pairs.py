"""Sends and receives that both sides have posted and that do not end: of two sizes, or held by what lies between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Where
from .diagnosis import Diagnosis
from .signatures import Signature, same_count
from .waiting import oldest_in_flight
from .words import at_site, call_words, last_step, named_ranks

if TYPE_CHECKING:
    from ...capsules import Capsule


@dataclass(frozen=True)
class Pair:
    """Rows of a send and of its receive among the sends, and their ranks."""

    sent: int
    received: int
    source: int
    target: int


def stuck_pairs(found: Diagnosis) -> tuple[Pair, ...]:
    """Pairs of one number that are the oldest call in flight on both sides, in a job that stands still."""
    calls, table = found.calls, found.calls.direct
    if found.still is None or not found.still.sure:
        return ()
    heads = oldest_in_flight(calls)
    sides: dict[tuple[int, int, int, int], dict[bool, int]] = {}
    for row in np.flatnonzero(table.pending & (table.peer >= 0)).tolist():
        rank, peer = int(table.rank[row]), int(table.peer[row])
        sends = calls.signatures[int(table.signature[row])].family == "send"
        ends = (rank, peer) if sends else (peer, rank)
        if heads.get(rank) == (True, row):
            sides.setdefault((int(table.group[row]), *ends, int(table.seq[row])), {})[sends] = row
    return tuple(
        Pair(each[True], each[False], source, target)
        for (_, source, target, _), each in sides.items()
        if len(each) == 2
    )


def held_by_pairs(found: Diagnosis) -> bool:
    """Whether all that others wait for stands in such a pair, so that the pair is what holds the job."""
    inside = {rank for pair in stuck_pairs(found) for rank in (pair.source, pair.target)}
    apart = found.partings or found.circles or found.added
    return bool(inside) and not apart and all(each.ranks and inside.issuperset(each.ranks) for each in found.missing)


def pair_of_two_sizes(capsule: Capsule, found: Diagnosis) -> Finding | None:
    """The first pair whose sides move different data; None where there is none."""
    for pair in stuck_pairs(found):
        sent, received = (_call(found, row) for row in (pair.sent, pair.received))
        if _differ(sent, received):
            return _of_two_sizes(capsule, found, pair, sent, received)
    return None


def pair_that_does_not_end(capsule: Capsule, found: Diagnosis) -> Finding | None:
    """A pair of one size that does not end though both sides are posted; None where there is none."""
    pair = next(iter(stuck_pairs(found)), None)
    if pair is None or not held_by_pairs(found) or found.still is None or pair_of_two_sizes(capsule, found) is not None:
        return None
    sides = _call(found, pair.sent), _call(found, pair.received)
    equal = " with equal sizes" if all(each.dtype and each.shapes for each in sides) else ""
    call, site = call_words(found.calls, pair.sent, direct=True), at_site(found.calls, pair.sent, direct=True)
    who = named_ranks((pair.source, pair.target))
    held = sorted(set(found.state.victims) - {pair.source, pair.target})
    return Finding(
        title=f"Both sides are in the {call} and it does not end",
        summary=f"{who.capitalize()} posted both sides of the {call}{site}{equal}, and "
        f"{found.still.reason}: no rank is missing, so network, device or driver are left.",
        confidence="undetermined",
        where=Where(step=last_step(capsule), order=int(found.calls.direct.seq[pair.sent])),
        evidence=(
            Evidence(name="waiting_ranks", value=[pair.source, pair.target], note="both sides are posted"),
            *((Evidence(name="downstream_victims", value=held, note="wait for these two"),) if held else ()),
            Evidence(name="standstill", value=found.still.reason),
        ),
        next=(
            "look for NCCL_DEBUG=INFO lines, Xid errors in the kernel log, link errors (nvidia-smi nvlink -e, ibstat)",
            f"run nccl-tests (sendrecv) between the devices of {who}",
        ),
    )


def _of_two_sizes(capsule: Capsule, found: Diagnosis, pair: Pair, sent: Signature, received: Signature) -> Finding:
    calls, seq = found.calls, int(found.calls.direct.seq[pair.sent])
    here, there = (at_site(calls, row, direct=True) for row in (pair.sent, pair.received))
    return Finding(
        title=f"Rank {pair.source} sends another size than rank {pair.target} awaits",
        summary=f"Rank {pair.source} sends {_data(sent)}{here} and rank {pair.target} awaits {_data(received)}{there}, "
        f"call {seq:,} between them; of two ranks nothing says which is right.",
        confidence="undetermined",
        where=Where(step=last_step(capsule), order=seq),
        evidence=(
            Evidence(name=f"sent by rank {pair.source}", value=str(sent), expected=str(received)),
            Evidence(name=f"awaited by rank {pair.target}", value=str(received), expected=str(sent)),
        ),
        cause="the two ranks hold different shapes of one message: batch, sequence length or micro-batch",
        next=("print the shape on both ranks before the call: which differs from the configuration",),
        fix=("give both sides one shape: pad to a common size, or exchange the shapes before the data",),
    )


def _call(found: Diagnosis, row: int) -> Signature:
    return found.calls.signatures[int(found.calls.direct.signature[row])]


def _data(call: Signature) -> str:
    return str(call).partition(" ")[2] or str(call)


def _differ(sent: Signature, received: Signature) -> bool:
    """Whether dtype or number of elements differ, of what both sides have on record."""
    dtypes = {each.dtype for each in (sent, received) if each.dtype}
    return len(dtypes) > 1 or (bool(sent.shapes and received.shapes) and not same_count(sent, received))
