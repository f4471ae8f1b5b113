"""Real repositories and real capsules for the tests of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

IDENTITY = {
    "GIT_AUTHOR_NAME": "Ada",
    "GIT_AUTHOR_EMAIL": "ada@example.org",
    "GIT_COMMITTER_NAME": "Ada",
    "GIT_COMMITTER_EMAIL": "ada@example.org",
}
TEST_FILE = """\
class TestLabels:
    def test_shift(self):
        assert True

def test_alone():
    assert True
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of the machine, of the user or of a surrounding git call reach a test."""
    for name in [name for name in os.environ if name.startswith(("GIT_", "LLMCONSOLE_"))]:
        monkeypatch.delenv(name)
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    for name, value in IDENTITY.items():
        monkeypatch.setenv(name, value)


def git(directory: Path, *arguments: str) -> str:
    """Run git in a directory and return what it printed."""
    done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def make_repository(root: Path) -> Path:
    """A repository with a broken commit, and a fix that comes with its test."""
    root.mkdir(parents=True)
    git(root, "init", "-q", "-b", "main")
    (root / "train.py").write_text("shift = 0\n")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "Train")
    (root / "train.py").write_text("shift = 1\n")
    (root / "tests").mkdir()
    (root / "tests" / "test_labels.py").write_text(TEST_FILE)
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "Shift the labels once")
    return root


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """See ``make_repository``."""
    return make_repository(tmp_path / "user code" / "训练")


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cli(tmp_path: Path) -> Run:
    """Run the real command line in a process of its own, in ``cwd``, and return what it printed."""

    def run(*arguments: str, cwd: Path = tmp_path, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "llmconsole.app.cli", *arguments],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=100,
        )

    return run
