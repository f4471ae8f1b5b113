"""How much memory a training step of a decoder-only transformer needs, term by term, from its configuration.

Sources, derived again here from what autograd keeps for each operation of PyTorch in eager mode:

- activations: Korthikanti et al. 2022 (arXiv 2205.05198). Their s·b·h·(34 + 5·a·s/h) bytes a layer (16 bits, dropout,
  scores materialised, GELU) is what ``Shape(attention="materialised")`` and ``Job(precision="half", dropout=True)``
  give; 10 + 24/t with tensor parallelism, 34/t with sequence parallelism too.
- weights, gradients, optimizer states and their sharding: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054):
  (2 + 2 + 12)·Ψ bytes for Adam in mixed precision with master weights.

A step is a row of pieces (a norm, an attention, a feed-forward, the loss). Each keeps bytes for backward, and needs
some more while it runs, forward and backward. Walking along the row and back gives the live bytes at each moment; the
largest is the peak, and the moment is its phase. Copies that only some code makes (logits that the loop holds, an
upcast) are stated where they are counted. Left out: fragmentation, contexts, workspaces of libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .memory_job import STATE_BYTES, Job, Shape, matrices, parameters
from .memory_pieces import Piece, end_pieces, layer_pieces, logits_of, noise_of, stream_of, tokens_of, width_of


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes of one rank at its peak, by term, and the peak of each phase (forward, backward, optimizer)."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    communication: float
    transient: float
    phase: str
    phases: dict[str, float]

    @property
    def peak(self) -> float:
        """All terms together."""
        return self.phases[self.phase]


@dataclass(frozen=True)
class _Moment:
    """What lies in memory at one moment besides weights, states and what rests for communication."""

    phase: str
    gradients: float
    activations: float
    transient: float
    communication: float = 0.0

    @property
    def bytes(self) -> float:
        return self.gradients + self.activations + self.transient + self.communication


def estimate(shape: Shape, job: Job) -> Estimate:
    """The peak of one rank, and what it is made of; of a pipeline the first stage, which holds most activations."""
    own = _owned(shape, job)
    size = 2.0 if job.precision in ("half", "half-master") else 4.0
    share = job.data_parallel
    weights = own * size / (share if job.stage >= 3 else 1)
    gradients = own * size / (share if job.stage >= 2 else 1)
    states = _state_bytes(shape, job, own) / (share if job.stage >= 1 else 1)
    resting = gradients if job.buckets and job.stage == 0 and share > 1 else 0.0
    moments = list(_moments(shape, job, gradients / own, gradients))
    phases = {
        phase: weights + states + resting + max(each.bytes for each in moments if each.phase == phase)
        for phase in ("forward", "backward", "optimizer")
    }
    peak = max(moments, key=lambda each: each.bytes)
    return Estimate(
        weights=weights,
        gradients=peak.gradients,
        optimizer=states,
        activations=peak.activations,
        communication=peak.communication + resting,
        transient=peak.transient,
        phase=peak.phase,
        phases=phases,
    )


def saved_by_layer(shape: Shape, job: Job) -> float:
    """Bytes that one layer keeps for its backward, checkpointing left aside."""
    return sum(piece.saved for piece in layer_pieces(shape, job))


def _moments(shape: Shape, job: Job, each: float, gradients: float) -> Iterator[_Moment]:
    """The step as a walk along the network and back. ``each``: bytes of gradient for an element of a parameter."""
    layer, end = layer_pieces(shape, job), end_pieces(shape, job)
    layers = -(-shape.layers // job.pipeline_parallel)
    if job.pipeline_parallel > 1:
        end = ()  # on the last stage, which holds the activations of one micro-batch only
    start = gradients if job.accumulating else 0.0
    kept = _kept(layer, shape, job)
    ahead, around, inside_layer = (_gathered(shape, job, layers_whole) for layers_whole in (1, 2, 3))
    held = logits_of(shape, job) * width_of(job) if job.held_logits and end else 0.0
    # Under 1F1B the first stage has sent as many micro-batches forward as there are stages.
    stored = _embedded(shape, job) + kept * layers * job.pipeline_parallel

    running = max(piece.saved + piece.forward for piece in layer)
    if job.checkpointing == "none":
        running = max(piece.forward for piece in layer)
    yield _Moment("forward", start, stored, running, around)
    saved = stored + held
    for piece in end:
        saved += piece.saved
        yield _Moment("forward", start, saved, piece.forward, ahead)
    done = 0.0
    for piece in reversed(end):
        done += piece.parameters
        yield _Moment("backward", max(start, done * each), saved, piece.backward, ahead)
        saved -= piece.saved
    again = 0.0 if job.checkpointing == "none" else sum(piece.saved for piece in layer) - kept
    for _ in range(layers):
        inside = again
        for piece in reversed(layer):
            done += piece.parameters
            yield _Moment("backward", max(start, done * each), saved + inside, piece.backward, inside_layer)
            inside -= piece.saved
        saved -= kept
    table = shape.vocabulary * shape.hidden / job.tensor_parallel * each * (2 if shape.tied and end else 0)
    yield _Moment("backward", gradients, saved, table + tokens_of(job) * shape.hidden * stream_of(job), ahead)
    yield _Moment("optimizer", gradients, held, _stepping(shape, job))


def _kept(layer: tuple[Piece, ...], shape: Shape, job: Job) -> float:
    """Bytes that a layer keeps from forward to backward."""
    if job.checkpointing == "full":
        return tokens_of(job) * shape.hidden * stream_of(job) / (job.tensor_parallel if job.sequence_parallel else 1)
    return sum(piece.saved - (piece.core if job.checkpointing == "selective" else 0.0) for piece in layer)


def _embedded(shape: Shape, job: Job) -> float:
    """Token ids, and the noise of the dropout behind the embedding."""
    noise = shape.hidden * noise_of(job, stream_of(job)) if job.dropout else 0.0
    return tokens_of(job) * (8 + noise)


def _gathered(shape: Shape, job: Job, count: int) -> float:
    """Where weights are sharded: the tables, and so many times the weights of a layer, whole.

    One that is fetched ahead of the loss; two in forward, the one at work and the next; three in backward, with the
    gradients of the one at work. Where only gradients are sharded, those of the layer at work are whole.
    """
    if job.stage < 2 or job.data_parallel == 1:
        return 0.0
    size = 4.0 if job.precision == "fp32" else 2.0
    layer = sum(piece.parameters for piece in layer_pieces(shape, job))
    if job.stage == 2:
        return size * layer if count == 3 else 0.0
    tables = shape.vocabulary * shape.hidden * (1 if shape.tied else 2) / job.tensor_parallel
    return size * (count * layer + tables)


def _owned(shape: Shape, job: Job) -> float:
    """Elements of the parameters on one rank before any sharding over data-parallel ranks."""
    layers = -(-shape.layers // job.pipeline_parallel)
    tables = shape.vocabulary * shape.hidden * (1 if shape.tied or job.pipeline_parallel > 1 else 2)
    tables = tables / job.tensor_parallel + shape.positions * shape.hidden
    last = shape.hidden * (2 if shape.norm == "layer" else 1) if job.pipeline_parallel == 1 else 0
    return layers * sum(piece.parameters for piece in layer_pieces(shape, job)) + tables + last


def _state_bytes(shape: Shape, job: Job, own: float) -> float:
    name = job.optimizer.lower()
    master = 4 * own if job.precision == "half-master" else 0.0
    if name == "adafactor":
        whole = sum(count * (rows + (columns if columns > 1 else 0)) for count, rows, columns in matrices(shape))
        return 4.0 * whole * own / parameters(shape) + master
    size = STATE_BYTES[name]
    return own * (size / 2 if job.precision == "half" and "8bit" not in name else size) + master


def _stepping(shape: Shape, job: Job) -> float:
    """Bytes that the optimizer needs besides: Adam's denominator, of one parameter (twice) or of all; an update."""
    name, size = job.optimizer.lower(), 2.0 if job.precision == "half" else 4.0
    if "adam" not in name and name != "adafactor":
        return 0.0
    share = job.data_parallel if job.stage >= 1 else 1
    if job.foreach and "8bit" not in name and name != "adafactor":
        return _owned(shape, job) * size / share
    largest = max(rows * columns for _, rows, columns in matrices(shape)) / job.tensor_parallel
    return (1 if name == "adafactor" else 2) * largest * size / share
