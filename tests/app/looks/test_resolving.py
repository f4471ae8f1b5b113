"""What the form of an incident is filled with before the engineer has typed anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from llmconsole.app.looks.resolving import resolve_draft
from llmconsole.capsules import CapsuleWriter


def git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def capsule(tmp_path: Path) -> str:
    path = tmp_path / "run.capsule"
    with CapsuleWriter(path) as writer:
        writer.scalars("loss", step=[0, 1], value=[2.0, float("nan")], rank=0)
    return str(path)


def test_the_fix_is_head_where_head_may_be_one(repository: Path, capsule: str) -> None:
    head = git(repository, "rev-parse", "HEAD")[:12]
    draft = resolve_draft(capsule, str(repository))
    assert draft.values["fix_commit"] == head
    assert draft.head == f"HEAD {head} Shift the labels once"


def test_commits_that_file_a_case_are_passed_over(repository: Path, capsule: str) -> None:
    fix = git(repository, "rev-parse", "HEAD")[:12]
    for case in ("labels-twice", "labels-thrice"):
        git(repository, "commit", "-q", "--allow-empty", "-m", f"Resolve\n\nCase-Id: {case}\nGate-Result: not-run")
    draft = resolve_draft(capsule, str(repository))
    assert draft.values["fix_commit"] == fix
    assert draft.head == f"newest but for cases: {fix} Shift the labels once"


def test_nothing_is_filled_in_where_every_commit_files_a_case(tmp_path: Path, capsule: str) -> None:
    log = tmp_path / "log"
    log.mkdir()
    git(log, "init", "-q", "-b", "main")
    assert "fix_commit" not in resolve_draft(capsule, str(log)).values
    git(log, "commit", "-q", "--allow-empty", "-m", "Resolve\n\nCase-Id: labels-twice")
    draft = resolve_draft(capsule, str(log))
    assert "fix_commit" not in draft.values
    assert draft.head == ""


def test_the_fix_of_the_card_comes_before_head(repository: Path, capsule: str) -> None:
    fix = git(repository, "rev-parse", "HEAD")[:12]
    git(repository, "commit", "-q", "--allow-empty", "-m", "Something else")
    head = git(repository, "rev-parse", "HEAD")[:12]
    card = "# Cases\n\n## own-case · NaN\n\n- **Rules:** numerics/loss-nonfinite\n- **Fix:** shift once (commit FIX)\n"
    (repository / "debug-cases.md").write_text(card.replace("FIX", fix))
    draft = resolve_draft(capsule, str(repository))
    assert draft.values["case"] == "own-case"
    assert draft.values["fix_commit"] == fix
    assert draft.head == f"on the card: {fix} Shift the labels once; HEAD {head} Something else"


@pytest.mark.parametrize("fix", ["shift once (commit 0123456789ab)", "shift once", "(commit --all)"])
def test_a_card_whose_fix_is_not_here_leaves_head(repository: Path, capsule: str, fix: str) -> None:
    head = git(repository, "rev-parse", "HEAD")[:12]
    card = "# Cases\n\n## own-case · NaN\n\n- **Rules:** numerics/loss-nonfinite\n- **Fix:** FIX\n"
    (repository / "debug-cases.md").write_text(card.replace("FIX", fix))
    draft = resolve_draft(capsule, str(repository))
    assert (draft.values["case"], draft.values["fix_commit"]) == ("own-case", head)
    assert draft.head == f"HEAD {head} Shift the labels once"
