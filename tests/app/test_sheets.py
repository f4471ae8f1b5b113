"""``show --layers`` and ``show --batch`` print what the console's views show."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmconsole.capsules import CapsuleWriter

GOLDEN = Path(__file__).parent / "golden"
UPDATE = bool(os.environ.get("LLMCONSOLE_UPDATE_GOLDEN"))

Cli = Callable[..., Any]


@pytest.fixture
def capsule(tmp_path: Path) -> Path:
    """Two tensors, of which the second overflows at step 4, and a batch of three tokens."""
    path = tmp_path / "run.capsule"
    row = {"role": "activation", "dtype": "float16", "shape": [2, 2], "numel": 4, "nan": 0, "neginf": 0, "zeros": 1}
    with CapsuleWriter(path, title="run", phase="training", manifest={"tokenizer": {"vocab_size": 256}}) as writer:
        writer.norms(3, [("up", "activation", "float16", (2, 2), 4.0, 0, 0)], rank=0)
        up = {"step": 4, "order": 0, "name": "up", "posinf": 0, "absmax": 16_376.0, "rms": 4.0, "micro": 0, "call": 0}
        writer.stats([{**row, **up}, {**row, **up, "order": 1, "name": "down", "posinf": 2}], rank=0)
        writer.batch(
            step=4,
            rank=0,
            input_ids=[[104, 105, 33]],
            labels=[[-100, 105, 33]],
            token_loss=[[0.5, 2.5, float("nan")]],
            sample_ids=["greeting"],
        )
    return path


def test_layers_are_printed_in_the_order_of_execution(cli: Cli, capsule: Path) -> None:
    done = cli("show", str(capsule), "--layers")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].strip() == "forward pass  step 4 (2 of 2 recorded)"
    assert lines[1].strip() == "first bad: down, forward pass, step 4"
    # 65,504 / 16,376 = 4, two doublings; the norm before was 4 of four elements: rms 2.
    assert lines[3].split() == ["up", "fp16", "▓▓", "16,376", "2.0", "4", "×2.00", "25%"]
    assert lines[4].split() == ["✗", "down", "fp16", "✗✗", "16,376", "2.0", "4", "2", "Inf", "25%"]


def test_a_step_and_a_kind_can_be_asked_for(cli: Cli, capsule: Path) -> None:
    assert "step 3 (1 of 2 recorded)" in cli("show", str(capsule), "--layers", "3").stdout
    assert "nothing recorded" in cli("show", str(capsule), "--layers", "--kind", "updates").stdout


def test_a_batch_is_printed_by_token(cli: Cli, capsule: Path) -> None:
    done = cli("show", str(capsule), "--batch")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["token", "hi!"] in rows
    assert ["label", "·i!"] in rows
    assert ["loss", "02"] in rows  # whole nats of 0.5 and 2.5


def test_what_is_no_step_is_one_line_and_status_2(cli: Cli, capsule: Path) -> None:
    done = cli("show", str(capsule), "--batch", "last")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "whole number" in done.stderr


@pytest.mark.parametrize("name", ["layers", "batch"])
def test_the_document_is_as_promised(cli: Cli, capsule: Path, name: str) -> None:
    done = cli("show", str(capsule), f"--{name}", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["format"] == f"llmconsole.show-{name}/1"
    golden = GOLDEN / f"show-{name}.json"
    if UPDATE:
        golden.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    assert document == json.loads(golden.read_text(encoding="utf-8"))


@pytest.mark.parametrize("option", ["--layers", "--batch"])
def test_a_path_in_the_place_of_the_step_is_answered_with_the_way_to_write_it(
    cli: Cli, capsule: Path, option: str
) -> None:
    for arguments in ([option, str(capsule)], [str(capsule), option, "last"]):
        done = cli("show", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"is no step (a whole number); write llmconsole show CAPSULE {option} [STEP]" in done.stderr
        assert len(done.stderr.splitlines()) == 1
