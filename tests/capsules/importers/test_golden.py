"""Megatron-LM golden values: by step or as a list, and "nan" for what was not logged."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from llmconsole.capsules import Capsule, EvidenceError
from llmconsole.capsules.importers import import_files, recognise

REAL = Path(__file__).resolve().parents[4] / "shared" / "real" / "metrics_json"


def imported(tmp_path: Path, document: object) -> Capsule:
    path = tmp_path / "golden_values.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document, indent=4))
    return Capsule.open(import_files([path], tmp_path / "out", attach=False))


def test_values_by_step_are_points_and_nan_as_text_is_none(tmp_path: Path) -> None:
    values = {"1": 12.95636, "5": "12.91493", "10": "nan", "15": float("nan")}
    capsule = imported(tmp_path, {"lm loss": {"start_step": 1, "end_step": 15, "step_interval": 5, "values": values}})
    loss = capsule.scalars("loss")
    assert loss.step.tolist() == [1, 5, 15]  # step 10 was not logged; step 15 was, and is not a number
    assert loss.value[:2].tolist() == [12.95636, 12.91493]
    assert math.isnan(loss.value[2])
    assert "not logged" in capsule.manifest.raw["imported"]["files"][0]["notes"][0]


def test_older_files_hold_a_list(tmp_path: Path) -> None:
    described = {"start_step": 0, "end_step": 15, "step_interval": 5, "values": [10.8, 10.7, 10.6]}
    capsule = imported(tmp_path, {"lm loss": described, "iteration-time": {**described, "values": [5.0, 0.5, 0.5]}})
    assert capsule.scalars("loss").step.tolist() == [0, 5, 10]
    assert capsule.scalars("step_time").value.tolist() == [5.0, 0.5, 0.5]


def test_cut_anywhere_it_keeps_every_whole_value(tmp_path: Path) -> None:
    values = {str(step): 10.25 - step / 64 for step in range(100)}
    text = json.dumps({"lm loss": {"start_step": 0, "end_step": 99, "step_interval": 1, "values": values}}, indent=4)
    ends = [text.index(f'"{step}": ') + len(f'"{step}": {values[str(step)]}') for step in range(100)]
    random.seed(6)
    for _ in range(50):
        cut = random.randrange(len(text))
        whole = sum(end < cut for end in ends)  # a number is whole when something follows it
        try:
            loss = imported(tmp_path, text[:cut]).scalars("loss")
        except EvidenceError:
            assert whole == 0
            continue
        assert loss.value.tolist() == list(values.values())[: len(loss)]
        assert len(loss) >= whole


@pytest.mark.parametrize("text", ['{"a": {"b": 1}}', '{"a": 1, "values": 2}', '{"lm loss": [1, 2]}'])
def test_other_json_is_left_to_others(tmp_path: Path, text: str) -> None:
    path = tmp_path / "some.json"
    path.write_text(text)
    importer = recognise(path)
    assert importer is None or importer.FORMAT != "Megatron-LM golden values"


def test_the_real_file_spans_thirteen_thousand_steps(tmp_path: Path) -> None:
    found = list((REAL / "megatron").glob("*.json")) if REAL.is_dir() else []
    if not found:
        pytest.skip("no ../shared/real/metrics_json")
    capsule = imported(tmp_path, found[0].read_text())
    described = json.loads(found[0].read_text())["lm loss"]["values"]
    loss = capsule.scalars("loss")
    assert len(loss) == sum(value != "nan" for value in described.values())
    assert not any(map(math.isnan, loss.value.tolist()))
    assert loss.step[-1] > 12_000
