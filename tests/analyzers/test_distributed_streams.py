"""What hangs among ranks whose hosts queue calls ahead of their devices: batches, rounds ahead, dumps of a moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from llmconsole.analyzers.distributed.layout import layout
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.registry import all_rules
from llmconsole.analyzers.runner import analyze

MISSING = "distributed/missing-rank"
T0 = 1_700_000_000.0
RULES = [each for each in all_rules() if each.stage == "distributed" and each.kind == "divergence"]
Call = tuple[str, Sequence[int], str, bool, int | None]  # group, its ranks, operation, ended, peer

Judge = Callable[..., list[Finding]]


@pytest.fixture
def judged(build: Any) -> Judge:
    """``judged(calls of each rank, age)``: findings on dumps written so many seconds after the last call began."""

    def judged(jobs: Sequence[Sequence[Call]], age: float = 605.0) -> list[Finding]:
        def fill(w: Any) -> None:
            for rank, calls in enumerate(jobs):
                numbers: dict[tuple[str, bool], int] = {}
                for order, (group, ranks, op, ended, peer) in enumerate(calls):
                    key = group, peer is not None
                    numbers[key] = numbers.get(key, 0) + (op != "recv")  # a send and a receive are one batch
                    record = {
                        "group": group, "group_ranks": list(ranks), "seq": numbers[key], "order": order, "op": op,
                        "dtype": "float32", "shapes_in": [[4]], "shapes_out": [[4]], "timeout_s": 600.0,
                        "t_created": T0 + order, "state": "completed" if ended else "scheduled", "p2p": key[1],
                    }  # fmt: skip
                    w.record("collectives", record | ({} if peer is None else {"peer": peer}), rank=rank)
                dumped = T0 + max(map(len, jobs)) - 1 + age
                w.record("ranks", {"dump": True, "dumped": dumped}, rank=rank)

        found = analyze(build(fill), RULES)
        assert not found.errors, found.errors
        return [each for each in found.findings if each.severity != "info"]

    return judged


def ring(rank: int, ended: bool) -> list[Call]:
    ranks = range(4)
    return [
        ("1", ranks, "send", ended, (rank + 1) % 4),
        ("1", ranks, "recv", ended, (rank - 1) % 4),
    ]


@pytest.mark.fires(MISSING)
def test_who_left_an_exchange_of_a_ring_out_is_not_its_neighbour_whose_batch_has_ended(judged: Judge) -> None:
    last: Call = ("0", range(4), "all_reduce", False, None)
    jobs = [[*(ring(rank, True) * 3), *ring(rank, rank == 0), last] for rank in range(4)]
    jobs[2] = [*(ring(2, True) * 3), last]
    (found,) = judged(jobs)
    assert (found.rule, found.where.rank, found.confidence) == (MISSING, 2, "likely")


@pytest.mark.fires(MISSING)
def test_a_rank_that_skipped_a_call_and_queued_the_next_one_behind_a_receive_is_named(judged: Judge) -> None:
    everyone, pairs = range(4), [(0, 1), (2, 3)]

    def step(rank: int, ended: int) -> list[Call]:
        pair = pairs[rank // 2]
        calls: list[Call] = [(f"{1 + rank // 2}", pair, "all_reduce", True, None)] * 3
        return [*calls, ("0", everyone, "all_reduce", ended > 0, None)]

    jobs = [[*(step(rank, 1) * 3), *step(rank, 0)] for rank in range(4)]
    receive: list[Call] = [("3", (0, 2), "send", False, 0), ("3", (0, 2), "recv", False, 0)]
    jobs[2] = [*(step(2, 1) * 3), *step(2, 1)[:-1], *receive, *step(2, 0)]
    (found,) = judged(jobs)
    assert (found.rule, found.where.rank, found.where.order) == (MISSING, 2, 4)
    assert "Rank 2 skipped all_reduce 4" in found.title


@pytest.mark.fires(MISSING)
@pytest.mark.quiet(MISSING)
@pytest.mark.parametrize(("age", "said"), [(605.0, True), (3.0, False), (5e6, False)])
def test_all_in_one_call_is_said_where_its_time_out_passed_and_blames_nobody(
    judged: Judge, age: float, said: bool
) -> None:
    calls: list[Call] = [("0", range(4), "all_reduce", ended, None) for ended in (True, True, True, False)]
    found = judged([calls] * 4, age)
    assert [(each.rule, each.confidence, each.where.rank) for each in found] == (
        [(MISSING, "undetermined", None)] if said else []
    )


@pytest.mark.quiet(MISSING)
def test_dumps_of_one_moment_do_not_make_a_rank_between_two_calls_missing(judged: Judge) -> None:
    calls: list[Call] = [("0", range(4), "all_reduce", ended, None) for ended in (True, True, True, False)]
    assert judged([calls, calls, calls, calls[:-1]], age=0.02) == []


def test_ranks_that_only_send_to_each_other_have_no_layout_by_which_replicas_could_be_told(build: Any) -> None:
    def fill(w: Any) -> None:
        for rank in range(4):
            w.record("collectives", {"group": "0", "seq": 1, "op": "send", "p2p": True, "peer": 3 - rank}, rank=rank)

    assert layout(build(fill)) is None
