"""A small decoder-only transformer with the parts that faults need: padding, documents, dropout, norms, adapters."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[B, T, C], [B, 1, T, T] -> [B, T, C]."""
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # each [B, H, T, D]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))


class FeedForward(nn.Module):
    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, dropout)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = FeedForward(hidden, dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Token ids in, logits out.

    Args:
        vocabulary, hidden, heads, layers, positions: sizes.
        dropout: in attention and after each feed-forward.
        tied: the output layer is the embedding.
        block: what a layer is made of.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 96,
        hidden: int = 32,
        heads: int = 2,
        layers: int = 2,
        positions: int = 64,
        dropout: float = 0.0,
        tied: bool = False,
        block: type[Block] = Block,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(positions, hidden)
        self.blocks = nn.ModuleList(block(hidden, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """[B, T] (and the same shape for the rest) -> logits [B, T, V].

        ``attention_mask`` is 0 for padding, or [B, T, T] with 1 for what each position may see.
        """
        length = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length)[None]
        allowed = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        if segment_ids is not None:
            allowed = allowed & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
        if attention_mask is not None:
            seen = attention_mask.bool()
            seen = seen[:, None, None, :] if seen.ndim == 2 else seen[:, None]
            allowed = allowed & (seen | torch.eye(length, dtype=torch.bool))  # no query is left without a key
        x = self.embedding(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x))


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained low-rank update beside it, in the names that peft uses."""

    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 16.0) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        self.scaling = alpha / rank
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x))


def add_adapters(model: GPT, layer: type[LoraLinear] = LoraLinear) -> GPT:
    """Freeze ``model`` and put an adapter beside the attention's and the feed-forward's linear layers."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.attention.qkv = layer(block.attention.qkv)
        block.attention.out = layer(block.attention.out)
        block.mlp.up = layer(block.mlp.up)
    return model
