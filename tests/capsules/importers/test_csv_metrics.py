"""CSV of metrics: of Lightning, of W&B's and TensorBoard's export, and of one's own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from llmconsole.capsules.importers import csv_metrics, recognise

from .conftest import Imports, notes, points, values


class TestProducers:
    def test_lightnings_logger_leaves_cells_empty(self, imported: Imports):
        text = "epoch,lr-AdamW,step,train_loss,val_loss\n0,0.001,49,2.5,\n0,,99,,2.75\n"
        capsule = imported(text, name="metrics.csv")
        assert values(capsule, "loss") == [(49, 2.5)]
        assert values(capsule, "eval_loss") == [(99, 2.75)]
        assert values(capsule, "learning_rate") == [(49, 0.001)]

    def test_units_in_headers_and_decimal_commas(self, imported: Imports):
        capsule = imported("Step;Loss (nats);LR\n1;2,5;1e-4\n2;2,25;0,0001\n")
        assert values(capsule, "loss") == [(1, 2.5), (2, 2.25)]
        assert values(capsule, "learning_rate") == [(1, 1e-4), (2, 1e-4)]
        assert values(imported('step,loss,tok/s\n1,2.5,"12,345"\n'), "throughput") == [(1, 12345.0)]

    def test_of_two_columns_that_may_be_the_loss_the_surer_one_is(self, imported: Imports):
        capsule = imported("step,total_loss,loss\n1,3.5,2.5\n")
        assert values(capsule, "loss") == [(1, 2.5)]
        assert values(capsule, "total_loss") == [(1, 3.5)]

    def test_the_export_of_one_tensorboard_series_is_named_by_its_file(self, imported: Imports):
        text = "Wall time,Step,Value\n1700000000.5,1,2.5\n1700000001.5,2,2.25\n"
        capsule = imported(text, name="run-x-tag-train_loss.csv")
        assert values(capsule, "loss") == [(1, 2.5), (2, 2.25)]
        assert capsule.scalars("loss").time.tolist() == [1700000000.5, 1700000001.5]

    def test_the_export_of_wandb_names_runs(self, imported: Imports):
        text = '"Step","fancy-1 - train/loss","fancy-1 - train/loss__MIN"\n"1","2.5","2.5"\n"2","NaN",""\n'
        capsule = imported(text)
        assert [step for step, _ in values(capsule, "loss")] == [1, 2]
        assert values(capsule, "fancy-1 - train/loss__MIN") == [(1, 2.5)]

    @pytest.mark.parametrize("delimiter", [",", ";", "\t"])
    def test_ones_own(self, imported: Imports, delimiter: str):
        text = "Step,Loss,Grad Norm\n1,2.5,1.0\n2,inf,nan\n".replace(",", delimiter)
        capsule = imported("\ufeff" + text)
        assert values(capsule, "loss") == [(1, 2.5), (2, float("inf"))]
        assert [step for step, _ in values(capsule, "grad_norm")] == [1, 2]

    def test_rows_without_a_step_column_are_counted(self, imported: Imports):
        capsule = imported("loss,acc\n3.0,0.1\n2.0,0.2\n")
        assert values(capsule, "loss") == [(0, 3.0), (1, 2.0)]
        assert "number of the row" in notes(capsule)

    def test_rows_of_epochs_are_steps_by_their_own_number(self, imported: Imports):
        assert values(imported("epoch,loss\n1,2.0\n2,1.5\n3,1.0\n"), "loss") == [(1, 2.0), (2, 1.5), (3, 1.0)]
        # Where epochs are fractions the rows are counted.
        assert values(imported("epoch,loss\n0.5,2.0\n1.0,1.5\n"), "loss") == [(0, 2.0), (1, 1.5)]


class TestDamage:
    def test_cut_at_random_places_it_keeps_all_whole_rows_and_no_torn_cell(self, tmp_path: Path):
        path = tmp_path / "m.csv"
        rows = [(step, 1000 / (step + 1), 0.25 * step) for step in range(200)]
        data = ("step,loss,thing\n" + "".join(f"{step},{loss!r},{thing!r}\n" for step, loss, thing in rows)).encode()
        everything = {("loss", step, repr(loss)) for step, loss, _ in rows} | {
            ("thing", step, repr(thing)) for step, _, thing in rows
        }
        random_ = random.Random(0)
        for _ in range(50):
            at = random_.randrange(40, len(data))
            path.write_bytes(data[:at])
            found = {(name, step, value) for name, _, step, value in points(csv_metrics, path)}
            assert found <= everything
            assert len(found) >= 2 * (data[:at].count(b"\n") - 1)

    def test_rows_that_do_not_fit_and_repeated_headers_are_passed_over(self, imported: Imports):
        capsule = imported("step,loss\n1,2.0\nstep,loss\n1,2,3,4\nx,5\n2,1.0\n")
        assert values(capsule, "loss") == [(1, 2.0), (2, 1.0)]

    @pytest.mark.parametrize(
        "text", ["a,b\n1,2\n", "step loss\n", "Hello, world\nstep, by step\n", "TIMESTAMP,Tokens\n1,2\n"]
    )
    def test_other_tables_are_left_to_others(self, tmp_path: Path, text: str):
        path = tmp_path / "x.csv"
        path.write_text(text)
        assert recognise(path) is None
