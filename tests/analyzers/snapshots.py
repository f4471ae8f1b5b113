"""Jobs on a model of the caching allocator, and the capsule that the snapshot of such a job is imported to."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import import_files

from benchmarks.caching_allocator import GIB, KIB, MIB, CachingAllocator, Frames, stack

LOOP = ("train /home/me/train.py:120", "<module> /home/me/train.py:150")
CALL = ("_call_impl /site-packages/torch/nn/modules/module.py:1779", *LOOP)
BACKWARD = stack(
    "_make_grads /site-packages/torch/autograd/__init__.py:180",
    "backward /site-packages/torch/autograd/__init__.py:360",
    "backward /site-packages/torch/_tensor.py:630",
    *LOOP,
)
ADAM_STATE = stack(
    "_init_group /site-packages/torch/optim/adamw.py:100", "step /site-packages/torch/optim/adamw.py:220", *LOOP
)
ADAM = stack(
    "_multi_tensor_adam /site-packages/torch/optim/adam.py:700", "step /site-packages/torch/optim/adamw.py:240", *LOOP
)
WEIGHTS = stack("__init__ /site-packages/torch/nn/modules/linear.py:110", "build /home/me/model.py:8", LOOP[1])
EXTRA_LOSS = stack("training_step /home/me/train.py:88", *LOOP)


def layer(line: int) -> Frames:
    """The stack of one operation of the model."""
    return stack("linear /site-packages/torch/nn/functional.py:40", f"forward /home/me/model.py:{line}", *CALL)


class Job:
    """A training job: weights, optimizer state at the first step, activations that a backward pass gives back.

    Args:
        allocator: the device.
        layers: operations of one forward pass.
        activation: bytes of each one's result.
        fused: the optimizer makes nothing of its own in a step.
    """

    def __init__(
        self, allocator: CachingAllocator, layers: int = 6, activation: int = 24 * MIB, fused: bool = False
    ) -> None:
        self.device, self.layers, self.activation, self.fused = allocator, layers, activation, fused
        self.weights = [allocator.malloc(12 * MIB, WEIGHTS) for _ in range(layers)]
        self.steps = 0

    def forward(self, activation: int | None = None) -> list[int]:
        size = self.activation if activation is None else activation
        return [self.device.malloc(size, layer(30 + number)) for number in range(self.layers)]

    def backward(self, held: list[int]) -> None:
        seed = self.device.malloc(4, BACKWARD)
        gradients: list[int] = []
        for address in reversed(held):
            gradients.append(self.device.malloc(12 * MIB))  # threads of the engine have no Python frames
            self.device.free(address)
        self.device.free(seed)
        if not self.steps:
            self.state = [self.device.malloc(12 * MIB, ADAM_STATE) for _ in range(2 * self.layers)]
        if not self.fused:
            self.device.free(self.device.malloc(12 * MIB, ADAM))
        for address in gradients:
            self.device.free(address)
        self.steps += 1
        self.device.tick(200_000)

    def step(self, activation: int | None = None, also: Callable[[], Any] | None = None) -> None:
        held = self.forward(activation)
        if also is not None:
            also()
        self.backward(held)


def save(path: Path, snapshot: Any) -> Path:
    """Write a snapshot as torch does."""
    with path.open("wb") as file:
        pickle.dump(snapshot, file)
    return path


def imported(tmp_path: Path, snapshot: Any, *beside: Path, name: str = "snapshot.pickle") -> Capsule:
    """The capsule of a snapshot, or of a simulated device's, and of files beside it."""
    if isinstance(snapshot, CachingAllocator):
        snapshot = snapshot.snapshot()
    found = import_files([save(tmp_path / name, snapshot), *beside], tmp_path / "imported", attach=False)
    return Capsule.open(found)


__all__ = ["EXTRA_LOSS", "GIB", "KIB", "LOOP", "MIB", "CachingAllocator", "Job", "imported", "layer", "save", "stack"]
