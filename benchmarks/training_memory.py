"""Training jobs on the model of a caching allocator, honest and leaking ones, by number."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from .caching_allocator import GIB, KIB, MIB, CachingAllocator, Frames, stack

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


#: What a numbered job does beside its training. Only ``leak`` is a fault.
KINDS = (
    *("leak", "leak", "leak", "window", "cache", "temporary", "bouts", "flushed"),
    *("evaluation", "accumulation", "powers of two", "ever rarer"),
)
#: Steps with a leaked block, within the trace, from which it must be found.
ENOUGH = 12


def numbered(number: int) -> tuple[str, CachingAllocator, int]:
    """A job that follows from its number: its kind, its device, and the blocks that it leaked within the trace."""
    chosen = random.Random(number)
    kind = chosen.choice(KINDS)
    a = CachingAllocator(
        chosen.choice((24, 40, 80)) * GIB,
        elsewhere=600 * MIB,
        expandable=chosen.random() < 0.3,
        entries=chosen.choice((None, None, 3000, 1500)),
        own_stacks=chosen.random() < 0.3,
        recording=False,
    )
    job = Job(a, chosen.choice((2, 6, 12)), chosen.choice((2, 8, 24)) * MIB, fused=chosen.random() < 0.4)
    steps, every = chosen.choice((12, 25, 60, 100)), chosen.choice((1, 1, 2, 5))
    begin = chosen.randrange(max(1, steps // 4))
    size = chosen.choice((512, 40 * KIB, 300 * KIB, 2 * MIB, 6 * MIB))
    beside = _Beside(a, kind, chosen, steps, every, size)
    for step in range(steps):
        if step == begin:
            a.record()
        activation = int(job.activation * (0.5 + chosen.random())) if chosen.random() < 0.3 else job.activation
        micro = chosen.choice((2, 4)) if kind == "accumulation" else 1
        held = [each for _ in range(micro) for each in job.forward(activation)]
        beside.step(step)
        job.backward(held)
        if kind == "evaluation" and step % 10 == 9:
            beside.evaluate(job, keep=step == steps - 1 and chosen.random() < 0.5)
    seen = {each["addr"] for each in a.snapshot()["device_traces"][0] if each["action"] == "alloc"}
    return kind, a, sum(each in seen for each in beside.leaked)


class _Beside:
    """What a job keeps beside its training."""

    def __init__(
        self, a: CachingAllocator, kind: str, chosen: random.Random, steps: int, every: int, size: int
    ) -> None:
        self.a, self.kind, self.chosen, self.steps, self.every, self.size = a, kind, chosen, steps, every, size
        self.kept: deque[int] = deque()
        self.leaked: list[int] = []

    def step(self, step: int) -> None:
        often, rare = step % self.every == 0, self.chosen.random() < 2 / (1 + step)
        if self.kind == "leak" and often:
            self.leaked.append(self.make())
        elif self.kind == "temporary":
            self.a.free(self.make())
        elif self.kind == "bouts" and step in (2, 3):
            for _ in range(20):
                self.make()
        elif (
            (self.kind == "cache" and step < self.steps // 2)
            or (self.kind == "powers of two" and not step & (step - 1))
            or (self.kind == "ever rarer" and rare)
        ):
            self.make()
        elif self.kind in ("window", "flushed") and (often or self.kind == "window"):
            self.kept.append(self.make())
            if self.kind == "window" and len(self.kept) > min(10, self.steps // 3):
                self.a.free(self.kept.popleft())
            elif self.kind == "flushed" and len(self.kept) > 6:
                while self.kept:
                    self.a.free(self.kept.popleft())

    def make(self) -> int:
        return self.a.malloc(self.size, EXTRA_LOSS)

    def evaluate(self, job: Job, keep: bool) -> None:
        outputs: list[int] = []
        for _ in range(self.chosen.choice((5, 30))):
            held = job.forward()
            outputs.append(self.a.malloc(4 * MIB, stack("run_epoch /home/me/loop.py:9", *LOOP)))
            for address in held:
                self.a.free(address)
        for address in outputs if not keep else ():
            with contextlib.suppress(KeyError):
                self.a.free(address)
