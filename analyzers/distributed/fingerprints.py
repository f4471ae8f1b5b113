"""What TORCH_DISTRIBUTED_DEBUG=DETAIL prints when two ranks are about to make different calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..finding import Evidence, Finding, Where
from . import thresholds as T
from .diagnosis import Diagnosis
from .signatures import Agreement, Difference, Shapes, Signature, agreement, difference, dtype_name, liberties
from .words import last_step, named_ranks

if TYPE_CHECKING:
    from ...capsules import Capsule


@dataclass(frozen=True)
class Fingerprints:
    """The calls that ranks were about to make under one number, as one event after another names them.

    ``differ`` is the first respect in which two of them differ, None where all agree; ``deviating`` the minority where
    three ranks or more ``decided`` it, else all of them.
    """

    event: dict[str, Any]
    calls: Mapping[int, Signature]
    agreed: Mapping[int, Agreement]
    differ: Difference | None
    deviating: tuple[int, ...]
    decided: bool


def fingerprints(found: Diagnosis) -> Fingerprints | None:
    """The first number at which fingerprints differ, None where none are on record."""
    seen: dict[int, Signature] = {}
    first: dict[str, Any] | None = None
    for event in found.calls.mismatches:
        own, other = _print(event, ""), _print(event, "other_")
        if own is None:
            continue
        first = first or event
        if event.get("seq") == first.get("seq"):
            seen[event["rank"]] = own
            if other is not None and type(event.get("other_rank")) is int:
                seen.setdefault(event["other_rank"], other)
    if first is None:
        return None
    rules = liberties(seen.values())
    agreed = {rank: agreement(each, rules) for rank, each in seen.items()}
    votes = Counter(agreed.values())
    most, count = votes.most_common(1)[0]
    decided = len(seen) >= T.DECIDING_RANKS and 2 * count > len(seen)
    kinds = list(votes)
    return Fingerprints(
        event=first,
        calls=seen,
        agreed=agreed,
        differ=difference(kinds[0], kinds[1]) if len(kinds) > 1 else None,
        deviating=tuple(sorted(rank for rank in seen if not decided or agreed[rank] != most)),
        decided=decided,
    )


def fingerprint_finding(capsule: Capsule, found: Diagnosis) -> Finding | None:
    """The mismatch that the fingerprints of a log tell, None where none differ in what must agree."""
    seen = fingerprints(found)
    if seen is None or (seen.differ is None and len(seen.calls) > 1):
        return None
    what = {"op": "operation", "dtype": "dtype", "shape": "size", None: "call"}[seen.differ]
    listed = "; ".join(f"rank {rank}: {each}" for rank, each in sorted(seen.calls.items())[:4])
    number = f"collective {seen.event['seq']:,}" if type(seen.event.get("seq")) is int else "one collective"
    who = named_ranks(seen.deviating)
    normal = next((str(call) for rank, call in seen.calls.items() if rank not in seen.deviating), None)
    one = "" if len(seen.deviating) > 1 else "s"
    return Finding(
        title=f"{who.capitalize()} differ{one} in {what} at {number}",
        summary=f"The fingerprints of {number} differ in {what}: {listed}"
        + ("." if seen.decided else "; nothing says which is right."),
        confidence="confirmed" if seen.decided else "undetermined",
        where=Where(step=last_step(capsule, seen.event), rank=min(seen.deviating) if seen.decided else None),
        evidence=(
            *(
                Evidence(name=f"rank_{rank}_call", value=str(each), expected=normal)
                for rank, each in sorted(seen.calls.items())[:8]
            ),
            Evidence(name="deviating_ranks", value=list(seen.deviating), note="" if seen.decided else "not decided"),
            *_unused(capsule),
        ),
        cause=f"{who} built another graph, or took another branch, than the others",
        next=(
            "compare the batches of these ranks: a rank without images, or with rows of one kind only, leaves parts of "
            "the model without gradient, and buckets of another size",
            "record the calls of all ranks (flight recorder) to let the majority decide",
        ),
        fix=("let every rank touch every module in every step, with 0 times a dummy output where it has no rows",),
    )


def _unused(capsule: Capsule) -> tuple[Evidence, ...]:
    named = [each for each in capsule.records("events") if each.get("kind") == "unused_parameters"]
    return tuple(
        Evidence(
            name="unused_parameters",
            value=len(each["missing"]) if isinstance(each.get("missing"), list) else None,
            note=f"rank {each['rank']}"
            + (f": {', '.join(map(str, each['missing'][:3]))}" if isinstance(each.get("missing"), list) else ""),
        )
        for each in named[:2]
    )


def _print(event: dict[str, Any], side: str) -> Signature | None:
    op, dtype, shapes = (event.get(f"{side}{name}") for name in ("op", "dtype", "shapes"))
    if not isinstance(op, str):
        return None
    return Signature(op, dtype_name(dtype) if isinstance(dtype, str) else None, _shapes(shapes), ())


def _shapes(value: Any) -> Shapes:
    if not isinstance(value, list):
        return ()
    sizes = [tuple(each) for each in value if isinstance(each, list) and all(type(size) is int for size in each)]
    return tuple(sizes) if len(sizes) == len(value) else ()
