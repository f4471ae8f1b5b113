"""A small GPT and the loops that the tests record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llmconsole.capsules import Capsule, Recorder
from torch import Tensor, nn

VOCABULARY = 50


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[None, :, None]
        x = x + self.mix(self.norm(past))
        return x + self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:  # [B, T] → [B, T, V]
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shifted(seed: int, rows: int = 4, length: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, length + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


class Run:
    """A model, its optimizer and a recorder around them."""

    def __init__(self, folder: Path, model: nn.Module | None = None, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = GPT() if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.recorder = Recorder(folder, model=self.model, optimizer=self.optimizer, **options)

    def train(self, steps: int, spoil: Callable[[int, Tensor], Tensor] = lambda step, loss: loss) -> list[float]:
        losses: list[float] = []
        for step in range(steps):
            inputs, targets = shifted(step)
            with self.recorder.step(batch=(inputs, targets)):
                loss = spoil(step, cross_entropy(self.model(inputs), targets))
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def capsule(self) -> Capsule:
        self.recorder.close()
        assert self.recorder.path is not None
        return Capsule.open(self.recorder.path)


@pytest.fixture
def gpt() -> SimpleNamespace:
    """The parts above: importlib mode gives test modules no way to import one another."""
    return SimpleNamespace(
        GPT=GPT, Block=Block, Run=Run, shifted=shifted, cross_entropy=cross_entropy, vocabulary=VOCABULARY
    )


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Run]:
    """Makes a ``Run`` that records below the test's own folder."""
    return lambda *arguments, **options: Run(tmp_path, *arguments, **options)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Job:
    """A training script in a process of its own."""

    def __init__(self, ask: Callable[..., int], folder: Path, code: str, runs: Path) -> None:
        self._ask = ask
        folder.mkdir(parents=True, exist_ok=True)
        self.runs = runs
        script = folder / "train.py"
        script.write_text(textwrap.dedent(code))
        self._out, self._err = folder / "out.txt", folder / "err.txt"
        self.pid = ask(start=str(script), argv=[str(self.runs)], out=str(self._out), err=str(self._err))

    def printed(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    def wait_for(self, line: str) -> None:
        while f"{line}\n" not in self.printed():
            time.sleep(0.002)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def finish(self) -> tuple[int, str, str]:
        """Exit status (negative: a signal), what it printed, and what it said on stderr."""
        status = self._ask(wait=self.pid)
        return status, self.printed(), self._err.read_text()

    def capsule(self) -> Capsule:
        (path,) = self.runs.glob("*.capsule")
        return Capsule.open(path)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Callable[..., int]]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("nursery.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    requests, answers = process.stdin, process.stdout

    def ask(**request: Any) -> int:
        requests.write(json.dumps(request) + "\n")
        requests.flush()
        return int(answers.readline())

    yield ask
    requests.close()
    process.wait()


@pytest.fixture
def job(nursery: Callable[..., int], tmp_path: Path) -> Callable[..., Job]:
    """``job(code, name="a")`` starts a script, which gets the directory for its capsules as its argument."""
    return lambda code, name="job", runs="": Job(nursery, tmp_path / name, code, tmp_path / (runs or f"{name}-runs"))
