"""From the list to a committed case, by keys alone, in a real terminal and a real repository."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from ..capsules import diverged
from ..conftest import git
from .terminal import Terminal

DOWN, F2, ESCAPE, ENTER = "\x1b[B", "\x1bOQ", "\x1b", "\r"


def test_from_home_to_a_committed_case_by_keys_alone(
    tmp_path: Path, repository: Path, terminal: Callable[..., Terminal]
) -> None:
    (tmp_path / "runs").mkdir()
    capsule = diverged(tmp_path / "runs" / "nan.capsule")
    fix = git(repository, "rev-parse", "HEAD")
    console = terminal(str(tmp_path / "runs"), cwd=repository)
    console.until("loss-nonfinite")

    console.send("r")
    console.until("Filled from ")
    assert fix[:12] in console.text
    console.send(F2)
    console.until("4 fields marked")
    for label in ("✗ root cause", "✗ trigger", "✗ regression test", "✗ prevention"):
        assert label in console.text

    # The cursor stands in the first field that is wrong.
    console.send(f"nobody shifts{ENTER}a new collator{DOWN}{DOWN}")
    console.send(f"tests/test_labels.py::test_none{ENTER}one place shifts{F2}")
    console.until("holds no such test")
    assert git(repository, "rev-parse", "HEAD") == fix
    console.send("\x7f" * 4 + "alone" + F2)
    console.until("Commit this, and only this?")
    assert "+- **Root cause:** nobody shifts" in console.text
    assert (git(repository, "status", "--porcelain"), git(repository, "rev-parse", "HEAD")) == ("", fix)

    console.send("y")
    console.until("✓ Committed")
    commit = git(repository, "rev-parse", "HEAD")
    assert commit in console.text
    assert git(repository, "show", "--format=", "--name-only", "HEAD") == "debug-cases.md"
    trailers = git(repository, "log", "-1", "--format=%(trailers:only,unfold)").splitlines()
    assert trailers[0] == "Case-Id: loss-nonfinite"
    assert trailers[2] == "Gate-Result: not-run"

    console.send("c")
    console.until("○ The loss is not finite")
    console.send(ENTER)
    console.until(f"{commit[:12]}")
    for screen in ("the card", "the review", "the form"):
        console.send(ESCAPE)
        console.read(1.0)
        assert console.pid, screen
    console.until("● ")
    console.send("q")
    assert console.wait() == 0
    console.assert_sane()
    assert json.loads((capsule / "incident.json").read_text())["case_commit"] == commit
