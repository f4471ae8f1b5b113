"""Which rank made which call otherwise: alignment, vote, circles, and what must not be said."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llmconsole.analyzers.distributed.reading import calls
from llmconsole.analyzers.distributed.reproduction import Call, reproduction
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.registry import all_rules
from llmconsole.analyzers.report import CapsuleReport
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import import_job

from tests.analyzers.played_jobs import STEP, T0, C, Played, play, same

MISMATCH = "distributed/collective-mismatch"
MISSING = "distributed/missing-rank"
ORDER = "distributed/group-order"
CONDITIONAL = "distributed/rank-conditional"
RAISED = "distributed/timeout-raised"
COVERAGE = "distributed/coverage"
MINE = {MISMATCH, MISSING, ORDER, CONDITIONAL, RAISED, COVERAGE, "distributed/rank-died-first"}
REAL = Path(__file__).resolve().parents[3] / "shared" / "real" / "flight_recorder"
RULES = [each for each in all_rules() if each.id in MINE]


def report(capsule: Capsule) -> CapsuleReport:
    found = analyze(capsule, RULES)
    assert not found.errors, found.errors
    return found


def loud(capsule: Capsule) -> list[Finding]:
    return [each for each in report(capsule).findings if each.severity != "info" and each.kind != "hygiene"]


def value(finding: Finding, name: str) -> Any:
    return next(each.value for each in finding.evidence if each.name == name)


@pytest.fixture
def said(build: Any) -> Any:
    """``said(played, …)``: what is loud about a played job."""

    def said(played: Played, **how: Any) -> list[Finding]:
        return loud(build(lambda w: played.write(w, **how)))

    return said


# -- one rank otherwise, named once


@pytest.mark.fires(MISMATCH)
@pytest.mark.parametrize("ranks", [3, 4, 16])
@pytest.mark.parametrize("frames", [True, False])
def test_a_skipped_call_is_named_once_and_not_every_call_after_it(said: Any, ranks: int, frames: bool) -> None:
    programs = same(ranks)
    del programs[2][12]  # the reduce-scatter of the third step, number 13
    (found,) = said(play(programs, depth=8), frames=frames)
    assert (found.rule, found.where.rank, found.confidence) == (MISMATCH, 2, "confirmed")
    assert (value(found, "deviating_ranks"), value(found, "sequence_number")) == ([2], 13)
    assert (value(found, "skipped_calls"), "train.py:13" in found.summary) == (1, frames)
    assert found.fix == ("let rank 2 make the call, too, or let no rank of the group do so",)
    assert any(each.endswith("llmconsole shrink CAPSULE") for each in found.next)


def test_among_equal_calls_in_a_row_the_call_sites_tell_which_was_skipped(said: Any) -> None:
    step = [C(line=line) for line in (20, 21, 22, 23)] + [C("broadcast", line=24)]
    programs = same(4, step=step)
    del programs[3][11]  # line 21 of the third step, number 12
    (found,) = said(play(programs, depth=8))
    assert (found.where.rank, value(found, "sequence_number")) == (3, 12)
    assert "train.py:21" in found.summary


def test_an_added_call_is_named_with_its_line(said: Any) -> None:
    programs = same(5)
    programs[1].insert(16, C("all_reduce", line=77, shape=(3,)))
    (found,) = said(play(programs, depth=8))
    assert (found.rule, found.where.rank, value(found, "sequence_number")) == (MISMATCH, 1, 17)
    assert value(found, "added_calls") == 1
    assert found.fix[0].startswith("leave the call out on rank 1")
    assert "train.py:77" in found.summary


@pytest.mark.parametrize(
    ("change", "words"),
    [({"shape": (129,)}, "size"), ({"dtype": "bfloat16"}, "dtype"), ({"op": "broadcast"}, "operation")],
)
@pytest.mark.parametrize("depth", [1, 8])
def test_another_size_dtype_or_operation_is_named(said: Any, change: Any, words: str, depth: int) -> None:
    programs = same(4)
    programs[3][11] = replace(programs[3][11], **change)
    (found,) = said(play(programs, depth=depth))
    assert (found.rule, found.where.rank, value(found, "sequence_number")) == (MISMATCH, 3, 12)
    assert words in found.title
    assert "train.py:12" in found.summary
    assert words in found.fix[0]


def test_two_calls_exchanged_in_one_group_are_no_two_mismatches(said: Any) -> None:
    programs = same(4)
    programs[0][11], programs[0][12] = programs[0][12], programs[0][11]
    (found,) = said(play(programs, depth=8))
    assert (found.rule, found.where.rank, value(found, "exchanged_calls")) == (MISMATCH, 0, 2)


def test_two_ranks_at_fault_at_different_places_are_two_findings(said: Any) -> None:
    programs = same(8)
    programs[2][6] = replace(programs[2][6], shape=(7,))
    programs[5][6] = replace(programs[5][6], dtype="float16")
    found = said(play(programs, depth=8))
    assert sorted((each.rule, each.where.rank) for each in found) == [(MISMATCH, 2), (MISMATCH, 5)]


def test_ranks_that_go_the_same_odd_way_are_one_finding(said: Any) -> None:
    programs = same(8)
    for rank in (2, 5):
        programs[rank][6] = replace(programs[rank][6], shape=(7,))
    (found,) = said(play(programs))
    assert value(found, "deviating_ranks") == [2, 5]


def test_garbage_of_another_dtype_is_found_in_a_job_that_ended_well(build: Any) -> None:
    played = play(same(4))
    for each in played.calls[1][11:12]:
        each["dtype"] = "float16"
    (found,) = loud(build(lambda w: played.write(w)))
    assert (found.rule, found.where.rank, found.severity) == (MISMATCH, 1, "critical")
    assert "ranks went on" in next(each.note for each in found.evidence if each.name == "ended")


def test_equally_many_elements_arranged_otherwise_that_ended_are_a_warning(build: Any) -> None:
    played = play(same(4))
    played.calls[1][10]["shapes_in"] = [[16, 64]]
    (found,) = loud(build(lambda w: played.write(w)))
    assert (found.severity, found.confidence) == ("warning", "likely")


@pytest.mark.quiet(MISMATCH)
def test_sizes_that_differ_legally_are_no_mismatch(said: Any) -> None:
    def program(rank: int) -> list[C]:
        step = [
            C("all_to_all", shape=(100 + rank, 16)),
            C("all_gather", shape=(3 + rank, 8), outputs=tuple((3 + each, 8) for each in range(4))),
            C("gather", shape=(4,), outputs=((4,),) * 4 if rank == 0 else ()),
            C("scatter", shape=(4,) if rank == 0 else (1,), outputs=((9,),)),
            C("barrier", shape=(rank + 1,)),
            C("all_reduce", shape=() if rank else (1,)),
        ]
        return step * 3

    played = play({rank: program(rank) for rank in range(4)})
    for made in played.calls.values():
        for each in made:
            each |= {"state": "completed", "t_completed": T0 + 9}
    assert said(played) == []


def test_two_sides_without_a_majority_are_both_named_and_none_accused(said: Any, build: Any) -> None:
    for ranks, odd in ((2, [1]), (4, [1, 3])):
        programs = same(ranks)
        for rank in odd:
            programs[rank][11] = replace(programs[rank][11], shape=(7,))
        (found,) = said(play(programs))
        assert (found.confidence, found.cause, found.where.rank) == ("undetermined", None, None)
        named = {*value(found, "deviating_ranks"), *value(found, "agreeing_ranks")}
        assert named == set(range(ranks))


def test_pairs_are_judged_by_the_other_pairs_of_their_kind(said: Any) -> None:
    pairs = {f"tp{at}": ("TENSOR_PARALLEL", (2 * at, 2 * at + 1)) for at in range(4)}
    programs = {
        rank: [replace(each, group=f"tp{rank // 2}") if each.line != 15 else each for each in STEP * 5]
        for rank in range(8)
    }
    programs[5][7] = replace(programs[5][7], dtype="float64")
    programs[5][7] = replace(programs[5][7], dtype="bfloat16")
    programs[5][6] = replace(programs[5][6], shape=(9,))
    (found,) = said(play(programs, pairs))
    assert (found.rule, found.where.rank, value(found, "deviating_ranks")) == (MISMATCH, 5, [5])


# -- conditions


@pytest.mark.fires(CONDITIONAL)
@pytest.mark.parametrize("depth", [1, 8])
def test_a_call_that_only_rank_0_makes_is_under_a_condition(said: Any, depth: int) -> None:
    programs = same(4)
    programs[0].insert(16, C("barrier", line=99, shape=(1,)))
    (found,) = said(play(programs, depth=depth))
    assert (found.rule, found.where.rank, value(found, "call_site")) == (CONDITIONAL, 0, "train.py:99 in step")


def test_a_barrier_of_rank_0_after_the_others_have_ended_is_under_a_condition(said: Any) -> None:
    programs = same(4)
    programs[0].append(C("barrier", line=99, shape=(1,)))
    (found,) = said(play(programs))
    assert (found.rule, found.where.rank) == (CONDITIONAL, 0)


@pytest.mark.quiet(CONDITIONAL)
def test_one_round_more_of_a_call_that_all_make_is_no_condition(said: Any) -> None:
    programs = same(4)
    programs[0] += STEP
    (found,) = said(play(programs))
    assert (found.rule, found.where.rank) == (MISMATCH, 0)
    assert "one call more" in found.title


# -- circles over groups


def two_groups(odd: int | None, depth: int = 1, ranks: int = 4) -> Played:
    groups = {"7": ("data", tuple(range(ranks))), "8": ("expert", tuple(range(ranks)))}
    step = [C(group="7", line=30), C(line=31), C(group="8", line=32), C(group="7", line=33)]
    programs = {rank: step * 4 for rank in range(ranks)}
    if odd is not None:
        programs[odd] = [*programs[odd]]
        programs[odd][9], programs[odd][10] = programs[odd][10], programs[odd][9]
    return play(programs, groups, depth=depth)


@pytest.mark.fires(ORDER)
@pytest.mark.parametrize("depth", [1, 6])
def test_groups_entered_in_the_other_order_are_a_circle_and_its_odd_rank_is_named(said: Any, depth: int) -> None:
    (found,) = said(two_groups(3, depth))
    assert (found.rule, found.where.rank, found.confidence) == (ORDER, 3, "likely")
    assert value(found, "deviating_ranks") == [3]
    assert "train.py:32" in found.summary


def test_of_two_ranks_in_a_circle_none_is_accused(said: Any) -> None:
    (found,) = said(two_groups(1, ranks=2))
    assert (found.rule, found.confidence, found.where.rank) == (ORDER, "undetermined", None)
    assert value(found, "ranks_in_the_circle") == [0, 1]


@pytest.mark.quiet(ORDER)
def test_one_order_of_the_groups_and_a_rank_that_stops_are_no_circle(said: Any) -> None:
    groups = {"7": ("data", (0, 1, 2, 3)), "8": ("expert", (0, 1, 2, 3))}
    programs = {rank: [C(group="7"), C(), C(group="8")] * 4 for rank in range(4)}
    (found,) = said(play(programs, groups, stuck=lambda rank, at: rank == 2 and at >= 7))
    assert (found.rule, found.where.rank) == (MISSING, 2)


def test_ranks_that_send_to_each_other_first_are_a_circle(build: Any) -> None:
    played = play({rank: [C("send", peer=1 - rank, line=40)] for rank in range(2)})
    for each in (each for made in played.calls.values() for each in made):
        each["t_created"] = T0

    def fill(w: Any) -> None:
        played.write(w)
        w.record("events", {"kind": "collective_timeout", "op": "send", "timeout_s": 600.0, "t": T0 + 600}, rank=0)

    (found,) = loud(build(fill))
    assert (found.rule, found.confidence) == (ORDER, "undetermined")
    assert "sends" in found.title


# -- missing ranks, victims


@pytest.mark.fires(MISSING)
@pytest.mark.parametrize("unfinished", [True, False])
def test_the_rank_that_waits_for_nobody_is_missing_and_the_others_are_victims(said: Any, unfinished: bool) -> None:
    groups = {f"tp{at}": ("TP", (4 * at, 4 * at + 1, 4 * at + 2, 4 * at + 3)) for at in range(2)}
    programs = {rank: [C(group=f"tp{rank // 4}", line=50), C("_all_gather_base", line=51)] * 6 for rank in range(8)}
    played = play(programs, groups, stuck=lambda rank, at: rank == 5 and at >= 6)
    (found,) = said(played, unfinished=unfinished)
    assert (found.rule, found.where.rank, found.confidence) == (MISSING, 5, "likely")
    assert value(found, "missing_ranks") == [5]
    assert value(found, "waiting_ranks") == [4, 6, 7]
    assert value(found, "downstream_victims") == [0, 1, 2, 3]
    assert "all_reduce 4 of TP (tp1) (train.py:50 in step)" in found.summary


def test_ranks_with_most_calls_in_flight_are_not_at_fault(said: Any) -> None:
    (found,) = said(play(same(4), depth=20, stuck=lambda rank, at: rank == 1 and at >= 9), unfinished=True)
    assert value(found, "missing_ranks") == [1]


def test_a_skip_among_calls_that_all_look_alike_is_placed_by_its_line(said: Any) -> None:
    step = [C(line=line) for line in (60, 61, 62)]
    programs = same(4, step=step)
    del programs[2][7]
    (found,) = said(play(programs))
    assert (found.rule, value(found, "missing_ranks"), value(found, "skipped_calls")) == (MISSING, [2], 1)
    assert "train.py:61" in found.summary


@pytest.mark.quiet(MISSING)
def test_dumps_of_a_running_job_have_every_newest_call_in_flight(said: Any) -> None:
    played = play(same(4), depth=4, stuck=lambda rank, at: at >= 20 + rank)
    for rank, made in played.calls.items():  # all have entered these; the newest ends just after the dump
        for each in made[18 - rank :]:
            each.pop("t_completed", None)
            each["state"] = "scheduled"
    assert said(played) == []


def test_dumps_that_were_asked_for_are_no_standstill(build: Any) -> None:
    played = play(same(4), stuck=lambda rank, at: at >= 20 + (rank > 0))
    assert loud(build(lambda w: played.write(w)))
    for kind in ("manual", "signal"):
        assert loud(build(lambda w: played.write(w), {"trigger": {"kind": kind}})) == []


def test_a_job_that_a_person_stopped_is_no_hang(build: Any) -> None:
    played = play(same(4), stuck=lambda rank, at: at >= 20 + (rank > 0))

    def fill(w: Any) -> None:
        for rank, made in played.calls.items():
            w.records("collectives", made, rank=rank)
            w.record("ranks", {"steps": 4, "exit": {"kind": "signal", "message": "SIGTERM", "t": T0 + 1}}, rank=rank)

    assert loud(build(fill)) == []


def test_a_call_older_than_its_time_out_is_a_hang_without_dumps(build: Any) -> None:
    played = play(same(3), stuck=lambda rank, at: rank == 2 and at >= 8)

    def fill(w: Any) -> None:
        for rank, made in played.calls.items():
            w.records("collectives", made, rank=rank)
        w.record("events", {"kind": "log", "level": "warning", "message": "still here", "t": T0 + 700}, rank=0)

    (found,) = loud(build(fill))
    assert value(found, "missing_ranks") == [2]
    assert "600 s" in value(found, "standstill")


@pytest.mark.parametrize(
    ("age", "said"),
    [(5.0, ("undetermined", None)), (602.0, ("likely", 2)), (1e8, ("likely", 2)), (-50.0, ("likely", 2))],
)
def test_when_the_dumps_were_written_tells_a_slow_rank_from_a_hang(
    build: Any, age: float, said: tuple[str, int | None]
) -> None:
    played = play(same(4), stuck=lambda rank, at: rank == 2 and at >= 8)
    began = max(made[-1]["t_created"] for made in played.calls.values())

    def fill(w: Any) -> None:
        played.write(w)
        for rank in range(4):
            enqueued, completed = played.numbers(rank)
            status = {"dump": True, "last_seq": enqueued, "last_completed": completed, "dumped": began + age}
            w.record("ranks", status, rank=rank)

    (found,) = loud(build(fill))
    assert (found.confidence, found.where.rank) == said
    assert value(found, "missing_ranks") == [2]


def test_evidence_older_than_what_others_finished_accuses_nobody(build: Any) -> None:
    played = play(same(4))
    played.calls[3] = played.calls[3][:20]
    assert loud(build(lambda w: played.write(w))) == []


def test_a_rank_without_dump_is_the_only_one_left_and_is_not_accused(build: Any) -> None:
    played = play(same(4), stuck=lambda rank, at: rank == 3 and at >= 8)
    del played.calls[3]
    (found,) = loud(build(lambda w: played.write(w), {"run": {"world_size": 4}}))
    assert (found.confidence, found.where.rank) == ("undetermined", None)
    assert value(found, "silent_ranks") == [3]


@pytest.mark.parametrize(
    ("manifest", "age", "expected"),
    [({}, None, "warning"), ({}, 5.0, None), ({}, 500.0, "warning"), ({"trigger": {"kind": "signal"}}, None, None)],
)
def test_dumps_of_half_of_the_ranks_that_wait_for_the_other_half_are_no_health(
    build: Any, manifest: dict[str, Any], age: float | None, expected: str | None
) -> None:
    played = play(same(4), stuck=lambda rank, at: rank == 3 and at >= 8)
    for rank in (2, 3):
        del played.calls[rank]
    for rank in (0, 1):  # a send of each to a rank without a dump, as between pipeline stages
        last = played.calls[rank][-1]
        last |= {"op": "send", "p2p": True, "peer": rank + 2}
    began = max(made[-1]["t_created"] for made in played.calls.values())

    def fill(w: Any) -> None:
        played.write(w)
        for rank in (0, 1) if age is not None else ():
            w.record("ranks", {"dump": True, "last_seq": {"0": 9}, "dumped": began + (age or 0.0)}, rank=rank)

    found = report(build(fill, manifest | {"run": {"world_size": 4}}))
    said = [each for each in found.findings if each.severity != "info"]
    assert [each.severity for each in said] == [expected] * bool(expected)
    if expected:
        assert (said[0].rule, said[0].confidence, said[0].where.rank) == (MISSING, "undetermined", None)
        assert "get the dumps of ranks 2 and 3" in said[0].summary
    else:
        assert MISSING in [each.rule for each in found.skipped]


def test_a_member_without_a_dump_beside_a_missing_one_may_be_as_guilty(build: Any) -> None:
    played = play(same(6), stuck=lambda rank, at: rank in (3, 4) and at >= 8)
    del played.calls[4]
    (found,) = loud(build(lambda w: played.write(w), {"run": {"world_size": 6}}))
    assert (found.confidence, found.where.rank, value(found, "missing_ranks")) == ("likely", 3, [3])
    assert "of rank 4 there is no evidence: it may be missing, too" in found.summary
    assert any("rank 4" in each for each in found.next)
    assert "rank 4" in found.title


def test_of_two_ranks_the_absent_one_is_named_and_not_accused(said: Any) -> None:
    (found,) = said(play(same(2), stuck=lambda rank, at: rank == 1 and at >= 8))
    assert (found.rule, found.confidence, found.where.rank) == (MISSING, "undetermined", None)
    assert "Rank 1 did not enter" in found.title


def test_pipeline_neighbours_that_wait_for_a_send_are_victims(build: Any) -> None:
    groups = {"pp0": ("PIPELINE", (0, 2)), "pp1": ("PIPELINE", (1, 3)), "tpa": ("TP", (0, 1)), "tpb": ("TP", (2, 3))}
    programs = {rank: [C(group="tpa" if rank < 2 else "tpb", line=70)] * 4 for rank in range(4)}
    for rank in (0, 1):
        programs[rank] += [C("recv", group=f"pp{rank}", peer=rank + 2, line=71)]
    played = play(programs, groups, stuck=lambda rank, at: rank == 3 and at >= 3)
    (found,) = loud(build(lambda w: played.write(w)))
    assert value(found, "missing_ranks") == [3]
    assert value(found, "waiting_ranks") == [2]
    assert value(found, "downstream_victims") == [0, 1]


def test_a_rank_that_comes_when_the_others_have_given_up_was_missing(build: Any) -> None:
    played = play(same(4), stuck=lambda rank, at: at >= 9)
    for rank in range(4):
        late = 800.0 if rank == 1 else 0.0
        newest = played.calls[rank][-1]
        newest |= {"state": "started", "t_created": T0 + 5 + late}
        newest.pop("t_completed")

    def fill(w: Any) -> None:
        for rank, made in played.calls.items():
            w.records("collectives", made, rank=rank)
            ended = {"kind": "exception", "message": "Timed out waiting 600000ms for recv", "t": T0 + 610}
            w.record("ranks", {"exit": ended}, rank=rank)
        w.record("events", {"kind": "collective_timeout", "op": "all_reduce", "timeout_s": 600.0}, rank=0)

    (found,) = loud(build(fill))
    assert (found.rule, found.where.rank, value(found, "entered_late")) == (MISSING, 1, 800.0)


def test_a_call_that_all_are_in_and_that_does_not_end_is_nobodys_absence(build: Any) -> None:
    played = play(same(4), stuck=lambda rank, at: at >= 9)
    for made in played.calls.values():
        made[-1]["state"] = "started"
        made[-1].pop("t_completed")

    def fill(w: Any) -> None:
        played.write(w)
        w.record("events", {"kind": "collective_timeout", "seq": 9, "group": "0", "timeout_s": 600.0}, rank=0)

    (found,) = loud(build(fill))
    assert (found.confidence, found.where.rank) == ("undetermined", None)
    assert "All ranks are in" in found.title


# -- time-outs and coverage


@pytest.mark.fires(RAISED)
def test_a_raised_time_out_over_a_missing_rank_is_hygiene(build: Any) -> None:
    played = play(same(4), stuck=lambda rank, at: rank == 1 and at >= 8, timeout=7200.0)
    found = [each for each in report(build(lambda w: played.write(w))).findings if each.rule == RAISED]
    assert [(each.kind, each.severity, each.evidence[0].value) for each in found] == [("hygiene", "warning", 7200.0)]
    assert found[0].evidence[0].expected == 1800.0


@pytest.mark.quiet(RAISED)
def test_a_long_time_out_of_ranks_that_agree_and_the_default_over_a_difference_are_quiet(build: Any) -> None:
    for played in (
        play(same(4), timeout=7200.0),
        play(same(4), stuck=lambda rank, at: rank == 1 and at >= 8, timeout=600.0),
    ):
        assert RAISED in report(build(lambda w, played=played: played.write(w))).quiet


@pytest.mark.fires(COVERAGE)
def test_ranks_without_evidence_are_listed_as_unknown(build: Any) -> None:
    played = play(same(4))
    del played.calls[2]
    (found,) = report(build(lambda w: played.write(w))).findings
    assert (found.rule, found.severity, found.kind) == (COVERAGE, "info", "hygiene")
    assert value(found, "silent_ranks") == [2]


@pytest.mark.quiet(COVERAGE)
def test_a_dump_without_entries_is_evidence(build: Any) -> None:
    played = play(same(4))
    assert report(build(lambda w: played.write(w, unfinished=True))).findings == ()


# -- the smallest reproduction


def test_the_smallest_reproduction_says_what_each_of_two_ranks_calls(build: Any) -> None:
    programs = same(4)
    programs[3][11] = replace(programs[3][11], shape=(129,))
    found = reproduction(build(lambda w: play(programs).write(w)))
    assert found is not None
    assert (found.kind, found.rule, found.ranks, found.frame) == ("shape", MISMATCH, (0, 3), "train.py:12 in step")
    assert (found.a, found.b) == (
        (Call("all_reduce", "float32", ((128,),), "0"),),
        (Call("all_reduce", "float32", ((129,),), "0"),),
    )


def test_a_missing_an_added_and_a_turned_call_have_reproductions(build: Any) -> None:
    missing = reproduction(build(lambda w: play(same(3), stuck=lambda rank, at: (rank, at) == (1, 8)).write(w)))
    assert missing is not None
    assert (missing.kind, missing.b, missing.rule) == ("missing", (), MISSING)
    programs = same(4)
    programs[0].insert(16, C("barrier", line=99, shape=(1,)))
    added = reproduction(build(lambda w: play(programs, depth=8).write(w)))
    assert added is not None
    assert (added.kind, added.a, added.b[0].op, added.rule) == ("extra", (), "barrier", CONDITIONAL)
    turned = reproduction(build(lambda w: two_groups(3).write(w)))
    assert turned is not None
    assert (turned.kind, turned.rule) == ("order", ORDER)
    assert [each.group for each in turned.a] == ["0", "8"]
    assert [each.group for each in turned.b] == ["8", "0"]
    assert reproduction(build(lambda w: play(same(4)).write(w))) is None


# -- real files


def imported(folder: Path, target: Path) -> Capsule:
    files = sorted(each for each in folder.iterdir() if each.is_file())
    return Capsule.open(import_job(files, target, attach=False).path)


def real(name: str) -> Path:
    if not (REAL / name).is_dir():
        pytest.skip(f"{REAL / name} is not here")
    return REAL / name


@pytest.mark.recorded(MISSING)
@pytest.mark.parametrize(
    ("name", "missing", "call"),
    [
        ("nvrx/fr_traces/gpu_error_1st", [12], "all_to_all 20,537 of EXPERT_MODEL_PARALLEL_GROUP (74)"),
        ("nvrx/fr_traces/lock_gil_1st", [9, 14], "all_to_all 45,265 of EXPERT_MODEL_PARALLEL_GROUP (72)"),
    ],
)
def test_dumps_of_a_real_job_name_the_ranks_in_which_faults_were_injected(
    tmp_path: Path, name: str, missing: list[int], call: str
) -> None:
    folder = real(name)
    dumps = [each for each in folder.iterdir() if each.name.startswith("_dump_")]
    random.Random(4).shuffle(dumps)
    capsule = Capsule.open(import_job(dumps, tmp_path / "made", attach=False).path)
    (found,) = loud(capsule)
    assert (found.rule, value(found, "missing_ranks")) == (MISSING, missing)
    assert call in found.summary
    assert set(value(found, "downstream_victims")) >= set(range(8))
    slow = [each.note[:7] for each in found.evidence if each.name == "last_completed"]
    assert slow == (["rank 14"] if missing == [12] else [])


@pytest.mark.parametrize("ranks", [range(8), range(1)])
def test_dumps_of_some_ranks_of_a_real_job_ask_for_the_others(tmp_path: Path, ranks: range) -> None:
    dumps = [real("nvrx/fr_traces/lock_gil_1st") / f"_dump_{rank}" for rank in ranks]
    capsule = Capsule.open(import_job(dumps, tmp_path / "made", attach=False).path)
    (found,) = loud(capsule)
    assert (found.rule, found.severity, found.confidence) == (MISSING, "warning", "undetermined")
    assert value(found, "waiting_ranks") == list(ranks)
    assert f"get the dumps of ranks {len(ranks)} to 15" in found.summary


def test_an_example_cut_down_to_one_finished_call_says_nothing_loud(tmp_path: Path) -> None:
    capsule = imported_only(real("pytorch_tutorial") / "fr_v2.5_example.json", tmp_path)
    found = report(capsule)
    assert [each.rule for each in found.findings] == [COVERAGE]


def imported_only(file: Path, target: Path) -> Capsule:
    return Capsule.open(import_job([file], target / "made", attach=False).path)


@pytest.mark.recorded(MISMATCH)
@pytest.mark.recorded(CONDITIONAL)
@pytest.mark.recorded(ORDER)
@pytest.mark.recorded(COVERAGE)
@pytest.mark.recorded(RAISED)
def test_dumps_as_torch_writes_them_lead_to_the_same_verdicts(tmp_path: Path) -> None:
    skipped, added = same(4), same(4)
    del skipped[2][12]
    added[0].insert(16, C("barrier", line=99, shape=(1,)))
    cases = {
        MISMATCH: (play(skipped, depth=8, timeout=5400.0), 2),
        CONDITIONAL: (play(added, depth=8), 0),
        ORDER: (two_groups(3), 3),
    }
    for rule, (played, rank) in cases.items():
        folder = tmp_path / rule.rpartition("/")[2]
        folder.mkdir()
        played.dump(folder)
        capsule = imported(folder, tmp_path / f"{folder.name}.made")
        (found,) = loud(capsule)
        assert (found.rule, found.where.rank) == (rule, rank)
        assert (RAISED in {each.rule for each in report(capsule).findings}) == (rule == MISMATCH)
    (tmp_path / "group-order" / "nccl_trace_rank_1").unlink()
    capsule = imported(tmp_path / "group-order", tmp_path / "fewer")
    assert COVERAGE in {each.rule for each in report(capsule).findings}


# -- hostile and large evidence


def test_odd_evidence_makes_no_error_and_accuses_nobody(build: Any) -> None:
    rng = random.Random(11)
    values: list[Any] = [None, 0, 1, 2**62, "", "0", [], [[1, 2]], [[]], {}, True, -1, float("nan"), "x" * 300]

    def fill(w: Any) -> None:
        for rank in range(3):
            for _ in range(60):
                fields = ("group", "group_ranks", "seq", "order", "op", "dtype", "shapes_in", "state", "t_created")
                record = {name: rng.choice(values) for name in rng.sample(fields, 5)}
                for name, given in list(record.items()):
                    try:
                        w.record("collectives", {name: given}, rank=rank)
                    except Exception:
                        del record[name]
                w.record("collectives", record, rank=rank)
            w.record("ranks", {"last_seq": {"0": rng.choice([-1, 5, 2**62])}, "dump": True}, rank=rank)
            w.record("events", {"kind": "collective_timeout", "seq": rng.choice([-5, 3]), "group": None}, rank=rank)
            w.record("events", {"kind": "collective_mismatch", "shapes": rng.choice(values)}, rank=rank)

    assert not analyze(build(fill), RULES).errors


def test_one_call_missing_of_two_hundred_on_thirty_two_ranks(build: Any) -> None:
    programs = same(32, steps=40)
    del programs[17][133]
    played = play(programs, depth=4)
    capsule = build(lambda w: played.write(w))
    (found,) = loud(capsule)
    assert (found.where.rank, value(found, "sequence_number")) == (17, 134)


def test_a_call_is_found_by_group_rank_and_number(build: Any) -> None:
    rows = [(group, rank, seq) for group in ("0", "1", "2") for rank in (0, 1, 3, 5) for seq in (2, 3, 7, 8)]
    rows = [row for at, row in enumerate(rows) if at % 5]
    records = [
        {"group": group, "group_ranks": [0, 1, 3, 5], "rank": rank, "seq": seq, "order": seq, "op": "all_reduce",
         "dtype": "float32", "shapes_in": [[4]], "state": "completed"}
        for group, rank, seq in rows
    ]  # fmt: skip
    table = calls(build(lambda w: [w.record("collectives", each, rank=each["rank"]) for each in records]))
    names = {each.name: at for at, each in enumerate(table.groups)}
    for group in names:
        for rank in range(-1, 7):
            for seq in range(10):
                row = table.at(names[group], rank, seq)
                assert (row is not None) == ((group, rank, seq) in rows)
                if row is not None:
                    assert (table.table.rank[row], table.table.seq[row]) == (rank, seq)
                    assert table.groups[table.table.group[row]].name == group
    assert table.at(len(names), 0, 2) is None
