"""A tiny GPT that is really trained under the recorder, and the knobs that make a run wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from llmconsole.capsules import Capsule, Recorder
from torch import Tensor, nn

VOCABULARY, WIDTH = 31, 16
Step = Callable[["Run", Tensor], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[None, :, None].to(x.dtype)
        x = x + self.mix(self.norm(past))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, cut: int | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.cut = cut

    def forward(self, ids: Tensor) -> Tensor:  # [B, T] → [B, T, V]
        x = self.tokens(ids)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == self.cut:
                x = x.detach()
        return self.head(self.norm(x))


def two_groups(model: nn.Module, decay: float = 0.1, spared: Callable[[str, Tensor], bool] | None = None) -> list[Any]:
    """Groups as they should be: decay for matrices only."""
    spare = spared or (lambda name, p: p.ndim < 2)
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if not spare(name, p)], "weight_decay": decay},
        {"params": [p for name, p in named if spare(name, p)], "weight_decay": 0.0},
    ]


def plain(run: Run, loss: Tensor) -> None:
    """Backward, clip, step, zero: the loop of every tutorial."""
    loss.backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.optimizer.zero_grad()


class Run:
    """A recorded run; ``step`` takes the loss to the next weights."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module | None = None,
        optimizer: Callable[[nn.Module], Any] | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        named: bool = True,
        every: int = 4,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self.model: Any = (Model() if model is None else model).to(dtype)
        self.optimizer = (optimizer or (lambda m: torch.optim.AdamW(two_groups(m), lr=3e-3)))(self.model)
        self.scaler: Any = None
        held = self.optimizer if named else None
        self.recorder = Recorder(folder, model=self.model, optimizer=held, every=every, **options)
        self.seed = seed

    def batch(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        start = torch.randint(0, VOCABULARY, (8, 1), generator=generator)
        return (start + 3 * torch.arange(10)[None]) % VOCABULARY

    def loss(self, ids: Tensor) -> Tensor:
        logits = self.model(ids[:, :-1]).float()
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))

    def train(self, steps: int | Iterable[int], step: Step = plain, numbered: bool = False) -> Run:
        for index in range(steps) if isinstance(steps, int) else steps:
            ids = self.batch(index)
            with self.recorder.step(batch=(ids[:, :-1], ids[:, 1:]), step=index if numbered else None):
                step(self, self.loss(ids))
        return self

    def capsule(self) -> Capsule:
        self.recorder.close()
        assert self.recorder.path is not None
        return Capsule.open(self.recorder.path)


def scaled(clip_first: bool = False, unscale: bool = True, limit: float = 0.5) -> Step:
    """A step with a GradScaler, clipped before or after the unscaling."""

    def step(run: Run, loss: Tensor) -> None:
        run.scaler = run.scaler or torch.amp.GradScaler("cpu", init_scale=1024.0)
        run.scaler.scale(loss).backward()
        if unscale and not clip_first:
            run.scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), limit)
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.optimizer.zero_grad()

    return step


class WrongAdamW(torch.optim.Optimizer):
    """AdamW as someone wrote it, with L2 where decoupled decay was meant."""

    def __init__(self, params: Any, lr: float, decay: float = 0.1, right: bool = False) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": decay, "betas": (0.9, 0.999), "eps": 1e-8})
        self.right = right

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, (beta1, beta2) = self.state[p], group["betas"]
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                state["step"] += 1
                grad = p.grad if self.right else p.grad + group["weight_decay"] * p
                if self.right:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
                p.addcdiv_(state["exp_avg"] / (1 - beta1 ** state["step"]), root, value=-group["lr"])
