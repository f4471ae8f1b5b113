"""Several attempts in one log, who prints a line, what a text only quotes, and how many ranks there are."""

from __future__ import annotations

import pytest
from llmconsole.capsules.importers.logs.prefixes import common

from .conftest import Imports


def steps(first: int, last: int) -> str:
    return "".join(f"step {step} loss {9 - step / 1000:.3f}\n" for step in range(first, last + 1))


def watchdog(rank: int, seq: int, at: str = "01 07:10:00.1", ran: int = 600_029) -> str:
    return (
        f"[rank{rank}]:[E11{at} ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for {ran} "
        "milliseconds before timing out.\n"
    )


def summary(rank: int, code: int) -> str:
    return (
        f"  time      : 2026-11-01_07:10:05\n  host      : n0\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: {3000 + rank})\n  error_file: <N/A>\n"
    )


def timeouts(capsule) -> list[tuple[int, int, bool]]:
    found = [each for each in capsule.records("events") if each["kind"] == "collective_timeout"]
    return sorted((each["rank"], each["seq"], each.get("past", False)) for each in found)


class TestAttempts:
    @pytest.mark.parametrize(
        "after",
        [steps(20, 24), summary(0, -6) + steps(41, 42), steps(41, 240)],
        ids=["steps go back", "the launcher had ended", "more steps than a block of output holds"],
    )
    def test_what_ended_an_attempt_is_past_where_training_went_on(self, imported: Imports, after: str):
        capsule = imported(steps(1, 40) + watchdog(0, 121) + after)
        assert timeouts(capsule) == [(0, 121, True)]
        assert not any("exit" in each for each in capsule.records("ranks"))

    @pytest.mark.parametrize(
        "after",
        ["", steps(41, 60), summary(0, -6), steps(39, 41), summary(0, -6) + steps(41, 41)],
        ids=["nothing", "buffered output", "a summary", "lines of another rank", "one stray line"],
    )
    def test_it_is_not_where_what_follows_may_be_older_output(self, imported: Imports, after: str):
        assert timeouts(imported(steps(1, 40) + watchdog(0, 121) + after)) == [(0, 121, False)]

    def test_steps_that_ranks_print_in_turn_go_back_all_the_time(self, imported: Imports):
        capsule = imported(steps(1, 10) + steps(1, 10) + steps(1, 10) + watchdog(0, 9) + steps(1, 10))
        assert timeouts(capsule) == [(0, 9, False)]

    @pytest.mark.parametrize(("own", "past"), [(range(30, 45), False), (range(15, 45), True)], ids=["lags", "again"])
    def test_a_rank_that_names_itself_goes_back_against_its_own_steps(self, imported: Imports, own: range, past: bool):
        lines = [
            "".join(f"[rank{rank}]: {each}" for each in steps(1, 40 - 11 * rank).splitlines(True)) for rank in (0, 1)
        ]
        after = "".join(f"[rank1]: {each}" for step in own for each in [steps(step, step)])
        assert timeouts(imported(lines[1] + lines[0] + watchdog(2, 121) + after)) == [(2, 121, past)]

    def test_the_same_number_times_out_in_two_attempts(self, imported: Imports):
        capsule = imported(steps(1, 40) + watchdog(0, 121) + steps(20, 40) + watchdog(0, 121))
        assert timeouts(capsule) == [(0, 121, False), (0, 121, True)]

    def test_a_call_that_began_after_its_rank_gave_up_is_another_lifes(self, imported: Imports):
        capsule = imported(steps(1, 2) + watchdog(0, 456) + watchdog(1, 456) + watchdog(0, 37, at="01 09:10:00.1"))
        assert timeouts(capsule) == [(0, 37, False), (0, 456, True), (1, 456, True)]

    def test_two_calls_of_one_rank_that_were_open_at_once_are_of_one_life(self, imported: Imports):
        capsule = imported(steps(1, 2) + watchdog(0, 456) + watchdog(0, 37, at="01 07:12:00.1"))
        assert timeouts(capsule) == [(0, 37, False), (0, 456, False)]

    def test_the_last_summary_tells_how_ranks_ended(self, imported: Imports):
        capsule = imported(steps(1, 40) + summary(1, 1) + steps(20, 40) + summary(2, 3))
        ended = {each["rank"]: each["exit"]["message"] for each in capsule.records("ranks") if "exit" in each}
        assert ended == {2: "exit code 3"}

    @pytest.mark.parametrize(
        ("between", "left_out"),
        [
            (steps(11, 400), 2),  # an error that the loop dealt with
            (steps(5, 40), 1),  # the job was started again
        ],
    )
    def test_what_a_rank_left_out_is_of_its_life(self, imported: Imports, between: str, left_out: int):
        skipped, raised = "skipped sample: 12 < 32\n", "Traceback (most recent call last):\nOSError: no disk\n"
        capsule = imported(steps(1, 10) + skipped + raised + between + skipped)
        assert [each["samples_skipped"] for each in capsule.records("ranks")] == [left_out]
        (error,) = (each for each in capsule.records("events") if each["kind"] == "exception")
        assert error["past"] is True


class TestWho:
    @pytest.mark.parametrize(
        "before",
        ["[rank1] ", "[Rank 1] ", "[rank 1]: ", "(rank=1/8) ", "rank 1: ", "RANK1 | ", "Rank 1 - ", "[1]: "],
    )
    def test_whatever_names_a_rank_before_a_line(self, imported: Imports, before: str):
        capsule = imported(f"{steps(1, 3)}{before}skipped sample: 12 < 32\n{watchdog(0, 9)}")
        assert [each["rank"] for each in capsule.records("ranks") if "samples_skipped" in each] == [1]

    def test_a_rank_further_in_counts_where_it_is_the_jobs(self, imported: Imports):
        text = "2026-11-01 07:00:00 INFO data: {0}skipped sample: 12 < 32\n"
        capsule = imported(steps(1, 3) + text.format("[rank 1] ") + watchdog(0, 9))
        assert [each["rank"] for each in capsule.records("ranks") if "samples_skipped" in each] == [1]
        capsule = imported(steps(1, 3) + text.format("local_rank 1 ") + watchdog(0, 9) + watchdog(2, 9))
        assert not any("samples_skipped" in each for each in capsule.records("ranks"))

    def test_an_unknown_prefix_among_several_ranks_is_nobody(self, imported: Imports):
        capsule = imported(f"{steps(1, 3)}<worker-1> skipped sample: 12 < 32\n{watchdog(0, 9)}{watchdog(2, 9)}")
        assert not any("samples_skipped" in each for each in capsule.records("ranks"))
        (skipped,) = (each for each in capsule.records("events") if "samples_skipped" in each)
        assert skipped["told"] is False

    def test_in_the_log_of_one_process_it_is_that_one(self, imported: Imports):
        capsule = imported(f"{steps(1, 3)}skipped sample: 12 < 32\n")
        assert [each["samples_skipped"] for each in capsule.records("ranks")] == [1]


class TestQuotes:
    @pytest.mark.parametrize(
        "text",
        [
            *("> {0}", ">> {0}", "```\n{0}```\n", "```text\nsaid\n{0}```\n"),
            "Sample 1:\n```\nx\n```\nSample 2:\n```\n{0}```\n",
        ],
    )
    def test_what_a_mail_or_a_note_quotes_is_no_evidence(self, imported: Imports, text: str):
        assert timeouts(imported(text.format(watchdog(0, 9)) + steps(1, 3))) == []

    @pytest.mark.parametrize(
        "text",
        [
            *("```\n{0}", "```python\nx = 1\n{0}```text\n", "{0}```\nx\n```\n"),
            "Sample 1:\n```\ncut\n{0}Sample 2:\n```\nx\n```\n",
        ],
    )
    def test_a_fence_that_does_not_enclose_it_hides_nothing(self, imported: Imports, text: str):
        assert timeouts(imported(steps(1, 3) + text.format(watchdog(0, 9)))) == [(0, 9, False)]


class TestWorld:
    @pytest.mark.parametrize(
        "line",
        [
            "n0:41:41 [0] NCCL INFO comm 0x5 rank 0 nranks 8 cudaDev 0 nvmlDev 0 busId 1000 commId 0x3 - Init COMPLETE",
            "using world size: 8, data-parallel size: 4, tensor-model-parallel size: 2",
            "export WORLD_SIZE=8",
            "  global_world_sizes=[8, 8, 8, 8]",
            "[rank0]: world_size=8 rank=0",
            "Initializing distributed: GLOBAL_RANK: 3, MEMBER: 4/8",
            "+ torchrun --nnodes=2 --nproc_per_node=4 train.py",
            "{'RANK': '0', 'WORLD_SIZE': '8'}",
            "[2026-11-01 07:00:00,123] [INFO] [launch.py:256:main] dist_world_size=8",
            "args: Namespace(lr=0.1, world_size=8, rank=0)",
            "2026-11-01 07:00:00,123 - root - INFO - Initialized process group, world size: 8",
            "total world size: 8\nnote: the last run used world_size=4\nvLLM engine: world_size=4",
            "[rank1]: global_world_sizes=[4, 4]\n[rank1]: global_world_sizes=[8, 8]",
        ],
    )
    def test_a_line_that_states_it(self, imported: Imports, line: str):
        capsule = imported(f"{steps(1, 3)}{line}\nn0:41:41 [0] NCCL INFO comm 0x6 rank 1 nranks 2 cudaDev 1\n")
        assert capsule.manifest.run is not None
        assert capsule.manifest.run.world_size == 8

    @pytest.mark.parametrize(
        "line",
        [
            "LOCAL_WORLD_SIZE=8",
            "data parallel world size: 8",
            "dp_world_size = 8",
            "tp world size 8",
            "shard world size: 8",
            "[TP] world size: 8",
            "world_size: 8 per node",
            "world_size=8 (checkpoint was saved with)",
            "new_group ranks=[0,1,2,3] world_size=8",
            "world_size=8 rank=0 local_rank=0 distributed_init_method=tcp://n0:2000 backend=nccl",
            "world_size=999999",
            "torchrun --nnodes=1:4 --nproc_per_node=8",
            "Tip: to use all GPUs run `torchrun --nproc_per_node 8 train.py`",
            "+ torchrun --nnodes=1 --nproc_per_node=8 a.py\n+ torchrun --nnodes=1 --nproc_per_node=8 a.py",
            "world_size=4\n+ torchrun --nproc_per_node=8 train.py",
        ],
    )
    def test_that_of_a_part_is_none(self, imported: Imports, line: str):
        capsule = imported(f"{steps(1, 3)}{line}\n")
        assert capsule.manifest.run is None or capsule.manifest.run.world_size is None

    @pytest.mark.parametrize(
        ("lines", "ranks"),
        [
            (["world size: 8", "world size: 8"], 8),
            (["world size: 8", "world size: 4"], None),
            (["world size: 4", "n0:41:41 [0] NCCL INFO comm 0x5 rank 0 nranks 8 cudaDev 0"], None),
            ([f"n0:4{r}:4{r} [{r}] NCCL INFO comm 0x5 rank {r} nranks 4 cudaDev {r}" for r in range(4)], 4),
            ([f"n0:4{r}:4{r} [{r}] NCCL INFO comm 0x5 rank {r % 4} nranks 4 cudaDev {r}" for r in range(8)], None),
        ],
        ids=["twice", "two numbers", "a larger communicator", "one group", "two groups of as many ranks"],
    )
    def test_statements_that_do_not_fit_together_are_none(self, imported: Imports, lines: list[str], ranks: int | None):
        capsule = imported(steps(1, 3) + "".join(f"{line}\n" for line in lines))
        assert (capsule.manifest.run.world_size if capsule.manifest.run is not None else None) == ranks


class TestMachines:
    RAISED = "[rank5]: Traceback (most recent call last):\n[rank5]: ValueError: bad row\n"

    @pytest.mark.parametrize(
        "before", ["node02: ", "10.0.0.2: ", "worker-1: ", "gpu7.cluster:", "2026-11-01 07:00:00 n2 "]
    )
    def test_the_name_of_a_machine_before_each_line_is_taken_off(self, imported: Imports, before: str):
        text = "".join(f"{before}{line}\n" for line in (steps(1, 9) + self.RAISED).splitlines())
        capsule = imported(text)
        (found,) = (each for each in capsule.records("events") if each["kind"] == "exception")
        assert (found["rank"], found["step"], found["message"]) == (5, 9, "bad row")

    @pytest.mark.parametrize(
        "lines",
        [
            [f"step: {step} loss: 2.5" for step in range(9)],
            [f"it{step}: loss 2.5" for step in range(9)],
            [f"{rank}: step 1 loss 2.5" for rank in range(9)],
            [f"2026-11-01 07:00:00 INFO step {step}" for step in range(9)],
            ["n7: up", "n7: down", *(f"step {step} loss 2.5" for step in range(9))],
        ],
    )
    def test_words_numbers_and_single_lines_are_no_machines(self, lines: list[str]):
        found = common("\n".join(lines))
        assert found is None or not found.places
