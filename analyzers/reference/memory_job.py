"""What a memory estimate is made from: the shape of a decoder-only transformer, and how one rank trains it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

Attention = Literal["fused", "materialised"]
Checkpointing = Literal["none", "selective", "full"]
Precision = Literal["fp32", "autocast", "half", "half-master", "half-gathered"]

#: Bytes of optimizer state for each element of a parameter; those of ``half`` weights are half of float32's.
STATE_BYTES: Final = {
    **dict.fromkeys(("adamw", "adam", "nadam", "radam", "lamb", "adan"), 8.0),
    **dict.fromkeys(("adamw8bit", "adam8bit", "pagedadamw8bit"), 2.0 + 8 / 256),  # one float32 scale for 256 elements
    **dict.fromkeys(("momentum", "lion", "rmsprop", "adagrad", "muon"), 4.0),
    **dict.fromkeys(("lion8bit",), 1.0 + 4 / 256),
    **dict.fromkeys(("sgd", "none"), 0.0),  # none: offloaded to the host
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder-only transformer. ``positions`` is the number of learned ones, 0 for a rotation.

    ``attention`` is fused where no [T, T] scores are kept (flash, memory-efficient, SDPA). ``mlp`` is two matrices with
    a GELU between them (one kernel, or its tanh formula written out in eager code), or three with a gate; ``norm`` a
    LayerNorm, or an RMSNorm as it is written out in eager code.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    kv_heads: int = 0
    head_dim: int = 0
    intermediate: int = 0
    positions: int = 0
    tied: bool = False
    bias: bool = True
    norm: Literal["layer", "rms"] = "layer"
    mlp: Literal["gelu", "gelu-written-out", "gated"] = "gelu"
    attention: Attention = "fused"

    def __post_init__(self) -> None:
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)

    @property
    def head_width(self) -> int:
        """Channels of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def inner(self) -> int:
        """Width of the feed-forward."""
        return self.intermediate or 4 * self.hidden

    def changed(self, **fields: Any) -> Shape:
        """The same with some fields changed."""
        return dataclasses.replace(self, **fields)


@dataclass(frozen=True, kw_only=True)
class Job:
    """How one rank trains it.

    ``precision``: fp32; autocast (parameters in float32, matrices in 16 bits); half (all in 16 bits); half-master (16
    bits, with master weights and states in float32); half-gathered (float32 where it is sharded, 16 bits wherever it is
    gathered and computed with, as FSDP's mixed precision has it). ``accumulating``: gradients of earlier micro-batches
    lie there when a micro-batch begins. ``stage``: 0 replicated, 1 optimizer sharded, 2 gradients too, 3 weights too
    (FSDP). ``buckets``: DDP keeps gradients a second time, in its buckets. ``foreach``: the optimizer works on all
    parameters at once. ``held_logits``: the loop keeps them until the step is over. ``device``: on a CPU dropout keeps
    its noise in the dtype of the activations instead of a byte, and attention with dropout is not fused.
    """

    batch: int
    length: int
    precision: Precision = "fp32"
    optimizer: str = "adamw"
    dropout: bool = False
    checkpointing: Checkpointing = "none"
    accumulating: bool = False
    stage: int = 0
    data_parallel: int = 1
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    pipeline_parallel: int = 1
    buckets: bool = False
    foreach: bool = False
    held_logits: bool = True
    device: Literal["cuda", "cpu"] = "cuda"

    def changed(self, **fields: Any) -> Job:
        """The same with some fields changed."""
        return dataclasses.replace(self, **fields)


def parameters(shape: Shape) -> int:
    """Elements of all parameters."""
    return sum(count * rows * columns for count, rows, columns in matrices(shape))


def matrices(shape: Shape) -> Iterator[tuple[int, int, int]]:
    """(how many, rows, columns) of the parameters; a vector has one column."""
    hidden, layers, bias = shape.hidden, shape.layers, shape.bias
    wide, narrow = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    yield (1 if shape.tied else 2), shape.vocabulary, hidden
    yield 1, shape.positions, hidden
    yield 2 * layers, wide, hidden
    yield 2 * layers, narrow, hidden
    yield (3 if shape.mlp == "gated" else 2) * layers, shape.inner, hidden
    yield (2 * layers + 1) * (2 if shape.norm == "layer" else 1), hidden, 1
    if bias:
        yield layers, wide + 2 * narrow, 1
        yield layers, shape.inner * (2 if shape.mlp == "gated" else 1), 1
        yield 2 * layers, hidden, 1
