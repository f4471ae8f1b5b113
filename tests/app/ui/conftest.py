"""Capsules for the console's tests, and a console driven without a terminal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmconsole.capsules import CapsuleWriter

from .terminal import Terminal

Make = Callable[..., Path]


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """State and settings of the person who runs the tests are neither read nor written."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))


@pytest.fixture
def make_capsule(tmp_path: Path) -> Make:
    """Writes a small capsule with a loss curve; ``loss`` replaces the values."""

    def make(name: str, *, title: str = "", loss: Any = None, **manifest: Any) -> Path:
        path = tmp_path / f"{name}.capsule"
        values = np.asarray(2 + np.exp(-np.arange(60) / 10) if loss is None else loss, dtype=np.float64)
        with CapsuleWriter(path, title=title or name, phase="training", manifest=manifest) as writer:
            writer.scalars("loss", step=np.arange(len(values)), value=values, time=None, rank=0, unit="nats/token")
            writer.scalars("grad_norm", step=np.arange(len(values)), value=np.ones(len(values)), time=None, rank=0)
        return path

    return make


Until = Callable[[Any, Callable[[], bool], str], Awaitable[None]]


@pytest.fixture
def until() -> Until:
    """Wait until a condition holds; the worker is a real process and takes its time."""

    async def wait(pilot: Any, happened: Callable[[], bool], what: str) -> None:
        for _ in range(600):
            await pilot.pause(0.05)
            if happened():
                return
        pytest.fail(f"did not happen: {what}")

    return wait


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Starts the console in a pseudo-terminal; what is left of it is ended afterwards."""
    opened: list[Terminal] = []

    def start(*arguments: str, **options: Any) -> Terminal:
        opened.append(Terminal([*arguments], **options))
        return opened[-1]

    yield start
    for each in opened:
        each.close()
