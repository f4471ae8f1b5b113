"""The Trainer's printed dicts: of a real run, and in each version's form."""

from __future__ import annotations

import math

import pytest
from llmconsole.capsules.importers import recognise

from .conftest import Imports, Trained, notes, values


class TestARealRun:
    def test_every_training_loss_of_its_own_history_is_read_from_its_output(self, trained: Trained, imported: Imports):
        capsule = imported(trained.log)
        printed = [row["loss"] for row in trained.history if "loss" in row]
        read = values(capsule, "loss")
        assert [step for step, _ in read] == list(range(1, 13))
        assert [value for _, value in read] == pytest.approx(printed, rel=1e-3)

    def test_norms_rates_and_evaluations_come_with_them(self, trained: Trained, imported: Imports):
        capsule = imported(trained.log)
        norms = [row["grad_norm"] for row in trained.history if "grad_norm" in row]
        assert [value for _, value in values(capsule, "grad_norm")] == pytest.approx(norms, rel=1e-3)
        rates = [row["learning_rate"] for row in trained.history if "learning_rate" in row]
        assert [value for _, value in values(capsule, "learning_rate")] == pytest.approx(rates, rel=1e-3)
        held_out = [row["eval_loss"] for row in trained.history if "eval_loss" in row]
        assert [step for step, _ in values(capsule, "eval_loss")] == [4, 8, 12]
        assert [value for _, value in values(capsule, "eval_loss")] == pytest.approx(held_out, rel=1e-3)
        assert len(values(capsule, "train_runtime")) == 1
        assert "names no steps" in notes(capsule)

    def test_log_state_and_events_of_one_run_count_no_point_twice(self, trained: Trained, imported: Imports):
        capsule = imported(trained.log, trained.state, *trained.events)
        losses = [key for key in capsule.scalar_keys() if key.name == "loss"]
        assert sorted(key.side or "" for key in losses)[0] == ""
        assert len(losses) == 3
        own = {row["step"]: row["loss"] for row in trained.history if "loss" in row}
        assert dict(values(capsule, "loss")) == pytest.approx(own, rel=1e-6)
        assert len(values(capsule, "loss")) == len(own)


class TestForms:
    def test_numbers_of_version_four_and_text_of_version_five_read_alike(self, imported: Imports):
        four = "{'loss': 4.8621, 'grad_norm': 1.18, 'learning_rate': 3e-05, 'epoch': 0.25}\n"
        five = "{'loss': '4.865', 'grad_norm': '1.157', 'learning_rate': '5e-05', 'epoch': '0.0625'}\n"
        capsule = imported(four + five)
        assert values(capsule, "loss") == [(1, 4.8621), (2, 4.865)]
        assert values(capsule, "learning_rate") == [(1, 3e-05), (2, 5e-05)]

    def test_bare_and_quoted_nan_are_values(self, imported: Imports):
        capsule = imported(
            "{'loss': nan, 'grad_norm': 'nan', 'epoch': 1.0}\n{'loss': 0.0, 'grad_norm': inf, 'epoch': 2.0}\n"
        )
        assert math.isnan(values(capsule, "loss")[0][1])
        assert math.isnan(values(capsule, "grad_norm")[0][1])
        assert values(capsule, "grad_norm")[1] == (2, math.inf)

    def test_a_step_in_the_line_is_the_step(self, imported: Imports):
        line = (
            "{'loss': 1.5, 'memory(GiB)': 12.3, 'epoch': 0.1, 'global_step/max_steps': '5/100', 'elapsed': '1m 3s'}\n"
        )
        capsule = imported(line)
        assert values(capsule, "loss") == [(5, 1.5)]
        assert values(capsule, "memory(GiB)") == [(5, 12.3)]

    def test_another_dict_is_no_metric(self, imported: Imports, tmp_path):
        path = tmp_path / "config.txt"
        path.write_text("{'hidden_size': 64, 'layers': 2}\n")
        assert recognise(path) is None
