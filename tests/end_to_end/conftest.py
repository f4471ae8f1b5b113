"""The real demo, once a fault, two at a time; every test looks at the run it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from llmconsole.app.demo.faults import FAULTS

CLI = [sys.executable, "-m", "llmconsole.app.cli"]

#: One demo is trained with a narration for people, the others for scripts.
FOR_PEOPLE = "overflow"


def environment(**changes: str) -> dict[str, str]:
    """The environment of a stranger: no git identity, no settings of ours, one thread a training run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "LLMCONSOLE_"))}
    home = {"HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    return {**kept, **home, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **changes}


def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, env=environment(**changes))


@dataclass(frozen=True)
class Played:
    """One demo that was played to its end."""

    fault: str
    directory: Path
    status: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """The outcome, where it was printed for scripts."""
        return json.loads(self.stdout)

    @property
    def capsule(self) -> Path:
        """The capsule of its training run."""
        (capsule,) = (self.directory / "runs").glob("*.capsule")
        return capsule

    def git(self, *arguments: str) -> str:
        """What git says of its repository."""
        done = subprocess.run(
            ["git", "-C", str(self.directory), *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()


@pytest.fixture(scope="session")
def _pending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Played]]]:
    root = tmp_path_factory.mktemp("demos")

    def play(fault: str) -> Played:
        options = [] if fault == FOR_PEOPLE else ["--json"]
        done = run("demo", "--fault", fault, "--headless", "--dir", str(root / fault), *options)
        return Played(fault, root / fault, done.returncode, done.stdout, done.stderr)

    with ThreadPoolExecutor(2) as pool:
        yield {fault: pool.submit(play, fault) for fault in FAULTS}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def demo(request: pytest.FixtureRequest, _pending: dict[str, Future[Played]]) -> Played:
    """The demo of the fault that the test's parameter names."""
    return _pending[request.param].result()


@pytest.fixture(scope="session")
def report(_pending: dict[str, Future[Played]]) -> Any:
    """``analyze --json`` of a demo's capsule, asked once a demo."""
    known: dict[str, dict[str, Any]] = {}

    def ask(demo: Played) -> dict[str, Any]:
        if demo.fault not in known:
            known[demo.fault] = json.loads(run("analyze", "--json", str(demo.capsule)).stdout)["reports"][0]
        return known[demo.fault]

    return ask
