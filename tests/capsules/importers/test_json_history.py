"""JSON documents of metrics, and documents of a known format in which there is nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llmconsole.capsules import Capsule
from llmconsole.capsules.errors import EvidenceError
from llmconsole.capsules.importers import import_files

from .conftest import Imports, notes, values

ROWS = [{"step": 10 * at, "loss": 4.0 - at, "lr": 1e-4} for at in range(4)]
LISTS = {"accuracy": [0.1, 0.2, 0.3], "Loss": [4.0, 3.0, 2.0], "val_loss": [4.5, 3.5, 2.5], "epochs_done": [3]}


def test_a_list_of_rows(imported: Imports):
    capsule = imported(json.dumps(ROWS, indent=1), name="history.json")
    assert values(capsule, "loss") == [(0, 4.0), (10, 3.0), (20, 2.0), (30, 1.0)]
    assert values(capsule, "learning_rate")[-1] == (30, 1e-4)


def test_lists_under_names(imported: Imports):
    capsule = imported(json.dumps(LISTS), name="history.json")
    assert values(capsule, "loss") == [(0, 4.0), (1, 3.0), (2, 2.0)]
    assert values(capsule, "eval_loss") == [(0, 4.5), (1, 3.5), (2, 2.5)]


def test_what_stands_before_a_tear_is_kept(imported: Imports):
    text = json.dumps(ROWS, indent=1)
    for cut in range(text.index('"step": 10'), len(text) - 1, 7):
        capsule = imported(text[:cut], name="history.json")
        found = values(capsule, "loss")
        assert found == [(10 * at, 4.0 - at) for at in range(len(found))]
        assert found
        assert "is cut at its end" in notes(capsule)


@pytest.mark.parametrize(
    "text", ['{"log_history": [1, null, {"step": "x", "loss": {}}]}', "step,loss\nx,y\n1,?\n", '[{"loss": "nothing"}]']
)
def test_a_file_of_which_nothing_is_a_measurement_is_refused_in_one_line(tmp_path: Path, text: str):
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(EvidenceError) as refused:
        import_files([tmp_path / "odd.json"], tmp_path / "out", attach=False)
    assert "\n" not in str(refused.value)


def test_a_state_without_a_row_says_that_nothing_was_logged(tmp_path: Path):
    (tmp_path / "trainer_state.json").write_text('{"global_step": 0, "log_history": [], "max_steps": 100}')
    capsule = Capsule.open(import_files([tmp_path / "trainer_state.json"], tmp_path / "out", attach=False))
    assert [each.get("type") for each in capsule.records("events")] == ["nothing_logged"]
