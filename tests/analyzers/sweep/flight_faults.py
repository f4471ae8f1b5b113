"""Faults of jobs of many ranks, with what a diagnosis should say of each, and the flight-recorder dumps they leave."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .parallel_jobs import BEGAN, Call, Job, Made, as_of, hangs, run, train

#: Faults that a diagnosis should name, those that are none, and faults that dumps cannot show.
NAMED = ("missing", "extra", "shape", "dtype", "op", "order", "died", "stuck", "first-rank-only", "pair")
QUIET = ("healthy", "slow")
OUTSIDE = ("network", "old-dump", "staggered", "swapped-halves", "torn-apart")
_RUNNING = ("staggered", "old-dump")
VERSIONS = ("2.4", "2.9", "2.10")
#: Seconds after which a collective that does not end makes its process write the dump.
TIMEOUT = 600
_FILES = ("_dump_", "nccl_trace_rank_", "comm_lib_trace_rank_")


@dataclass(frozen=True)
class Truth:
    """What happened: the ranks at fault, the group, and the numbers by which the call may be called.

    Several numbers where calls before or after it are equal, so that nothing tells which of them it was; none where any
    is right (a send has one on each side). ``deciding`` is true where at least three ranks of the group left a dump.
    """

    fault: str
    ranks: frozenset[int] = frozenset()
    groups: frozenset[str] = frozenset()
    numbers: frozenset[int] = frozenset()
    deciding: bool = False


@dataclass
class Incident:
    """A job that went wrong (or not), as it is left behind."""

    seed: int
    truth: Truth
    job: Job
    made: list[list[Made]]
    version: str
    as_json: bool
    missing_dumps: frozenset[int]
    buffer: int
    timing: bool
    frames: bool
    cut: dict[int, float]


def incident(seed: int, fault: str, small: bool = False) -> Incident:
    """The incident of a seed; the same seed and fault always give the same one."""
    draw = random.Random(f"{fault} {seed}")
    for _ in range(200):
        made = _try(seed, fault, draw, small)
        if made is not None:
            return made
    raise RuntimeError(f"no incident of {fault} with seed {seed}")


def _try(seed: int, fault: str, draw: random.Random, small: bool) -> Incident | None:
    job = _job(draw, small, fault)
    whole = run(job)
    truth = _break(fault, job, whole, draw)
    if truth is None:
        return None
    running = fault in QUIET or fault in _RUNNING
    made = run(job)
    if not running and not hangs(made):
        return None
    cut: dict[int, float] = {}
    if running:
        end = max((each.completed or 0.0 for own in made for each in own), default=BEGAN)
        moment = BEGAN + (end - BEGAN) * draw.uniform(0.3, 0.9)
        spread = 0.4 * (end - BEGAN) if fault == "staggered" else 0.0
        cut = {rank: moment + draw.uniform(-0.5, 0.5) * spread for rank in range(job.world)}
        if fault == "old-dump":
            cut[draw.randrange(job.world)] = BEGAN + (moment - BEGAN) * draw.uniform(0.2, 0.8)
        made = run(job, until=moment)
    absent: set[int] = set()
    if fault == "died":
        absent |= truth.ranks if draw.random() < 0.5 else set()
    if draw.random() < 0.2 and job.world > 4:
        others = [rank for rank in range(job.world) if rank not in truth.ranks]
        absent |= set(draw.sample(others, draw.randint(1, max(1, job.world // 16))))
    longest = max(map(len, made))
    buffer = draw.choice((2000, 2000, 2000, max(20, longest // 2)))
    if truth.groups:
        members = set(job.groups[min(truth.groups)][1])
        truth = replace(truth, deciding=len(members - absent) >= 3 or (len(members) >= 3 and fault == "died"))
    as_json = draw.random() < 0.25
    return Incident(
        seed, truth, job, made, draw.choice(VERSIONS), as_json, frozenset(absent), buffer,
        draw.random() < 0.4, not as_json and draw.random() < 0.8, cut,
    )  # fmt: skip


def _job(draw: random.Random, small: bool, fault: str) -> Job:
    layouts = [
        (2, 1, 1), (4, 1, 1), (8, 1, 1), (8, 2, 1), (8, 2, 2), (16, 4, 1), (16, 4, 2), (4, 2, 1), (4, 1, 2),
        *([] if small else [(32, 4, 2), (32, 8, 1), (64, 8, 2), (64, 8, 4), (24, 2, 3)]),
    ]  # fmt: skip
    if fault == "pair":
        layouts = [each for each in layouts if each[2] > 1]
    world, tensor, pipeline = draw.choice(layouts)
    return train(draw, world, tensor, pipeline, draw.randint(20, 60 if small else 200))


# -- faults


def _break(fault: str, job: Job, whole: list[list[Made]], draw: random.Random) -> Truth | None:
    """Put a fault into the programs; None where it cannot be put there."""
    rank = draw.randrange(job.world)
    program = job.programs[rank]
    at = draw.randrange(len(program) // 5, max(len(program) // 5 + 1, len(program) * 4 // 5))
    call = program[at]
    number = whole[rank][at].number
    if fault in QUIET:
        if fault == "slow":
            job.slow[rank] = draw.uniform(0.02, 0.2)
            return Truth(fault, frozenset((rank,)))
        return Truth(fault)
    if fault in OUTSIDE:
        return _outside(fault, job, rank, at, draw)
    if fault in ("died", "stuck"):
        del program[at:]
        job.stopped.add(rank)
        waits = _first_missed(job, rank)
        return None if waits is None else Truth(fault, frozenset((rank,)), *waits)
    if fault == "pair":
        return _pair(job, rank, draw)
    if call.peer is not None:
        return None
    if fault == "missing":
        del program[at]
        return Truth(fault, frozenset((rank,)), frozenset((call.group,)), _equal(whole[rank], call.group, number))
    if fault == "extra":
        added = call if draw.random() < 0.5 else replace(call, op="broadcast", shape=(7,), shape_out=None, site=60)
        program.insert(at, added)
        equal = frozenset((number,))
        if added == call:  # the numbers differ from where the equal calls end
            equal = _equal(whole[rank], call.group, number)
            equal |= {max(equal) + 1}
        return Truth(fault, frozenset((rank,)), frozenset((call.group,)), equal)
    if fault == "first-rank-only":
        return _first_rank_only(job, whole, draw)
    if fault == "order":
        return _order(job, rank, at)
    program[at] = _other(fault, call, draw)
    if program[at].meaning == call.meaning:
        return None
    return Truth(fault, frozenset((rank,)), frozenset((call.group,)), frozenset((number,)))


def _other(fault: str, call: Call, draw: random.Random) -> Call:
    if fault == "shape":
        first, *rest = call.shape
        return replace(call, shape=(first + draw.choice((1, -1, 8)), *rest))
    if fault == "dtype":
        return replace(call, dtype="Half" if call.dtype != "Half" else "Float")
    ops = {"all_reduce": ("broadcast", "reduce"), "_all_gather_base": ("all_reduce",)}
    return replace(call, op=draw.choice(ops.get(call.op, ("all_reduce",))), shape_out=None)


def _equal(own: list[Made], group: str, number: int) -> frozenset[int]:
    """The numbers of the calls around this one that mean the same: a skipped one could be any of them."""
    calls = [each.call for each in own if each.call.group == group and each.call.peer is None]
    first = last = number - 1
    while last + 1 < len(calls) and calls[last + 1].meaning == calls[last].meaning:
        last += 1
    while first > 0 and calls[first - 1].meaning == calls[first].meaning:
        first -= 1
    return frozenset(range(first + 1, last + 2 + (last + 1 == len(calls))))


def _first_missed(job: Job, rank: int) -> tuple[frozenset[str], frozenset[int]] | None:
    """Groups and numbers of the calls in which others wait for a rank that stopped."""
    made = run(job)
    counts: dict[str, int] = defaultdict(int)
    for each in made[rank]:
        counts[each.call.group] += each.call.peer is None
    groups: set[str] = set()
    numbers: set[int] = set()
    sent = False
    for other, own in enumerate(made):
        for each in own:
            if other == rank or each.completed is not None:
                continue
            if each.call.peer == rank:
                groups.add(each.call.group)
                sent = True
                continue
            missed = each.call.peer is None and each.number == counts[each.call.group] + 1
            if missed and rank in job.groups[each.call.group][1]:
                groups.add(each.call.group)
                numbers.add(each.number)
    return (frozenset(groups), frozenset() if sent else frozenset(numbers)) if groups else None


def _pair(job: Job, rank: int, draw: random.Random) -> Truth | None:
    """A receive that is never posted."""
    program = job.programs[rank]
    found = [at for at, call in enumerate(program) if call.peer is not None and 3 < at < len(program) - 3]
    if not found:
        return None
    at = draw.choice(found)
    group = program[at].group
    del program[at]
    return Truth("pair", frozenset((rank,)), frozenset((group,)))


def _first_rank_only(job: Job, whole: list[list[Made]], draw: random.Random) -> Truth | None:
    group = draw.choice([name for name, (_, ranks) in job.groups.items() if len(ranks) > 1])
    rank = job.groups[group][1][0]
    program = job.programs[rank]
    at = draw.randrange(len(program) // 4, max(len(program) // 4 + 1, len(program) * 3 // 4))
    number = sum(call.group == group and call.peer is None for call in program[:at]) + 1
    op, shape = draw.choice((("all_reduce_barrier", (1,)), ("all_reduce", (3,))))
    program.insert(at, Call(group, op, "Byte" if len(shape) > 1 else "Float", shape, site=70, sync=True))
    return Truth("first-rank-only", frozenset((rank,)), frozenset((group,)), frozenset((number,)))


def _order(job: Job, rank: int, at: int) -> Truth | None:
    """Two calls in a row, of different groups, the other way round."""
    program = job.programs[rank]
    for place in (*range(at, len(program) - 1), *range(1, at)):
        one, other = program[place], program[place + 1]
        if one.peer is None and other.peer is None and one.group != other.group:
            shared = set(job.groups[one.group][1]) & set(job.groups[other.group][1])
            if len(shared) > 1:
                program[place : place + 2] = [replace(other, sync=one.sync), replace(one, sync=other.sync)]
                before = program[:place]
                groups = (one.group, other.group)
                numbers = {sum(call.group == each and call.peer is None for call in before) + 1 for each in groups}
                return Truth("order", frozenset((rank,)), frozenset(groups), frozenset(numbers))
    return None


def _outside(fault: str, job: Job, rank: int, at: int, draw: random.Random) -> Truth | None:
    """Faults that dumps show as something that no rank can be blamed for."""
    if fault == "network":  # all are in the call and it does not end
        program = job.programs[rank]
        place = max(place for place in range(at + 1) if program[place].peer is None or place == 0)
        group = program[place].group
        job.broken.add((group, sum(call.group == group and call.peer is None for call in program[: place + 1])))
    elif fault == "swapped-halves":  # two halves of a group, each of one mind
        group = max(job.groups, key=lambda name: len(job.groups[name][1]))
        members = job.groups[group][1]
        if len(members) % 2:
            return None
        number = draw.randint(2, max(2, sum(call.group == group for call in job.programs[0]) - 1))
        for each in members[: len(members) // 2]:
            _replace_nth(job.programs[each], group, number, dtype="Half")
    elif fault == "torn-apart":  # a host is gone: half of the ranks stop, and leave no dump
        for each in range(job.world // 2, job.world):
            del job.programs[each][at:]
    return Truth(fault)


def _replace_nth(program: list[Call], group: str, number: int, **changed: Any) -> None:
    seen = 0
    for place, call in enumerate(program):
        seen += call.group == group and call.peer is None
        if call.group == group and call.peer is None and seen == number:
            program[place] = replace(call, **changed)
            return


# -- dumps


def write(found: Incident, directory: Path, draw: random.Random | None = None, pickled: bool = False) -> list[Path]:
    """Write the dumps of an incident; ``pickled`` writes pickles even where the incident has JSON.

    Returns:
        The files, shuffled.
    """
    draw = draw or random.Random(found.seed)
    directory.mkdir(parents=True, exist_ok=True)
    prefix = draw.choice(_FILES)
    files: list[Path] = []
    for rank in range(found.job.world):
        if rank in found.missing_dumps or (found.truth.fault == "torn-apart" and rank >= found.job.world // 2):
            continue
        dump = _dump(found, rank)
        as_json = found.as_json and not pickled
        path = directory / f"{prefix}{rank}{'.json' if as_json else ''}"
        path.write_bytes(_as_json(dump) if as_json else pickle.dumps(dump, 2))
        last = max((each.created for own in found.made for each in own), default=BEGAN)
        moment = found.cut.get(rank, last + TIMEOUT) + draw.uniform(0.01, 0.5)
        os.utime(path, (moment, moment))
        files.append(path)
    draw.shuffle(files)
    return files


_LINES = {
    10: ("recv_forward", "schedules.py", 211), 11: ("send_forward", "schedules.py", 219),
    12: ("recv_backward", "schedules.py", 240), 13: ("send_backward", "schedules.py", 252),
    20: ("forward", "layers.py", 88), 21: ("dispatch", "experts.py", 140), 22: ("reduce", "layers.py", 97),
    23: ("backward", "layers.py", 131), 30: ("start_grad_sync", "buckets.py", 73),
    31: ("gather_parameters", "optimizer.py", 310), 40: ("grad_norm", "optimizer.py", 207),
    60: ("evaluate", "train.py", 91), 70: ("log_metrics", "train.py", 143),
}  # fmt: skip


def _frames(site: int) -> list[dict[str, Any]]:
    name, file, line = _LINES[site]
    own = {"name": name, "filename": f"/job/megatron/{file}", "line": line}
    torch = {"name": "wrapper", "filename": "/lib/torch/distributed/c10d_logger.py", "line": 83}
    return [torch, own, {"name": "train_step", "filename": "/job/train.py", "line": 55}]


def _dump(found: Incident, rank: int) -> dict[str, Any]:
    job, own = found.job, found.made[rank]
    if rank in found.cut:
        moment = found.cut[rank]
        own = as_of(own, moment)
    mine = [name for name, (_, ranks) in job.groups.items() if rank in ranks]
    local = {name: at if at < 2 else at + 2 for at, name in enumerate(sorted(mine, key=int))}
    collective: dict[str, int] = defaultdict(int)
    direct: dict[str, int] = defaultdict(int)
    total: dict[str, int] = defaultdict(int)
    status = {
        str(local[name]): {
            "last_enqueued_collective": 0,
            "last_started_collective": 0 if found.timing else -1,
            "last_completed_collective": 0,
        }
        for name in mine
    }
    entries: list[dict[str, Any]] = []
    for order, each in enumerate(own):
        call = each.call
        desc, ranks = job.groups[call.group]
        total[call.group] += 1
        (collective if call.peer is None else direct)[call.group] += 1
        number = (collective if call.peer is None else direct)[call.group]
        reached = status[str(local[call.group])]
        reached["last_enqueued_collective"] = number
        if each.completed is not None:
            reached["last_completed_collective"] = number
        if found.timing and each.started is not None:
            reached["last_started_collective"] = number
        name = call.op
        if call.peer is not None:
            arrow = "->" if call.op == "send" else "<-"
            name = f"{call.op} {ranks.index(rank)}{arrow}{ranks.index(call.peer)}"
        started = each.started if found.timing else None
        state = "completed" if each.completed is not None else "scheduled" if started is None else "started"
        entry = {
            "record_id": order,
            "pg_id": local[call.group],
            "process_group": (call.group, desc),
            "collective_seq_id": collective[call.group],
            "p2p_seq_id": direct[call.group],
            "op_id": total[call.group],
            "profiling_name": f"nccl:{name}",
            "time_created_ns": int(each.created * 1e9),
            "input_sizes": [list(call.shape)],
            "input_dtypes": [call.dtype],
            "output_sizes": [list(call.shape_out or call.shape)],
            "output_dtypes": [call.dtype],
            "state": state,
            "time_discovered_started_ns": None if started is None else int(started * 1e9),
            "time_discovered_completed_ns": int(each.completed * 1e9) if each.completed is not None else None,
            "retired": each.completed is not None,
            "timeout_ms": TIMEOUT * 1000,
            "is_p2p": call.peer is not None,
        }
        if found.frames:
            entry["frames"] = _frames(call.site)
        entries.append(entry)
    library = "nccl_version" if found.version != "2.10" else "comm_lib_version"
    config = {
        name: {"name": name, "desc": job.groups[name][0], "ranks": str(list(job.groups[name][1]))} for name in mine
    }
    return {
        "version": found.version,
        "pg_config": config,
        library: "2.27.3",
        "pg_status": status,
        "entries": entries[-found.buffer :],
    }


def _as_json(dump: dict[str, Any]) -> bytes:
    """As ``dump_json`` has it: strings in the status, 0 for no time, no entries where there are none."""
    entries = [
        {
            key: (0 if value is None and key.endswith("_ns") else value)
            for key, value in entry.items()
            if key != "frames"
        }
        for entry in dump["entries"]
    ]
    status = {local: {key: str(value) for key, value in each.items()} for local, each in dump["pg_status"].items()}
    shown = {**dump, "pg_status": status, "entries": entries}
    if not entries:
        del shown["entries"]
    return json.dumps(shown).encode()
