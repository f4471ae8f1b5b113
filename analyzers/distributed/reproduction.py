"""The smallest reproduction of a hang or mismatch: what two ranks call, described and not run.

Pure description: ``app/commands/shrink.py`` makes a two-rank script of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .alignment import Edit, Parting
from .diagnosis import Circle, Diagnosis, Missing, diagnosis
from .fingerprints import fingerprints
from .mismatch import conditional, conditional_end
from .pairs import stuck_pairs
from .signatures import Signature, family

if TYPE_CHECKING:
    from ...capsules import Capsule

ReproductionKind = Literal["missing", "extra", "shape", "dtype", "op", "order"]


@dataclass(frozen=True)
class Call:
    """One collective as a rank makes it; ``group`` is the job's name of the process group.

    ``op`` is the bare lower-case name (``all_reduce``), ``dtype`` torch's name without prefix (``float32``) or None
    where it is not on record, ``shapes`` those of the inputs (of the outputs where an op has no input on every rank).
    """

    op: str
    dtype: str | None
    shapes: tuple[tuple[int, ...], ...]
    group: str


@dataclass(frozen=True)
class Reproduction:
    """Two ranks that fail as the job did.

    Args:
        kind: what rank B does otherwise: it misses a call, makes one more, calls with another shape, dtype or op, or
            makes the calls of two groups in the other order.
        a: calls of a rank that does as most do, in order.
        b: calls of the rank that deviates; empty where it misses the only call.
        ranks: the ranks of the job that A and B stand for.
        frame: call site in the job (``file:line in function``), None where no frames were recorded.
        rule: id of the rule whose finding this reproduces.
    """

    kind: ReproductionKind
    a: tuple[Call, ...]
    b: tuple[Call, ...]
    ranks: tuple[int, int]
    frame: str | None
    rule: str


#: What rank B does otherwise, by the edit that leads from the common sequence to its own.
_KINDS: dict[Edit, ReproductionKind] = {
    "op": "op",
    "dtype": "dtype",
    "shape": "shape",
    "skipped": "missing",
    "added": "extra",
    "exchanged": "order",
}


def reproduction(capsule: Capsule) -> Reproduction | None:
    """The smallest reproduction of the capsule's first distributed fault, or None where no call is at fault.

    Of two sides of which nothing says which is right, B is the smaller one, or else that of the later rank.
    """
    found = diagnosis(capsule)
    for parting in found.partings:
        return _of_parting(found, parting)
    for added in found.added:
        return _of_added(found, added)
    for circle in found.circles:
        if (made := _of_circle(found, circle)) is not None:
            return made
    for missing in found.missing:
        if missing.ranks and not missing.wait.direct and (made := _of_missing(found, missing)) is not None:
            return made
    return _of_fingerprints(capsule, found)


def among_sends(found: Diagnosis) -> bool:
    """Whether what is at fault is a send or a receive, of which no reproduction is made."""
    waits = [each.wait for each in (*found.missing, *found.added)]
    waits += [wait for circle in found.circles for wait, _ in circle.classes]
    return any(wait.direct for wait in waits) or bool(stuck_pairs(found))


def _call(found: Diagnosis, row: int) -> Call:
    group = found.calls.groups[int(found.calls.table.group[row])]
    return _as_call(found.calls.call(row), group.name)


def _as_call(call: Signature, group: str) -> Call:
    call = call.parts[0] if call.parts else call
    return Call(family(call.op), call.dtype, call.shapes, group)


def _of_parting(found: Diagnosis, parting: Parting) -> Reproduction:
    common = (_call(found, parting.common),) if parting.common >= 0 else ()
    theirs = (_call(found, parting.theirs),) if parting.theirs >= 0 else ()
    kind = _KINDS[parting.edit]
    a, b = common, theirs
    if kind == "missing":
        b = ()
    elif kind == "extra":
        a = ()
    elif kind == "order" and common and theirs:
        a, b = (*common, *theirs), (*theirs, *common)
    row = parting.common if kind == "missing" else parting.theirs
    rule = "distributed/rank-conditional" if conditional(found, parting) else "distributed/collective-mismatch"
    ranks = (parting.others[0], parting.ranks[0])
    return Reproduction(kind, a, b, ranks, found.calls.frame(row) if row >= 0 else None, rule)


def _of_added(found: Diagnosis, added: Missing) -> Reproduction | None:
    wait = added.wait
    if wait.row < 0:
        return None
    rule = "distributed/rank-conditional" if conditional_end(found, added) else "distributed/collective-mismatch"
    ranks = (wait.absent[0], wait.waiting[0])
    return Reproduction("extra", (), (_call(found, wait.row),), ranks, found.calls.frame(wait.row), rule)


def _of_circle(found: Diagnosis, circle: Circle) -> Reproduction | None:
    if len(circle.classes) < 2:
        return None
    sides = [(wait, ranks) for wait, ranks in circle.classes if not wait.direct and wait.row >= 0][:2]
    if len(sides) < 2:
        return None
    (one, ranks), (other, theirs) = sides
    if ranks[0] in circle.deviating:
        one, ranks, other, theirs = other, theirs, one, ranks
    first, second = _call(found, one.row), _call(found, other.row)
    frame = found.calls.frame(other.row)
    return Reproduction(
        "order", (first, second), (second, first), (ranks[0], theirs[0]), frame, "distributed/group-order"
    )


def _of_missing(found: Diagnosis, missing: Missing) -> Reproduction | None:
    row = missing.skipped if missing.skipped >= 0 else missing.wait.row
    if row < 0 or not missing.wait.waiting:
        return None
    ranks = (missing.wait.waiting[0], missing.ranks[0])
    return Reproduction("missing", (_call(found, row),), (), ranks, found.calls.frame(row), "distributed/missing-rank")


def _of_fingerprints(capsule: Capsule, found: Diagnosis) -> Reproduction | None:
    seen = fingerprints(found)
    if seen is None or not seen.differ:
        return None
    deviating = seen.deviating[0] if seen.decided else max(seen.calls)
    other = next(rank for rank in sorted(seen.calls) if seen.agreed[rank] != seen.agreed[deviating])
    a, b = (_as_call(seen.calls[each], "0") for each in (other, deviating))
    return Reproduction(seen.differ, (a,), (b,), (other, deviating), None, "distributed/collective-mismatch")
