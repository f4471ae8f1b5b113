"""From a failing capsule over hypotheses and fix to a gate record in git, and what the next one like it gains."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from llmconsole.app.casebook.cards import parse
from llmconsole.app.casebook.gate.record import verify
from llmconsole.app.casebook.store import Repository

from ..capsules import diverged
from ..conftest import git
from .terminal import Terminal

DOWN, UP, F2, ESCAPE, ENTER = "\x1b[B", "\x1b[A", "\x1bOQ", "\x1b", "\r"
CASE = "loss-nonfinite"


@pytest.mark.timeout(300)
def test_from_a_failing_capsule_to_a_gated_case_which_the_next_capsule_finds(
    tmp_path: Path, repository: Path, terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (repository / "tests" / "test_labels.py").write_text(
        "from train import shift\n\ndef test_shift():\n    assert shift == 1\n"
    )
    git(repository, "commit", "-q", "-a", "-m", "Test the shift")
    (tmp_path / "runs").mkdir()
    first = diverged(tmp_path / "runs" / "first.capsule")
    console = terminal(str(tmp_path / "runs"), cwd=repository)
    console.until("loss-nonfinite")

    # Hypotheses: the rules suggest some, one is tested by hand.
    console.send(ENTER)
    console.until("First divergence")
    console.send("8")
    console.until("not opened")
    console.send("s")
    console.until("target 30 min")
    console.until("The loss is not finite")
    console.send("x")
    console.until("What a test of hypothesis 1 showed")
    console.send(f"fp32{ENTER}the loss stays finite{ENTER}s{ENTER}")
    console.until("located in")
    assert json.loads((first / "incident.json").read_text())["status"] == "located"

    # The fix becomes a case.
    console.send("r")
    console.until("Filled from ")
    console.send(F2)
    console.until("4 fields marked")
    console.send(f"nobody shifts{ENTER}a new collator{DOWN}{DOWN}")
    console.send(f"tests/test_labels.py::test_shift{ENTER}one place{ENTER}")
    console.send(f"{DOWN}溢出, 训练{F2}")
    console.until("Commit this, and only this?")
    console.send("y")
    console.until("✓ Committed")
    console.send(ESCAPE)
    console.until("target 30 min")
    assert "located in" in (repository / "debug-cases.md").read_text()

    # The gate: its file written, edited as in an editor, run and watched.
    console.send("9")
    console.until("not run yet")
    console.send("i")
    console.until("needs a command")
    broken, fixed = git(repository, "rev-parse", "HEAD~3"), git(repository, "rev-parse", "HEAD~1")
    skipped = "".join(
        f'[{name}]\nskip = "small"\n' for name in ("neighbours", "equivalence", "performance", "faults", "documents")
    )
    (repository / "gates" / f"{CASE}.toml").write_text(
        f'[regression]\ncommand = "{sys.executable} -m pytest -q tests/test_labels.py"\nbroken = "{broken}"\n'
        f'fixed = "{fixed}"\nfiles = ["tests/test_labels.py"]\n{skipped}'
    )
    console.send("8")
    console.until("target 30 min")
    console.send("9")
    console.until("not run yet")
    console.read(1.0)
    console.send("t")
    console.until("running:")
    console.until("passed-with-exceptions", 90)
    console.until("holds")
    assert verify(Repository(repository), CASE).outcome == "passed-with-exceptions"
    named = git(repository, "show", "--format=", "--name-only", "HEAD").split("\n")
    assert named == ["debug-cases.md", f"gates/{CASE}.json", f"gates/{CASE}.toml"]

    # A second capsule with the same fault: the case is found by a Chinese word and gains an occurrence.
    diverged(tmp_path / "runs" / "second.capsule")
    console.send(ESCAPE)
    console.until("│? ")
    console.send("c")
    console.until("rule:numerics/loss-nonfinite")
    console.send("\x15溢出")
    console.until("● The loss is not finite")
    console.send(ESCAPE)
    console.read(1.0)
    console.send(UP * 3)
    console.read(1.0)
    console.send("r")
    console.until(CASE)
    console.send(F2)
    console.until("Commit this, and only this?")
    console.send("y")
    console.until("✓ Committed")
    (card,) = parse((repository / "debug-cases.md").read_text())
    assert card.get("Occurrences").count("capsule ") == 2
    console.send(ESCAPE)
    console.read(1.0)
    console.send(ESCAPE)
    console.read(1.0)
    console.send("q")
    assert console.wait() == 0
    console.assert_sane()
