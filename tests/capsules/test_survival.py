"""Writers that are killed, starved of disk, or watched while they write."""

import contextlib
import errno
import itertools
import os
import random
import resource
import signal
import time

import numpy as np
import pytest
from llmconsole.capsules import Capsule, CapsuleWriter

KILLS = int(os.environ.get("LLMCONSOLE_KILLS", "20"))
IDS = np.arange(24).reshape(2, 12)


def write_steps(path, pipe, pause: float = 0.0) -> None:
    """Write everything there is, step after step, and report each step once all its calls have returned."""
    w = CapsuleWriter(path, title="doomed")
    for step in itertools.count():
        w.scalar_row(step, {"loss": step / 2, "grad_norm": float("nan")}, time=float(step))
        w.norms(step, [(f"layer{at}", "activation", "float16", (2, 12), float(at), 0, 0) for at in range(50)])
        w.record("events", {"step": step, "kind": "optimizer_step", "message": "x" * 200})
        if step % 7 == 0:
            w.stats([{"step": step, "name": "w", "role": "parameter", "shape": [3], "nan": 0, "rms": 1.0}])
            w.batch(step=step, input_ids=IDS + step, reported_loss=float(step))
        pipe.send(step)
        time.sleep(pause)


def reported(pipe) -> int:
    """The last step that was reported before the pipe broke."""
    last = -1
    with contextlib.suppress(EOFError):
        while True:
            last = pipe.recv()
    return last


def assert_complete(capsule: Capsule, last: int) -> None:
    """Every step up to ``last`` is there with its values, and nothing is there that was not written."""
    steps = list(range(last + 1))
    for name in ("loss", "grad_norm"):
        assert capsule.scalars(name).step.tolist()[: last + 1] == steps
    assert capsule.scalars("loss").value.tolist()[: last + 1] == [step / 2 for step in steps]
    events = capsule.records("events")
    assert [each["step"] for each in events][: last + 1] == steps
    norms = capsule.stats(role="activation", step=range(last + 1))
    assert norms.step.tolist() == [step for step in steps for _ in range(50)]
    captured = [step for step in steps if step % 7 == 0]
    batches = [each for each in capsule.batches() if each.step <= last]
    assert [each.step for each in batches] == captured
    for batch in batches[-2:]:
        np.testing.assert_array_equal(batch.input_ids, IDS + batch.step)
    assert capsule.stats(role="parameter", step=range(last + 1)).step.tolist() == captured


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_writer_killed_at_a_random_moment_loses_no_step_whose_writes_returned(path, seed, processes):
    ours, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=write_steps, args=(path, theirs))
    process.start()
    theirs.close()
    assert ours.recv() == 0
    time.sleep(random.Random(seed).uniform(0.0, 0.12))
    os.kill(process.pid, signal.SIGKILL)
    last = max(0, reported(ours))
    process.join()

    c = Capsule.open(path, clock=lambda: time.time() + 31)
    assert_complete(c, last)
    assert c.status == "crashed"
    died = [each for each in c.damage() if "died without sealing" in each.what]
    torn = [each for each in c.damage() if "torn" in each.what]
    assert len(died) == 1
    assert len(c.damage()) == len(died) + len(torn)
    assert len({each.where.split()[0] for each in torn}) == len(torn)
    assert c.inventory().batches.count >= last // 7 + 1


def test_a_reader_sees_every_reported_step_while_the_writer_goes_on(path, processes):
    ours, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=write_steps, args=(path, theirs, 0.005))
    process.start()
    theirs.close()
    try:
        seen = []
        for _ in range(20):
            last = ours.recv()
            while ours.poll():
                last = ours.recv()
            c = Capsule.open(path)
            assert_complete(c, last)
            assert c.status == "recording"
            assert c.damage() == ()
            seen.append(last)
        assert seen == sorted(set(seen))
    finally:
        process.kill()
        process.join()


def write_until_full(path, limit: int, pipe) -> None:
    """Write until a file reaches ``limit`` bytes, then report what was written and how it failed."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    steps, failure, after = 0, None, None
    with CapsuleWriter(path) as w:
        try:
            for step in itertools.count():
                w.scalar_row(step, {f"s{at}": float(step) for at in range(12)})
                steps = step + 1
        except OSError as error:
            failure = error.errno
        try:
            w.tensor("a/b", np.zeros(limit), step=0)
        except OSError as error:
            after = error.errno
        w.record("events", {"kind": "log", "message": "the disk is full"})
    pipe.send((steps, failure, after))


@pytest.mark.parametrize("limit", [20_000, 20_011, 4_097])
def test_on_a_full_disk_a_write_is_a_plain_error_and_what_was_written_stays_whole(path, limit, processes):
    ours, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=write_until_full, args=(path, limit, theirs))
    process.start()
    steps, failure, after = ours.recv()
    process.join()
    assert process.exitcode == 0
    assert (failure, after) == (errno.EFBIG, errno.EFBIG)
    assert steps == limit // (28 + 12 * 28)
    c = Capsule.open(path)
    assert c.status == "sealed"
    assert c.scalars("s11").step.tolist() == list(range(steps))
    assert c.records("events")[0]["message"] == "the disk is full"
    assert c.damage() == ()
    assert not list((path / "ranks/rank00000/arrays").iterdir())
