"""``llmconsole diff``: two logs, two capsules, or one of each."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmconsole.app.cli import main
from llmconsole.capsules import CapsuleWriter

GOLDEN = Path(__file__).parent / "golden" / "diff.json"
UPDATE = bool(os.environ.get("LLMCONSOLE_UPDATE_GOLDEN"))

#: Megatron's line, with the values of the loss in its notation.
LINE = (
    " iteration {step:8d}/    1000 | consumed samples: {samples:12d} | elapsed time per iteration (ms): 144915.6 | "
    "learning rate: 1.875E-05 | global batch size:  1024 | lm loss: {loss:.6E} | loss scale: 12.0 | "
    "grad norm: 67.593 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)

LOSSES = (12.44238, 12.44502, 12.31157, 12.10569, 11.94122, 11.76877)


def log(path: Path, losses: tuple[float, ...]) -> Path:
    lines = (LINE.format(step=step, samples=1024 * step, loss=loss) for step, loss in enumerate(losses, 1))
    path.write_text("".join(lines))
    return path


def capsule(path: Path, losses: tuple[float, ...], **manifest: Any) -> Path:
    with CapsuleWriter(path, title="recorded", phase="training", manifest=manifest) as writer:
        writer.scalars("loss", step=range(1, len(losses) + 1), value=list(losses))
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: object) -> tuple[int, str, str]:
        status = main(["diff", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_two_logs_that_part_are_told_with_the_step_in_eighty_columns(tmp_path: Path, run: Callable[..., Any]) -> None:
    left = log(tmp_path / "a.log", LOSSES)
    right = log(tmp_path / "b.log", (*LOSSES[:3], 14.8, 15.1, 15.3))
    status, out, _ = run(left, right)
    assert status == 1
    assert "First divergence  step 4 · loss" in out
    assert "A step like a bug's" in out
    assert "12.10569" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_log_and_the_capsule_of_the_same_run_are_the_same(tmp_path: Path, run: Callable[..., Any]) -> None:
    status, out, _ = run(log(tmp_path / "a.log", LOSSES), capsule(tmp_path / "a.capsule", LOSSES))
    assert status == 0
    assert "the same as far as both were logged" in out


def test_a_directory_stands_for_the_one_run_in_it(tmp_path: Path, run: Callable[..., Any]) -> None:
    (tmp_path / "one").mkdir()
    capsule(tmp_path / "one" / "a.capsule", LOSSES)
    assert run(tmp_path / "one", log(tmp_path / "a.log", LOSSES))[0] == 0


@pytest.mark.parametrize("content", [b"", b"no log at all\n", bytes(range(256)) * 40], ids=["empty", "text", "binary"])
def test_what_cannot_be_read_is_one_line_and_status_two(
    tmp_path: Path, run: Callable[..., Any], content: bytes
) -> None:
    odd = tmp_path / "odd"
    odd.write_bytes(content)
    status, out, err = run(log(tmp_path / "a.log", LOSSES), odd)
    assert (status, out) == (2, "")
    assert err.startswith("llmconsole: ")
    assert err.count("\n") == 1


def test_runs_with_nothing_in_common_are_not_called_the_same(tmp_path: Path, run: Callable[..., Any]) -> None:
    with CapsuleWriter(tmp_path / "other.capsule", phase="serving") as writer:
        writer.scalars("queue", step=[1], value=[2.0])
    status, _, err = run(log(tmp_path / "a.log", LOSSES), tmp_path / "other.capsule")
    assert status == 2
    assert "nothing to compare" in err


def test_several_runs_in_a_directory_must_be_told_apart(tmp_path: Path, run: Callable[..., Any]) -> None:
    for name in ("a", "b"):
        capsule(tmp_path / "runs" / f"{name}.capsule", LOSSES)
    status, _, err = run(tmp_path / "runs", log(tmp_path / "a.log", LOSSES))
    assert status == 2
    assert "holds 2 jobs" in err


def test_hostile_titles_reach_no_terminal(tmp_path: Path, run: Callable[..., Any]) -> None:
    title, config = "\x1b[31m[red]evil", {"\x1b[2Jx": 1}
    with CapsuleWriter(tmp_path / "a.capsule", title=title, manifest={"config": config}) as writer:
        writer.scalars("loss", step=[1, 2], value=[1.0, 2.0])
    with CapsuleWriter(tmp_path / "b.capsule", title="b", manifest={"config": {"\x1b[2Jx": 2}}) as writer:
        writer.scalars("loss", step=[1, 2], value=[1.0, 3.0])
    for option in ((), ("--json",)):
        status, out, _ = run(tmp_path / "a.capsule", tmp_path / "b.capsule", *option)
        assert status == 1
        assert "\x1b[31m" not in out
        assert "\x1b[2J" not in out


def test_the_document_is_the_golden_one(tmp_path: Path, run: Callable[..., Any]) -> None:
    packages = {"torch": "2.4.0", "transformers": "4.35.1"}
    left = capsule(tmp_path / "a.capsule", LOSSES, environment={"packages": packages}, training={"max_grad_norm": 1.0})
    packages = {"torch": "2.4.0", "transformers": "4.36.2"}
    losses = (*LOSSES[:3], float("nan"), 15.1)
    right = capsule(tmp_path / "b.capsule", losses, environment={"packages": packages}, training={"max_grad_norm": 0.5})
    status, out, _ = run(left, right, "--json")
    assert status == 1
    out = re.sub(r'"id": "[^"]+"', '"id": "ID"', out.replace(str(tmp_path), "DIR"))
    document = json.loads(out)
    if UPDATE:
        GOLDEN.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    assert document == json.loads(GOLDEN.read_text(encoding="utf-8"))
