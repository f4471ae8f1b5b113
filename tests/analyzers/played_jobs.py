"""Jobs of several ranks, played: each rank makes its calls, a call ends when all members are in it and agree.

What is left when nothing moves any more is what a job that hangs leaves. It becomes a capsule, or flight-recorder dumps
as torch 2.10 writes them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmconsole.capsules import CapsuleWriter

T0 = 1_700_000_000.0


@dataclass(frozen=True)
class C:
    """One call: operation, group, line of train.py, dtype and shape; ``peer`` for a send or a receive."""

    op: str = "all_reduce"
    group: str = "0"
    line: int = 10
    dtype: str = "float32"
    shape: tuple[int, ...] = (8, 4)
    outputs: tuple[tuple[int, ...], ...] | None = None
    peer: int | None = None

    @property
    def agreed(self) -> tuple[Any, ...]:
        return (self.op, self.dtype, None if self.op == "all_to_all" else self.shape)


@dataclass
class Played:
    """What each rank did: records as a capsule holds them, and how far it came in each group."""

    groups: Mapping[str, tuple[str, tuple[int, ...]]]
    calls: dict[int, list[dict[str, Any]]] = field(default_factory=dict[int, list[dict[str, Any]]])

    def numbers(self, rank: int) -> tuple[dict[str, int], dict[str, int]]:
        """(last enqueued, last completed) by group."""
        enqueued = {name: 0 for name, (_, ranks) in self.groups.items() if rank in ranks}
        completed = dict(enqueued)
        for each in self.calls[rank]:
            enqueued[each["group"]] = max(enqueued[each["group"]], each["seq"])
            if each.get("state") == "completed":
                completed[each["group"]] = max(completed[each["group"]], each["seq"])
        return enqueued, completed

    def write(self, w: CapsuleWriter, *, ring: int = 0, unfinished: bool = False, frames: bool = True) -> None:
        """The capsule of its dumps; ``ring``: only so many newest calls; ``unfinished``: only those in flight."""
        for rank, made in self.calls.items():
            rows = [each for each in made[-ring:] if not unfinished or each["state"] != "completed"]
            w.records("collectives", rows if frames else [_bare(each) for each in rows], rank=rank)
            enqueued, completed = self.numbers(rank)
            w.record("ranks", {"dump": True, "last_seq": enqueued, "last_completed": completed}, rank=rank)

    def dump(self, folder: Path) -> None:
        """One JSON dump a rank, ``nccl_trace_rank_N``."""
        for rank, made in self.calls.items():
            enqueued, completed = self.numbers(rank)
            config = {
                name: {"name": name, "desc": text, "ranks": str(list(ranks))}
                for name, (text, ranks) in self.groups.items()
                if rank in ranks
            }
            status = {
                str(number): {
                    "last_enqueued_collective": enqueued[name],
                    "last_started_collective": -1,
                    "last_completed_collective": completed[name],
                }
                for number, name in enumerate(config)
            }
            entries = [self._entry(each, list(config).index(each["group"])) for each in made]
            whole = {"version": "2.10", "pg_config": config, "pg_status": status, "entries": entries}
            (folder / f"nccl_trace_rank_{rank}").write_text(json.dumps(whole))

    def _entry(self, each: dict[str, Any], group: int) -> dict[str, Any]:
        done = each["state"] == "completed"
        dtypes = {"float32": "Float", "bfloat16": "BFloat16", "float16": "Half"}
        return {
            "record_id": each["order"],
            "pg_id": group,
            "process_group": [each["group"], self.groups[each["group"]][0]],
            "collective_seq_id": each["seq"],
            "p2p_seq_id": 0,
            "op_id": each["order"] + 1,
            "profiling_name": f"nccl:{each['op']}",
            "time_created_ns": int(each["t_created"] * 1e9),
            "input_sizes": each["shapes_in"],
            "input_dtypes": [dtypes[each["dtype"]]],
            "output_sizes": each["shapes_out"],
            "output_dtypes": [dtypes[each["dtype"]]],
            "state": each["state"],
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": int(each["t_completed"] * 1e9) if done else None,
            "retired": done,
            "timeout_ms": int(each["timeout_s"] * 1000),
            "is_p2p": False,
            "frames": [{"name": f["name"], "filename": f["file"], "line": f["line"]} for f in each["frames"]],
        }


def _bare(each: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in each.items() if name != "frames"}


def play(
    programs: Mapping[int, Sequence[C]],
    groups: Mapping[str, tuple[str, Sequence[int]]] | None = None,
    *,
    depth: int = 1,
    stuck: Callable[[int, int], bool] = lambda rank, number: False,
    timeout: float = 600.0,
) -> Played:
    """Run programs until nothing moves.

    Args:
        programs: the calls of each rank, in order.
        groups: name → (purpose, ranks); the default group of all ranks otherwise.
        depth: calls that a rank may have in flight.
        stuck: whether a rank never makes its call of that number (and what follows).
        timeout: of all calls, seconds.
    """
    named = {name: (text, tuple(own)) for name, (text, own) in (groups or {}).items()}
    named.setdefault("0", ("default_pg", tuple(sorted(programs))))
    played = Played(named, {rank: [] for rank in programs})
    flying: dict[int, list[tuple[C, dict[str, Any]]]] = {rank: [] for rank in programs}
    inside: dict[tuple[str, int], dict[int, tuple[C, dict[str, Any]]]] = defaultdict(dict)
    numbers: dict[tuple[int, str], int] = defaultdict(int)
    now, moved = T0, True
    while moved:
        moved = False
        for rank, program in programs.items():
            at = len(played.calls[rank])
            if at == len(program) or len(flying[rank]) >= depth or stuck(rank, at):
                continue
            call, now = program[at], now + 0.001
            numbers[rank, call.group] += 1
            record = _record(call, rank, numbers[rank, call.group], at, now, timeout, named[call.group])
            played.calls[rank].append(record)
            flying[rank].append((call, record))
            if call.peer is None:
                inside[call.group, record["seq"]][rank] = call, record
            moved = True
        for (group, seq), members in list(inside.items()):
            ready = len(members) == len(named[group][1]) and len({call.agreed for call, _ in members.values()}) == 1
            if ready and all(flying[rank] and flying[rank][0][1] is record for rank, (_, record) in members.items()):
                now, moved = now + 0.001, True
                del inside[group, seq]
                for rank, (_, record) in members.items():
                    record |= {"state": "completed", "t_completed": now}
                    flying[rank].pop(0)
    return played


def _record(
    call: C, rank: int, seq: int, order: int, now: float, timeout: float, group: tuple[str, tuple[int, ...]]
) -> dict[str, Any]:
    return {
        "group": call.group,
        "group_desc": group[0],
        "group_ranks": list(group[1]),
        "seq": seq,
        "order": order,
        "op": call.op,
        "dtype": call.dtype,
        "shapes_in": [list(call.shape)],
        "shapes_out": [list(each) for each in call.outputs or (call.shape,)],
        "state": "scheduled",
        "t_created": now,
        "timeout_s": timeout,
        "p2p": call.peer is not None,
        "frames": [
            {"name": call.op, "file": "/site-packages/torch/distributed/distributed_c10d.py", "line": 2810},
            {"name": "step", "file": "train.py", "line": call.line},
        ],
    } | ({"peer": call.peer} if call.peer is not None else {})


#: A training step: gather, compute, scatter, sum.
STEP = (
    C("_all_gather_base", line=11, dtype="bfloat16", shape=(64, 16)),
    C("all_reduce", line=12, shape=(128,)),
    C("_reduce_scatter_base", line=13, dtype="bfloat16", shape=(1024, 16)),
    C("all_reduce", line=14, shape=(128,)),
    C("broadcast", line=15, dtype="float16", shape=(16,)),
)


def same(ranks: int, steps: int = 6, step: Sequence[C] = STEP) -> dict[int, list[C]]:
    """One program for all ranks."""
    return {rank: [*step] * steps for rank in range(ranks)}
