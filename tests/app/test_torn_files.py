"""A file whose end is missing: every importer keeps what stands before, and the import says what it lacks."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from llmconsole.app.cli import main
from llmconsole.capsules.importers import import_job

LOG = "".join(f"step {step} loss {random.Random(step).random():.9f}\n" for step in range(2000))
CSV = "step,loss\n" + "".join(f"{step},{random.Random(step).random()}\n" for step in range(2000))
LINES = "".join(json.dumps({"step": step, "loss": random.Random(step).random()}) + "\n" for step in range(2000))
STATE = json.dumps({"log_history": [{"step": step, "loss": random.Random(step).random()} for step in range(2000)]})
EVENTS = [
    {
        "ph": "X",
        "cat": "cpu_op",
        "name": f"op {random.Random(at).random()}",
        "ts": 10 * at,
        "dur": 5,
        "pid": 1,
        "tid": 1,
    }
    for at in range(2000)
]
TRACE = json.dumps({"schemaVersion": 1, "traceEvents": EVENTS})


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.log", LOG), ("a.csv", CSV), ("a.jsonl", LINES), ("trainer_state.json", STATE), ("a.pt.trace.json", TRACE)],
)
def test_a_torn_archive_is_said_whatever_is_in_it(tmp_path: Path, name: str, text: str):
    data = gzip.compress(text.encode())
    path = tmp_path / f"{name}.gz"
    path.write_bytes(data)
    assert import_job([path], tmp_path / "whole", attach=False).problems == ()
    path.write_bytes(data[: len(data) // 2])
    (problem,) = import_job([path], tmp_path / "torn", attach=False).problems
    assert problem.startswith(f"{path}: is cut at its end: ")


def test_a_text_that_may_still_grow_is_not_called_cut(tmp_path: Path):
    for name, text in (("a.log", LOG), ("a.csv", CSV), ("a.jsonl", LINES)):
        (tmp_path / name).write_text(text[:-4])
        assert import_job([tmp_path / name], tmp_path / "made", attach=False).problems == ()


@pytest.mark.parametrize("packed", [True, False])
def test_a_cut_trace_is_no_health(tmp_path: Path, capsys: pytest.CaptureFixture[str], packed: bool):
    path = tmp_path / ("cut.json.gz" if packed else "cut.json")
    data = gzip.compress(TRACE.encode()) if packed else TRACE.encode()
    path.write_bytes(data[: len(data) // 2])
    assert main(["analyze", "--json", str(path)]) == 2
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    ((rule, error),) = ((each["rule"], each["error"]) for each in report["errors"])
    assert rule == "import"
    assert "is cut at its end: " in error
    assert error.endswith(" events were read")
    if packed:
        return
    assert main(["analyze", str(path)]) == 2
    shown = capsys.readouterr().out
    assert "Nothing could be judged" in shown
    assert "Nothing found" not in shown


def test_what_a_torn_file_still_decides_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "trainer_state.json"
    path.write_text(STATE[: len(STATE) // 2])
    assert main(["analyze", str(path)]) < 2
    assert "\u2713 Nothing found" not in capsys.readouterr().out


def test_two_traces_are_to_be_analyzed_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(TRACE)
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert "`llmconsole analyze` tells of each by itself" in capsys.readouterr().err
