"""What each of two ranks over Gloo did: its collectives, how it ended, and what is written while it hangs."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llmconsole.capsules import Capsule
from llmconsole.capsules.underway import later

START = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
rank, port = int({rank}), "{port}"
os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
import torch, torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from llmconsole.capsules import Recorder
torch.manual_seed(0); torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 50))
def batch(step):
    ids = torch.randint(0, 50, (4, 13), generator=torch.Generator().manual_seed(10 * step + rank))
    return ids[:, :-1], ids[:, 1:]
def loss_of(net, pair):
    return F.cross_entropy(net(pair[0]).reshape(-1, 50), pair[1].reshape(-1))
def wait_for(name):
    while not Path(sys.argv[1], name).exists():
        time.sleep(0.01)
"""


class Pair:
    """The two processes of one job."""

    def __init__(self, job: Any, code: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        scripts = [START.format(rank=rank, port=port) + code for rank in (0, 1)]
        self.jobs = [job(script, f"rank{rank}", runs="runs") for rank, script in enumerate(scripts)]
        self.runs: Path = self.jobs[0].runs
        self._ended: dict[int, tuple[int, str, str]] = {}

    def end(self, rank: int) -> tuple[int, str, str]:
        """Wait for a rank: exit status, what it printed, and what it said on stderr."""
        if rank not in self._ended:
            self._ended[rank] = self.jobs[rank].finish()
        return self._ended[rank]

    def finish(self) -> list[tuple[int, str, str]]:
        return [self.end(rank) for rank in (0, 1)]

    def kill(self) -> None:
        for rank in (0, 1):
            if rank not in self._ended:
                self.jobs[rank].kill()
        self.finish()

    def capsule(self) -> Capsule:
        return self.jobs[0].capsule()

    def lines(self, rank: int, stream: str) -> list[dict[str, Any]]:
        found = list(self.runs.glob(f"*.capsule/ranks/rank{rank:05d}/records/{stream}.jsonl"))
        return [json.loads(line) for path in found for line in path.read_text().splitlines()]

    def wait_until(self, holds: Callable[[], bool]) -> None:
        given_up = time.monotonic() + 120
        while not holds():
            assert time.monotonic() < given_up, [each.printed() for each in self.jobs]
            time.sleep(0.02)

    def said(self, rank: int, kind: str, word: str = "") -> bool:
        events = self.lines(rank, "events")
        return any(e["kind"] == kind and word in e.get("message", "") for e in events)

    def tell(self, name: str) -> None:
        (self.runs / name).touch()


@pytest.fixture
def pair(job: Any) -> Iterator[Callable[[str], Pair]]:
    made: list[Pair] = []

    def start(code: str) -> Pair:
        made.append(Pair(job, code))
        return made[-1]

    yield start
    for each in made:
        each.kill()


def rows_of(capsule: Capsule, rank: int) -> list[dict[str, Any]]:
    return sorted(capsule.records("collectives", rank=rank), key=lambda row: row["order"])


def in_script(frames: list[dict[str, Any]]) -> list[str]:
    """The functions of the job itself in a stack."""
    return [frame["name"] for frame in frames if Path(frame["file"]).name == "train.py"]


HEALTHY = """
net = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
group = dist.new_group([0, 1], group_desc="extra", timeout=timedelta(seconds=40))
recorder = Recorder(sys.argv[1], model=model, optimizer=optimizer)
x = torch.ones(3)
@torch.compile(fullgraph=True, backend="eager")
def compiled(value):
    dist.all_reduce(value)
    return value + 1
for step in range(4):
    pair = batch(step)
    with recorder.step(batch=pair):
        loss_of(net, pair).backward()
        optimizer.step(); optimizer.zero_grad()
        dist.all_reduce(x, group=group)
        handle = dist.all_reduce(x, async_op=True)
        if step == 2:
            x.add_(1)  # before the wait
        handle.wait()
        if step == 3:
            dist.broadcast(x, 0, async_op=True)
        half = torch.ones(8)
        handle = dist.all_reduce(half[:4], async_op=True)
        half[4:] += 1  # another part of the same storage
        handle.wait()
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        gathered = [None, None]
        dist.all_gather_object(gathered, {"rank": rank})
out = torch.empty(6)
dist.all_gather_into_tensor(out, x)
assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
recorder.close()
assert "Calls" not in repr(dist.ProcessGroup.allreduce)  # put back
print("done", flush=True)
dist.barrier(); dist.destroy_process_group()
"""


def test_a_healthy_job_has_one_sequence_on_both_ranks(pair: Any) -> None:
    started = pair(HEALTHY)
    for status, out, err in started.finish():
        assert (status, out) == (0, "done\n"), err
        assert "recording" not in err
    capsule = started.capsule()
    assert (capsule.status, capsule.trigger) == ("sealed", None)
    said = [event["message"] for event in capsule.records("events", rank=0) if event["kind"] == "log"]
    assert [message.partition(";")[0] for message in said] == [
        "coverage: collectives come from torch's flight recorder, C++ included, Gloo's sends and receives from calls of"
        " Python"
    ]
    rows = [rows_of(capsule, rank) for rank in (0, 1)]
    same = ("group", "seq", "dtype", "shapes_in", "shapes_out", "p2p", "timeout_s", "group_ranks", "step")
    assert [[row.get(each) for each in same] for row in rows[0]] == [
        [row.get(each) for each in same] for row in rows[1]
    ]
    assert {row["state"] for row in rows[0] + rows[1]} == {"completed"}
    own = [row for row in rows[0] if row.get("step") == 1 and not row.get("p2p")]
    # What C++ asked for in backward is among them, with the line of the loop that called it.
    assert [row["op"] for row in own][-6:] == ["all_reduce"] * 4 + ["all_gather"] * 2
    buckets = next(row for row in rows[0] if row.get("step") == 1 and row["shapes_in"] == [[5138]])
    assert "async_op" not in buckets
    assert buckets["frames"][0]["name"] == "_engine_run_backward"
    assert in_script(buckets["frames"]) == ["<module>"]
    for group, description, timeout in (("0", "default_pg", 60.0), ("1", "extra", 40.0)):
        found = [row for row in rows[0] if row["group"] == group and not row.get("p2p")]
        assert [row["seq"] for row in found] == list(range(1, len(found) + 1))
        assert {(row["group_desc"], row["timeout_s"], row["default_timeout_s"]) for row in found} == {
            (description, timeout, 1800.0)
        }
    for row in rows[0]:
        assert not any("llmconsole" in frame["file"] and "recorder" in frame["file"] for frame in row["frames"])

    handles_are_followed_until_they_are_waited_for_or_dropped(capsule)
    the_accounts_are_complete(capsule, started.runs)


def handles_are_followed_until_they_are_waited_for_or_dropped(capsule: Capsule) -> None:
    whole = [row for row in rows_of(capsule, 0) if row.get("async_op") and row["shapes_in"] == [[3]]]
    about = [(row["step"], row["op"], row["waited"], row["buffer_reused_before_wait"]) for row in whole]
    assert about == [
        (0, "all_reduce", True, False),
        (1, "all_reduce", True, False),
        (2, "all_reduce", True, True),
        (3, "all_reduce", True, False),
        (3, "broadcast", False, False),
    ]
    parts = [row for row in rows_of(capsule, 0) if row.get("async_op") and row["shapes_in"] == [[4]]]
    # Torch counts writes into a storage as a whole: of a part of one nothing can be said.
    assert [(row["waited"], row.get("buffer_reused_before_wait")) for row in parts] == [(True, None)] * 4
    assert all(row["t_completed"] >= row["t_created"] for row in whole[:4])
    pairs = [[row for row in rows_of(capsule, rank) if row.get("p2p")] for rank in (0, 1)]
    for rank, op in ((0, "send"), (1, "recv")):
        assert [(row["op"], row["seq"], row["peer"], row["step"]) for row in pairs[rank]] == [
            (op, step + 1, 1 - rank, step) for step in range(4)
        ]


def the_accounts_are_complete(capsule: Capsule, runs: Path) -> None:
    for rank in (0, 1):
        last = capsule.records("ranks", rank=rank)[-1]
        numbers = {
            group: max(row["seq"] for row in rows_of(capsule, rank) if row["group"] == group and not row.get("p2p"))
            for group in ("0", "1")
        }
        assert last["last_seq"] == last["last_completed"] == numbers
        assert (last["steps"], last["samples_seen"], last["exit"]["kind"]) == (4, 16, "ok")
        inside, step = (capsule.scalars(name, rank=rank).value for name in ("communication_time", "step_time"))
        assert ((inside > 0) & (inside < step)).all()
        means = last["compute_ms"] + last["communication_ms"]
        assert means == pytest.approx(1e3 * step[1:].mean(), rel=1e-6)
        assert not list(runs.glob("*.capsule/ranks/*/underway"))
        assert [len(capsule.scalars(f"grad_norm_{name}", rank=rank)) for name in ("local", "reduced")] == [4, 4]
    assert capsule.manifest.training is not None
    assert capsule.manifest.training.data_parallel == 2  # the model was given before it was wrapped
    digests = [
        {(r["step"], r["name"]): r["sha256"] for r in capsule.records("checksums", rank=rank) if r["kind"] != "rng"}
        for rank in (0, 1)
    ]
    assert digests[0] == digests[1]
    assert {step for step, _ in digests[0]} == {0, 1, 3}
    assert len({digest for (_, name), digest in digests[0].items() if name == "1.weight"}) == 3


BY_HAND = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Recorder(sys.argv[1], model=model, optimizer=optimizer) as recorder:
    for step in range(6):
        pair = batch(step)
        with recorder.step(batch=pair):
            loss_of(model, pair).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)  # a sum
            optimizer.step(); optimizer.zero_grad()
            if step == 4 and rank == 1:
                raise ValueError("out of ideas")
        if step == 1 and rank == 1:
            with torch.no_grad():
                model[1].weight[40, 7] += 1e-3
"""


def test_gradients_summed_by_hand_a_replica_that_parts_and_a_rank_that_raises(pair: Any) -> None:
    started = pair(BY_HAND)
    (survivor, *_), (status, _, error) = started.finish()
    assert (survivor, status) == (1, 1)
    assert "out of ideas" in error
    capsule = started.capsule()
    local = [capsule.scalars("grad_norm_local", rank=rank).value for rank in (0, 1)]
    reduced = [capsule.scalars("grad_norm_reduced", rank=rank).value for rank in (0, 1)]
    assert reduced[0][:2] == pytest.approx(reduced[1][:2], rel=1e-6)
    assert local[0][0] != pytest.approx(local[1][0], rel=1e-3)
    assert max(local[0][0], local[1][0]) < reduced[0][0] <= local[0][0] + local[1][0]
    kept = {
        (record["step"], record["name"], record["rank"]): record["sha256"] for record in capsule.records("checksums")
    }
    apart = {step: kept[step, "1.weight", 0] != kept[step, "1.weight", 1] for step in (0, 1, 3)}
    assert apart == {0: False, 1: False, 3: True}
    ends = [capsule.records("ranks", rank=rank)[-1] for rank in (0, 1)]
    assert [end["exit"]["kind"] for end in ends] == ["exception", "exception"]
    assert ends[1]["exit"]["message"] == "ValueError: out of ideas"
    assert ends[1]["exit"]["t"] < ends[0]["exit"]["t"]
    (raised,) = [event for event in capsule.records("events", rank=1) if event["kind"] == "exception"]
    assert in_script(raised["frames"][:1]) == ["<module>"]
    # Torch counts what failed as completed.
    last = rows_of(capsule, 0)[-1]
    assert (last["state"], last["seq"], last["step"]) == ("started", 26, 5)
    assert (ends[0]["last_seq"], ends[0]["last_completed"]) == ({"0": 26}, {"0": 25})
    assert (ends[1]["last_seq"], ends[1]["last_completed"]) == ({"0": 25}, {"0": 25})


HANG = """
net = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
recorder = Recorder(sys.argv[1], model=net, optimizer=optimizer, hang_after=0.4)
for step in range(6):
    pair = batch(step)
    with recorder.step(batch=pair):
        loss = loss_of(net, pair)
        if rank == 1 and step in (2, 4):
            wait_for(f"go{step}")
        loss.backward()
        optimizer.step(); optimizer.zero_grad()
    if step == 3:
        print("went on", flush=True)
"""


def test_every_rank_says_where_it_is_when_one_does_not_come(pair: Any) -> None:
    started = pair(HANG)
    started.wait_until(lambda: started.said(0, "stack") and started.said(1, "stack"))
    assert started.capsule().trigger.kind == "hang"
    assert started.lines(0, "ranks")[-1]["exit"]["kind"] == "hang"
    started.tell("go2")
    started.wait_until(lambda: started.said(0, "log", "went on"))
    started.jobs[0].wait_for("went on")
    capsule = started.capsule()
    assert capsule.trigger is None  # slow, not stuck
    assert "exit" not in capsule.records("ranks", rank=0)[-1]
    assert {row["state"] for row in rows_of(capsule, 0) if row.get("step", 0) <= 3} == {"completed"}
    two = lambda rank: sum(event["kind"] == "stack" for event in started.lines(rank, "events")) == 2  # noqa: E731
    started.wait_until(lambda: two(0) and two(1))
    started.kill()
    assert [status for status, *_ in started.finish()] == [-signal.SIGKILL] * 2
    capsule = started.capsule()
    assert (capsule.trigger.kind, capsule.trigger.rank, capsule.trigger.step) == ("hang", 0, 4)
    last = rows_of(capsule, 0)[-1]
    assert (last["op"], last["state"], last["step"], last["shapes_in"]) == ("all_reduce", "scheduled", 4, [[5138]])
    assert len(rows_of(capsule, 0)) == len(rows_of(capsule, 1)) + 1
    assert rows_of(capsule, 1)[-1]["state"] == "completed"
    numbers = [capsule.records("ranks", rank=rank)[-1] for rank in (0, 1)]
    assert numbers[0]["last_seq"]["0"] == last["seq"] == numbers[0]["last_completed"]["0"] + 1
    assert numbers[1]["last_seq"]["0"] == last["seq"] - 1
    assert (numbers[0]["exit"]["kind"], numbers[1].get("exit")) == ("hang", None)
    stacks = [
        [event for event in capsule.records("events", rank=rank) if event["kind"] == "stack"][-1]["frames"]
        for rank in (0, 1)
    ]
    assert stacks[0][0]["name"] == "_engine_run_backward"
    assert stacks[1][0]["name"] == "wait_for"
    assert [in_script(stack) for stack in stacks] == [["<module>"], ["wait_for", "<module>"]]


ABORT = """
import ctypes
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recorder = Recorder(sys.argv[1], model=model, optimizer=optimizer)
x = torch.ones(4)
for step in range(3):
    with recorder.step(batch=batch(step)):
        loss_of(model, batch(step)).backward()
        optimizer.step(); optimizer.zero_grad()
        dist.all_reduce(x)
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        if step == 2:
            if rank == 0:
                dist.all_reduce(torch.ones(5))  # rank 1 has more: Gloo aborts this process
            libc = ctypes.CDLL(None)
            mutex = ctypes.create_string_buffer(64)
            libc.pthread_mutex_init(mutex, None)
            libc.pthread_mutex_lock(mutex)
            handle = dist.all_reduce(torch.ones(5000), async_op=True)
            libc.pthread_mutex_lock(mutex)  # no Python runs in this thread any more
"""


def test_a_call_that_aborts_is_on_disk_and_so_is_a_signal_that_python_never_sees(pair: Any) -> None:
    started = pair(ABORT)
    status, _, error = started.end(0)
    assert (status, "EnforceNotMet" in error) == (-signal.SIGABRT, True)
    started.wait_until(lambda: len(started.lines(1, "ranks")) == 2)
    os.kill(started.jobs[1].pid, signal.SIGTERM)
    # The job did not handle the signal: it ends the process, as it would without a recorder, once all is written.
    assert started.end(1)[0] == -signal.SIGTERM
    assert started.said(1, "stack", "SIGTERM")
    capsule = started.capsule()
    last = rows_of(capsule, 0)[-1]
    assert (last["op"], last["seq"], last["shapes_in"], last["state"]) == ("all_reduce", 4, [[5]], "started")
    assert (last["frames"][0]["name"], in_script(last["frames"])) == ("all_reduce", ["<module>"])
    assert (last["dtype"], last["step"], last["group_ranks"]) == ("float32", 2, [0, 1])
    orders = [row["order"] for row in rows_of(capsule, 0)]
    assert orders == list(range(len(orders)))
    end = capsule.records("ranks", rank=1)[-1]["exit"]
    assert (end["kind"], end["message"], capsule.trigger.kind) == ("signal", "SIGTERM", "signal")


LOST = """
net = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with Recorder(sys.argv[1], model=net, optimizer=optimizer) as recorder:
    for step in range(4):
        pair = batch(step)
        with recorder.step(batch=pair):
            loss_of(net, pair).backward()
            optimizer.step(); optimizer.zero_grad()
        if step == 2 and rank == 1:
            raise ValueError("no batch")
"""


def test_an_error_that_a_step_has_told_makes_no_earlier_call_a_failed_one(pair: Any) -> None:
    started = pair(LOST)
    assert [status for status, *_ in started.finish()] == [1, 1]
    capsule = started.capsule()
    rows = rows_of(capsule, 0)
    assert [row["state"] for row in rows] == ["completed"] * (len(rows) - 1) + ["started"]
    ends = [capsule.records("ranks", rank=rank)[-1] for rank in (0, 1)]
    assert [end["last_completed"]["0"] for end in ends] == [rows[-1]["seq"] - 1] * 2
    assert ends[1]["exit"]["message"] == "ValueError: no batch"


RING = """
from llmconsole.capsules import CapsuleWriter
from llmconsole.capsules.recorder.collectives import MOST_ROWS, Collectives
alone = dist.new_group([rank])
writer = CapsuleWriter(Path(sys.argv[1], "ring.capsule"), rank=rank)
collectives = Collectives(writer, lambda: None)
collectives.calls.install()
x = torch.ones(2)
def turn(calls):
    for _ in range(calls):
        dist.all_reduce(x, group=alone)
    collectives.collect()
    while collectives.oldest() is not None:  # Gloo's thread has not said yet that the last one is over
        collectives.collect()
    path = writer.path / f"ranks/rank{rank:05d}/records/collectives.jsonl"
    rows = [line for line in path.read_text().splitlines()]
    print(len(rows), collectives.lost, flush=True)
for calls in (1500, 1500, 1000, 1500, 2700) if rank == 0 else ():
    turn(calls)
collectives.close(collected=True)
writer.close()
dist.barrier()
"""


def test_the_stream_stays_short_and_has_no_hole(pair: Any) -> None:
    started = pair(RING)
    (status, out, err), (other, *_) = started.finish()
    assert (status, other) == (0, 0), err
    # The last turn was longer than what torch's flight recorder holds: what is before the hole goes.
    assert out.splitlines() == ["1500 0", "3000 0", "4000 0", "2000 0", "2000 700"]
    rows = rows_of(started.capsule(), 0)
    assert [row["seq"] for row in rows] == list(range(6201, 8201))


def test_a_rank_alone_has_no_watchdog_and_no_followed_calls(run: Any) -> None:
    import threading

    import torch.distributed as dist

    before = dist.ProcessGroup.allreduce
    recorded = run()
    recorded.train(2)
    assert dist.ProcessGroup.allreduce is before
    assert not [thread for thread in threading.enumerate() if "llmconsole" in thread.name]
    capsule = recorded.capsule()
    assert not {"ranks", "collectives", "checksums"} & set(capsule.inventory().records)
    assert len(capsule.scalars("communication_time", rank=0)) == 0


class TestCallsUnderWay:
    def test_only_what_is_beyond_the_stream_is_taken_in_the_order_of_the_calls(self) -> None:
        known = [{"group": "0", "seq": 7, "order": 3}, {"group": "0", "seq": 2, "p2p": True, "order": 4}]
        found = [
            {"group": "0", "seq": 9, "call": 12},
            {"group": "0", "seq": 8, "call": 11},
            {"group": "0", "seq": 7, "call": 9},
            {"group": "0", "seq": 3, "p2p": True, "call": 10},
            {"group": "1", "seq": 1, "call": 13},
        ]
        assert [(row["group"], row["seq"], row["order"]) for row in later(found, known)] == [
            ("0", 3, 5),
            ("0", 8, 6),
            ("0", 9, 7),
            ("1", 1, 8),
        ]

    @pytest.mark.parametrize("odd", [{}, {"seq": "x", "group": []}, {"seq": None, "call": "9"}, {"seq": True}])
    def test_odd_lines_are_left_out(self, odd: dict[str, Any]) -> None:
        assert later([odd], [{"group": {}, "seq": None, "order": "?"}]) == []
