"""Trainer states: rows as transformers writes them, in each of its versions, whole or torn."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from llmconsole.analyzers.diff.compare import compare
from llmconsole.capsules import Capsule, EvidenceError
from llmconsole.capsules.importers import import_files, recognise
from transformers.trainer_callback import TrainerState

REAL = Path(__file__).resolve().parents[4] / "shared" / "real" / "trainer_state"

ROWS = [
    {"loss": 4.8621, "grad_norm": 1.18, "learning_rate": 3e-05, "epoch": 0.25, "step": 4},
    {"eval_loss": 4.7, "eval_runtime": 0.5, "eval_samples_per_second": 8.0, "epoch": 0.25, "step": 4},
    {"eval_code_loss": 5.1, "epoch": 0.25, "step": 4},
    {"loss": 0.0, "grad_norm": float("nan"), "learning_rate": 2e-05, "epoch": 0.5, "step": 8},
    {"train_runtime": 12.5, "train_loss": 2.43, "total_flos": 1e15, "epoch": 0.5, "step": 8},
]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """What transformers itself writes."""
    state = TrainerState(
        epoch=0.5,
        global_step=8,
        max_steps=16,
        num_train_epochs=1,
        logging_steps=4,
        train_batch_size=2,
        num_input_tokens_seen=4096,
        total_flos=1e15,
        log_history=ROWS,
    )
    path = tmp_path / "trainer_state.json"
    state.save_to_json(str(path))
    return path


def imported(tmp_path: Path, path: Path) -> Capsule:
    return Capsule.open(import_files([path], tmp_path / "out", attach=False))


def points(capsule: Capsule) -> set[tuple[str, int, str]]:
    found: set[tuple[str, int, str]] = set()
    for key in capsule.scalar_keys():
        series = capsule.scalars(key.name)
        found |= {
            (key.name, step, repr(value))
            for step, value in zip(series.step.tolist(), series.value.tolist(), strict=True)
        }
    return found


def expected(rows: list[dict[str, float]]) -> set[tuple[str, int, str]]:
    return {(key, int(row["step"]), repr(float(value))) for row in rows for key, value in row.items() if key != "step"}


def test_every_number_of_every_row_is_kept_under_its_key(written: Path, tmp_path: Path) -> None:
    capsule = imported(tmp_path, written)
    assert "NaN" in written.read_text()  # bare, as transformers writes it
    assert points(capsule) == expected(ROWS)
    assert capsule.scalars("loss").unit == "nats/token"
    assert math.isnan(capsule.scalars("grad_norm").value[1])


def test_the_manifest_has_what_the_state_says_and_nothing_else(written: Path, tmp_path: Path) -> None:
    manifest = imported(tmp_path, written).manifest
    assert manifest.raw["position"] == {"global_step": 8, "epoch": 0.5, "tokens_seen": 4096}
    assert manifest.raw["training"] == {"micro_batch": 2, "epochs": 1.0, "schedule": {"total_steps": 16}}
    assert manifest.raw["config"]["trainer_state"]["total_flos"] == 1e15
    assert manifest.model is None


def test_states_of_an_old_version_are_read(tmp_path: Path) -> None:
    rows = [{"epoch": 0.1, "learning_rate": 1e-5, "loss": 2.5, "step": 10}]  # 4.30: no grad_norm, no batch size
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"best_metric": None, "epoch": 0.1, "global_step": 10, "log_history": rows}))
    assert points(imported(tmp_path, path)) == expected(rows)


def test_a_bare_log_history_is_read(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    path.write_text(json.dumps(ROWS))
    assert points(imported(tmp_path, path)) == expected(ROWS)


def test_numbers_as_text_are_numbers_and_odd_values_are_noted(tmp_path: Path) -> None:
    rows = [{"loss": "4.865", "step": 1, "epoch": "0.0625", "tags": ["a"], "flag": True}, "not a row"]
    path = tmp_path / "history.json"
    path.write_text(json.dumps({"global_step": 1, "log_history": rows}))
    capsule = imported(tmp_path, path)
    assert points(capsule) == {("loss", 1, "4.865"), ("epoch", 1, "0.0625")}
    assert any("no numbers" in note for note in capsule.manifest.raw["imported"]["files"][0]["notes"])


def test_rows_of_a_resumed_run_that_overlap_are_all_kept(tmp_path: Path) -> None:
    rows = [{"loss": 5.0 - at, "step": step, "epoch": 1.0} for at, step in enumerate((10, 20, 30, 20, 30))]
    path = tmp_path / "history.json"
    path.write_text(json.dumps(rows))
    capsule = imported(tmp_path, path)
    assert capsule.scalars("loss").value.tolist() == [5.0, 4.0, 2.0, 3.0, 1.0]
    assert [event["step"] for event in capsule.records("events")] == [20]


def test_cut_anywhere_it_keeps_every_whole_row(tmp_path: Path) -> None:
    rows = [{"epoch": 0.1, "loss": 3.25 + step, "step": step} for step in range(40)]
    path = tmp_path / "trainer_state.json"
    TrainerState(global_step=40, log_history=rows).save_to_json(str(path))
    text = path.read_text()
    ends = [at + 1 for at, sign in enumerate(text) if sign == "}"][: len(rows)]
    random.seed(5)
    for number in range(50):
        cut = random.randrange(len(text))
        torn = tmp_path / f"torn-{number}.json"
        torn.write_text(text[:cut])
        whole = sum(end <= cut for end in ends)
        try:
            capsule = imported(tmp_path, torn)
        except EvidenceError:
            assert whole == 0
            continue
        loss = capsule.scalars("loss")
        assert loss.step.tolist()[:whole] == list(range(whole))
        assert len(loss) <= whole + 1
        assert all(value == 3.25 + step for step, value in zip(loss.step.tolist(), loss.value.tolist(), strict=True))


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", '{"log_history": 3}', '{"log_history": {"a": 1}}', '[{"step": 1}]', "[" * 5000, '{"a":' * 5000],
)
def test_other_json_is_left_to_others(tmp_path: Path, text: str) -> None:
    path = tmp_path / "some.json"
    path.write_text(text)
    importer = recognise(path)
    assert importer is None or importer.FORMAT != "transformers trainer state"


def test_the_real_state_has_thirty_epochs_and_six_evaluation_groups(tmp_path: Path) -> None:
    if not REAL.is_dir():
        pytest.skip("no ../shared/real/trainer_state")
    capsule = imported(tmp_path, next(REAL.iterdir()))
    assert len(capsule.scalars("loss")) == 30
    names = {key.name for key in capsule.scalar_keys()}
    assert {f"eval_g{group}_loss" for group in range(6)} <= names
    assert all(len(capsule.scalars(f"eval_g{group}_loss")) == 31 for group in range(6))


def test_what_the_real_trainer_left_is_read_whole_and_agrees_with_its_event_files(trained, tmp_path: Path) -> None:
    state = imported(tmp_path, trained.state)
    assert points(state) == expected(list(trained.history))
    events = Capsule.open(import_files(trained.events, tmp_path / "events", attach=False))
    found = compare(state, events)
    assert {"loss", "eval_loss", "grad_norm", "learning_rate"} <= {each.name for each in found.series}
    assert found.same, found.first_divergence
