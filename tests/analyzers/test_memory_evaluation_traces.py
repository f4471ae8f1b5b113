"""memory/eval-graph on snapshots of jobs that ran on a model of the caching allocator, and on frames of failures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule

from benchmarks.caching_allocator import GIB, MIB, CachingAllocator, Frames, OutOfMemory, stack
from benchmarks.training_memory import EXTRA_LOSS, LOOP, Job
from tests.analyzers.conftest import rule_named
from tests.analyzers.snapshots import imported

EVAL, LEAK, LOGGED = "memory/eval-graph", "memory/leak", "memory/logged-tensors"
FULL, SPLIT = "memory/capacity", "memory/fragmentation"
CALL = "_call_impl /site-packages/torch/nn/modules/module.py:1779"
Make = Callable[..., Capsule]


def inside(line: int, function: str = "evaluate") -> Frames:
    """The stack of one operation of the model in an evaluation."""
    return stack(
        "linear /site-packages/torch/nn/functional.py:40",
        f"forward /home/me/model.py:{line}",
        CALL,
        f"{function} /home/me/train.py:60",
        LOOP[1],
    )


def body(line: int, function: str = "evaluate") -> Frames:
    """The stack of a line of the evaluation's own function."""
    return stack(f"{function} /home/me/train.py:{line}", LOOP[1])


class Evaluated:
    """A job that trains and evaluates; ``keep`` names what stays of each batch of an evaluation."""

    def __init__(self, capacity: int = 40 * GIB, steps: int = 8, function: str = "evaluate") -> None:
        self.a, self.function = CachingAllocator(capacity), function
        self.job = Job(self.a)
        self.train(steps)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.job.step()

    def evaluate(self, batches: int, keep: Callable[[list[int]], list[int]], lines: int = 4) -> list[int]:
        """The blocks that stay after so many batches of ``lines`` operations, the last of which makes logits."""
        kept: list[int] = []
        for _ in range(batches):
            batch = self.a.malloc(MIB, body(58, self.function))
            held = [self.a.malloc(24 * MIB, inside(30 + at, self.function)) for at in range(lines)]
            stays = keep(held)
            kept += stays
            for each in (batch, *held):
                if each not in stays:
                    self.a.free(each)
        return kept

    def until_full(self, keep: Callable[[list[int]], list[int]]) -> CachingAllocator:
        with pytest.raises(OutOfMemory):
            self.evaluate(2000, keep)
        return self.a


def logits(held: list[int]) -> list[int]:
    return held[-1:]


def everything(held: list[int]) -> list[int]:
    return held


def nothing(held: list[int]) -> list[int]:
    return []


def says(rule: str, capsule: Capsule) -> list[Finding]:
    report = analyze(capsule, [rule_named(rule)])
    assert not report.errors, report.errors
    return list(report.findings)


def values(finding: Finding) -> dict[str, Any]:
    return {each.name: each.value for each in finding.evidence}


class TestUntilTheDeviceIsFull:
    @pytest.mark.fires(EVAL)
    @pytest.mark.parametrize("steps", [0, 1, 8, 30])
    def test_outputs_that_are_collected_are_named_and_the_failure_follows(self, tmp_path: Path, steps: int):
        capsule = imported(tmp_path, Evaluated(2 * GIB, steps).until_full(logits))
        report = analyze(capsule, [rule_named(each) for each in (EVAL, LEAK, LOGGED, FULL, SPLIT)])
        assert report.first_divergence is not None
        assert report.first_divergence.rule == EVAL
        found = {each.rule: each for each in report.findings}
        assert all(each.caused_by == EVAL for rule, each in found.items() if rule != EVAL)
        finding = found[EVAL]
        assert (finding.severity, finding.confidence) == ("warning", "likely")
        assert "model.py:33" in finding.summary
        assert "outputs are collected" in finding.summary
        assert values(finding)["kept in evaluation"] == 24 * MIB * values(finding)["blocks that are kept"]

    def test_a_graph_that_is_kept_is_told_from_outputs(self, tmp_path: Path):
        [finding] = says(EVAL, imported(tmp_path, Evaluated(4 * GIB).until_full(everything)))
        assert finding.confidence == "likely"
        assert "its graph is kept" in finding.summary
        assert "no_grad" in finding.fix[0]

    def test_between_a_graph_and_outputs_of_each_layer_it_stays_open(self, tmp_path: Path):
        job = Evaluated(4 * GIB)
        with pytest.raises(OutOfMemory):
            job.evaluate(2000, lambda held: held[-4:], lines=10)
        [finding] = says(EVAL, imported(tmp_path, job.a))
        assert (finding.confidence, finding.cause) == ("undetermined", None)

    def test_outputs_that_are_joined_with_each_batch_are_collected(self, tmp_path: Path):
        """The trainer of transformers: the new tensor takes what there was and a batch more, then the old one goes."""
        join = stack(
            "torch_pad_and_concatenate /site-packages/transformers/trainer_pt_utils.py:90",
            "nested_concat /site-packages/transformers/trainer_pt_utils.py:120",
            "evaluation_loop /site-packages/transformers/trainer.py:4373",
            "evaluate /site-packages/transformers/trainer.py:4166",
            LOOP[1],
        )
        job = Evaluated(2 * GIB)
        held = [job.a.malloc(30 * MIB, join)]

        def batch(number: int) -> None:
            for each in [job.a.malloc(24 * MIB, inside(30 + at)) for at in range(4)]:
                job.a.free(each)
            held.append(job.a.malloc((number + 2) * 30 * MIB, join))
            job.a.free(held.pop(0))

        with pytest.raises(OutOfMemory):
            list(map(batch, range(2000)))
        [finding] = says(EVAL, imported(tmp_path, job.a))
        assert finding.confidence == "likely"
        assert "torch_pad_and_concatenate" in finding.summary
        assert "outputs are collected" in finding.summary

    def test_a_phase_without_a_name_leaves_growth_open_at_the_failure(self, tmp_path: Path):
        job = Evaluated(2 * GIB, function="run_epoch")
        with pytest.raises(OutOfMemory):
            job.evaluate(2000, logits)
        capsule = imported(tmp_path, job.a)
        assert says(EVAL, capsule) == []
        [finding] = says(LEAK, capsule)
        assert finding.confidence == "undetermined"
        assert "model.py:33" in finding.summary
        job = Evaluated(40 * GIB, function="run_epoch")
        job.evaluate(40, logits)
        assert says(LEAK, imported(tmp_path, job.a, name="fits.pickle")) == []


class TestWithoutAFailure:
    @pytest.mark.parametrize("back", [True, False])
    def test_outputs_of_one_evaluation_are_a_remark(self, tmp_path: Path, back: bool):
        job = Evaluated()
        for each in job.evaluate(20, logits) if back else [*job.evaluate(20, logits)] * 0:
            job.a.free(each)
        [finding] = says(EVAL, imported(tmp_path, job.a))
        assert finding.severity == "info"
        assert "20 batches" in finding.summary
        assert ("given back" in finding.summary.partition("collected.")[2]) == back

    def test_outputs_of_two_evaluations_that_are_still_there_are_a_warning(self, tmp_path: Path):
        job = Evaluated()
        for _ in range(2):
            job.evaluate(12, logits)
            job.train(3)
        [finding] = says(EVAL, imported(tmp_path, job.a))
        assert (finding.severity, finding.confidence) == ("warning", "likely")
        assert "2 evaluations are still there, 0.56 GiB" in finding.summary  # 2 of 12 batches of 24 MiB

    def test_a_graph_is_a_warning_even_where_it_is_given_back(self, tmp_path: Path):
        job = Evaluated()
        for each in job.evaluate(12, everything):
            job.a.free(each)
        [finding] = says(EVAL, imported(tmp_path, job.a))
        assert (finding.severity, finding.confidence) == ("warning", "likely")

    @pytest.mark.quiet(EVAL)
    def test_an_evaluation_that_gives_back_each_batch_is_quiet(self, tmp_path: Path):
        job = Evaluated()
        job.evaluate(30, nothing)
        report = analyze(imported(tmp_path, job.a), [rule_named(EVAL)])
        assert (list(report.findings), list(report.quiet)) == ([], [EVAL])

    def test_few_batches_are_not_judged(self, tmp_path: Path):
        job = Evaluated()
        job.evaluate(5, logits)
        report = analyze(imported(tmp_path, job.a), [rule_named(EVAL)])
        assert [each.rule for each in report.skipped] == [EVAL]

    def test_a_function_that_evaluates_within_each_step_of_training_is_no_evaluation(self, tmp_path: Path):
        a = CachingAllocator(40 * GIB)
        job = Job(a)
        for _ in range(30):
            job.step(also=lambda: a.malloc(6 * MIB, body(70, "evaluate_actions")))
        assert says(EVAL, imported(tmp_path, a)) == []

    def test_a_leak_of_training_is_no_matter_of_evaluation(self, tmp_path: Path):
        job = Evaluated(steps=0)
        for _ in range(30):
            job.job.step(also=lambda: job.a.malloc(6 * MIB, EXTRA_LOSS))
        job.evaluate(12, nothing)
        assert says(EVAL, imported(tmp_path, job.a)) == []

    def test_layers_of_one_batch_are_at_most_an_open_question(self, tmp_path: Path):
        a = CachingAllocator(40 * GIB)
        Job(a).step()
        a.malloc(24 * MIB, inside(20))
        for _ in range(80):
            a.malloc(24 * MIB, inside(30))
            a.free(a.malloc(48 * MIB, inside(31)))
        for finding in says(EVAL, imported(tmp_path, a)):
            assert (finding.confidence, finding.cause) == ("undetermined", None)

    def test_text_that_is_generated_with_a_growing_cache_is_quiet(self, tmp_path: Path):
        job = Evaluated()
        cache = stack(
            "update /site-packages/transformers/cache_utils.py:110",
            "generate /home/me/sample.py:9",
            *body(61)[0:0],
            CALL,
        ) + body(61)
        kept = job.a.malloc(MIB, cache)
        for token in range(2, 60):
            for each in [job.a.malloc(8 * MIB, inside(30 + at)) for at in range(4)]:
                job.a.free(each)
            longer = job.a.malloc(token * MIB, cache)
            job.a.free(kept)
            kept = longer
        assert says(EVAL, imported(tmp_path, job.a)) == []

    def test_batches_in_the_order_of_their_lengths_are_quiet(self, tmp_path: Path):
        job, last = Evaluated(), None
        for number in range(1, 40):
            made = job.a.malloc(number * 8 * MIB, inside(30))
            job.a.free(job.a.malloc(8 * MIB, inside(31)))
            if last is not None:
                job.a.free(last)
            last = made
        assert says(EVAL, imported(tmp_path, job.a)) == []


class TestAFailureInALog:
    """The frames of the error tell whether outputs were joined, or a forward pass was under way."""

    TRAINER = "/usr/lib/python3/site-packages/transformers"

    def log(self, *inner: tuple[str, str, int]) -> Callable[[Any], None]:
        outer = (("evaluation_loop", f"{self.TRAINER}/trainer.py", 4373), ("<module>", "train.py", 91))
        frames = [{"name": name, "file": file, "line": line} for name, file, line in (*inner, *outer)]
        event = {"kind": "oom", "step": 49, "phase": "eval", "frames": frames}
        sizes = {"requested": 16 * GIB, "free": 9 * GIB, "allocated": 68 * GIB, "capacity": 79 * GIB}
        return lambda writer: writer.record("events", event | sizes)

    @pytest.mark.fires(EVAL)
    @pytest.mark.parametrize(
        "inner",
        [
            [("add", f"{TRAINER}/trainer_pt_utils.py", 330)],
            [("torch_pad_and_concatenate", f"{TRAINER}/trainer_pt_utils.py", 90)],
            [("dim_zero_cat", "/usr/lib/python3/site-packages/torchmetrics/utilities/data.py", 30)],
        ],
    )
    def test_where_outputs_are_joined_they_are_collected_and_capacity_follows(self, build: Make, inner: Any):
        report = analyze(build(self.log(*inner)), [rule_named(EVAL), rule_named(FULL)])
        assert report.first_divergence is not None
        assert report.first_divergence.rule == EVAL
        finding = next(each for each in report.findings if each.rule == EVAL)
        assert f"{inner[0][0]} " in finding.summary
        assert any("eval_accumulation_steps" in each for each in finding.fix)

    @pytest.mark.quiet(EVAL)
    @pytest.mark.parametrize(
        "inner",
        [
            [("forward", "model.py", 8)],
            [("cat", "model.py", 5), ("forward", "model.py", 8)],
            [("distributed_concat", f"{TRAINER}/trainer_pt_utils.py", 190)],
            [("prediction_step", f"{TRAINER}/trainer.py", 4500)],
        ],
    )
    def test_a_forward_pass_or_what_the_ranks_of_one_batch_gave_is_quiet(self, build: Make, inner: Any):
        for finding in says(EVAL, build(self.log(*inner))):
            raise AssertionError(finding.summary)

    def test_outputs_that_are_joined_in_training_are_quiet(self, build: Make):
        def fill(writer: Any) -> None:
            frames = [
                {"name": "cat_all", "file": "loop.py", "line": 3},
                {"name": "train", "file": "loop.py", "line": 9},
            ]
            writer.record("events", {"kind": "oom", "step": 4, "phase": "eval", "requested": GIB, "frames": frames})

        assert says(EVAL, build(fill)) == []
