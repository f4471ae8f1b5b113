"""What TORCH_DISTRIBUTED_DEBUG=DETAIL prints when two ranks are about to make different calls."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ..finding import Evidence, Finding, Where
from . import thresholds as T
from .diagnosis import Diagnosis
from .signatures import Signature, agreement, difference, dtype_name, liberties
from .words import last_step, named_ranks

if TYPE_CHECKING:
    from ...capsules import Capsule


def fingerprint_finding(capsule: Capsule, found: Diagnosis) -> Finding | None:
    """The mismatch that the fingerprints of a log tell, None where none differ in what must agree."""
    seen: dict[int, Signature] = {}
    first: dict[str, Any] | None = None
    for event in found.calls.mismatches:
        own, other = _print(event, ""), _print(event, "other_")
        if own is None:
            continue
        if first is None:
            first = event
        if event.get("seq") != first.get("seq"):
            continue
        seen[event["rank"]] = own
        if other is not None and type(event.get("other_rank")) is int:
            seen.setdefault(event["other_rank"], other)
    if first is None:
        return None
    rules = liberties(seen.values())
    agreed = {rank: agreement(each, rules) for rank, each in seen.items()}
    votes = Counter(agreed.values())
    if len(votes) == 1 and len(seen) > 1:
        return None
    (most, count), *_ = votes.most_common(1)
    decided = len(seen) >= T.DECIDING_RANKS and 2 * count > len(seen)
    deviating = sorted(rank for rank in seen if agreed[rank] != most) if decided else sorted(seen)
    others = sorted(rank for rank in seen if agreed[rank] == most) if decided else []
    kinds = list(votes)
    what = (
        {"op": "operation", "dtype": "dtype", "shape": "size"}[difference(kinds[0], kinds[1])] if kinds[1:] else "call"
    )
    calls = "; ".join(f"rank {rank}: {each}" for rank, each in sorted(seen.items())[:4])
    number = f"collective {first['seq']:,}" if type(first.get("seq")) is int else "one collective"
    return Finding(
        title=f"{named_ranks(deviating).capitalize()} {'differs' if len(deviating) == 1 else 'differ'} in {what} at {number}",
        summary=f"The fingerprints of {number} differ in {what}: {calls}"
        + ("." if decided else "; of two ranks nothing says which is right."),
        confidence="confirmed" if decided else "undetermined",
        where=Where(step=last_step(capsule, first), rank=deviating[0] if decided else None),
        evidence=(
            *(
                Evidence(
                    name=f"rank_{rank}_call", value=str(each), expected=None if not decided else str(seen[others[0]])
                )
                for rank, each in sorted(seen.items())[:8]
            ),
            Evidence(name="deviating_ranks", value=deviating, note="" if decided else "not decided"),
            *_unused(capsule),
        ),
        cause=f"{named_ranks(deviating)} built another graph, or took another branch, than the others",
        next=(
            "compare the batches of these ranks: a rank without images, or of one kind of rows only, leaves parts of the "
            "model without gradient, and buckets of another size",
            "record the calls of all ranks (flight recorder) to let the majority decide",
        ),
        fix=("let every rank touch every module in every step, with 0 times a dummy output where it has no rows",),
    )


def _unused(capsule: Capsule) -> tuple[Evidence, ...]:
    named = [each for each in capsule.records("events") if each.get("kind") == "unused_parameters"]
    return tuple(
        Evidence(
            name=f"rank_{each['rank']}_unused_parameters",
            value=len(each["missing"]) if isinstance(each.get("missing"), list) else None,
            note=", ".join(map(str, each["missing"][:3])) if isinstance(each.get("missing"), list) else "",
        )
        for each in named[:2]
    )


def _print(event: dict[str, Any], side: str) -> Signature | None:
    op, dtype, shapes = (event.get(f"{side}{name}") for name in ("op", "dtype", "shapes"))
    if not isinstance(op, str):
        return None
    sound = isinstance(shapes, list) and all(
        isinstance(each, list) and all(type(size) is int for size in each) for each in shapes
    )
    return Signature(
        op, dtype_name(dtype) if isinstance(dtype, str) else None, tuple(map(tuple, shapes)) if sound else (), ()
    )
