"""A small model of a job of many ranks: programs of collectives, a device that runs them, and what it leaves behind.

Every rank has a program, the calls that it makes in its order. A collective ends when all members of its group have
come to the call of that number and mean the same thing; a send ends with its receive. A rank's device runs its calls
one after the other, the host enqueues some of them ahead. What can no longer move hangs.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

#: Seconds since 1970 at which jobs begin.
BEGAN = 1_750_000_000.0


@dataclass(frozen=True)
class Call:
    """One call; ``site`` numbers its line of code, ``sync`` makes the host wait for it, ``peer`` is a global rank."""

    group: str
    op: str
    dtype: str = "BFloat16"
    shape: tuple[int, ...] = (1024,)
    shape_out: tuple[int, ...] | None = None
    site: int = 0
    sync: bool = False
    peer: int | None = None

    @property
    def meaning(self) -> tuple[object, ...]:
        """What all members of a group have to agree on."""
        return (self.op, self.dtype) if self.op == "all_to_all" else (self.op, self.dtype, self.shape, self.shape_out)


@dataclass
class Job:
    """Groups by name as (description, ranks), and a program for each rank.

    ``stopped`` ranks make no call after the end of their program; others would go on.
    """

    world: int
    groups: dict[str, tuple[str, tuple[int, ...]]]
    programs: list[list[Call]]
    ahead: int = 8
    stopped: set[int] = field(default_factory=set[int])
    broken: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    slow: dict[int, float] = field(default_factory=dict[int, float])


@dataclass
class Made:
    """A call as it went: its number in its group (or between its two ranks), and its times; None: never."""

    call: Call
    number: int
    created: float
    started: float | None = None
    completed: float | None = None


def train(draw: random.Random, world: int, tensor: int, pipeline: int, calls: int) -> Job:
    """A healthy job with about ``calls`` calls a rank: tensor, data and pipeline parallelism as Megatron has them."""
    data = world // (tensor * pipeline)

    def rank(stage: int, replica: int, shard: int) -> int:
        return (stage * data + replica) * tensor + shard

    groups: dict[str, tuple[str, tuple[int, ...]]] = {"0": ("default_pg", tuple(range(world)))}
    names: dict[tuple[str, int], str] = {}

    def add(kind: str, desc: str, ranks: tuple[int, ...]) -> None:
        if len(ranks) > 1:
            name = str(len(groups) + 3 * (len(groups) > 2))
            groups[name] = (desc, ranks)
            names.update({(kind, each): name for each in ranks})

    for stage in range(pipeline):
        for shard in range(tensor):
            add("data", "DATA_PARALLEL_GROUP", tuple(rank(stage, replica, shard) for replica in range(data)))
        for replica in range(data):
            add("tensor", "TENSOR_MODEL_PARALLEL_GROUP", tuple(rank(stage, replica, each) for each in range(tensor)))
    for replica in range(data):
        for shard in range(tensor):
            stages = tuple(rank(stage, replica, shard) for stage in range(pipeline))
            add("pipeline", "PIPELINE_MODEL_PARALLEL_GROUP", stages)
    width, layers = draw.choice((512, 1024, 4096)), draw.randint(1, 3)
    experts = tensor > 1 and draw.random() < 0.3
    programs: list[list[Call]] = [[] for _ in range(world)]
    while min(map(len, programs)) < calls:
        for each in range(world):
            stage, replica, shard = each // (data * tensor), each // tensor % data, each % tensor
            before = rank(stage - 1, replica, shard) if stage else None
            after = rank(stage + 1, replica, shard) if stage + 1 < pipeline else None
            step = _step(names, each, before, after, width, tensor, data, layers, experts, draw.random)
            programs[each] += step
    return Job(world, groups, [program[: max(calls, 8)] if pipeline == 1 else program for program in programs])


def _step(
    names: dict[tuple[str, int], str],
    rank: int,
    before: int | None,
    after: int | None,
    width: int,
    shards: int,
    replicas: int,
    layers: int,
    experts: bool,
    uneven: Callable[[], float],
) -> list[Call]:
    calls: list[Call] = []
    pipe, tensor, data = (names.get((kind, rank)) for kind in ("pipeline", "tensor", "data"))
    hidden = (8, 1, width)

    def exchange(op: str, peer: int | None, site: int) -> None:
        if pipe is not None and peer is not None:
            calls.append(Call(pipe, op, shape=hidden, site=site, peer=peer))

    exchange("recv", before, 10)
    for layer in range(layers if tensor is not None else 0):
        calls.append(Call(tensor, "_all_gather_base", shape=hidden, shape_out=(8 * shards, 1, width), site=20))
        if experts and layer == 0:
            calls.append(Call(tensor, "all_to_all", shape=(64 + int(uneven() * 16), width), site=21))
        calls.append(Call(tensor, "_reduce_scatter_base", shape=(8 * shards, 1, width), shape_out=hidden, site=22))
    exchange("send", after, 11)
    exchange("recv", after, 12)
    for _ in range(layers if tensor is not None else 0):
        calls.append(Call(tensor, "all_reduce", shape=hidden, site=23))
    exchange("send", before, 13)
    for bucket in range(3 if data is not None else 0):
        calls.append(Call(data, "all_reduce", "Float", (width * 4 + (bucket == 2) * 512,), site=30))
    calls.append(Call("0", "all_reduce", "Float", (1,), site=40, sync=True))
    if data is not None:
        calls.append(Call(data, "_all_gather_base", shape=(width,), shape_out=(width * replicas,), site=31))
    return calls


def run(job: Job, until: float | None = None) -> list[list[Made]]:
    """What every rank did, up to the moment ``until`` or until nothing moves any more.

    Returns:
        The calls of each rank in its order, those that it enqueued.
    """
    made: list[list[Made]] = []
    for rank, program in enumerate(job.programs):
        counts: dict[tuple[object, ...], int] = defaultdict(int)
        own: list[Made] = []
        for call in program:
            key = _key(call, rank)
            counts[key] += 1
            own.append(Made(call, counts[key], float("inf")))
        made.append(own)
    head = [0] * job.world
    host = [BEGAN] * job.world
    device = [BEGAN] * job.world
    arrived: dict[tuple[object, ...], dict[int, Made]] = defaultdict(dict)
    enqueued = [0] * job.world
    waiting = deque(range(job.world))

    def enqueue(rank: int) -> None:
        own = made[rank]
        while enqueued[rank] < len(own) and enqueued[rank] < head[rank] + job.ahead:
            at = enqueued[rank]
            if at and own[at - 1].call.sync:
                if own[at - 1].completed is None:
                    return
                host[rank] = max(host[rank], own[at - 1].completed) + job.slow.get(rank, 0.0)
            host[rank] += 2e-4
            own[at].created = host[rank]
            enqueued[rank] += 1

    while waiting:
        rank = waiting.popleft()
        enqueue(rank)
        if head[rank] >= enqueued[rank]:
            continue
        mine = made[rank][head[rank]]
        place = (*_key(mine.call, rank), mine.number)
        if rank not in arrived[place]:
            mine.started = max(device[rank], mine.created)
            arrived[place][rank] = mine
        members = (rank, mine.call.peer) if mine.call.peer is not None else job.groups[mine.call.group][1]
        there = arrived[place]
        if len(there) < len(set(members)) or (mine.call.group, mine.number) in job.broken:
            continue
        if len({_across(each.call) for each in there.values()}) > 1:
            continue  # they mean different things: nobody leaves
        done = max(each.started or 0.0 for each in there.values()) + 1e-3
        for each, call in there.items():
            call.completed = done
            device[each] = done
            head[each] += 1
            waiting.append(each)
    if until is not None:
        return [as_of(own[: enqueued[rank]], until) for rank, own in enumerate(made)]
    return [own[: enqueued[rank]] for rank, own in enumerate(made)]


def _key(call: Call, rank: int) -> tuple[object, ...]:
    if call.peer is None:
        return (call.group,)
    return (call.group, rank, call.peer) if call.op == "send" else (call.group, call.peer, rank)


def _across(call: Call) -> tuple[object, ...]:
    return ("direct", call.dtype, call.shape) if call.peer is not None else call.meaning


def as_of(own: list[Made], moment: float) -> list[Made]:
    """The calls of a rank as a dump of that moment has them."""

    def seen(time: float | None) -> float | None:
        return time if time is not None and time <= moment else None

    return [
        replace(each, started=seen(each.started), completed=seen(each.completed))
        for each in own
        if each.created <= moment
    ]


def hangs(made: list[list[Made]]) -> bool:
    """Whether a call was enqueued and never ended."""
    return any(each.completed is None for own in made for each in own)
