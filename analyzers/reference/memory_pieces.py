"""The pieces that a transformer's step is made of: what each keeps for its backward, and what it needs while it runs.

Counted from what autograd saves for each operation of PyTorch in eager mode.
"""

from __future__ import annotations

from dataclasses import dataclass

from .memory_job import Job, Shape


@dataclass(frozen=True)
class Piece:
    """A part of the network: bytes kept for its backward, and bytes needed besides while it runs, forward and backward.

    ``parameters`` get their gradients there. ``core`` is the part of ``saved`` that selective checkpointing drops.
    """

    saved: float
    forward: float
    backward: float
    parameters: float = 0.0
    core: float = 0.0


def layer_pieces(shape: Shape, job: Job) -> tuple[Piece, ...]:
    """Norm, attention, norm, feed-forward."""
    return (_norm(shape, job), _attention(shape, job), _norm(shape, job), _feed_forward(shape, job))


def _norm(shape: Shape, job: Job) -> Piece:
    elements = tokens_of(job) * shape.hidden / (job.tensor_parallel if job.sequence_parallel else 1)
    stream = stream_of(job)
    if shape.norm == "layer":
        saved = elements * stream + 8 * tokens_of(job)  # the input, mean and inverse deviation
    elif job.precision.startswith("half"):
        saved = elements * (4 + 2)  # the input in float32, and normalised in the dtype of the weights
    else:
        saved = elements * (stream + 4)  # the input and its normalised copy
    backward = elements * stream * (3 if shape.norm == "layer" else 4)
    return Piece(saved, elements * stream, backward, shape.hidden * (2 if shape.norm == "layer" else 1))


def _attention(shape: Shape, job: Job) -> Piece:
    tokens, width, t = tokens_of(job), width_of(job), job.tensor_parallel
    through = shape.heads * shape.head_width / t
    hidden = tokens * shape.hidden
    saved = hidden / (t if job.sequence_parallel else 1) * width  # the input of the projections
    saved += tokens * 4 * through * width  # queries, keys and values (repeated for all heads), and the output
    scores = tokens * job.length * shape.heads / t
    if fused(shape, job):
        core = tokens * shape.heads / t * 4  # logarithm of the sum of each row
        forward = backward = 0.0
    else:
        # Autocast computes a softmax in float32 on CUDA; SDPA that is not fused does all of its work in float32.
        soft = 4.0 if shape.attention == "fused" or (job.precision, job.device) == ("autocast", "cuda") else width
        copy = width if soft != width and shape.attention != "fused" else 0.0
        core = scores * (soft + (noise_of(job, soft) + (copy or soft) if job.dropout else copy))
        core += tokens * 3 * through * (soft - width if shape.attention == "fused" else 0.0)
        forward = scores * (0.0 if job.dropout and job.device == "cpu" else soft)
        backward = scores * (soft if job.dropout else 2 * soft)
    stream = hidden * stream_of(job)
    backward += stream + tokens * 5 * through * width
    mask = hidden * noise_of(job, width) / (t if job.sequence_parallel else 1) if job.dropout else 0.0
    linear = shape.hidden * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_width / t
    biases = (shape.heads + 2 * shape.kv_heads) * shape.head_width / t + shape.hidden if shape.bias else 0
    saved += core + mask + _cast(job, linear)
    return Piece(saved, forward + stream + hidden * width, backward, linear + biases, core)


def _feed_forward(shape: Shape, job: Job) -> Piece:
    tokens, width, t = tokens_of(job), width_of(job), job.tensor_parallel
    hidden, inner = tokens * shape.hidden, tokens * shape.inner / t
    gated = shape.mlp == "gated"
    # Before and after the GELU, and of its formula x/2, tanh and 1 + tanh; gate, its SiLU, the other branch, product.
    kept, more = {"gelu": (2, 1), "gelu-written-out": (5, 2), "gated": (4, 2)}[shape.mlp]
    saved = hidden / (t if job.sequence_parallel else 1) * width + inner * width * kept
    saved += hidden * noise_of(job, width) / (t if job.sequence_parallel else 1) if job.dropout else 0.0
    stream = hidden * stream_of(job)
    backward = stream + hidden * width + inner * width * more
    linear = shape.hidden * shape.inner / t * (3 if gated else 2)
    biases = shape.inner / t * (2 if gated else 1) + shape.hidden if shape.bias else 0
    return Piece(saved + _cast(job, linear), stream + hidden * width, backward, linear + biases)


def end_pieces(shape: Shape, job: Job) -> tuple[Piece, ...]:
    """The last norm, the output layer, and the loss, which works in float32."""
    width, logits = width_of(job), logits_of(shape, job)
    hidden = tokens_of(job) * shape.hidden * width
    linear = shape.vocabulary * shape.hidden / job.tensor_parallel
    head = Piece(hidden + _cast(job, linear), logits * width, logits * width + hidden, linear)
    # The logarithms of the softmax are kept; backward makes their gradient and then that of the logits.
    loss = Piece(logits * 4, logits * (4 if width < 4 else 0), logits * 8)
    return (_norm(shape, job), head, loss)


def fused(shape: Shape, job: Job) -> bool:
    """Whether attention keeps no scores; on a CPU torch has no fused kernel that drops."""
    return shape.attention == "fused" and not (job.device == "cpu" and job.dropout)


def tokens_of(job: Job) -> float:
    """Tokens of a micro-batch."""
    return float(job.batch * job.length)


def logits_of(shape: Shape, job: Job) -> float:
    """Elements of the logits of a micro-batch."""
    return tokens_of(job) * shape.vocabulary / job.tensor_parallel


def width_of(job: Job) -> float:
    """Bytes of an element that goes into a matrix product."""
    return 4.0 if job.precision == "fp32" else 2.0


def stream_of(job: Job) -> float:
    """Bytes of an element of the residual stream; autocast leaves it in float32."""
    return 2.0 if job.precision.startswith("half") else 4.0


def noise_of(job: Job, width: float) -> float:
    """Bytes that dropout keeps of an element."""
    return width if job.device == "cpu" else 1.0


def _cast(job: Job, elements: float) -> float:
    """Bytes of the 16-bit copies of weights that autocast keeps from forward to backward."""
    return 2 * elements if job.precision == "autocast" and job.stage < 3 else 0.0
