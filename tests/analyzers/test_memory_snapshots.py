"""Leaks, logged tensors and fragmentation in snapshots of jobs that ran on a model of the caching allocator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, CapsuleWriter

from benchmarks.caching_allocator import GIB, KIB, MIB, CachingAllocator, OutOfMemory, devices, largest_free, stack
from benchmarks.training_memory import ENOUGH, EXTRA_LOSS, LOOP, WEIGHTS, Job, layer, numbered
from tests.analyzers.conftest import rule_named
from tests.analyzers.snapshots import imported, save

LEAK, LOGGED, FRAGMENTED = "memory/leak", "memory/logged-tensors", "memory/fragmentation"


def says(rule: str, capsule: Capsule) -> list[Finding]:
    report = analyze(capsule, [rule_named(rule)])
    assert not report.errors, report.errors
    return list(report.findings)


def until_full(work: Callable[[int], Any]) -> None:
    """Do something again and again, until the device is full."""
    with pytest.raises(OutOfMemory):
        list(map(work, range(2000)))


def value(finding: Finding, name: str) -> Any:
    return next(each.value for each in finding.evidence if each.name == name)


def note(finding: Finding, name: str) -> str:
    return next(each.note for each in finding.evidence if each.name == name)


class TestALoggedLossThatIsKept:
    """pdearena#4: a block of 2 MB a step, from the line of an additional loss."""

    def job(self, steps: int, fused: bool = False, **device: Any) -> CachingAllocator:
        a = CachingAllocator(40 * GIB, **device)
        job = Job(a, fused=fused)
        for _ in range(steps):
            job.step(also=lambda: a.malloc(2 * MIB, EXTRA_LOSS))
        return a

    @pytest.mark.fires(LOGGED)
    @pytest.mark.recorded(LOGGED)
    @pytest.mark.fires(LEAK)
    @pytest.mark.recorded(LEAK)
    def test_is_named_by_its_line_and_the_leak_is_its_consequence(self, tmp_path: Path):
        capsule = imported(tmp_path, self.job(60), name="rank3_snapshot.pickle")
        [logged] = says(LOGGED, capsule)
        assert (logged.confidence, logged.where.rank) == ("likely", 3)
        assert "60 live blocks of 2.00 MiB" in logged.summary
        assert "train.py:88" in logged.summary
        assert value(logged, "live blocks") == 60
        assert value(logged, "bytes of them") == 60 * 2 * MIB
        report = analyze(capsule, [rule_named(LEAK), rule_named(LOGGED)])
        assert report.first_divergence is not None
        assert report.first_divergence.rule == LOGGED
        leak = next(each for each in report.findings if each.rule == LEAK)
        assert (leak.kind, leak.caused_by) == ("consequence", LOGGED)

    @pytest.mark.parametrize("device", [{"entries": 700}, {"expandable": True}, {"own_stacks": True}])
    def test_is_named_where_the_trace_is_the_end_of_a_ring_or_segments_expand(self, tmp_path: Path, device: Any):
        [finding] = says(LOGGED, imported(tmp_path, self.job(60, **device)))
        assert "train.py:88" in finding.summary

    def test_is_named_by_the_calls_of_backward_where_the_optimizer_makes_nothing(self, tmp_path: Path):
        [finding] = says(LOGGED, imported(tmp_path, self.job(60, fused=True)))
        assert "the calls of backward" in note(finding, "blocks a step")

    def test_every_tenth_step_is_steady_as_well(self, tmp_path: Path):
        a = CachingAllocator(40 * GIB)
        job = Job(a)
        for number in range(120):
            job.step(also=lambda at=number: at % 10 or a.malloc(512, EXTRA_LOSS))
        [finding] = says(LOGGED, imported(tmp_path, a))
        assert value(finding, "live blocks") == 12

    def test_up_to_a_failure_it_is_what_filled_the_device(self, tmp_path: Path):
        a = CachingAllocator(1 * GIB)
        job = Job(a)
        until_full(lambda _: job.step(also=lambda: a.malloc(2 * MIB, EXTRA_LOSS)))
        report = analyze(imported(tmp_path, a))
        assert report.first_divergence is not None
        assert report.first_divergence.rule == LOGGED

    @pytest.mark.quiet(LOGGED)
    @pytest.mark.quiet(LEAK)
    def test_a_healthy_job_is_quiet(self, tmp_path: Path):
        a = CachingAllocator(40 * GIB)
        job = Job(a)
        for _ in range(60):
            job.step(also=lambda: a.free(a.malloc(2 * MIB, EXTRA_LOSS)))
        capsule = imported(tmp_path, a)
        assert says(LOGGED, capsule) == says(LEAK, capsule) == []

    @pytest.mark.parametrize("entries", [None, 500])
    def test_a_window_of_the_last_losses_is_quiet(self, tmp_path: Path, entries: int | None):
        a = CachingAllocator(40 * GIB, entries=entries)
        job, window = Job(a), deque[int]()

        def keep() -> None:
            window.append(a.malloc(2 * MIB, EXTRA_LOSS))
            if len(window) > 20:
                a.free(window.popleft())

        for _ in range(60):
            job.step(also=keep)
        capsule = imported(tmp_path, a)
        assert says(LOGGED, capsule) == says(LEAK, capsule) == []

    def test_a_cache_that_fills_up_is_quiet(self, tmp_path: Path):
        a = CachingAllocator(40 * GIB)
        job = Job(a)
        for number in range(80):
            job.step(also=lambda at=number: at < 40 and a.malloc(2 * MIB, EXTRA_LOSS))
        capsule = imported(tmp_path, a)
        assert says(LOGGED, capsule) == says(LEAK, capsule) == []

    def test_a_kv_cache_that_is_joined_anew_with_each_token_is_quiet(self, tmp_path: Path):
        a = CachingAllocator(40 * GIB)
        cat = stack("update /site-packages/transformers/cache_utils.py:110", *LOOP)
        joined = stack("attend /home/me/decode.py:12", *LOOP)
        kept = [(a.malloc(MIB, cat), a.malloc(MIB, joined)) for _ in range(8)]
        for token in range(100):
            for at, (mine, other) in enumerate(kept):
                kept[at] = (a.malloc((token + 2) * 64 * KIB, cat), a.malloc((token + 2) * 64 * KIB, joined))
                a.free(mine)
                a.free(other)
            a.free(a.malloc(3 * MIB, layer(40)))
        capsule = imported(tmp_path, a)
        assert says(LOGGED, capsule) == says(LEAK, capsule) == []

    def test_one_forward_pass_of_many_layers_is_quiet(self, tmp_path: Path):
        a = CachingAllocator(80 * GIB)
        for _ in range(80):
            a.malloc(12 * MIB, WEIGHTS)
        a.free(a.malloc(MIB, layer(7)))
        checkpointed = stack("checkpoint /site-packages/torch/utils/checkpoint.py:480", *LOOP)
        for _ in range(80):
            a.malloc(12 * MIB, layer(44))
            a.free(a.malloc(60 * MIB, layer(45)))
            a.malloc(2 * MIB, checkpointed)
        capsule = imported(tmp_path, a)
        for rule in (LOGGED, LEAK):
            assert not [each for each in says(rule, capsule) if each.confidence != "undetermined"]
        assert "train.py:88" not in str(says(LEAK, capsule))

    def test_outputs_that_an_evaluation_keeps_till_its_end_are_quiet(self, tmp_path: Path):
        a = CachingAllocator(40 * GIB)
        job = Job(a)
        for _ in range(20):
            job.step()
        outputs = stack("evaluate /home/me/train.py:60", LOOP[1])
        for _ in range(50):
            held = job.forward()
            a.malloc(8 * MIB, outputs)
            for address in held:
                a.free(address)
        capsule = imported(tmp_path, a)
        assert says(LOGGED, capsule) == says(LEAK, capsule) == []


class TestWhatAValueKeepsAndWhatOnlyGrows:
    """memory/logged-tensors speaks of a value, and of its graph where that is seen; memory/leak of any line."""

    LOSS = stack("mse_loss /site-packages/torch/nn/functional.py:3900", "step /home/me/train.py:88", *LOOP)
    KEEP = stack("remember /home/me/train.py:77", *LOOP)

    def job(self, steps: int, also: Callable[[CachingAllocator, int], Any], **device: Any) -> CachingAllocator:
        a = CachingAllocator(40 * GIB, **device)
        job = Job(a)
        for number in range(steps):
            job.step(also=lambda at=number: also(a, at))
        return a

    def test_a_loss_with_what_its_forward_pass_computed_is_kept_with_its_graph(self, tmp_path: Path):
        def keep(a: CachingAllocator, at: int) -> None:
            for line in (90, 91, 92):
                a.malloc(6 * MIB, layer(line))
            a.malloc(4, self.LOSS)

        [finding] = says(LOGGED, imported(tmp_path, self.job(20, keep)))
        assert (finding.severity, finding.confidence) == ("warning", "likely")
        assert "its graph is kept" in finding.summary
        assert "360.00 MiB of 3 lines" in finding.summary  # 20 steps of 3 × 6 MiB
        assert "with its graph" in str(finding.cause)
        assert "train.py:88" in finding.summary

    def test_a_line_without_the_name_of_a_value_is_its_value_where_the_graph_stays_with_it(self, tmp_path: Path):
        def keep(a: CachingAllocator, at: int) -> None:
            for line in (90, 91):
                a.malloc(20 * MIB, layer(line))
            a.malloc(2 * MIB, self.KEEP)

        [finding] = says(LOGGED, imported(tmp_path, self.job(20, keep)))
        assert "train.py:77" in finding.summary
        assert "its graph is kept" in finding.summary

    def test_a_loss_of_which_all_else_is_given_back_is_kept_and_nothing_is_said_of_a_graph(self, tmp_path: Path):
        capsule = imported(tmp_path, self.job(20, lambda a, at: a.malloc(2 * MIB, self.LOSS)))
        [finding] = says(LOGGED, capsule)
        assert "train.py:88" in finding.summary
        assert "graph" not in f"{finding.summary} {finding.cause}"

    def test_a_scalar_is_a_value_whatever_its_line_is_called(self, tmp_path: Path):
        [finding] = says(LOGGED, imported(tmp_path, self.job(20, lambda a, at: a.malloc(4, self.KEEP))))
        assert finding.severity == "info"

    @pytest.mark.parametrize("size", [2 * MIB, 10 * MIB])
    def test_growth_of_another_line_is_a_leak_and_no_logged_value(self, tmp_path: Path, size: int):
        capsule = imported(tmp_path, self.job(20, lambda a, at: a.malloc(size, self.KEEP)))
        assert says(LOGGED, capsule) == []
        [finding] = says(LEAK, capsule)
        assert finding.confidence == "likely"
        assert "train.py:77: 1 a step over 20 steps" in finding.summary

    def test_a_line_of_a_model_that_a_trainer_calls_for_its_loss_is_no_loss(self, tmp_path: Path):
        """All stands beneath compute_loss and training_step; the line that counts is the innermost beyond torch."""
        trainer = tuple(
            f"{name} /site-packages/transformers/trainer.py:{line}"
            for name, line in (("compute_loss", 3800), ("training_step", 3700))
        )
        hidden = stack("forward /site-packages/transformers/models/llama/modeling_llama.py:900", *trainer, LOOP[1])
        capsule = imported(tmp_path, self.job(20, lambda a, at: a.malloc(2 * MIB, hidden)))
        assert says(LOGGED, capsule) == []
        [finding] = says(LEAK, capsule)
        assert "modeling_llama.py:900" in finding.summary  # and not the script's line that starts the trainer
        loss = stack("mse_loss /site-packages/torch/nn/functional.py:3900", *trainer, LOOP[1])
        capsule = imported(tmp_path, self.job(20, lambda a, at: a.malloc(2 * MIB, loss)), name="loss.pickle")
        [finding] = says(LOGGED, capsule)
        assert "compute_loss transformers/trainer.py:3800" in finding.summary

    def test_a_hook_of_every_layer_is_counted_with_all_its_stacks(self, tmp_path: Path):
        hooks = [
            stack("hook /home/me/probe.py:18", f"forward /home/me/model.py:{line}", *LOOP) for line in range(40, 46)
        ]
        capsule = imported(tmp_path, self.job(30, lambda a, at: [a.malloc(3 * MIB // 2, each) for each in hooks]))
        assert says(LOGGED, capsule) == []
        [finding] = says(LEAK, capsule)
        assert "180 live blocks" in finding.summary  # 30 steps of 6
        assert "probe.py:18: 6 a step over 30 steps" in finding.summary
        assert value(finding, "live blocks") == 180

    def test_a_line_that_grows_through_another_stack_each_time_is_found(self, tmp_path: Path):
        """Of 12 layers one is looked at in each step: no one stack has more than 5 blocks."""
        probes = [stack("probe /home/me/probe.py:9", f"forward /home/me/model.py:{n}", *LOOP) for n in range(12)]
        capsule = imported(tmp_path, self.job(60, lambda a, at: a.malloc(2 * MIB, probes[at * 7 % 12])))
        [finding] = says(LEAK, capsule)
        assert "probe.py:9: 1 a step over 60 steps" in finding.summary
        windowed: deque[int] = deque()

        def window(a: CachingAllocator, at: int) -> None:
            windowed.append(a.malloc(2 * MIB, probes[at * 7 % 12]))
            if len(windowed) > 12:
                a.free(windowed.popleft())

        assert says(LEAK, imported(tmp_path, self.job(60, window), name="window.pickle")) == []

    def test_copies_of_each_checkpoint_are_a_leak_with_their_rate(self, tmp_path: Path):
        copy = stack("gather_full_state_dict /home/me/ckpt.py:14", *LOOP)

        def keep(a: CachingAllocator, at: int) -> Any:
            return at % 10 == 9 and [a.malloc(8 * MIB, copy) for _ in range(3)]

        capsule = imported(tmp_path, self.job(200, keep))
        assert says(LOGGED, capsule) == []
        [finding] = says(LEAK, capsule)
        assert finding.confidence == "likely"
        assert "ckpt.py:14: 3 every 10 steps, 20 times in 200 steps" in finding.summary
        assert value(finding, "blocks a step") == 0.3

    def test_six_equal_bouts_leave_it_open_and_fewer_or_ever_rarer_ones_are_quiet(self, tmp_path: Path):
        copy = stack("gather_full_state_dict /home/me/ckpt.py:14", *LOOP)

        def job(steps: int, at: set[int]) -> CachingAllocator:
            return self.job(steps, lambda a, step: step in at and [a.malloc(8 * MIB, copy) for _ in range(6)])

        [finding] = says(LEAK, imported(tmp_path, job(60, set(range(9, 60, 10))), name="bouts.pickle"))
        assert finding.confidence == "undetermined"
        assert "6 every 10 steps, 6 times in 60 steps" in finding.summary
        for name, steps, times in (
            ("five", 50, set(range(9, 50, 10))),
            ("rarer", 70, {1, 2, 4, 8, 16, 32, 64}),
            ("ended", 90, set(range(9, 60, 10))),
        ):
            assert says(LEAK, imported(tmp_path, job(steps, times), name=f"{name}.pickle")) == []

    @pytest.mark.parametrize(
        "line", ["_init_group /site-packages/torch/optim/adamw.py:100", "update /home/me/kv_cache.py:5"]
    )
    def test_states_and_caches_that_are_made_step_after_step_leave_it_open(self, tmp_path: Path, line: str):
        made = stack(line, *LOOP)
        [finding] = says(LEAK, imported(tmp_path, self.job(20, lambda a, at: a.malloc(2 * MIB, made))))
        assert finding.confidence == "undetermined"

    def test_blocks_of_a_private_pool_leave_it_open(self, tmp_path: Path):
        a = self.job(20, lambda a, at: a.malloc(30 * MIB, self.KEEP))
        snapshot = a.snapshot()
        for event in snapshot["device_traces"][0]:
            event["pool_id"] = (0, 1) if event["frames"] == self.KEEP else (0, 0)
        [finding] = says(LEAK, imported(tmp_path, snapshot))
        assert finding.confidence == "undetermined"

    @pytest.mark.parametrize(("steps", "said"), [(1.7, 2), (4.7, 5)])
    def test_a_trace_of_so_few_steps_says_so_and_how_many_it_holds(self, tmp_path: Path, steps: float, said: int):
        """40 blocks are live, and each step of the trace makes one more: too few to tell; quiet would say healthy."""
        a = self.job(40, lambda a, at: a.malloc(2 * MIB, self.KEEP))
        each_step = len(a.events) / 40
        a = self.job(40, lambda a, at: a.malloc(2 * MIB, self.KEEP), entries=round(steps * each_step))
        report = analyze(imported(tmp_path, a), [rule_named(LEAK), rule_named(LOGGED)])
        assert not report.findings
        assert {each.rule for each in report.skipped} == {LEAK, LOGGED}
        assert f"this one holds {said}" in str(report.skipped)


class TestSeveralDevicesOfOneProcess:
    """The number of a device is no rank."""

    def test_a_leak_names_the_device_and_no_rank(self, tmp_path: Path):
        healthy, leaking = CachingAllocator(40 * GIB), CachingAllocator(40 * GIB, device=1)
        one, two = Job(healthy), Job(leaking)
        for _ in range(20):
            one.step()
            two.step(also=lambda: leaking.malloc(2 * MIB, EXTRA_LOSS))
        capsule = imported(tmp_path, devices(healthy, leaking))
        for rule in (LEAK, LOGGED):
            [finding] = says(rule, capsule)
            assert finding.where.rank is None
            assert "It is device 1." in finding.summary
        [ledger] = says("memory/ledger", capsule)
        assert ledger.where.rank is None
        [finding] = says(LEAK, imported(tmp_path, leaking, name="rank6_snapshot.pickle"))
        assert finding.where.rank == 6
        assert "device" not in finding.summary


class TestALeakOfOtherKinds:
    def test_activations_that_stay_without_a_value_are_a_leak_of_several_lines(self, tmp_path: Path):
        a = CachingAllocator(80 * GIB)
        job = Job(a)
        for _ in range(30):
            job.step(also=lambda: [a.malloc(40 * MIB, layer(90 + n)) for n in range(5)])
        capsule = imported(tmp_path, a)
        assert says(LOGGED, capsule) == []
        [finding] = says(LEAK, capsule)
        assert "5 lines" in finding.summary
        assert finding.confidence == "likely"

    def test_without_optimizer_or_backward_the_rhythm_shows_the_steps_and_many_blocks_are_needed(self, tmp_path: Path):
        for name, count, said in (("few", 12, "undetermined"), ("many", 64, "likely")):
            a = CachingAllocator(40 * GIB)
            for _ in range(count):
                for line in (5, 6, 7):
                    a.free(a.malloc(30 * MIB, layer(line)))
                a.malloc(2 * MIB, EXTRA_LOSS)
            [finding] = says(LOGGED, imported(tmp_path, a, name=f"{name}.pickle"))
            assert finding.confidence == said

    def test_blocks_without_stacks_are_told_apart_by_size(self, tmp_path: Path):
        a = CachingAllocator(40 * GIB)
        job = Job(a)
        for _ in range(40):
            job.step(also=lambda: a.malloc(3 * MIB))
        [finding] = says(LEAK, imported(tmp_path, a))
        assert value(finding, "live blocks") == 40

    def test_live_blocks_without_a_trace_leave_it_open(self, tmp_path: Path):
        a = CachingAllocator(40 * GIB)
        for _ in range(400):
            a.malloc(2 * MIB, EXTRA_LOSS)
            a.malloc(MIB, layer(3))
        snapshot = a.snapshot() | {"device_traces": []}
        [finding] = says(LOGGED, imported(tmp_path, snapshot))
        assert finding.confidence == "undetermined"
        assert "400 live blocks" in finding.summary
        assert "train.py:88" in finding.summary

    def test_live_blocks_without_a_trace_and_a_log_that_rises_by_as_much_are_a_logged_tensor(self, tmp_path: Path):
        a = CachingAllocator(40 * GIB)
        for _ in range(400):
            a.malloc(2 * MIB, EXTRA_LOSS)
        log = tmp_path / "metrics.jsonl"
        rows = (
            f'{{"step": {step}, "memory_allocated": {7_600_000_000 + 3_200_000 * step}}}\n' for step in range(1, 400)
        )
        log.write_text("".join(rows))
        capsule = imported(tmp_path, a.snapshot() | {"device_traces": []}, log)
        [finding] = says(LOGGED, capsule)
        assert finding.confidence == "likely"
        [leak] = says(LEAK, capsule)
        assert next(each.value for each in leak.evidence if each.name == "growth") == 3_200_000

    def test_weights_that_are_read_layer_after_layer_are_quiet(self, tmp_path: Path):
        a = CachingAllocator(40 * GIB)
        for _ in range(400):
            a.malloc(2 * MIB, stack("read /home/me/io.py:8", "load_weights /home/me/io.py:20", LOOP[1]))
        assert says(LOGGED, imported(tmp_path, a.snapshot() | {"device_traces": []})) == []

    def test_a_trace_that_leaves_the_frees_out_is_not_judged(self, tmp_path: Path):
        a = CachingAllocator(40 * GIB)
        job = Job(a)
        for _ in range(40):
            job.step()
        snapshot = a.snapshot()
        kept = [each for each in snapshot["device_traces"][0] if not each["action"].startswith("free")]
        capsule = imported(tmp_path, snapshot | {"device_traces": [kept]})
        report = analyze(capsule, [rule_named(LEAK)])
        assert not report.findings
        assert "tells of all allocations" in str(report.skipped)

    def test_a_store_that_fills_up_and_one_that_leaks_cannot_be_told_apart(self, tmp_path: Path):
        a = CachingAllocator(40 * GIB)
        job, fill = Job(a), stack("push /home/me/replay_buffer.py:40", *LOOP)
        for _ in range(40):
            job.step(also=lambda: a.malloc(MIB, fill))
        [finding] = says(LEAK, imported(tmp_path, a))
        assert finding.confidence == "undetermined"

    def test_a_trace_of_a_few_steps_says_that_it_is_too_short(self, tmp_path: Path):
        a = CachingAllocator(40 * GIB)
        job = Job(a)
        for _ in range(4):
            job.step(also=lambda: a.malloc(2 * MIB, EXTRA_LOSS))
        report = analyze(imported(tmp_path, a), [rule_named(LEAK), rule_named(LOGGED)])
        assert not report.findings
        assert {each.rule for each in report.skipped} == {LEAK, LOGGED}

    def test_a_trace_of_a_few_steps_will_do_with_the_blocks_from_before_it(self, tmp_path: Path):
        a = CachingAllocator(40 * GIB, entries=200)
        job = Job(a)
        for _ in range(400):
            job.step(also=lambda: a.malloc(2 * MIB, EXTRA_LOSS))
        [finding] = says(LOGGED, imported(tmp_path, a))
        assert finding.confidence == "likely"
        assert "400 live blocks" in finding.summary

    def test_a_trace_of_one_step_leaves_many_blocks_alike_open(self, tmp_path: Path):
        a = CachingAllocator(40 * GIB, entries=60)
        job = Job(a)
        for _ in range(400):
            job.step(also=lambda: a.malloc(2 * MIB, EXTRA_LOSS))
        [finding] = says(LOGGED, imported(tmp_path, a))
        assert finding.confidence == "undetermined"
        assert "400 live blocks" in finding.summary

    def test_accumulated_micro_batches_and_lengths_that_vary_are_quiet(self, tmp_path: Path):
        a = CachingAllocator(60 * GIB)
        job = Job(a)
        for number in range(40):
            held = [each for micro in range(4) for each in job.forward((8 + (number * 7 + micro * 3) % 13) * MIB)]
            job.backward(held)
        capsule = imported(tmp_path, a)
        assert says(LOGGED, capsule) == says(LEAK, capsule) == []


class TestFragmentation:
    def shattered(self, **device: Any) -> CachingAllocator:
        """Blocks of 96 MiB, small ones of long life between them; the large ones go, and 300 MiB are asked for."""
        a = CachingAllocator(4 * GIB, elsewhere=600 * MIB, **device)
        keep = stack("remember /home/me/train.py:77", *LOOP)
        arena = a.malloc(3000 * MIB, layer(1))
        a.free(arena)
        pieces: list[int] = []
        for _ in range(28):
            pieces.append(a.malloc(96 * MIB, layer(2)))
            a.malloc(2 * MIB, keep)
        for address in pieces:
            a.free(address)
        until_full(lambda _: a.malloc(300 * MIB, layer(3)))
        return a

    @pytest.mark.fires(FRAGMENTED)
    @pytest.mark.recorded(FRAGMENTED)
    def test_is_confirmed_by_every_piece_and_the_small_blocks_are_named(self, tmp_path: Path):
        a = self.shattered()
        [finding] = says(FRAGMENTED, imported(tmp_path, a))
        assert finding.confidence == "confirmed"
        assert "train.py:77" in finding.summary
        snapshot = a.snapshot()
        assert value(finding, "its largest piece") == largest_free(snapshot)
        unused = sum(
            block["size"] for each in snapshot["segments"] for block in each["blocks"] if block["state"] == "inactive"
        )
        assert value(finding, "unused, for this request") == unused
        assert value(finding, "reserved, not allocated") == a.reserved - a.allocated
        assert "28 blocks" in note(finding, "unused beside live blocks")

    def test_is_looked_at_in_the_history_of_its_device_where_a_process_has_several(self, tmp_path: Path):
        a, other = self.shattered(device=1), CachingAllocator(4 * GIB)
        other.malloc(MIB, WEIGHTS)
        [finding] = says(FRAGMENTED, imported(tmp_path, devices(other, a)))
        assert (finding.confidence, finding.where.rank, value(finding, "device")) == ("confirmed", None, 1)
        assert value(finding, "its largest piece") == largest_free(a.snapshot())

    def test_is_confirmed_where_the_snapshot_was_written_after_all_was_given_back(self, tmp_path: Path):
        a = self.shattered()
        held = [each["addr"] for each in a.events if each["action"] == "alloc"]
        for address in dict.fromkeys(held):
            if a.holds(address):
                a.free(address)
        a.release()
        [finding] = says(FRAGMENTED, imported(tmp_path, a))
        assert finding.confidence == "confirmed"
        assert value(finding, "its largest piece") < 300 * MIB

    def test_is_confirmed_where_a_log_tells_of_the_same_failure(self, tmp_path: Path):
        log = tmp_path / "job.log"
        log.write_text(
            'Traceback (most recent call last):\n  File "run.py", line 3, in <module>\n    main()\n'
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 300.00 MiB. GPU 0 has a total capacity of "
            "4.00 GiB of which 10.00 MiB is free. Of the allocated memory 760.00 MiB is allocated by PyTorch, and "
            "2.60 GiB is reserved by PyTorch but unallocated.\n"
        )
        [finding] = says(FRAGMENTED, imported(tmp_path, self.shattered(), log))
        assert finding.confidence == "confirmed"

    def test_is_confirmed_by_the_snapshot_that_a_recording_holds_as_a_file(self, tmp_path: Path):
        a = self.shattered()
        path = save(tmp_path / "memory-oom-1.pickle", a.snapshot())
        with CapsuleWriter(tmp_path / "r.capsule", title="recorded") as writer:
            writer.attach(path, "snapshot")
            sizes = {"requested": 300 * MIB, "free": 4 * GIB - 600 * MIB - a.reserved}
            writer.record("events", {"kind": "oom", "allocated": a.allocated, "reserved": a.reserved, **sizes})
        [finding] = says(FRAGMENTED, Capsule.open(tmp_path / "r.capsule"))
        assert finding.confidence == "confirmed"
        assert "train.py:77" in finding.summary

    def test_is_confirmed_by_segments_alone_where_they_are_in_the_state_that_the_log_tells_of(self, tmp_path: Path):
        a = self.shattered()
        log = tmp_path / "job.log"
        idle = (a.reserved - a.allocated) / MIB
        log.write_text(
            'Traceback (most recent call last):\n  File "run.py", line 3, in <module>\n    main()\n'
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 300.00 MiB. GPU 0 has a total capacity of "
            f"4.00 GiB of which 10.00 MiB is free. Of the allocated memory {a.allocated / MIB:.2f} MiB is allocated by "
            f"PyTorch, and {idle:.2f} MiB is reserved by PyTorch but unallocated.\n"
        )
        [finding] = says(FRAGMENTED, imported(tmp_path, a.snapshot() | {"device_traces": [[]]}, log))
        assert finding.confidence == "confirmed"
        assert "train.py:77" in finding.summary

    @pytest.mark.quiet(FRAGMENTED)
    def test_a_full_device_is_quiet(self, tmp_path: Path):
        a = CachingAllocator(4 * GIB, elsewhere=600 * MIB)
        until_full(lambda _: a.malloc(96 * MIB, layer(2)))
        capsule = imported(tmp_path, a)
        assert says(FRAGMENTED, capsule) == []
        assert [each.rule for each in analyze(capsule).findings if each.severity == "warning"] == ["memory/capacity"]

    def test_unused_memory_of_another_stream_is_said_to_be_elsewhere(self, tmp_path: Path):
        a = CachingAllocator(4 * GIB, elsewhere=600 * MIB)
        side = [a.malloc(200 * MIB, layer(2), stream=7) for _ in range(12)]
        for address in side:
            a.free(address)
        a.malloc(20 * MIB, layer(4), stream=7)  # each segment stays in part in use
        for _ in range(11):
            a.malloc(2 * MIB, layer(4), stream=7)
        until_full(lambda _: a.malloc(150 * MIB, layer(3)))
        found = says(FRAGMENTED, imported(tmp_path, a))
        assert all("elsewhere" in each.title and each.confidence != "confirmed" for each in found)

    def test_growing_lengths_are_the_cause_where_each_batch_asks_for_more(self, tmp_path: Path):
        a = CachingAllocator(8 * GIB, elsewhere=600 * MIB)
        outputs = stack("predict /home/me/run.py:31", *LOOP)

        def process(number: int) -> None:
            batch = a.malloc((10 + number) * 24 * MIB, layer(1))
            a.malloc((10 + number) * 3 * MIB, outputs)  # is kept, and lies in what the batch before gave back
            a.free(batch)

        until_full(process)
        [finding] = says(FRAGMENTED, imported(tmp_path, a))
        assert "lengths grow" in str(finding.cause)
        assert "longest batches first" in finding.fix[0]


@pytest.mark.parametrize("number", range(14))
def test_of_jobs_by_number_those_that_leak_are_named_and_the_others_are_quiet(tmp_path: Path, number: int):
    kind, device, leaked = numbered(number)
    report = analyze(imported(tmp_path, device), [rule_named(each) for each in (LEAK, LOGGED, FRAGMENTED)])
    assert not report.errors
    if kind != "leak":
        assert not report.findings
    elif leaked >= ENOUGH:
        assert report.first_divergence is not None
        assert report.first_divergence.rule == LOGGED
        assert "train.py:88" in report.first_divergence.summary


@pytest.mark.parametrize("rule", [LEAK, LOGGED, FRAGMENTED])
def test_the_real_file_of_made_up_events_holds_nothing(tmp_path: Path, rule: str):
    path = Path(__file__).resolve().parents[3] / "shared" / "real" / "memory_snapshot" / "mosaic_output.pickle"
    if not path.is_file():
        pytest.skip("../shared/real is not here")
    from llmconsole.capsules.importers import import_files

    assert says(rule, Capsule.open(import_files([path], tmp_path, attach=False))) == []
