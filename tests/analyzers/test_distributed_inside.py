"""Calls that all ranks are in: devices that did not start one, calls that all differ, evidence that is set aside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.registry import all_rules
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule

from tests.analyzers.played_jobs import T0, Played, play, same

MISMATCH, MISSING, COVERAGE = (
    "distributed/collective-mismatch",
    "distributed/missing-rank",
    "distributed/coverage",
)
RULES = [each for each in all_rules() if each.id in (MISMATCH, MISSING, COVERAGE)]


def findings(capsule: Capsule, rule: str) -> list[Finding]:
    report = analyze(capsule, RULES)
    assert not report.errors
    return [each for each in report.findings if each.rule == rule]


def in_one_call(states: str, older: str = "") -> Played:
    """Four ranks in call 9, each in the state of its letter: scheduled, running; ``older``: call 8 as well."""
    played = play(same(4), stuck=lambda rank, at: at >= 9)
    for made, state, before in zip(played.calls.values(), states, older or "cccc", strict=True):
        for record, letter in zip(made[-2:], (before, state), strict=True):
            record["state"] = {"s": "scheduled", "r": "started", "c": "completed"}[letter]
            if letter != "c":
                record.pop("t_completed", None)
    return played


def fill(played: Played, w: Any, age: float = 600.0, *, gave_up: bool = True) -> None:
    began = max(made[-1]["t_created"] for made in played.calls.values() if made)
    for rank, made in played.calls.items():
        w.records("collectives", made, rank=rank)
        enqueued, completed = played.numbers(rank)
        status = {"dump": True, "last_seq": enqueued, "last_completed": completed, "dumped": began + age}
        w.record("ranks", status, rank=rank)
    if gave_up:
        w.record("events", {"kind": "collective_timeout", "seq": 9, "group": "0", "timeout_s": 600.0}, rank=0)


class TestDevices:
    @pytest.mark.fires(MISSING)
    def test_a_rank_whose_device_has_not_started_what_the_others_run_is_named(self, build: Any) -> None:
        (found,) = findings(build(lambda w: fill(in_one_call("rrsr"), w)), MISSING)
        assert (found.confidence, found.where.rank, found.where.order) == ("likely", 2, 9)
        assert "its device has not started it" in found.title

    @pytest.mark.parametrize("states", ["ssss", "rrrr", "rssr", "sssr"])
    def test_states_that_are_equal_or_of_no_minority_name_nobody(self, build: Any, states: str) -> None:
        (found,) = findings(build(lambda w: fill(in_one_call(states), w)), MISSING)
        assert (found.confidence, found.where.rank) == ("undetermined", None)

    def test_a_state_that_is_not_on_record_names_nobody(self, build: Any) -> None:
        def written(w: Any) -> None:
            played = in_one_call("rrsr")
            played.calls[2][-1].pop("state")
            fill(played, w)

        (found,) = findings(build(written), MISSING)
        assert (found.confidence, found.where.rank) == ("undetermined", None)

    def test_a_state_that_is_not_on_record_is_not_said_to_run(self, build: Any) -> None:
        def written(w: Any) -> None:
            played = in_one_call("rrsr")
            played.calls[3][-1].pop("state")
            fill(played, w)

        (found,) = findings(build(written), MISSING)
        assert found.where.rank == 2
        assert "the devices of ranks 0 and 1 run it" in found.summary

    def test_dumps_of_the_moment_in_which_it_was_queued_name_nobody(self, build: Any) -> None:
        (found,) = findings(build(lambda w: fill(in_one_call("rrsr"), w, age=5.0)), MISSING)
        assert found.where.rank is None

    def test_a_device_that_is_in_an_older_call_with_all_others_is_not_behind(self, build: Any) -> None:
        found = findings(build(lambda w: fill(in_one_call("sssr", older="rrrr"), w)), MISSING)
        assert [each.where.rank for each in found] == [None]


class TestDifferentCalls:
    @pytest.mark.fires(MISMATCH)
    def test_each_of_the_calls_that_all_differ_is_said(self, build: Any) -> None:
        programs = same(4)
        for rank in range(4):
            programs[rank][6] = replace(programs[rank][6], shape=(100 + 7 * rank, 64))
        (found,) = findings(build(lambda w: play(programs).write(w)), MISMATCH)
        for rank in range(4):
            assert f"rank {rank} called all_reduce float32 [{100 + 7 * rank}, 64]" in found.summary
        assert found.confidence == "undetermined"

    def test_two_sides_are_said_as_two(self, build: Any) -> None:
        programs = same(4)
        for rank in (1, 3):
            programs[rank][6] = replace(programs[rank][6], shape=(7,))
        (found,) = findings(build(lambda w: play(programs).write(w)), MISMATCH)
        assert "ranks 1 and 3 called all_reduce float32 [7]" in found.summary
        assert "ranks 0 and 2 called all_reduce float32 [128]" in found.summary


class TestUnstated:
    """Rank 3 does not say what it called, or not all of it: that can neither accuse it nor acquit it."""

    def parted(self, build: Any, **fields: Any) -> list[Finding]:
        def written(w: Any) -> None:
            played = in_one_call("rrrr")
            for record in played.calls[3]:
                for name, value in fields.items():
                    if value is None:
                        record.pop(name)
                    else:
                        record[name] = value
            fill(played, w)

        return findings(build(written), MISMATCH)

    @pytest.mark.quiet(MISMATCH)
    @pytest.mark.parametrize("missing", ["op", "dtype", "shapes_in", "shapes_out"])
    def test_what_is_not_on_record_is_no_other_call(self, build: Any, missing: str) -> None:
        assert self.parted(build, **{missing: None}) == []

    @pytest.mark.fires(MISMATCH)
    @pytest.mark.parametrize("other", [{"dtype": "float16"}, {"op": "broadcast"}, {"op": None, "dtype": "float16"}])
    def test_what_is_on_record_and_differs_is(self, build: Any, other: dict[str, Any]) -> None:
        (found,) = self.parted(build, shapes_out=None, **other)
        assert found.where.rank == 3

    def test_arguments_that_are_not_on_record_are_not_said_to_be_equal(self, build: Any) -> None:
        def written(w: Any, *, without: bool) -> None:
            played = in_one_call("rrrr")
            if without:
                for name in ("shapes_in", "shapes_out"):
                    played.calls[3][-1].pop(name)
            fill(played, w)

        said = [findings(build(lambda w, each=each: written(w, without=each)), MISSING) for each in (False, True)]
        assert ["with equal arguments" in found.summary for (found,) in said] == [True, False]

    @pytest.mark.fires(COVERAGE)
    def test_a_dump_of_which_entries_are_lost_names_nobody(self, build: Any) -> None:
        def written(w: Any) -> None:
            played = in_one_call("rrrr")
            played.calls[3] = played.calls[3][:-1]
            fill(played, w)
            w.record("ranks", {"dump": True, "last_seq": {}, "entries_lost": 1}, rank=3)

        capsule = build(written)
        (found,) = findings(capsule, MISSING)
        assert (found.confidence, found.where.rank) == ("undetermined", None)
        assert "only rank 3 can be missing" in found.summary
        (said,) = findings(capsule, COVERAGE)
        assert said.title == "Entries of the dump of rank 3 could not be read"


class TestSetAside:
    @pytest.mark.fires(COVERAGE)
    def test_a_dump_older_than_what_others_finished_is_said_to_be_set_aside(self, build: Any) -> None:
        played = play(same(4), stuck=lambda rank, at: rank == 1 and at >= 16)
        played.calls[3] = played.calls[3][:8]
        (found,) = findings(build(lambda w: played.write(w)), COVERAGE)
        assert found.evidence[0].value == [3]
        assert "set aside" in found.summary

    @pytest.mark.quiet(COVERAGE)
    def test_a_rank_that_is_missing_is_not_set_aside(self, build: Any) -> None:
        played = play(same(4), stuck=lambda rank, at: rank == 1 and at >= 16)
        assert findings(build(lambda w: played.write(w)), COVERAGE) == []

    @pytest.mark.fires(MISSING)
    @pytest.mark.parametrize("kept", [0, 4])
    def test_a_dump_that_is_set_aside_is_as_good_as_none(self, build: Any, kept: int) -> None:
        """Ranks 0 to 2 stand in call 9, and rank 3's dump is empty or ends before what the others have left."""

        def older(w: Any) -> None:
            played = in_one_call("rrrr")
            played.calls[3] = played.calls[3][:kept]
            fill(played, w)

        def absent(w: Any) -> None:
            played = in_one_call("rrrr")
            del played.calls[3]
            fill(played, w)

        (found,), (alone,) = (findings(build(each), MISSING) for each in (older, absent))
        assert (found.severity, found.confidence, found.where.rank) == ("critical", "undetermined", None)
        assert "only rank 3 can be missing, of which there is no evidence of that moment" in found.summary
        assert (alone.severity, alone.confidence, alone.where) == (found.severity, found.confidence, found.where)
        (said,) = findings(build(older), COVERAGE)
        assert said.evidence[0].value == [3]

    def test_a_dump_of_the_moment_that_lacks_the_call_alone_names_its_rank(self, build: Any) -> None:
        def written(w: Any) -> None:
            played = in_one_call("rrrr")
            played.calls[3] = played.calls[3][:-1]
            fill(played, w)

        (found,) = findings(build(written), MISSING)
        assert (found.confidence, found.where.rank) == ("likely", 3)

    def test_older_dumps_beside_a_job_that_runs_name_nobody(self, build: Any) -> None:
        """Ranks 0 to 2 have their newest call in flight for a second when they were asked, and rank 3 an hour ago."""

        def written(w: Any) -> None:
            played = in_one_call("rrrr")
            played.calls[3] = played.calls[3][:4]
            fill(played, w, age=1.0, gave_up=False)

        assert all(each.severity != "critical" for each in findings(build(written), MISSING))


def one_pair(sent: tuple[int, ...], awaited: tuple[int, ...], *, age: float = 600.0, seq: int = 7) -> Any:
    """Ranks 0 and 1 in one send and its receive; ``age`` of the call in the dumps, ``seq`` of the receive."""

    def fill(w: Any) -> None:
        for rank, (op, shape, number) in enumerate((("send", sent, 7), ("recv", awaited, seq))):
            call = {"group": "0", "group_ranks": [0, 1], "op": op, "p2p": True, "peer": 1 - rank, "seq": number}
            call |= {"order": 9, "dtype": "float32", "shapes_in": [list(shape)], "shapes_out": [list(shape)]}
            w.record("collectives", {**call, "state": "started", "t_created": T0, "timeout_s": 600.0}, rank=rank)
            w.record("ranks", {"dump": True, "last_seq": {"0": 0}, "dumped": T0 + age}, rank=rank)

    return fill


class TestPairs:
    @pytest.mark.fires(MISMATCH)
    def test_a_send_of_another_size_than_its_receive_is_said_of_both_sides(self, build: Any) -> None:
        capsule = build(one_pair((4, 2, 64), (4, 1, 64)))
        (found,) = findings(capsule, MISMATCH)
        assert (found.confidence, found.where.rank) == ("undetermined", None)
        assert "Rank 0 sends float32 [4, 2, 64]" in found.summary
        assert "rank 1 awaits float32 [4, 1, 64]" in found.summary
        assert findings(capsule, MISSING) == []

    @pytest.mark.fires(MISSING)
    @pytest.mark.quiet(MISMATCH)
    def test_a_pair_of_one_size_that_stands_for_its_time_out_does_not_end(self, build: Any) -> None:
        capsule = build(one_pair((4, 2, 64), (4, 128)))
        (found,) = findings(capsule, MISSING)
        assert (found.confidence, found.where.rank) == ("undetermined", None)
        assert "no rank is missing" in found.summary
        assert findings(capsule, MISMATCH) == []

    def test_sizes_that_are_not_on_record_are_not_said_to_be_equal(self, build: Any) -> None:
        def written(w: Any) -> None:
            for rank, op in enumerate(("send", "recv")):
                call = {"group": "0", "group_ranks": [0, 1], "op": op, "p2p": True, "peer": 1 - rank, "seq": 7}
                call |= {"order": 9, "dtype": "float32", "state": "started", "t_created": T0, "timeout_s": 600.0}
                w.record("collectives", call | ({"shapes_in": [[4]]} if rank else {}), rank=rank)
                w.record("ranks", {"dump": True, "last_seq": {"0": 0}, "dumped": T0 + 600.0}, rank=rank)

        capsule = build(written)
        assert findings(capsule, MISMATCH) == []
        (found,) = findings(capsule, MISSING)
        assert "equal sizes" not in found.summary
        (found,) = findings(build(one_pair((4,), (4,))), MISSING)
        assert "with equal sizes" in found.summary

    @pytest.mark.parametrize(("awaited", "rule"), [((4, 1, 64), MISMATCH), ((4, 2, 64), MISSING)])
    def test_a_pair_that_holds_others_is_what_is_said(self, build: Any, awaited: tuple[int, ...], rule: str) -> None:
        """Ranks 2 and 3 wait in a call of all four for the two that stand in their send."""
        pair = one_pair((4, 2, 64), awaited)

        def fill(w: Any) -> None:
            pair(w)
            for rank in range(4):
                call = {"group": "all", "group_ranks": [0, 1, 2, 3], "op": "all_reduce", "seq": 3, "order": 10}
                call |= {"dtype": "float32", "shapes_in": [[8]], "shapes_out": [[8]], "state": "started"}
                if rank > 1:
                    w.record("collectives", {**call, "t_created": T0, "timeout_s": 600.0}, rank=rank)
                status = {"last_seq": {"all": 2 + (rank > 1)}, "last_completed": {"all": 2}}
                w.record("ranks", {"dump": True, "dumped": T0 + 600.0, **status}, rank=rank)

        capsule = build(fill)
        (found,) = findings(capsule, rule)
        assert (found.confidence, found.where.rank) == ("undetermined", None)
        assert "rank" in found.summary
        assert "did not enter" not in " ".join(each.title for each in findings(capsule, rule))

    @pytest.mark.quiet(MISSING)
    @pytest.mark.quiet(MISMATCH)
    @pytest.mark.parametrize("how", [{"age": 1.0}, {"age": 1.0, "seq": 8}])
    def test_a_pair_under_way_is_health(self, build: Any, how: dict[str, Any]) -> None:
        capsule = build(one_pair((4, 2, 64), (4, 2, 64), **how))
        assert findings(capsule, MISSING) == findings(capsule, MISMATCH) == []


def test_many_ranks_against_as_many_are_not_few(build: Any) -> None:
    programs = same(8)
    for rank in range(4):
        programs[rank][6] = replace(programs[rank][6], shape=(7,))
    (found,) = findings(build(lambda w: play(programs).write(w)), MISMATCH)
    assert "with 4 ranks against 4 nothing says which is right" in found.summary
