"""Stragglers, and more ranks that are no faster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llmconsole.analyzers.distributed import speed
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.registry import all_rules
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import import_files

STRAGGLER, SCALING = "distributed/straggler", "distributed/scaling"


@pytest.fixture
def said(build: Any) -> Any:
    """``said(rule, fill, manifest)``: what the rule says of a capsule; nothing where it has nothing to compare."""
    rules = {each.id: each for each in all_rules()}

    def said(rule: str, fill: Any, manifest: Any = None) -> list[Finding]:
        report = analyze(build(fill, manifest), [rules[rule]])
        assert not report.errors, report.errors
        return list(report.findings)

    return said


def value_of(finding: Finding, name: str) -> Any:
    return next(each.value for each in finding.evidence if each.name == name)


def per_step(own: Any, steps: int = 40, **more: Any) -> Any:
    """Scalars of a synchronous job. ``own(step, rank)`` in ms; each step lasts as long as its slowest rank."""

    def fill(w: Any) -> None:
        numbers = np.array([[own(step, rank) for rank in range(more.get("ranks", 4))] for step in range(steps)])
        whole = numbers.max(axis=1) + 10.0  # what the collectives take when all are there
        for rank in range(numbers.shape[1]):
            at = list(range(steps))
            w.scalars("step_time", step=at, value=(whole / 1e3).tolist(), rank=rank)
            w.scalars("communication_time", step=at, value=((whole - numbers[:, rank]) / 1e3).tolist(), rank=rank)
            if "data" in more:
                w.scalars("data_time", step=at, value=[more["data"](step, rank) / 1e3 for step in at], rank=rank)

    return fill


class TestTracemlReport:
    """traceml#252: 200 ms of busy waiting in the backward of rank 1 of four; every rank's backward takes 292 ms."""

    @pytest.mark.fires(STRAGGLER)
    def test_equal_steps_and_one_rank_that_hardly_waits(self, said: Any) -> None:
        def fill(w: Any) -> None:
            for rank, (backward, nccl) in enumerate(((293.0, 210), (292.2, 10), (293.0, 210), (293.1, 210))):
                w.record("ranks", {"compute_ms": backward - nccl, "communication_ms": nccl}, rank=rank)

        (found,) = said(STRAGGLER, fill)
        assert (found.where.rank, found.confidence, found.severity) == (1, "likely", "warning")
        # 293.1 − 10 of its own, the others 293.1 − 210.
        assert value_of(found, "relative speed") == pytest.approx(83.1 / 283.1)
        assert value_of(found, "time in collectives") == pytest.approx(0.010)

    def test_step_by_step(self, said: Any) -> None:
        (found,) = said(STRAGGLER, per_step(lambda step, rank: 282 if rank == 1 else 82))
        assert found.where.rank == 1
        assert value_of(found, "share of the step lost") == pytest.approx(200 / 292)

    def test_backward_times_given_as_computation_still_show_the_rank_that_does_not_wait(self, said: Any) -> None:
        def fill(w: Any) -> None:
            for rank, nccl in enumerate((210, 10, 210, 210)):
                w.record("ranks", {"compute_ms": 292.0, "communication_ms": nccl}, rank=rank)

        assert [each.where.rank for each in said(STRAGGLER, fill)] == [1]

    def test_the_control_with_a_slow_loader_names_the_input(self, said: Any) -> None:
        """150 ms of input stall on rank 2: 199.7 ms beside 10.4."""

        def fill(w: Any) -> None:
            for rank in range(4):
                stall = 199.7 if rank == 2 else 10.4
                w.scalars("data_time", step=list(range(20)), value=[stall / 1e3] * 20, rank=rank)
                w.scalars("step_time", step=list(range(20)), value=[0.3] * 20, rank=rank)

        (found,) = said(STRAGGLER, fill)
        assert found.where.rank == 2
        assert "input" in found.cause


class TestStraggler:
    @pytest.mark.quiet(STRAGGLER)
    def test_equal_ranks_wait_a_little_for_each_other(self, said: Any) -> None:
        noise = np.random.default_rng(0).normal(0, 4, (60, 8))
        assert said(STRAGGLER, per_step(lambda s, r: 80 + noise[s, r], steps=60, ranks=8)) == []

    def test_one_slow_step_and_the_warm_up_are_no_straggler(self, said: Any) -> None:
        def own(step: int, rank: int) -> float:
            return 80 + (900 if rank == 0 and step % 20 == 10 else 0) + (3000 if step == 0 and rank == 2 else 0)

        assert said(STRAGGLER, per_step(own)) == []

    def test_rows_of_unequal_length_make_another_rank_slow_each_time(self, said: Any) -> None:
        slow = np.random.default_rng(1).integers(0, 8, 60)
        (found,) = said(STRAGGLER, per_step(lambda s, r: 200 if slow[s] == r else 80, steps=60, ranks=8))
        assert (found.severity, found.kind, found.where.rank) == ("info", "hygiene", None)

    def test_stages_of_a_pipeline_have_unequal_work(self, said: Any) -> None:
        # Ranks 0 to 3 are the first stage, 4 to 7 the last, with the loss.
        fill = per_step(lambda s, r: 60 if r < 4 else 140, ranks=8)
        staged = {"run": {"world_size": 8}, "training": {"pipeline_parallel": 2, "data_parallel": 4}}
        assert said(STRAGGLER, fill, staged) == []
        slow = per_step(lambda s, r: (60 if r < 4 else 140) + (110 if r == 2 else 0), ranks=8)
        assert [each.where.rank for each in said(STRAGGLER, slow, staged)] == [2]

    def test_a_tensor_parallel_rank_that_reads_for_its_peers_is_none(self, said: Any) -> None:
        fill = per_step(lambda s, r: 120 if r % 2 == 0 else 60, ranks=2, data=lambda s, r: 62 if r == 0 else 2)
        tensor = {"run": {"world_size": 2}, "training": {"tensor_parallel": 2}}
        assert said(STRAGGLER, fill, tensor) == []
        (found,) = said(STRAGGLER, fill, {"run": {"world_size": 2}})
        assert "input" in found.cause

    def test_a_wait_too_short_to_matter_is_none(self, said: Any) -> None:
        assert said(STRAGGLER, per_step(lambda s, r: 3.0 if r == 0 else 1.0)) == []
        assert said(STRAGGLER, per_step(lambda s, r: 95 if r == 0 else 80)) == []

    def test_two_ranks_are_enough_to_see_who_waits(self, said: Any) -> None:
        (found,) = said(STRAGGLER, per_step(lambda s, r: 160 if r == 0 else 80, ranks=2))
        assert found.where.rank == 0

    def test_traces_of_several_ranks(self, said: Any) -> None:
        def fill(w: Any) -> None:
            for rank in range(4):
                busy = 180.0 if rank == 3 else 90.0
                rows = [
                    {"step": s, "window_ms": 200.0, "compute_ms": busy, "communication_ms": 200 - busy}
                    for s in range(5)
                ]
                w.records("profile", rows, rank=rank)

        assert [each.where.rank for each in said(STRAGGLER, fill)] == [3]

    def test_hostile_numbers_are_no_times(self, said: Any) -> None:
        def fill(w: Any) -> None:
            for rank in range(3):
                row = {"compute_ms": -5.0, "communication_ms": float("nan"), "data_ms": float("inf")}
                w.record("ranks", row, rank=rank)
                w.scalars("step_time", step=[0, 1, 2], value=[float("nan"), -1.0, float("inf")], rank=rank)
                w.scalars("communication_time", step=[0, 1, 2], value=[0.0, float("nan"), 1.0], rank=rank)
                w.record("collectives", {"seq": 1, "t_created": float("inf"), "t_completed": float("nan")}, rank=rank)

        assert said(STRAGGLER, fill) == []


def calls(late: Any, *, completed: bool, offset: Any = None, stated: bool = False, n: int = 60) -> Any:
    """Blocking collectives: rank r comes ``late(k, r)`` s after the previous call; all leave 1 ms after the last."""

    hosts = 1 if offset is None else 4
    offset = offset or (lambda rank: 0.0)

    def fill(w: Any) -> None:
        rows: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(4)}
        left = 1000.0
        for k in range(n):
            at = [left + late(k, rank) for rank in range(4)]
            left = max(at) + 0.001
            for rank in range(4):
                row: dict[str, Any] = {"group": "0", "seq": k + 1, "order": k, "op": "all_reduce", "async_op": False}
                row["t_created"] = at[rank] + offset(rank)
                if completed:
                    row |= {"t_completed": left + offset(rank), "state": "completed"}
                rows[rank].append(row)
        for rank, each in rows.items():
            w.records("collectives", each, rank=rank)
            about = {"host": f"node{rank % hosts}"} | ({"clock_offset_s": offset(rank)} if stated else {})
            w.record("ranks", about, rank=rank)

    return fill


class TestCalls:
    def test_the_rank_that_comes_last_and_does_not_wait(self, said: Any) -> None:
        (found,) = said(STRAGGLER, calls(lambda k, r: 0.1 if r == 2 else 0.03, completed=True))
        assert found.where.rank == 2
        assert value_of(found, "relative speed") == pytest.approx(0.3, rel=0.01)
        assert value_of(found, "share of calls it came to last") == 1.0

    def test_clocks_of_hosts_that_differ_make_no_straggler(self, said: Any) -> None:
        def shifted(rank: int) -> float:
            return (0.0, 3.7, -0.2, 0.05)[rank]

        for completed in (True, False):
            for stated in (True, False):
                fill = calls(lambda k, r: 0.03, completed=completed, offset=shifted, stated=stated)
                assert said(STRAGGLER, fill) == []

    def test_a_straggler_shows_through_clocks_that_differ(self, said: Any) -> None:
        def shifted(rank: int) -> float:
            return (0.0, 3.7, -0.2, 0.05)[rank]

        slow = calls(lambda k, r: 0.1 if r == 1 else 0.03, completed=True, offset=shifted)
        assert [each.where.rank for each in said(STRAGGLER, slow)] == [1]
        # Without ends of calls, a stated offset decides, whichever sign it is written with.
        for sign in (1, -1):

            def fill(w: Any, sign: int = sign) -> None:
                calls(lambda k, r: 0.1 if r == 1 else 0.03, completed=False, offset=shifted)(w)
                for rank in range(4):
                    w.record("ranks", {"clock_offset_s": sign * shifted(rank)}, rank=rank)

            assert [each.where.rank for each in said(STRAGGLER, fill)] == [1]

    @pytest.mark.parametrize(("lag", "open_"), [(0.005, False), (0.03, True)])
    def test_a_thread_that_queues_calls_later_may_delay_nobody(self, said: Any, lag: float, open_: bool) -> None:
        """NCCL: times of creation are those of the host, which runs ahead; rank 3's lags steadily."""

        def fill(w: Any) -> None:
            for rank in range(4):
                rows = [
                    {"group": "0", "seq": k + 1, "order": k, "t_created": 1000 + 0.04 * k + lag * (rank == 3)}
                    for k in range(60)
                ]
                w.records("collectives", rows, rank=rank)
                w.record("ranks", {"host": "node0"}, rank=rank)

        found = said(STRAGGLER, fill)
        assert [(each.confidence, each.where.rank) for each in found] == [("undetermined", 3)] * open_


class TestMegatron:
    @pytest.mark.recorded(STRAGGLER)
    def test_its_straggler_lines_name_the_rank_with_the_lowest_throughput(self, tmp_path: Any) -> None:
        lines = [
            f" [2026-08-22 15:22:{i:02d}.123456] iteration {10 * i:8d}/    8000 | consumed samples: {640 * i:12d} | "
            "elapsed time per iteration (ms): 7624.3 | learning rate: 6.676000E-06 | global batch size:    64 | "
            "lm loss: 7.072597E-01 | loss scale: 1.0 | grad norm: 0.741 | number of skipped iterations:   0 | "
            "number of nan iterations:   0 |\n"
            f"MnRtt/Rnk: 3453.08ms/8 | MxRtt/Rnk: 5600.20ms/{slow} | MnPwr/Rnk: 601796.00W/8 | MxPwr/Rnk: 683801.00W/18"
            f" | MnTmp/Rnk: 52.00C/0 | MxTmp/Rnk: 65.00C/21 | MnUtl/Rnk: 97.00%/8 | MxUtl/Rnk: 100.00%/6 | "
            f"MnClk/Rnk: 1950.00MHz/28 | MxClk/Rnk: 1980.00MHz/0 | MnDRtt/Rnk: 14.27ms/23 | MxDRtt/Rnk: 34.65ms/0 | "
            f"MnEtpt/Rnk: {low}TF/{slow} | MxEtpt/Rnk: 302.78TF/8\n"
            for i, slow, low in ((i, 5, 181.6) for i in range(1, 9))
        ]
        log = tmp_path / "megatron.log"
        log.write_text("".join(lines))
        rule = next(each for each in all_rules() if each.id == STRAGGLER)
        slow = Capsule.open(import_files([log], tmp_path / "slow", attach=False))
        (found,) = analyze(slow, [rule]).findings
        assert found.where.rank == 5
        assert value_of(found, "relative speed") == pytest.approx(181.6 / 302.78, rel=1e-6)
        log.write_text("".join(lines).replace("181.6", "297.7").replace("5600.20", "3502.20"))
        even = Capsule.open(import_files([log], tmp_path / "even", attach=False))
        assert analyze(even, [rule]).findings == ()


class TestScaling:
    @staticmethod
    def table(*rows: tuple[int, int | None, float], **ranks: float) -> Any:
        def fill(w: Any) -> None:
            for world, batch, throughput in rows:
                about = {"global_batch": batch} if batch is not None else {}
                w.record("scaling", {"world_size": world, "throughput": throughput} | about)
            if ranks:
                for rank in range(4):
                    w.record("ranks", ranks, rank=rank)

        return fill

    @pytest.mark.fires(SCALING)
    def test_four_ranks_slower_than_one_with_the_same_global_batch(self, said: Any) -> None:
        """The case log's: 1,900 tokens/s on one GPU, 1,500 in total on four."""
        (found,) = said(SCALING, self.table((1, 32, 1900.0), (4, 32, 1500.0)))
        assert found.title == "More ranks are slower"
        assert value_of(found, "efficiency at 4") == pytest.approx(1500 / 1900 / 4)
        assert found.confidence == "likely"
        assert "global batch did not grow" in found.cause

    def test_communication_is_named_where_it_was_measured(self, said: Any) -> None:
        fill = self.table((1, 8, 1900.0), (4, 32, 3000.0), compute_ms=60.0, communication_ms=90.0)
        (found,) = said(SCALING, fill)
        assert value_of(found, "share of communication") == pytest.approx(0.6)
        assert "communication takes 60%" in found.cause

    def test_without_a_reason_it_is_open(self, said: Any) -> None:
        (found,) = said(SCALING, self.table((1, 8, 1900.0), (4, 32, 3000.0)))
        assert (found.confidence, found.cause) == ("undetermined", None)

    @pytest.mark.quiet(SCALING)
    def test_seven_of_eight_ranks_worth_of_speed_is_good(self, said: Any) -> None:
        assert said(SCALING, self.table((8, 64, 13_300.0), (1, 8, 1900.0), (4, 32, 7000.0))) == []

    def test_level_numbers_may_be_those_of_one_rank(self, said: Any) -> None:
        (found,) = said(SCALING, self.table((1, 32, 1900.0), (2, 32, 1890.0), (4, 32, 1850.0)))
        assert found.confidence == "undetermined"
        assert "numbers of one rank" in found.summary

    def test_one_size_or_odd_numbers_are_no_comparison(self, said: Any) -> None:
        assert said(SCALING, self.table((4, 32, 1900.0), (4, 32, 1500.0))) == []
        assert said(SCALING, self.table((0, 32, 1900.0), (4, 32, float("nan")), (2, 8, -1.0), (8, 1, 5.0))) == []


class TestInputBetweenSteps:
    """The recorder's convention: step_time begins when the batch is there, data_time ends then."""

    @staticmethod
    def loop(outside: Any, computing: Any, ranks: int = 2, steps: int = 20) -> Any:
        """Milliseconds between the steps and inside them by (step, rank); all meet at the end of each step."""

        def fill(w: Any) -> None:
            for step in range(steps):
                arrive = [outside(step, rank) + computing(step, rank) for rank in range(ranks)]
                for rank in range(ranks):
                    wait = max(arrive) + 5 - arrive[rank]
                    w.scalars("data_time", step=step, value=outside(step, rank) / 1e3, rank=rank)
                    w.scalars("step_time", step=step, value=(computing(step, rank) + wait) / 1e3, rank=rank)
                    w.scalars("communication_time", step=step, value=wait / 1e3, rank=rank)

        return fill

    def test_a_rank_that_sleeps_before_each_step(self, said: Any) -> None:
        (found,) = said(STRAGGLER, self.loop(lambda s, r: 150 * (r == 1), lambda s, r: 50))
        assert found.where.rank == 1
        # The time between two steps is on record, and not what fills it.
        assert found.cause == "its input comes late, or other work keeps it between two steps (logging, saving)"

    def test_it_shows_through_computation_that_scatters(self, said: Any) -> None:
        noise = np.random.default_rng(5).lognormal(4.5, 0.8, (20, 2))
        (found,) = said(STRAGGLER, self.loop(lambda s, r: 150 * (r == 1), lambda s, r: noise[s, r]))
        assert found.where.rank == 1

    def test_a_rank_that_waits_between_steps_waits_for_no_input(self, said: Any) -> None:
        """Rank 0 is fast and stands in a collective after each step: its data_time is long, and none of its own."""

        def fill(w: Any) -> None:
            for rank, (computing, between) in enumerate(((50.0, 155.0), (200.0, 5.0))):
                at = list(range(20))
                w.scalars("data_time", step=at, value=[between / 1e3] * 20, rank=rank)
                w.scalars("step_time", step=at, value=[computing / 1e3] * 20, rank=rank)
                w.scalars("communication_time", step=at, value=[between / 1e3] * 20, rank=rank)

        (found,) = said(STRAGGLER, fill)
        assert found.where.rank == 1
        assert "input" not in found.cause

    @pytest.mark.parametrize(
        ("steps", "others", "fires"), [(12, 1, True), (8, 1, True), (6, 1, False), (8, 300, False), (18, 300, True)]
    )
    def test_a_short_run_is_enough_where_the_slow_rank_stands_apart(
        self, build: Any, steps: int, others: float, fires: bool
    ) -> None:
        """Own times of 5 to 170 ms on a busy machine, and 600 ms more on rank 2; ``others``: a slow step of rank 0."""
        noise = np.random.default_rng(3).lognormal(2.5, 0.8, (steps, 4))
        noise[-1, 0] *= others
        capsule = build(self.loop(lambda s, r: 1, lambda s, r: noise[s, r] + 600 * (r == 2), 4, steps))
        (rule,) = (each for each in all_rules() if each.id == STRAGGLER)
        report = analyze(capsule, [rule])
        assert [each.where.rank for each in report.findings] == [2] * fires
        # Too short a run is not called even: silence would say that it looked and found nothing.
        assert [each.rule for each in report.skipped] == [STRAGGLER] * (not fires)
        assert list(report.quiet) == []

    def test_a_rank_whose_core_others_share_for_a_few_steps_is_no_straggler(self, said: Any) -> None:
        """Twice as slow at each of 8 steps: the times of neighbouring steps go together on a busy machine."""
        noise = np.random.default_rng(3).uniform(4.0, 8.0, (8, 2))
        assert said(STRAGGLER, self.loop(lambda s, r: 1, lambda s, r: 10 * noise[s, r] * (1 + r), 2, 8)) == []

    def test_a_few_steps_on_a_busy_machine_say_nothing(self, said: Any) -> None:
        for seed in range(30):
            noise = np.random.default_rng(seed).lognormal(4.0, 0.8, (8, 4))
            assert said(STRAGGLER, self.loop(lambda s, r: 1, lambda s, r, n=noise: n[s, r], 4, 8)) == []


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 9])
def test_the_median_of_the_others_leaves_each_out_once(ranks: int) -> None:
    for seed in range(20):
        values = np.round(np.random.default_rng(seed).random(ranks), 1)  # with ties
        expected = [float(np.median(np.delete(values, at))) for at in range(ranks)]
        assert speed._medians_of_others(values).tolist() == pytest.approx(expected)
