"""One operation of a process group, and the record that is written of it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from .calls import MOST_FRAMES, Call, is_inside
from .flight import Group, dtypes_of, op_of

Row = dict[str, Any]


@dataclass(eq=False)
class Operation:
    """What is known of it between its call and its record.

    Attributes:
        name: of the group in the whole job.
        group: None where this rank has destroyed it before anybody looked.
        created: Unix seconds.
        entry: of the flight recorder, as last read; None where it does not follow the group.
        call: as Python saw it; None where C++ made it.
        seq: its number in the group.
        order: its number on this rank.
        step: the window it belongs to.
        written: whether the stream has a record of it already.
    """

    name: str
    group: Group | None
    created: float
    entry: dict[str, Any] | None
    call: Call | None
    seq: int | None = None
    order: int = 0
    step: int | None = None
    written: bool = False

    @property
    def p2p(self) -> bool:
        """Whether it is between two ranks only."""
        return bool(self.entry["is_p2p"]) if self.entry is not None else self.call is not None and self.call.p2p

    @property
    def completed(self) -> bool:
        """Whether it is over, well or not; torch's own state stays behind where nothing asks for it."""
        entry, call = self.entry, self.call
        if call is not None and call.returned is not None and call.group.gloo and not call.failed:
            return True  # Gloo's threads may tell torch a moment later
        if entry is not None:
            return bool(entry.get("retired")) or entry.get("state") == "completed"
        return call is None or call.returned is not None

    @property
    def over(self) -> bool:
        """Whether nothing more will become known of it."""
        call = self.call
        if call is not None and call.failed:
            return True
        return self.completed and (call is None or call.settled)

    def row(self, failed: int | None) -> Row:
        """The record.

        Args:
            failed: number of the first collective of the group that failed; torch counts those as completed.
        """
        call, group, main = self.call, self.group, threading.main_thread().ident
        doubtful = failed is not None and self.seq is not None and self.seq >= failed and not self.p2p
        row: Row = {"order": self.order, "group": self.name, "t_created": self.created}
        row["state"] = "completed" if self.completed and not doubtful else "started"
        if group is not None:
            row["group_ranks"] = sorted(group.ranks)
            row |= {"group_desc": group.description} if group.description else {}
            row |= {"default_timeout_s": group.default_timeout} if group.default_timeout is not None else {}
        row |= {"seq": self.seq} if self.seq is not None else {}
        row |= {"step": self.step} if self.step is not None else {}
        row |= {"p2p": True} if self.p2p else {}
        if self.entry is not None:
            row |= _of_entry(self.entry, group)
            if row["state"] == "started" and call is None:
                row["state"] = self.entry["state"]
            if call is None and str(self.entry.get("thread_id", main)) != str(main):
                row["thread"] = str(self.entry["thread_id"])
        elif call is not None:
            row |= _of_call(call)
        if call is not None:
            about = {"async_op": call.async_op, "waited": call.waited, "buffer_reused_before_wait": call.reused}
            row |= {name: value for name, value in about.items() if value is not None}
            if call.failed:
                row["state"] = "started"
            elif call.returned is not None and (group is None or group.gloo):  # streams go on after the call returned
                row.setdefault("t_completed", call.returned)
            if call.thread != main:
                row["thread"] = call.thread
        return row


def _of_entry(entry: dict[str, Any], group: Group | None) -> Row:
    inputs, outputs = dtypes_of(entry["input_dtypes"]), dtypes_of(entry["output_dtypes"])
    row: Row = {
        "op": op_of(entry),
        "shapes_in": entry["input_sizes"],
        "shapes_out": entry["output_sizes"],
        "timeout_s": entry["timeout_ms"] / 1e3,
        "frames": [
            {"name": frame["name"], "file": frame["filename"], "line": frame["line"]}
            for frame in entry.get("frames") or []
            if not is_inside(frame["filename"])
        ][:MOST_FRAMES],
    }
    row |= {"dtype": (inputs or outputs)[0]} if inputs or outputs else {}
    row |= {"dtypes_out": outputs} if outputs and outputs != inputs else {}
    for name, field in (("t_started", "time_discovered_started_ns"), ("t_completed", "time_discovered_completed_ns")):
        row |= {name: entry[field] / 1e9} if entry.get(field) else {}
    peer = _peer(entry, group) if entry["is_p2p"] else None
    return row | ({"peer": peer} if peer is not None else {})


def _peer(entry: dict[str, Any], group: Group | None) -> int | None:
    """The other side of "nccl:send 0->1", whose numbers are ranks inside the group, or of "nccl:recv 0<-1"."""
    words = str(entry["profiling_name"]).partition(" ")[2]
    first, _, second = words.replace("<-", "->").partition("->")
    inside = second if op_of(entry) == "send" or "<-" in words else first
    return group.global_rank(int(inside)) if group is not None and inside.strip().isdecimal() else None


def _of_call(call: Call) -> Row:
    row: Row = {
        "op": call.shown or call.op,
        "shapes_in": call.shapes_in or [],
        "shapes_out": call.shapes_out or [],
        "frames": call.frames or [],
    }
    row |= {"dtype": call.dtype} if call.dtype else {}
    row |= {"timeout_s": call.group.timeout} if call.group.timeout is not None else {}
    return row | ({"peer": call.peer} if call.peer is not None else {})
