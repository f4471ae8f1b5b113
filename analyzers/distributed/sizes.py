"""What Gloo says when calls of two sizes meet, and what that tells of the rank that it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..attempts import current_events
from ..finding import Evidence, Finding, Where
from .words import last_step, named_ranks

if TYPE_CHECKING:
    from ...capsules import Capsule


def size_events(capsule: Capsule) -> list[dict[str, Any]]:
    """The events by which a rank says that more bytes came than its call awaits."""
    events = [each for each in current_events(capsule) if each.get("kind") == "collective_mismatch"]
    return [each for each in events if type(each.get("received")) is int and type(each.get("awaited")) is int]


def size_finding(capsule: Capsule) -> Finding | None:
    """Two ranks met in calls of different sizes, and nothing tells which of them is wrong; None without such words."""
    events = size_events(capsule)
    if not events:
        return None
    received, awaited = events[0]["received"], events[0]["awaited"]
    ended = sorted({each["rank"] for each in events if each.get("told") is not False})
    who = named_ranks(ended).capitalize() if ended else "A rank"
    note = "the receiver: Gloo ends it, whichever side left the path"
    return Finding(
        title="Ranks made calls of different sizes",
        summary=f"{who} awaited {awaited:,} bytes in a call and a peer sent {received:,}: one of them was in another "
        "call than the other. Gloo ends the rank that receives, which is often innocent; nothing here says "
        "who left the path.",
        confidence="undetermined",
        where=Where(step=last_step(capsule, events[0])),
        evidence=(
            Evidence(name="bytes_received", value=received, expected=awaited, unit="B"),
            *((Evidence(name="ended_ranks", value=ended, note=note),) if ended else ()),
        ),
        cause="one rank skipped a call, made one more, or made one of another size",
        next=(
            "run again with TORCH_DISTRIBUTED_DEBUG=DETAIL: it compares the calls of all ranks before they are made",
            "record the calls of all ranks (Recorder with hang_after, or the flight recorder): the majority decides",
            "look for branches around collectives that depend on the rank or on data",
        ),
        fix=("let every rank make the same calls, in one order and of one size",),
    )
