"""Steps, micro-batches and skipped samples of ranks that did not make the same number."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.registry import all_rules
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import import_job

RULE = "distributed/uneven-steps"
PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


def ranks_of(*rows: dict[str, Any]) -> Any:
    def fill(w: Any) -> None:
        for rank, row in enumerate(rows):
            w.record("ranks", row, rank=rank)

    return fill


def ended(kind: str, t: float = 0.0, message: str = "") -> dict[str, Any]:
    return {"kind": kind, "t": 100.0 + t, "message": message}


@pytest.fixture
def said(build: Any) -> Any:
    """``said(fill, manifest)``: what the rule says of a capsule; nothing where it has nothing to compare."""
    (rule,) = (each for each in all_rules() if each.id == RULE)

    def said(fill: Any, manifest: Any = None) -> list[Finding]:
        report = analyze(build(fill, manifest), [rule])
        assert not report.errors, report.errors
        return list(report.findings)

    return said


class TestSteps:
    @pytest.mark.fires(RULE)
    def test_a_rank_that_ended_well_one_step_early_while_others_waited_is_named(self, said: Any) -> None:
        rows = [{"steps": 98, "exit": ended("exception", 600, PEER)} for _ in range(4)]
        rows[1] = {"steps": 97, "exit": ended("ok")}
        (found,) = said(ranks_of(*rows))
        assert (found.confidence, found.severity, found.where.rank, found.where.step) == (
            "confirmed",
            "critical",
            1,
            97,
        )
        assert "Rank 1 made 97 steps, ranks 0, 2 and 3 made 98" in found.summary
        # The lengths of the loaders are not on record: the rank may have left its loop by a condition of its own.
        assert "different numbers of batches, or a condition" in found.cause

    def test_a_rank_that_left_before_its_first_step_made_fewer(self, said: Any) -> None:
        rows = [{"steps": 1, "exit": ended("exception", 600, PEER)}, {"steps": 0, "exit": ended("ok")}]
        (found,) = said(ranks_of(*rows))
        assert (found.confidence, found.where.rank, found.where.step) == ("confirmed", 1, 0)
        assert "Rank 1 made 0 steps, rank 0 made 1" in found.summary

    @pytest.mark.parametrize(
        "idle", [{"exit": ended("ok", 601)}, {"exit": ended("exception", 0, "KeyError: 'x'")}, {"exit": ended("hang")}]
    )
    def test_a_rank_that_never_trains_and_ends_last_or_one_that_failed_made_no_fewer(
        self, said: Any, idle: dict[str, Any]
    ) -> None:
        rows = [{"steps": 9, "exit": ended("exception", 600, PEER)} for _ in range(2)]
        assert said(ranks_of(*rows, {"steps": 0, **idle})) == []

    def test_a_window_that_hangs_counts_though_nobody_finished_it(self, said: Any) -> None:
        def fill(w: Any) -> None:
            for rank in range(3):
                w.records("microbatches", [{"step": step, "micro": 0} for step in range(10)], rank=rank)
                w.record("ranks", {"steps": 10, "exit": ended("ok" if rank == 2 else "hang")}, rank=rank)
                if rank != 2:
                    w.record(
                        "collectives", {"group": "0", "seq": 31, "step": 10, "state": "started", "order": 31}, rank=rank
                    )

        (found,) = said(fill)
        assert (found.confidence, found.where.rank, found.where.step) == ("confirmed", 2, 10)
        assert [each.value for each in found.evidence[:3]] == [10, 11, 11]

    def test_counts_far_apart_with_the_samples_to_match_are_likely_without_any_hang(self, said: Any) -> None:
        rows = [{"steps": 120, "samples_seen": 960, "exit": ended("ok")} for _ in range(4)]
        rows[3] = {"steps": 90, "samples_seen": 720, "exit": ended("ok")}
        (found,) = said(ranks_of(*rows))
        assert (found.confidence, found.severity, found.where.rank) == ("likely", "warning", 3)

    def test_counts_far_apart_with_nothing_else_are_undetermined(self, said: Any) -> None:
        rows = [{"steps": steps, "exit": ended("ok")} for steps in (40, 40, 30)]
        (found,) = said(ranks_of(*rows))
        assert (found.confidence, found.severity, found.cause) == ("undetermined", "warning", None)

    def test_a_rank_that_skipped_is_named_with_its_reason(self, said: Any) -> None:
        rows: list[dict[str, Any]] = [{"steps": 50, "exit": ended("hang")} for _ in range(4)]
        rows[2] = {
            "steps": 49,
            "samples_skipped": 1,
            "skip_reason": "12 < min_loss_tokens 32",
            "exit": ended("ok"),
        }
        (found,) = said(ranks_of(*rows))
        assert found.where.rank == 2
        assert "12 < min_loss_tokens 32" in found.summary
        assert "skipped samples on one rank" in found.cause

    @pytest.mark.quiet(RULE)
    def test_ranks_one_step_apart_were_cut_in_a_step(self, said: Any) -> None:
        assert said(ranks_of({"steps": 71}, {"steps": 70}, {"steps": 71}, {"steps": 70})) == []
        killed = [{"steps": 70 + rank % 2, "exit": ended("signal", 0, "SIGTERM")} for rank in range(4)]
        assert said(ranks_of(*killed)) == []

    def test_the_first_to_die_made_fewer_steps_because_it_died(self, said: Any) -> None:
        rows = [{"steps": 33, "exit": ended("exception", 600, PEER)} for _ in range(4)]
        rows[1] = {"steps": 31, "exit": ended("oom", 0, "CUDA out of memory")}
        assert said(ranks_of(*rows)) == []
        rows[1] = {"steps": 30}  # killed from outside: it says nothing
        assert said(ranks_of(*rows)) == []

    def test_ranks_that_wait_made_fewer_steps_because_they_wait(self, said: Any) -> None:
        # Rank 1 left out a call at step 4 and went on; the others stand in it.
        rows = [{"steps": 4, "exit": ended("exception", 5, PEER)} for _ in range(4)]
        rows[1] = {"steps": 8, "exit": ended("ok")}
        assert said(ranks_of(*rows)) == []

    def test_a_job_with_join_may_be_uneven(self, said: Any) -> None:
        rows = [{"steps": 98, "exit": ended("ok")}, {"steps": 90, "exit": ended("ok")}]
        assert said(ranks_of(*rows), {"config": {"trainer": {"join_uneven_inputs": True}}}) == []

        def fill(w: Any) -> None:
            ranks_of(*rows)(w)
            frames = [
                {"name": "notify_join_context", "file": "/site/torch/distributed/algorithms/join.py", "line": 260}
            ]
            w.record("collectives", {"group": "0", "seq": 1, "op": "all_reduce", "frames": frames}, rank=0)

        assert said(fill) == []
        assert said(ranks_of(*rows), {"config": {"join_uneven_inputs": False}})

    def test_ranks_of_another_role_and_ranks_that_log_less_are_no_measure(self, said: Any) -> None:
        roles = [{"steps": 100, "exit": ended("ok")}] * 2 + [{"steps": 0, "exit": ended("ok")}] * 2
        assert said(ranks_of(*roles)) == []

        def logs(w: Any) -> None:
            w.scalars("loss", step=list(range(0, 100, 10)), value=[1.0] * 10, rank=0)
            w.scalars("loss", step=list(range(100)), value=[1.0] * 100, rank=1)

        assert said(logs, {"trigger": {"kind": "hang"}}) == []

    def test_logs_of_a_killed_job_are_cut_by_their_buffers(self, said: Any) -> None:
        def logs(w: Any) -> None:
            for rank, steps in enumerate((100, 93, 96)):
                w.scalars("loss", step=list(range(steps)), value=[1.0] * steps, rank=rank)

        assert said(logs, {"trigger": {"kind": "imported"}}) == []

    def test_one_rank_alone_is_no_comparison(self, build: Any) -> None:
        (rule,) = (each for each in all_rules() if each.id == RULE)
        report = analyze(build(ranks_of({"steps": 10})), [rule])
        assert report.skipped
        assert not report.findings


class TestMicroBatches:
    @staticmethod
    def micros(counts: dict[int, list[int]], **extra: Any) -> Any:
        """``counts[rank]`` holds the micro-batches of steps 0, 1, 2 …"""

        def fill(w: Any) -> None:
            for rank, steps in counts.items():
                rows = [{"step": s, "micro": m, "window": 4} for s, count in enumerate(steps) for m in range(count)]
                w.records("microbatches", rows, rank=rank)
                if str(rank) in extra:
                    w.record("ranks", extra[str(rank)], rank=rank)

        return fill

    def test_the_rank_that_went_ahead_with_fewer_is_named(self, said: Any) -> None:
        counts = {rank: [4] * 6 + [4] for rank in range(4)}
        counts[1] = [4] * 6 + [3, 1]
        hang = {"exit": ended("hang")}
        (found,) = said(self.micros(counts, **{"0": hang, "1": hang, "2": hang, "3": hang}))
        assert (found.confidence, found.where.rank, found.where.step) == ("confirmed", 1, 6)

    def test_one_uneven_step_in_the_middle_is_likely(self, said: Any) -> None:
        counts = {rank: [4] * 20 for rank in range(4)}
        counts[2][11] = 3
        (found,) = said(self.micros(counts))
        assert (found.confidence, found.severity, found.where.rank, found.where.step) == ("likely", "warning", 2, 11)

    def test_batches_that_are_filled_by_tokens_differ_at_most_steps(self, said: Any) -> None:
        counts = {rank: [3 + (step * 7 + rank * 5) % 4 for step in range(30)] for rank in range(4)}
        assert said(self.micros(counts)) == []

    def test_a_job_cut_within_a_window_has_fewer_in_the_last(self, said: Any) -> None:
        assert said(self.micros({0: [4, 4, 4, 4, 2], 1: [4, 4, 4, 4, 3], 2: [4, 4, 4, 4, 4, 1]})) == []


class TestSkips:
    """TorchSpec#126: each rank's loader leaves out samples with fewer than 32 supervised tokens."""

    @staticmethod
    def dumps(w: Any, skipped: tuple[int, ...] = (1,)) -> None:
        for rank in range(4):
            last = 21936 if rank == 1 else 21937
            row: dict[str, Any] = {"last_seq": {"0": last}, "last_completed": {"0": 21936}, "dump": True}
            if rank in skipped:
                row |= {"samples_skipped": 1, "skip_reason": "12 < min_loss_tokens 32"}
            w.record("ranks", row, rank=rank)

    def test_the_rank_that_skipped_and_is_behind(self, said: Any) -> None:
        (found,) = said(self.dumps, {"run": {"world_size": 4}, "trigger": {"kind": "hang"}})
        assert (found.confidence, found.severity, found.where.rank) == ("likely", "critical", 1)
        assert "21936" in found.summary
        assert "21937" in found.summary
        assert "12 < min_loss_tokens 32" in found.summary

    @pytest.mark.recorded(RULE)
    def test_its_raw_files_dumps_of_four_ranks_and_one_log(self, tmp_path: Path) -> None:
        for rank in range(4):
            last = 21936 if rank == 1 else 21937
            entries = [
                {
                    **{"record_id": seq, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": seq},
                    **{"p2p_seq_id": 0, "op_id": seq, "profiling_name": "nccl:_all_gather_base", "is_p2p": False},
                    **{"time_created_ns": (1_700_000_000 + seq) * 10**9, "timeout_ms": 600_000, "frames": []},
                    **{"input_sizes": [[176556032]], "input_dtypes": ["BFloat16"], "output_dtypes": ["BFloat16"]},
                    **{"output_sizes": [[706224128]], "retired": seq < 21937, "time_discovered_started_ns": None},
                    **{"time_discovered_completed_ns": None, "state": "completed" if seq < 21937 else "scheduled"},
                }
                for seq in range(21920, last + 1)
            ]
            status = {
                "last_enqueued_collective": last,
                "last_started_collective": -1,
                "last_completed_collective": 21936,
            }
            dump = {
                "version": "2.9",
                "nccl_version": "2.21.5",
                "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}},
                "pg_status": {"0": status},
                "entries": entries,
            }
            (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, 2))
        (tmp_path / "rank1.log").write_text(
            "2026-05-01 10:00:00,000 INFO torchspec.data_fetcher: skipped sample: 12 < min_loss_tokens 32\n"
        )
        made = import_job(sorted(tmp_path.iterdir()), tmp_path / "made.capsule", attach=False)
        report = analyze(Capsule.open(made.path))
        assert report.first_divergence is not None
        assert (report.first_divergence.rule, report.first_divergence.where.rank) == (RULE, 1)

    def test_the_one_that_left_out_most_must_be_the_one_behind(self, said: Any) -> None:
        def fill(w: Any) -> None:
            for rank, skipped in enumerate((5, 3, 4, 6)):
                last = 99 if rank == 0 else 100
                w.record("ranks", {"last_seq": {"0": last}, "samples_skipped": skipped, "dump": True}, rank=rank)

        assert said(fill, {"trigger": {"kind": "hang"}}) == []

    def test_a_line_of_its_log_says_the_same(self, said: Any) -> None:
        def fill(w: Any) -> None:
            self.dumps(w, skipped=())
            message = "skipped sample: 12 < min_loss_tokens 32"
            w.record("events", {"kind": "log", "message": message, "step": 5484}, rank=1)

        (found,) = said(fill)
        assert (found.where.rank, found.where.step) == (1, 5484)

    def test_skips_of_all_ranks_alike_and_of_a_loss_scaler_are_none(self, said: Any) -> None:
        assert said(lambda w: self.dumps(w, skipped=(0, 1, 2, 3))) == []

        def scaler(w: Any) -> None:
            self.dumps(w, skipped=())
            message = "[deepspeed] OVERFLOW! Rank 1 Skipping step. Attempted loss scale: 65536, reducing to 32768"
            w.record("events", {"kind": "log", "message": message}, rank=1)
            w.record("events", {"kind": "log", "message": "number of skipped samples: 0"}, rank=1)
            w.scalars("loss", step=[0, 1], value=[1.0, 1.0], rank=0)
            w.scalars("loss", step=[0, 1], value=[1.0, 1.0], rank=1)

        assert said(scaler) == []

    def test_a_skip_that_was_made_good_is_none(self, said: Any) -> None:
        rows: list[dict[str, Any]] = [{"steps": 50, "samples_seen": 200, "exit": ended("ok")} for _ in range(4)]
        rows[1] |= {"samples_skipped": 3, "skip_reason": "too short"}
        assert said(ranks_of(*rows)) == []

    def test_beside_a_hang_without_counts_it_is_open(self, said: Any) -> None:
        rows: list[dict[str, Any]] = [{"samples_skipped": 0, "exit": ended("hang")} for _ in range(4)]
        rows[1]["samples_skipped"] = 2
        (found,) = said(ranks_of(*rows))
        assert (found.confidence, found.where.rank) == ("undetermined", 1)
