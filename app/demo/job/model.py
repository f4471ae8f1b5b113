"""A byte-level GPT, small enough for two CPU cores and complete enough to break like a large one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the model; the vocabulary is the 256 values of a byte."""

    vocab_size: int = 256
    layers: int = 4
    heads: int = 5
    hidden: int = 160
    max_positions: int = 128
    half: bool = False  # matrices and activations in fp16; parameters and the residual stream stay in fp32


class Linear(nn.Linear):
    """A linear map without bias; in fp16 it rounds what goes in and out and sums in fp32, as tensor cores do.

    Few CPUs multiply fp16 fast, and all of them convert it fast.
    """

    def __init__(self, inputs: int, outputs: int, config: ModelConfig) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.half_precision = config.half

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        if not self.half_precision:
            return F.linear(input, self.weight)
        return F.linear(input.half().float(), self.weight.half().float()).half()


class Attention(nn.Module):
    """Causal self-attention over the last ``max_positions`` bytes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.hidden, 3 * config.hidden, config)
        self.out = Linear(config.hidden, config.hidden, config)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        batch, length, channels = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # each [B, H, T, D]
        mixed = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, channels))


class FeedForward(nn.Module):
    """Two linear maps with a GELU between them, four times as wide inside."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = Linear(config.hidden, 4 * config.hidden, config)
        self.act = nn.GELU()
        self.down = Linear(4 * config.hidden, config.hidden, config)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    """Attention and feed-forward, each on a normalised copy of the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden, bias=False)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden, bias=False)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.positions = nn.Embedding(config.max_positions, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, bias=False)
        self.head = Linear(config.hidden, config.vocab_size, config)
        self.apply(self._initialise)
        for name, weight in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                # The residual stream sums 2 x layers branches: keep its variance (GPT-2).
                nn.init.normal_(weight, std=0.02 / (2 * config.layers) ** 0.5)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[B, T] byte values -> [B, T, V] logits."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embedding(input_ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def language_model_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats of the byte that follows each position.

    Args:
        logits: [B, T, V].
        labels: [B, T], the byte *at* each position; the shift to the next one happens here and only here.
    """
    predictions = logits[:, :-1].float()  # the last position has no next byte
    targets = labels[:, 1:]
    return F.cross_entropy(predictions.flatten(0, 1), targets.flatten())
