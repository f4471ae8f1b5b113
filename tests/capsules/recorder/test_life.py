"""How recordings end: exceptions, signals, kill -9 and full disks, in processes of their own."""

from __future__ import annotations

import signal
import textwrap
from typing import Any

import pytest

# A training script as a user has it; WHAT is put in at three places.
SCRIPT = """
import os, resource, signal, sys, time
import torch, torch.nn.functional as F
from llmconsole.capsules import Recorder
torch.manual_seed(0); torch.set_num_threads(1)
from torch import nn
model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 50))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
{before}
recorder = Recorder(sys.argv[1], model=model, optimizer=optimizer, every=5)
{after}
for step in range({steps}):
    ids = torch.randint(0, 50, (4, 13))
    with recorder.step(batch=(ids[:, :-1], ids[:, 1:])):
        loss = F.cross_entropy(model(ids[:, :-1]).view(-1, 50), ids[:, 1:].reshape(-1))
        loss.backward(); optimizer.step(); optimizer.zero_grad()
    {each}
print("final loss", repr(loss.item()), flush=True)
"""


def script(before: str = "", after: str = "", each: str = "pass", steps: int = 30) -> str:
    return SCRIPT.format(before=textwrap.dedent(before), after=textwrap.dedent(after), each=each, steps=steps)


class TestException:
    def test_it_passes_untouched_and_leaves_a_crashed_capsule_with_the_batch(self, run: Any, gpt: Any) -> None:
        recording = run(every=1000)
        recording.train(3)
        error = ValueError("bad batch")
        with pytest.raises(ValueError, match="bad batch") as caught, recording.recorder.step(batch=gpt.shifted(3)):
            raise error
        assert caught.value is error
        capsule = recording.capsule()
        assert capsule.status == "crashed"
        trigger = capsule.trigger
        assert (trigger.kind, trigger.step, trigger.signal, trigger.message) == (
            "exception",
            3,
            "ValueError",
            "ValueError: bad batch",
        )
        events = [event for event in capsule.records("events") if event["kind"] == "exception"]
        assert [(event["type"], event["message"], event["step"]) for event in events] == [
            ("ValueError", "bad batch", 3)
        ]
        assert [batch.step for batch in capsule.batches()] == [0, 1, 2, 3]
        assert (capsule.batches()[-1].input_ids == gpt.shifted(3)[0].numpy()).all()

    def test_a_loop_that_catches_it_goes_on_and_is_sealed(self, run: Any, gpt: Any) -> None:
        recording = run()
        with pytest.raises(ValueError, match="once"), recording.recorder.step():
            raise ValueError("once")
        recording.train(2)
        capsule = recording.capsule()
        assert capsule.status == "sealed"
        assert capsule.scalars("loss").step.tolist() == [1, 2]

    def test_running_out_of_memory_is_its_own_kind(self, run: Any) -> None:
        recording = run()
        with pytest.raises(MemoryError), recording.recorder.step():
            raise MemoryError
        capsule = recording.capsule()
        assert capsule.trigger.kind == "oom"
        assert any(event["kind"] == "oom" for event in capsule.records("events"))

    def test_around_the_whole_loop_it_is_seen_too(self, run: Any, gpt: Any) -> None:
        recording = run()
        recording.train(2)
        with pytest.raises(ValueError, match="between"), recording.recorder:
            raise ValueError("between two steps")
        capsule = recording.capsule()
        assert (capsule.status, capsule.trigger.kind, capsule.trigger.step) == ("crashed", "exception", 1)


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
    def test_the_default_action_still_ends_the_process_after_the_evidence_is_written(
        self, job: Any, number: signal.Signals
    ) -> None:
        killed = job(script(each=f"step == 12 and os.kill(os.getpid(), {int(number)})"))
        assert killed.finish()[:2] == (-number, "")
        capsule = killed.capsule()
        assert capsule.status == "crashed"
        assert (capsule.trigger.kind, capsule.trigger.signal, capsule.trigger.step) == ("signal", number.name, 12)
        assert len(capsule.scalars("loss")) == 13
        assert [batch.step for batch in capsule.batches()][-3:] == [10, 11, 12]

    def test_a_handler_of_the_job_is_called_and_the_job_ends_as_it_wishes(self, job: Any) -> None:
        handler = """
        def stop(number, frame):
            print("checkpoint written", flush=True)
            sys.exit(7)
        signal.signal(signal.SIGTERM, stop)
        """
        stopped = job(script(before=handler, each="step == 12 and os.kill(os.getpid(), signal.SIGTERM)"))
        assert stopped.finish()[:2] == (7, "checkpoint written\n")
        capsule = stopped.capsule()
        assert (capsule.status, capsule.trigger.kind, capsule.trigger.signal) == ("sealed", "signal", "SIGTERM")

    def test_an_interrupt_inside_a_step_is_still_a_keyboard_interrupt(self, run: Any, gpt: Any) -> None:
        recording = run()
        recording.train(2)
        with pytest.raises(KeyboardInterrupt), recording.recorder.step(batch=gpt.shifted(2)):
            signal.raise_signal(signal.SIGINT)
        trigger = recording.capsule().trigger
        assert (trigger.kind, trigger.signal, trigger.step) == ("signal", "SIGINT", 2)

    def test_a_signal_that_the_job_ignores_stays_ignored(self, job: Any) -> None:
        ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
        status, out, _ = job(script(before=ignore, each="step == 3 and os.kill(os.getpid(), signal.SIGTERM)")).finish()
        assert status == 0
        assert "final loss" in out

    def test_a_forked_child_that_is_ended_writes_nothing(self, job: Any) -> None:
        child = """
        def fork():
            pid = os.fork()
            if pid == 0:
                os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)
            assert os.waitpid(pid, 0)[1] == signal.SIGTERM
        """
        parent = job(script(before=child, each="step == 3 and fork()"))
        status, out, _ = parent.finish()
        assert status == 0
        assert "final loss" in out
        capsule = parent.capsule()
        assert (capsule.status, capsule.trigger) == ("sealed", None)


class TestKilled:
    @pytest.mark.parametrize("steps", [3, 17, 40])
    def test_every_finished_step_is_there_after_kill_9(self, job: Any, steps: int) -> None:
        killed = job(script(each="print(step, flush=True)", steps=10**6))
        killed.wait_for(str(steps))
        killed.kill()
        status, out, _ = killed.finish()
        assert status == -signal.SIGKILL
        finished = list(range(int(out.splitlines()[-1]) + 1))
        capsule = killed.capsule()
        assert capsule.status in ("recording", "crashed")  # the heartbeat is younger than 30 s
        assert capsule.scalars("loss").step.tolist()[: len(finished)] == finished
        assert set(finished) <= set(capsule.stats(role="activation").step.tolist())
        assert {record["step"] for record in capsule.records("samples")} >= set(finished)
        assert capsule.batches()[0].logits is not None


class TestFullDisk:
    def test_the_job_ends_with_the_same_result_and_status_and_one_warning(self, job: Any) -> None:
        plain = job(script(), "plain")
        full = job(script(after="resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))"), "full")
        expected, found = plain.finish(), full.finish()
        assert found[:2] == expected[:2]
        assert expected[2] == ""
        assert len(found[2].splitlines()) == 1
        assert "recording ended" in found[2]
        assert "File too large" in found[2]

    def test_what_was_written_before_can_be_read(self, job: Any) -> None:
        full = job(script(after="resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))", steps=200))
        status, _, err = full.finish()
        assert status == 0
        assert len(err.splitlines()) == 1
        losses = full.capsule().scalars("loss")
        assert 1 <= len(losses) < 200
        assert losses.step.tolist() == list(range(len(losses)))


def test_a_script_that_never_closes_is_sealed_at_exit(job: Any) -> None:
    left = job(script(steps=4))
    status, _, err = left.finish()
    assert (status, err) == (0, "")
    assert left.capsule().status == "sealed"
    assert len(left.capsule().scalars("loss")) == 4


def test_a_script_that_never_closes_and_raises_between_two_steps_says_so_at_exit(job: Any) -> None:
    left = job(script(each="if step == 3: raise ValueError('no batch')"))
    status, _, err = left.finish()
    assert (status, "ValueError: no batch" in err) == (1, True)
    capsule = left.capsule()
    assert (capsule.status, capsule.trigger.message, capsule.trigger.step) == ("crashed", "ValueError: no batch", 3)
    (event,) = [event for event in capsule.records("events") if event["kind"] == "exception"]
    assert event["frames"][0]["name"] == "<module>"
