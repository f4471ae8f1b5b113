"""JSON lines of metrics, as trainers and people write them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from llmconsole.capsules.importers import json_lines, recognise

from .conftest import Imports, notes, points, values


def lines(*records: object) -> str:
    return "".join(json.dumps(each) + "\n" for each in records)


class TestNames:
    def test_the_surer_of_two_names_is_the_loss_whatever_comes_first(self, imported: Imports):
        capsule = imported(lines({"step": 1, "total_loss": 3.5, "loss": 2.5}, {"step": 2, "loss": 2.25}))
        assert values(capsule, "loss") == [(1, 2.5), (2, 2.25)]
        assert values(capsule, "total_loss") == [(1, 3.5)]
        alone = imported(lines({"iteration": 20, "total_loss": 3.5, "loss_cls": 1.0}))
        assert values(alone, "loss") == [(20, 3.5)]

    def test_steps_times_and_usual_names_become_standard(self, imported: Imports):
        capsule = imported(
            lines(
                {
                    "_step": 3,
                    "_timestamp": 1.7e9,
                    "train/loss": 2.5,
                    "train/grad_norm": 1.5,
                    "lr": "1e-4",
                    "my/thing": 7,
                },
                {
                    "_step": 4,
                    "_timestamp": 1.7e9 + 1,
                    "train/loss": 2.25,
                    "val_loss": 2.75,
                    "note": "text",
                    "flag": True,
                },
            ),
            name="metrics.jsonl",
        )
        assert values(capsule, "loss") == [(3, 2.5), (4, 2.25)]
        assert values(capsule, "grad_norm") == [(3, 1.5)]
        assert values(capsule, "learning_rate") == [(3, 1e-4)]
        assert values(capsule, "eval_loss") == [(4, 2.75)]
        assert values(capsule, "my/thing") == [(3, 7.0)]
        assert {key.name for key in capsule.scalar_keys()} == {
            "loss",
            "grad_norm",
            "learning_rate",
            "eval_loss",
            "my/thing",
        }
        assert capsule.scalars("loss").time.tolist() == [1.7e9, 1.7e9 + 1]

    def test_nested_objects_and_splits(self, imported: Imports):
        capsule = imported(
            lines(
                {"step": 1, "train": {"loss": 3.0}, "gpu": {"0": {"mem": 5}}},
                {"step": 2, "mode": "val", "loss": 3.5, "acc": 0.5},
            )
        )
        assert values(capsule, "loss") == [(1, 3.0)]
        assert values(capsule, "gpu/0/mem") == [(1, 5.0)]
        assert values(capsule, "eval_loss") == [(2, 3.5)]
        assert values(capsule, "eval_acc") == [(2, 0.5)]

    def test_two_keys_of_one_meaning_do_not_share_a_series(self, imported: Imports):
        capsule = imported(
            lines({"step": 1, "loss": 3.0, "train_loss": 2.0}, {"step": 2, "loss": 2.5, "train_loss": 1.5})
        )
        assert values(capsule, "loss") == [(1, 3.0), (2, 2.5)]
        assert values(capsule, "train_loss") == [(1, 2.0), (2, 1.5)]

    def test_of_trainers_that_write_text(self, imported: Imports):
        capsule = imported(
            lines({"num_updates": "100", "loss": "11.2", "gnorm": "3.1"}, {"current_steps": "5/100", "loss": 1.0})
        )
        assert values(capsule, "loss") == [(5, 1.0), (100, 11.2)]

    def test_bare_nan_and_its_spellings(self, imported: Imports):
        capsule = imported('{"step": 1, "loss": NaN}\n{"step": 2, "loss": "NaN"}\n{"step": 3, "loss": -Infinity}\n')
        assert [math.isnan(value) for _, value in values(capsule, "loss")] == [True, True, False]

    def test_lines_without_a_step_are_counted(self, imported: Imports):
        capsule = imported(lines({"loss": 3.0}, {"loss": 2.0}))
        assert values(capsule, "loss") == [(0, 3.0), (1, 2.0)]
        assert "no step" in notes(capsule)


class TestDamage:
    def test_cut_at_random_places_it_keeps_all_whole_lines(self, tmp_path: Path):
        path = tmp_path / "m.jsonl"
        data = lines(*({"step": step, "loss": 1 / (step + 1), "lr": 1e-4} for step in range(200))).encode()
        random_ = random.Random(0)
        for _ in range(50):
            at = random_.randrange(1, len(data))
            path.write_bytes(data[:at])
            found = [each for each in points(json_lines, path) if each[0] == "loss"]
            whole = data[:at].count(b"\n") + (data[:at].endswith(b"}"))
            assert [step for _, _, step, _ in found] == list(range(whole))

    def test_lines_that_are_no_objects_are_passed_over(self, imported: Imports):
        capsule = imported('{"step": 1, "loss": 2.0}\nTraceback …\n[1, 2]\n{"step": 2, "loss": 1.0}\n')
        assert values(capsule, "loss") == [(1, 2.0), (2, 1.0)]
        assert "no JSON objects (2)" in notes(capsule)

    @pytest.mark.parametrize(
        "text",
        [
            '{"messages": [{"role": "user", "content": "hi"}]}\n',
            '{"timestamp": 1, "input_length": 5, "output_length": 6, "hash_ids": [1]}\n',
            '{"loss": "none"}\n',
            "{}\n",
        ],
    )
    def test_other_json_lines_are_left_to_others(self, tmp_path: Path, text: str):
        path = tmp_path / "x.jsonl"
        path.write_text(text)
        assert recognise(path) is None


def test_steps_that_begin_anew_with_each_epoch_are_counted_on(imported: Imports):
    records = [{"epoch": at // 2, "step": at % 2, "loss": 4.0 - at} for at in range(6)]
    assert values(imported(lines(*records)), "loss") == [(at, 4.0 - at) for at in range(6)]
    text = "epoch,step,loss\n" + "".join(f"{at // 2},{at % 2},{4.0 - at}\n" for at in range(6))
    assert values(imported(text), "loss") == [(at, 4.0 - at) for at in range(6)]


def test_metrics_in_an_object_of_their_own(imported: Imports):
    train = {"event": "train", "data": {"step": 1, "loss": 2.5}}
    capsule = imported(lines(train, {"event": "eval", "data": {"step": 1, "loss": 3.5}}))
    assert (values(capsule, "loss"), values(capsule, "eval_loss")) == ([(1, 2.5)], [(1, 3.5)])
