"""Small GPTs of many makes, and the peak of bytes that one training step of them really allocates."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from llmconsole.analyzers.reference.memory_job import Job, Shape, parameters
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint


class RMSNorm(nn.Module):
    """As models of the Llama family write it out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        wide, narrow = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        self.q, self.k, self.v = (nn.Linear(shape.hidden, n, bias=shape.bias) for n in (wide, narrow, narrow))
        self.out = nn.Linear(wide, shape.hidden, bias=shape.bias)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor, turn: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        shape = self.shape
        q = self.q(x).view(batch, length, shape.heads, -1).transpose(1, 2)
        k = self.k(x).view(batch, length, shape.kv_heads, -1).transpose(1, 2)
        v = self.v(x).view(batch, length, shape.kv_heads, -1).transpose(1, 2)
        if turn is not None:
            q, k = rotated(q, turn), rotated(k, turn)
        if shape.kv_heads != shape.heads:
            k = k.repeat_interleave(shape.heads // shape.kv_heads, dim=1)
            v = v.repeat_interleave(shape.heads // shape.kv_heads, dim=1)
        dropout = self.dropout if self.training else 0.0
        if shape.attention == "fused":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(shape.head_width))
            scores = scores.masked_fill(mask[:length, :length], -math.inf)
            scores = F.softmax(scores, dim=-1)
            scores = F.dropout(scores, dropout, self.training)
            y = scores @ v
        y = y.transpose(1, 2).contiguous().view(batch, length, -1)
        return self.residual_dropout(self.out(y))


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    other = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * turn[0] + other * turn[1]


class FeedForward(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.gated = shape.mlp == "gated"
        self.up = nn.Linear(shape.hidden, shape.inner, bias=shape.bias)
        if self.gated:
            self.gate = nn.Linear(shape.hidden, shape.inner, bias=shape.bias)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=shape.bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.silu(self.gate(x)) * self.up(x) if self.gated else F.gelu(self.up(x))
        return self.dropout(self.down(inner))


class Block(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        norm = RMSNorm if shape.norm == "rms" else nn.LayerNorm
        self.attention_norm, self.mlp_norm = norm(shape.hidden), norm(shape.hidden)
        self.attention, self.mlp = Attention(shape, dropout), FeedForward(shape, dropout)

    def forward(self, x: Tensor, mask: Tensor, turn: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask, turn)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, shape: Shape, dropout: float = 0.0, recompute: bool = False) -> None:
        super().__init__()
        self.shape, self.recompute = shape, recompute
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.positions, shape.hidden) if shape.positions else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden) if shape.norm == "rms" else nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.ones(2048, 2048, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        turn = None
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1]))
        else:
            angle = torch.arange(ids.shape[1])[:, None] / 10_000 ** torch.linspace(0, 1, self.shape.head_width // 2)
            angle = torch.cat((angle, angle), -1)
            turn = torch.stack((angle.cos(), angle.sin())).to(x.dtype)
        x = self.dropout(x)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, self.mask, turn, use_reentrant=False)
            else:
                x = block(x, self.mask, turn)
        return self.head(self.norm(x))


@dataclass
class Measured:
    """Bytes of one training step: what lies there before it, and the peak above it by phase."""

    weights: int
    gradients: int
    optimizer: int
    phases: dict[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        return max(self.phases.values())


def measure(
    shape: Shape,
    job: Job,
    dropout: float = 0.0,
    foreach: bool = False,
    wrap: Callable[[GPT], tuple[nn.Module, int]] = lambda model: (model, 0),
) -> Measured:
    """The peak of live bytes in forward, backward and optimizer step, from the events of torch's own profiler.

    Not the first step is measured: optimizer states exist by then, and gradients are set to none before it.

    Args:
        shape, job, dropout, foreach: what is trained.
        wrap: makes it a job of several ranks; gives what is called, and bytes that it allocated for good.
    """
    torch.manual_seed(0)
    model = GPT(shape, dropout, job.checkpointing == "full")
    if job.precision == "half":
        model = model.bfloat16()
    assert sum(each.numel() for each in model.parameters()) == parameters(shape)
    called, more = wrap(model)
    optimizer = made(job.optimizer, model, foreach)
    ids = torch.randint(0, shape.vocabulary, (job.batch, job.length + 1))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    cast = torch.autocast("cpu", torch.bfloat16) if job.precision == "autocast" else contextlib.nullcontext()

    def step(mark: Any) -> None:
        mark("forward")
        with cast:
            logits = called(inputs)
            loss = F.cross_entropy(logits.view(-1, shape.vocabulary).float(), targets.view(-1))
        mark("backward")
        loss.backward()
        mark("optimizer")
        optimizer.step()
        mark("end")

    for _ in range(2 if called is not model else 1):  # a job of several ranks settles its buckets in the first step
        step(lambda name: None)
        optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:

        def mark(name: str) -> None:
            with torch.profiler.record_function(f"mark:{name}"):
                pass

        step(mark)
    base = [size_of(model.parameters()), size_of(state_of(optimizer)), more]
    gradients = size_of(each.grad for each in model.parameters() if each.grad is not None)
    return Measured(base[0], gradients, base[1], dict(peaks(profiler, sum(base))))


def peaks(profiler: Any, base: int) -> Iterator[tuple[str, int]]:
    """Highest live bytes of each phase, from the order of memory events and marks."""
    events = sorted(
        (
            (event.start_ns(), event.name(), event.nbytes())
            for event in profiler.profiler.kineto_results.events()
            if event.name() == "[memory]" or event.name().startswith("mark:")
        ),
    )
    phase, live, highest = "", base, base
    for _, name, size in events:
        if name.startswith("mark:"):
            if phase:
                yield phase, highest
            phase, highest = name.removeprefix("mark:"), live
        else:
            live += size
            highest = max(highest, live)


def made(name: str, model: nn.Module, foreach: bool) -> Any:
    weights = list(model.parameters())
    if name == "adamw":
        return torch.optim.AdamW(weights, foreach=foreach)
    if name == "adafactor":
        return torch.optim.Adafactor(weights, foreach=False)
    return torch.optim.SGD(weights, momentum=0.9 if name == "momentum" else 0.0, foreach=foreach)


def state_of(optimizer: Any) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def size_of(tensors: Any) -> int:
    """Bytes of the distinct storages; of a sharded tensor the part of this rank."""
    local = (each.to_local() if hasattr(each, "to_local") else each for each in tensors)
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in local}.values())


BASE = Shape(layers=4, hidden=128, heads=4, vocabulary=1000, positions=512)
LLAMA = Shape(
    layers=4, hidden=128, heads=4, kv_heads=2, intermediate=344, vocabulary=1000, norm="rms", mlp="gated", bias=False
)


def grid() -> Iterator[tuple[Shape, Job, float, bool]]:
    """(shape, job, dropout, foreach) of the sweep: each knob alone around a base, and the usual pairs of them."""
    for shape, (batch, length) in itertools.product((BASE, LLAMA), ((1, 64), (4, 128), (8, 256), (2, 512))):
        for attention in ("fused", "materialised"):
            yield shape.changed(attention=attention), Job(batch=batch, length=length), 0.0, False
    for layers, hidden, heads, vocabulary in itertools.product((2, 8), (64, 256), (2, 8), (256, 8000)):
        size = {"layers": layers, "hidden": hidden, "heads": heads, "vocabulary": vocabulary}
        yield BASE.changed(**size, kv_heads=heads), Job(batch=4, length=128), 0.0, False
        yield LLAMA.changed(**size, kv_heads=2, intermediate=hidden * 8 // 3), Job(batch=4, length=128), 0.0, False
    for attention, checkpointing, dropout, precision in itertools.product(
        ("fused", "materialised"), ("none", "full"), (0.0, 0.1), ("fp32", "half", "autocast")
    ):
        for shape in (BASE, LLAMA):
            job = Job(batch=8, length=128, checkpointing=checkpointing, precision=precision, dropout=dropout > 0)
            yield shape.changed(attention=attention), job, dropout, False
    for optimizer, foreach in itertools.product(("adamw", "sgd", "momentum", "adafactor"), (False, True)):
        for batch, vocabulary in ((1, 1000), (8, 256), (1, 20_000)):
            job = Job(batch=batch, length=64, optimizer=optimizer)
            yield BASE.changed(vocabulary=vocabulary), job, 0.0, foreach
            yield BASE.changed(vocabulary=vocabulary, tied=True), job, 0.0, foreach
