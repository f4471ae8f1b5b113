"""What the recorder costs, measured step by step in turns in one process, as ratios of medians.

Every arm trains its own copy of one model on the same batches: plain, recorded with the defaults, recorded with all
statistics at every step, with a forward hook that reads each statistic with ``.item()``, and under transformers'
DebugUnderflowOverflow. Taking turns cancels what else the machine does, and hooks sit on their own copy only.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from llmconsole.capsules import Recorder
from torch import Tensor, nn

VOCABULARY, WIDTH, LAYERS, HEADS, BATCH, LENGTH = 256, 192, 4, 6, 8, 128
TARGETS = {"recorder, defaults": 1.05, "recorder, all statistics every step": 1.5}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D]
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(self.act(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:  # [B, T] → [B, T, V]
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Arm:
    """One copy of the model, its optimizer, and the seconds each of its steps took."""

    def __init__(self, recorder: Callable[[GPT, torch.optim.Optimizer], Recorder] | None = None) -> None:
        torch.manual_seed(0)
        self.model = GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.recorder = recorder(self.model, self.optimizer) if recorder else None
        self.seconds: list[float] = []

    def train(self, inputs: Tensor, targets: Tensor) -> None:
        loss = F.cross_entropy(self.model(inputs).view(-1, VOCABULARY), targets.reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        began = time.perf_counter()
        if self.recorder is None:
            self.train(inputs, targets)
        else:
            with self.recorder.step(batch=(inputs, targets)):
                self.train(inputs, targets)
        self.seconds.append(time.perf_counter() - began)


def hook_items(model: nn.Module) -> None:
    """The usual hand-written hook: five statistics of each output, each read at once."""

    def hook(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            for statistic in (output.min(), output.max(), output.mean(), output.std(), output.abs().max()):
                statistic.item()

    for module in model.modules():
        module.register_forward_hook(hook)


def measure(steps: int, warm: int) -> dict[str, float]:
    """Median seconds a step of each arm."""
    from transformers.debug_utils import DebugUnderflowOverflow

    with tempfile.TemporaryDirectory() as folder:
        arms = {
            "plain": Arm(),
            "recorder, defaults": Arm(lambda m, o: Recorder(folder, model=m, optimizer=o)),
            "recorder, all statistics every step": Arm(
                lambda m, o: Recorder(folder, model=m, optimizer=o, statistics_every=1)
            ),
            "forward hooks with .item()": Arm(),
            "transformers DebugUnderflowOverflow": Arm(),
        }
        hook_items(arms["forward hooks with .item()"].model)
        DebugUnderflowOverflow(arms["transformers DebugUnderflowOverflow"].model)
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps + warm):
            rows = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
            for arm in arms.values():
                with contextlib.redirect_stdout(io.StringIO()):
                    arm.step(rows[:, :-1], rows[:, 1:])
        for arm in arms.values():
            if arm.recorder is not None:
                arm.recorder.close()
        return {name: statistics.median(arm.seconds[warm:]) for name, arm in arms.items()}


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recorder", description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments or [])
    torch.set_num_threads(options.threads)
    parameters = sum(parameter.numel() for parameter in GPT().parameters())
    command = f"python -m benchmarks.recorder --steps {options.steps} --warm {options.warm} --threads {options.threads}"
    print(f"$ {command}")
    print(
        f"{parameters / 1e6:.2f} M parameters, batch {BATCH} × {LENGTH}, fp32, CPU, {options.threads} thread(s),"
        f" torch {torch.__version__}, {options.steps} steps in turns"
    )
    medians = measure(options.steps, options.warm)
    print(f"{'':38} {'median ms':>10} {'× plain':>9} {'target':>7}")
    for name, seconds in medians.items():
        target = f"≤ {TARGETS[name]}" if name in TARGETS else ""
        print(f"{name:38} {seconds * 1e3:10.1f} {seconds / medians['plain']:9.3f} {target:>7}")


if __name__ == "__main__":
    main(sys.argv[1:])
