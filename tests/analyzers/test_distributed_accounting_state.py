"""Shared data, replicas that part, gradients over the reduction, buffers used too early, one path for all ranks."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.registry import all_rules
from llmconsole.analyzers.runner import analyze

DATA, REPLICAS, GRADIENTS = "distributed/duplicate-data", "distributed/replicas-diverged", "distributed/gradient-scale"
BUFFER, PATHS = "distributed/unwaited-buffer", "distributed/rank-zero-work-everywhere"
FOUR: dict[str, Any] = {"run": {"world_size": 4}, "training": {"data_parallel": 4}}
PLAIN: dict[str, Any] = {"run": {"world_size": 4}}


@pytest.fixture
def said(build: Any) -> Any:
    """``said(rule, fill, manifest)``: what the rule says of a capsule; nothing where it has nothing to compare."""
    rules = {each.id: each for each in all_rules()}

    def said(rule: str, fill: Any, manifest: Any = None) -> list[Finding]:
        report = analyze(build(fill, manifest), [rules[rule]])
        assert not report.errors, report.errors
        return list(report.findings)

    return said


def digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def samples(row: Any, ranks: int = 4, steps: int = 12, batch: int = 4, key: str = "sha256", **more: Any) -> Any:
    """``row(rank, n)``: which sample is the n-th that a rank trains on; None writes nothing."""

    def fill(w: Any) -> None:
        for rank in range(ranks):
            rows: list[dict[str, Any]] = []
            for n in range(steps * batch):
                chosen = row(rank, n)
                if chosen is not None:
                    rows.append({"step": n // batch, key: digest(chosen) if key == "sha256" else str(chosen)} | more)
            w.records("samples", rows, rank=rank)

    return fill


class TestData:
    @pytest.mark.fires(DATA)
    def test_without_a_distributed_sampler_all_ranks_hold_the_same_rows(self, said: Any) -> None:
        (found,) = said(DATA, samples(lambda rank, n: n), FOUR)
        assert (found.confidence, found.severity, found.where.step) == ("confirmed", "critical", 0)
        assert "All ranks" in found.summary
        assert next(e.value for e in found.evidence if e.name == "share of rows in common") == 1.0
        # A sampler that is given one rank everywhere gives the same rows: each reads its share then, not the whole.
        assert found.cause == "no distributed sampler, or one that is given the same rank on every process"

    def test_nothing_said_of_the_layout_makes_it_likely(self, said: Any) -> None:
        (found,) = said(DATA, samples(lambda rank, n: n), PLAIN)
        assert (found.confidence, found.severity) == ("likely", "warning")

    def test_ranks_numbered_within_the_node_share_by_pairs(self, said: Any) -> None:
        (found,) = said(DATA, samples(lambda rank, n: (rank % 2, n)), FOUR)
        groups = next(e.value for e in found.evidence if e.name == "ranks with the same data")
        assert groups == [[0, 2], [1, 3]]
        assert "rank within the node" in found.cause

    def test_names_alone_are_likely_and_names_with_other_contents_are_open(self, said: Any) -> None:
        (found,) = said(DATA, samples(lambda rank, n: n, key="id"), FOUR)
        assert found.confidence == "likely"

        def local_numbers(w: Any) -> None:
            for rank in range(4):
                rows = [{"step": n // 4, "id": str(n), "sha256": digest(rank, n)} for n in range(48)]
                w.records("samples", rows, rank=rank)

        (found,) = said(DATA, local_numbers, FOUR)
        assert (found.confidence, found.cause) == ("undetermined", None)

    def test_digests_of_whole_batches_are_enough(self, said: Any) -> None:
        def fill(w: Any) -> None:
            for rank in range(4):
                rows = [{"kind": "step_begin", "step": s, "micro": 0, "batch_sha256": digest(s)} for s in range(12)]
                w.records("events", rows, rank=rank)

        assert said(DATA, fill, FOUR)[0].confidence == "confirmed"

    def test_captured_batches_are_enough(self, said: Any) -> None:
        def fill(w: Any) -> None:
            for rank in range(2):
                for step in range(4):
                    ids = np.random.default_rng(step).integers(0, 50, (4, 8))
                    w.batch(step=step, rank=rank, split="train", input_ids=ids)

        assert said(DATA, fill, {"run": {"world_size": 2}})

    def test_one_step_does_not_tell_it_from_a_repeated_batch(self, said: Any) -> None:
        (found,) = said(DATA, samples(lambda rank, n: n, steps=1, batch=8), FOUR)
        assert found.confidence == "undetermined"

    def test_each_rank_shuffles_the_whole_set_by_itself(self, said: Any) -> None:
        order = [np.random.default_rng(rank).permutation(400) for rank in range(4)]
        (found,) = said(DATA, samples(lambda rank, n: int(order[rank][n]), steps=60), PLAIN)
        assert found.confidence == "likely"
        assert "order of its own" in found.summary
        assert "without a distributed sampler or with it" in found.cause

    @pytest.mark.quiet(DATA)
    def test_disjoint_shares_over_several_epochs(self, said: Any) -> None:
        shuffled = [np.random.default_rng(epoch).permutation(120) for epoch in range(8)]

        def row(rank: int, n: int) -> int:
            epoch, at = divmod(n, 30)
            return int(shuffled[epoch][4 * at + rank])

        assert said(DATA, samples(row, steps=48), FOUR) == []

    def test_parts_of_one_model_share_a_batch_by_design(self, said: Any) -> None:
        whole = samples(lambda rank, n: n)
        tensor = {"run": {"world_size": 4}, "training": {"tensor_parallel": 4}}
        assert said(DATA, whole, tensor) == []
        pairs = samples(lambda rank, n: (rank // 2, n))
        assert said(DATA, pairs, {"run": {"world_size": 4}, "training": {"tensor_parallel": 2}}) == []
        # Megatron's arguments, torchtitan's configuration, a mesh: the same thing in other words.
        for manifest in (
            {"config": {"tensor_model_parallel_size": 2}},
            {"config": {"parallelism": {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 1}}},
            {"config": {"context_parallel_size": 2}},
            {"placement": {"mesh": {"dp": 2, "tp": 2}}},
            {"placement": {"mesh": {"names": ["dp_replicate", "cp"], "shape": [2, 2]}}},
        ):
            assert said(DATA, pairs, {"run": {"world_size": 4}, **manifest}) == []
        stages = samples(lambda rank, n: (rank % 2, n))  # the pipeline is outermost: 0 and 2 are one replica
        assert said(DATA, stages, {"run": {"world_size": 4}, "training": {"pipeline_parallel": 2}}) == []
        assert said(DATA, pairs, {"run": {"world_size": 4}, "training": {"pipeline_parallel": 2}})

    def test_shards_of_the_data_parallel_kind_have_batches_of_their_own_and_others_may_not(self, said: Any) -> None:
        def fill(w: Any) -> None:
            samples(lambda rank, n: n)(w)
            w.scalars("grad_norm_shard", step=[0, 1], value=[1.0, 1.0], rank=0)

        fsdp = {"run": {"world_size": 4}, "training": {"sharding": {"kind": "fsdp2"}}}
        assert said(DATA, fill, fsdp)[0].confidence == "confirmed"
        assert said(DATA, fill, PLAIN) == []  # tensor parallelism on a mesh that nobody named

    def test_names_of_process_groups_say_it_too(self, said: Any) -> None:
        def fill(w: Any) -> None:
            samples(lambda rank, n: (rank // 2, n))(w)
            for rank in range(4):
                pair = [rank // 2 * 2, rank // 2 * 2 + 1]
                row = {"group": "7", "group_desc": "TENSOR_MODEL_PARALLEL_GROUP", "group_ranks": pair, "seq": 1}
                w.record("collectives", row, rank=rank)

        assert said(DATA, fill, PLAIN) == []

    def test_groups_that_nothing_explains_leave_it_open(self, said: Any) -> None:
        def fill(w: Any) -> None:
            samples(lambda rank, n: (rank // 2, n))(w)
            for rank in range(4):
                pair = [rank // 2 * 2, rank // 2 * 2 + 1]
                w.record("collectives", {"group": "7", "group_desc": "undefined", "group_ranks": pair}, rank=rank)

        (found,) = said(DATA, fill, PLAIN)
        assert found.confidence == "undetermined"

    def test_one_batch_on_purpose(self, said: Any) -> None:
        overfit = {**FOUR, "run": {"world_size": 4, "overfit": True}}
        assert said(DATA, samples(lambda rank, n: n), overfit) == []
        assert said(DATA, samples(lambda rank, n: n % 4), FOUR) == []  # said by nobody, seen from the rows

    def test_few_samples_with_replacement(self, said: Any) -> None:
        for seed in range(4):
            drawn = np.random.default_rng(seed).integers(0, 3, (4, 400))
            for batch in (1, 2, 8):
                steps = 400 // batch
                assert said(DATA, samples(lambda r, n, d=drawn: int(d[r, n]), steps=steps, batch=batch), FOUR) == []

    def test_many_draws_with_replacement_meet_each_other_and_themselves(self, said: Any) -> None:
        for size in (60, 400, 3000):
            drawn = np.random.default_rng(size).integers(0, size, (4, 240))
            assert said(DATA, samples(lambda r, n, d=drawn: int(d[r, n]), steps=60), FOUR) == []

    def test_padding_at_the_end_of_an_epoch(self, said: Any) -> None:
        """Ten samples on four ranks: the sampler pads to twelve with the first two."""
        padded = [*range(10), 0, 1]
        assert said(DATA, samples(lambda rank, n: padded[4 * n + rank], steps=3, batch=1), FOUR) == []
        for epoch in (1, 2, 5):
            # Three samples: rank 3 holds what rank 0 holds, in each epoch.
            assert said(DATA, samples(lambda rank, n: rank % 3, steps=epoch, batch=1), FOUR) == []

    def test_validation_runs_alike_on_every_rank(self, said: Any) -> None:
        assert said(DATA, samples(lambda rank, n: n, split="validation"), FOUR) == []

    def test_prompts_that_are_sampled_several_times(self, said: Any) -> None:
        rl = {"run": {"world_size": 4}, "training": {"data_parallel": 4, "objective": "grpo"}}
        assert said(DATA, samples(lambda rank, n: n, key="id"), rl) == []


def checksums(values: Any, ranks: int = 4, steps: int = 6, names: Any = ("a.weight", "b.weight"), **more: Any) -> Any:
    """``values(rank, step, name)``: what a tensor holds."""

    def fill(w: Any) -> None:
        for rank in range(ranks):
            rows = [
                {"step": s, "name": name, "sha256": digest(values(rank, s, name)), "kind": "parameter"} | more
                for s in range(steps)
                for name in names
            ]
            w.records("checksums", rows, rank=rank)

    return fill


class TestReplicas:
    @pytest.mark.fires(REPLICAS)
    def test_the_first_step_the_first_name_and_the_rank_outside_the_majority(self, said: Any) -> None:
        def values(rank: int, step: int, name: str) -> Any:
            return (step, name, rank == 2 and step >= 3 and name == "b.weight")

        (found,) = said(REPLICAS, checksums(values), PLAIN)
        assert (found.confidence, found.severity) == ("confirmed", "critical")
        assert (found.where.step, found.where.rank, found.where.tensor) == (3, 2, "b.weight")

    def test_two_replicas_cannot_tell_which_is_right(self, said: Any) -> None:
        (found,) = said(
            REPLICAS, checksums(lambda r, s, n: (s, n, r == 1 and s > 2), ranks=2), {"run": {"world_size": 2}}
        )
        assert (found.confidence, found.where.rank, found.where.step) == ("confirmed", None, 3)
        assert "cannot tell which" in found.summary

    def test_other_starts_are_named_as_such(self, said: Any) -> None:
        (found,) = said(REPLICAS, checksums(lambda r, s, n: (s, n, r == 1)), PLAIN)
        assert (found.where.rank, found.where.step) == (1, 0)
        # The first checksum that the recorder takes is that after the first update.
        assert "did not start from the same values" in found.cause
        assert "gradients that were not reduced" in found.cause

    def test_all_apart_from_the_start_may_be_shards(self, said: Any) -> None:
        apart = checksums(lambda r, s, n: (s, n, r))
        assert said(REPLICAS, apart, PLAIN)[0].confidence == "undetermined"
        assert said(REPLICAS, apart, FOUR)[0].confidence == "confirmed"

    @pytest.mark.quiet(REPLICAS)
    def test_equal_replicas_and_shards(self, said: Any) -> None:
        assert said(REPLICAS, checksums(lambda r, s, n: (s, n)), PLAIN) == []
        apart = checksums(lambda r, s, n: (s, n, r))
        for sharding in ({"kind": "fsdp"}, {"kind": "zero", "stage": 3}, {"kind": "DeepSpeed-ZeRO3"}):
            assert said(REPLICAS, apart, {"run": {"world_size": 4}, "training": {"sharding": sharding}}) == []
        whole = {"run": {"world_size": 4}, "training": {"sharding": {"kind": "zero", "stage": 1}}}
        assert said(REPLICAS, apart, whole)[0].confidence == "confirmed"

    def test_parts_of_one_model_are_compared_with_their_like(self, said: Any) -> None:
        tensor = {"run": {"world_size": 4}, "training": {"tensor_parallel": 2}}
        assert said(REPLICAS, checksums(lambda r, s, n: (s, n, r % 2)), tensor) == []
        (found,) = said(REPLICAS, checksums(lambda r, s, n: (s, n, r % 2, r == 3 and s == 5)), tensor)
        assert (found.where.step, found.where.rank) == (5, None)

    def test_experts_differ_where_they_are_divided(self, said: Any) -> None:
        fill = checksums(lambda r, s, n: (s, n, r), names=("layers.0.experts.w1",))
        expert = {"run": {"world_size": 4}, "config": {"expert_model_parallel_size": 4}}
        assert said(REPLICAS, fill, expert) == []

    def test_running_statistics_are_a_remark_and_other_buffers_a_warning(self, said: Any) -> None:
        names = ("norm.running_mean", "norm.running_var")
        (found,) = said(REPLICAS, checksums(lambda r, s, n: (r, s, n), names=names, kind="buffer"), PLAIN)
        assert (found.severity, found.kind) == ("info", "hygiene")
        (found,) = said(
            REPLICAS, checksums(lambda r, s, n: (s, r == 1 and s > 3), names=("ema",), kind="buffer"), PLAIN
        )
        assert (found.severity, found.confidence, found.where.rank, found.where.step) == ("warning", "likely", 1, 4)

    def test_random_states_differ_by_design_unless_they_had_been_equal(self, said: Any) -> None:
        rng = {"names": ("torch",), "kind": "rng"}
        assert said(REPLICAS, checksums(lambda r, s, n: (r, s), **rng), PLAIN) == []
        (found,) = said(REPLICAS, checksums(lambda r, s, n: (s, r == 3 and s >= 4), **rng), PLAIN)
        assert (found.severity, found.where.step, found.where.rank) == ("info", 4, 3)

    def test_models_that_are_averaged_now_and_then_meet_again(self, said: Any) -> None:
        (found,) = said(REPLICAS, checksums(lambda r, s, n: (s, r if s % 3 else 0)), FOUR)
        assert (found.severity, found.kind) == ("info", "hygiene")
        assert "equal again at step 3" in found.summary

    def test_after_an_error_that_one_rank_caught_steps_of_one_number_are_other_steps(self, said: Any) -> None:
        def fill(w: Any) -> None:
            # Rank 1 raises at step 3 and does the batch again: its later windows count one more.
            checksums(lambda r, s, n: (n, s - (r == 1 and s >= 3)))(w)
            own = Gradients(0.3)
            mean = own.times(1.0)
            norms(own.local, lambda s, r: mean(s - (r == 1 and s >= 3), r), steps=6)(w)
            w.record("events", {"kind": "exception", "step": 3, "type": "OSError"}, rank=1)

        assert said(REPLICAS, fill, FOUR) == []
        assert said(GRADIENTS, fill, FOUR) == []

    def test_what_is_reduced_at_every_second_step_is_local_sgd(self, said: Any) -> None:
        own = Gradients(0.3)
        model = {**FOUR, "model": {"parameters": 1000}}

        def fill(every: int) -> Any:
            def fill(w: Any) -> None:
                checksums(lambda r, s, n: (s, n, r), steps=12)(w)
                norms(None, None, steps=12, grad_norm=own.local)(w)
                for rank in range(4):
                    rows = [
                        {"op": "all_reduce", "group": "0", "seq": s + 1, "step": s, "shapes_in": [[1000 - s % every]]}
                        | ({} if s % every == 0 else {"shapes_in": [[1]]})
                        for s in range(12)
                    ]
                    w.records("collectives", rows, rank=rank)

            return fill

        assert said(GRADIENTS, fill(2), model) == []
        (found,) = said(REPLICAS, fill(2), model)
        assert (found.severity, found.kind) == ("info", "hygiene")
        # At every step: the parameters, maybe, since the gradients' norms differ.
        assert said(GRADIENTS, fill(1), model)[0].confidence == "likely"
        # Never: confirmed.
        assert said(GRADIENTS, fill(99), {**FOUR, "model": {"parameters": 10**6}})[0].confidence == "confirmed"


def norms(local: Any, reduced: Any, ranks: int = 4, steps: int = 20, **more: Any) -> Any:
    """``local(step, rank)`` and ``reduced(step, rank)``; None writes nothing."""

    def fill(w: Any) -> None:
        at = list(range(steps))
        for rank in range(ranks):
            for name, value in (("grad_norm_local", local), ("grad_norm_reduced", reduced), *more.items()):
                if value is not None:
                    w.scalars(name, step=at, value=[float(value(step, rank)) for step in at], rank=rank)

    return fill


class Gradients:
    """Real vectors: ``own[step, rank]``, and norms of what a reduction makes of them."""

    def __init__(self, alike: float, ranks: int = 4, steps: int = 20) -> None:
        generator = np.random.default_rng(3)
        common = generator.normal(size=(steps, 1, 50))
        self.own = alike * common + (1 - alike) * generator.normal(size=(steps, ranks, 50))

    def local(self, step: int, rank: int) -> float:
        return float(np.linalg.norm(self.own[step, rank]))

    def times(self, factor: float) -> Any:
        return lambda step, rank: factor * float(np.linalg.norm(self.own[step].mean(axis=0)))


class TestGradients:
    @pytest.mark.quiet(GRADIENTS)
    @pytest.mark.parametrize("alike", [0.0, 0.3, 0.9, 1.0])
    def test_a_mean_is_quiet_however_alike_the_gradients_are(self, said: Any, alike: float) -> None:
        drawn = Gradients(alike)
        assert said(GRADIENTS, norms(drawn.local, drawn.times(1.0)), FOUR) == []

    @pytest.mark.fires(GRADIENTS)
    @pytest.mark.parametrize("alike", [0.3, 0.9, 1.0])
    def test_a_sum_is_longer_than_any_mean(self, said: Any, alike: float) -> None:
        drawn = Gradients(alike)
        (found,) = said(GRADIENTS, norms(drawn.local, drawn.times(4.0)), FOUR)
        assert found.title == "Gradients are not averaged over the ranks"
        assert found.confidence == "likely"
        assert "summed" in found.cause

    def test_a_root_of_the_ranks_is_told_from_a_sum_where_it_can_be(self, said: Any) -> None:
        drawn = Gradients(0.9)
        (root,) = said(GRADIENTS, norms(drawn.local, drawn.times(2.0)), FOUR)
        assert "√4" in root.cause
        (whole,) = said(GRADIENTS, norms(drawn.local, drawn.times(4.0)), FOUR)
        assert "√" not in whole.cause

    def test_known_means_of_each_rank_confirm_a_sum(self, said: Any) -> None:
        drawn = Gradients(0.9)

        def fill(w: Any) -> None:
            norms(drawn.local, drawn.times(4.0), loss=lambda s, r: 3.0 + 0.1 * r)(w)
            for rank in range(4):
                rows = [{"step": s, "tokens": 100, "loss_sum": 100 * (3.0 + 0.1 * rank)} for s in range(20)]
                w.records("microbatches", rows, rank=rank)

        (found,) = said(GRADIENTS, fill, FOUR)
        assert (found.confidence, found.severity) == ("confirmed", "critical")

    def test_losses_divided_by_the_tokens_of_all_are_rightly_summed(self, said: Any) -> None:
        drawn = Gradients(0.9)

        def fill(w: Any) -> None:
            norms(drawn.local, drawn.times(4.0), loss=lambda s, r: (3.0 + 0.1 * r) / 4)(w)
            for rank in range(4):
                rows = [{"step": s, "tokens": 100, "loss_sum": 100 * (3.0 + 0.1 * rank)} for s in range(20)]
                w.records("microbatches", rows, rank=rank)

        assert said(GRADIENTS, fill, FOUR) == []

    def test_equal_gradients_divided_once_too_often(self, said: Any) -> None:
        drawn = Gradients(1.0)
        (found,) = said(GRADIENTS, norms(drawn.local, drawn.times(0.25)), FOUR)
        assert "twice" in found.cause
        (found,) = said(GRADIENTS, norms(drawn.local, drawn.times(0.5)), FOUR)
        assert "root" in found.cause

    def test_gradients_divided_once_too_often_are_shorter_than_unrelated_ones(self, said: Any) -> None:
        drawn = Gradients(0.3)
        (found,) = said(GRADIENTS, norms(drawn.local, drawn.times(0.25)), FOUR)
        assert (found.title, found.confidence) == ("Gradients are divided once too often", "likely")

    def test_one_rank_is_enough_for_a_large_ratio(self, said: Any) -> None:
        def only(rank: int, factor: float) -> Any:
            def fill(w: Any) -> None:
                own = [1.0 + 0.1 * (step % 3) for step in range(20)]
                w.scalars("grad_norm_local", step=list(range(20)), value=own, rank=rank)
                w.scalars("grad_norm_reduced", step=list(range(20)), value=[factor * each for each in own], rank=rank)

            return fill

        (found,) = said(GRADIENTS, only(0, 4.0), FOUR)
        assert "summed" in found.cause
        assert said(GRADIENTS, only(0, 0.25), FOUR)[0].title == "Gradients are divided once too often"
        for factor in (1.0, 0.8, 0.5, 0.45, 1.1):
            assert said(GRADIENTS, only(0, factor), FOUR) == []

    def test_nothing_was_reduced(self, said: Any) -> None:
        drawn = Gradients(0.3)
        (found,) = said(GRADIENTS, norms(drawn.local, drawn.local), FOUR)
        assert (found.title, found.confidence) == ("Gradients are not synchronised", "confirmed")
        assert "no reduction" in found.cause

    def test_one_rank_is_left_out_of_the_reduction(self, said: Any) -> None:
        drawn = Gradients(0.3)
        mean = drawn.times(1.0)
        (found,) = said(GRADIENTS, norms(drawn.local, lambda s, r: drawn.local(s, r) if r == 2 else mean(s, r)), FOUR)
        assert found.where.rank == 2

    def test_norms_before_a_reduction_by_hand_are_told_by_the_parameters(self, said: Any) -> None:
        drawn = Gradients(0.3)

        def equal(w: Any) -> None:
            norms(None, None, grad_norm=drawn.local)(w)
            checksums(lambda r, s, n: (s, n))(w)

        assert said(GRADIENTS, equal, FOUR) == []

        def parted(w: Any) -> None:
            norms(None, None, grad_norm=drawn.local)(w)
            checksums(lambda r, s, n: (s, n, r if s else 0))(w)

        (found,) = said(GRADIENTS, parted, FOUR)
        assert found.confidence == "confirmed"
        assert said(GRADIENTS, norms(None, None, grad_norm=drawn.local), FOUR) == []  # nothing decides

    def test_parts_and_shards_have_norms_of_their_own(self, said: Any) -> None:
        drawn = Gradients(0.3)
        fill = norms(drawn.local, drawn.local)
        assert said(GRADIENTS, fill, {"run": {"world_size": 4}, "training": {"tensor_parallel": 4}}) == []
        assert said(GRADIENTS, fill, {"run": {"world_size": 4}, "training": {"sharding": {"kind": "fsdp"}}}) == []

    def test_steps_that_overflowed_are_left_out(self, said: Any) -> None:
        drawn = Gradients(0.3)
        mean = drawn.times(1.0)

        def broken(step: int, rank: int) -> float:
            return (math.inf if rank else math.nan) if step % 5 == 0 else mean(step, rank)

        assert said(GRADIENTS, norms(drawn.local, broken), FOUR) == []


JOB = {"name": "train_step", "file": "/home/me/train.py", "line": 88}
TORCH = {"name": "all_reduce", "file": "/site/torch/distributed/distributed_c10d.py", "line": 2700}


def asynchronous(n: int = 10, ranks: int = 2, frames: Any = (TORCH, JOB), **fields: Any) -> Any:
    def fill(w: Any) -> None:
        for rank in range(ranks):
            rows = [
                {"group": "0", "seq": k + 1, "order": k, "step": k, "op": "all_reduce", "async_op": True}
                | {"state": "completed", "frames": list(frames)}
                | fields
                for k in range(n)
            ]
            w.records("collectives", rows, rank=rank)

    return fill


class TestBuffers:
    @pytest.mark.fires(BUFFER)
    def test_a_buffer_written_before_the_wait(self, said: Any) -> None:
        (found,) = said(BUFFER, asynchronous(waited=True, buffer_reused_before_wait=True))
        assert (found.confidence, found.severity, found.where.step) == ("confirmed", "critical", 0)
        assert "/home/me/train.py:88 in train_step" in found.summary

    def test_a_stream_without_an_event(self, said: Any) -> None:
        (found,) = said(BUFFER, asynchronous(waited=False, stream_synced=False))
        assert (found.confidence, found.severity) == ("likely", "warning")

        assert said(BUFFER, asynchronous(waited=True, stream_synced=False))  # for another stream than the reader's

    def test_a_handle_that_nobody_waits_for(self, said: Any) -> None:
        (found,) = said(BUFFER, asynchronous(waited=False))
        assert (found.confidence, found.severity, len(found.evidence)) == ("likely", "warning", 3)

    @pytest.mark.quiet(BUFFER)
    def test_waits_events_and_calls_of_libraries(self, said: Any) -> None:
        assert said(BUFFER, asynchronous(waited=True, buffer_reused_before_wait=False)) == []
        assert said(BUFFER, asynchronous(waited=False, stream_synced=True)) == []
        for file in (
            "/site/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
            "/site/torch/nn/parallel/distributed.py",
            "/site/deepspeed/runtime/zero/stage_1_and_2.py",
        ):
            frames = (TORCH, {"name": "reduce", "file": file, "line": 1}, JOB)
            assert said(BUFFER, asynchronous(waited=False, frames=frames)) == []
        assert said(BUFFER, asynchronous(waited=False, op="barrier")) == []

    def test_the_wait_may_come_after_the_recording_ended(self, said: Any) -> None:
        assert said(BUFFER, asynchronous(n=1, waited=False)) == []


def saves(path: Any, ranks: int = 4, steps: Any = (100, 200), host: Any = "node0", **more: Any) -> Any:
    def fill(w: Any) -> None:
        for rank in range(ranks):
            at = [path] if isinstance(path, str) else None
            rows = [
                {"kind": "checkpoint_saved", "step": s, "path": at[0] if at else path(rank, s)}
                | {"contents": ["model", "optimizer"]}
                | more
                for s in steps
            ]
            w.records("events", rows, rank=rank)
            w.record("ranks", {"host": host if isinstance(host, str) else host(rank)}, rank=rank)

    return fill


class TestPaths:
    @pytest.mark.fires(PATHS)
    def test_every_rank_saves_to_one_file(self, said: Any) -> None:
        (found,) = said(PATHS, saves("/data/run/last.pt"), PLAIN)
        assert (found.confidence, found.severity, found.where.step, found.where.rank) == (
            "confirmed",
            "warning",
            100,
            1,
        )
        assert "/data/run/last.pt" in found.summary

    @pytest.mark.quiet(PATHS)
    def test_files_of_ones_own(self, said: Any) -> None:
        assert said(PATHS, saves(lambda rank, step: f"/data/run/step{step}/rank{rank}.pt"), PLAIN) == []
        assert said(PATHS, saves("/dev/null"), PLAIN) == []
        assert said(PATHS, saves("/data/run/last.pt", ranks=1), PLAIN) == []
        assert said(PATHS, saves("/data/run/last.pt", kind="checkpoint_loaded"), PLAIN) == []

    def test_a_directory_may_hold_a_file_a_rank(self, said: Any) -> None:
        directory = saves("/data/run/step-100")
        assert said(PATHS, directory, PLAIN)[0].confidence == "undetermined"
        for training in ({"sharding": {"kind": "fsdp"}}, {"tensor_parallel": 2}, {"sharding": {"kind": "zero1"}}):
            assert said(PATHS, directory, {"run": {"world_size": 4}, "training": training}) == []
        assert said(PATHS, saves("/data/run/step-100", contents=["rng"]), PLAIN) == []

    def test_disks_of_each_host(self, said: Any) -> None:
        (found,) = said(PATHS, saves("/scratch/last.pt", host=lambda rank: f"node{rank}"), PLAIN)
        assert (found.severity, found.confidence) == ("info", "undetermined")


HOSTILE: list[tuple[str, Any]] = [
    ("ranks", {"steps": 2**62, "exit": {"kind": "ok", "t": float("nan")}, "last_seq": {"0": -5}}),
    ("ranks", {"steps": 0, "samples_skipped": 2**60, "skip_reason": "\x1b[31m" + "x" * 5000}),
    ("microbatches", {"step": 2**62, "micro": 2**62}),
    ("samples", {"step": 2**62, "sha256": "", "id": "\u0000"}),
    ("checksums", {"name": "", "sha256": "x", "step": 2**62}),
    ("checksums", {"name": "w", "sha256": "x" * 10_000}),
    ("collectives", {"group": None, "group_ranks": [2**62, 0], "seq": 2**62, "order": 2**62, "t_created": -1e308}),
    ("collectives", {"frames": [{"file": None, "name": None}], "async_op": True, "waited": False}),
    ("events", {"kind": "checkpoint_saved", "path": "\\\\?\\\x00//..", "step": 2**62, "contents": ["model"]}),
    ("events", {"kind": "log", "message": "skipped sample " * 500}),
    ("scaling", {"world_size": 2**62, "throughput": float("inf")}),
    ("scaling", {"world_size": 1, "throughput": 5e-324}),
    ("profile", {"step": 2**62, "window_ms": -1e308, "communication_ms": float("nan")}),
]


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("manifest", [{}, {"run": {"world_size": 2**62}}, {"training": {"tensor_parallel": 2**62}}])
def test_odd_evidence_is_no_error(build: Any, manifest: dict[str, Any], copies: int) -> None:
    def fill(w: Any) -> None:
        for rank in (0, 1, 5):
            for stream, record in HOSTILE * copies:
                w.record(stream, record, rank=rank)
            for name in ("loss", "step_time", "communication_time", "grad_norm_reduced", "grad_norm_local"):
                w.scalars(name, step=[0, 2**62, 5, 5], value=[float("nan"), 1e308, -1e308, 0.0], rank=rank)

    mine = {DATA, REPLICAS, GRADIENTS, BUFFER, PATHS}
    mine |= {"distributed/uneven-steps", "distributed/straggler", "distributed/scaling"}
    report = analyze(build(fill, manifest), [each for each in all_rules() if each.id in mine])
    assert not report.errors
