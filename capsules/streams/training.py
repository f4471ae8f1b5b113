"""Records of a training loop."""

from __future__ import annotations

from typing import Any, Literal

from .base import Count, Frame, Integer, Part, Record

Kind = Literal["parameter", "buffer", "rng"]


class Event(Record):
    """Something that happened in the loop, in order; which fields apply depends on ``kind``.

    Sizes in bytes. ``nested`` is true where the call happened inside another one (GradScaler.step unscales).
    """

    kind: str | None = None
    nested: bool | None = None
    micro: Count | None = None
    # backward: norm of what lay in the sampled gradients before the window's first one
    carried: float | None = None
    # finite_check: above 0 where a gradient was not finite
    found_inf: float | None = None
    # grad_norm, clip
    norm: float | None = None
    max_norm: float | None = None
    clip_value: float | None = None
    # step_begin
    batch_sha256: str | None = None
    data_cursor: dict[str, Any] | None = None
    # scaler_update
    scale_before: float | None = None
    scale_after: float | None = None
    # eval_begin (training_mode of step_begin, too); the first forward drew random numbers, or normalised by the batch;
    # told by the loop or found; labels or a loss were seen; eval_end
    training_mode: bool | None = None
    grad_enabled: bool | None = None
    random_drawn: bool | None = None
    batch_statistics: bool | None = None
    told: bool | None = None
    supervised: bool | None = None
    batches: Count | None = None
    loss: float | None = None
    # loader_read (how many batches were taken of a split's loader, and whether that was all of it)
    split: str | None = None
    exhausted: bool | None = None
    # checkpoint_saved, checkpoint_loaded (what the file holds, what was taken over), weights_loaded, weights_updated
    path: str | None = None
    contents: list[str] | None = None
    expected: Any = None
    loaded: Any = None
    missing: Any = None
    unexpected: Any = None
    version: str | int | None = None
    # exception, log
    type: str | None = None
    message: str | None = None
    frames: list[Frame] | None = None
    level: str | None = None
    logger: str | None = None
    epoch: float | None = None
    batch: Any = None
    sample_ids: list[str] | None = None
    shapes: Any = None
    # oom
    requested: Count | None = None
    free: Count | None = None
    allocated: Count | None = None
    reserved: Count | None = None
    capacity: Count | None = None
    other_processes: Any = None
    phase: str | None = None
    device: Count | None = None
    # collective_timeout (what a watchdog says), collective_mismatch (what a fingerprint says)
    group: str | int | None = None
    seq: Integer | None = None
    op: str | None = None
    dtype: str | None = None
    numel_in: Count | None = None
    numel_out: Count | None = None
    timeout_s: float | None = None
    ran_s: float | None = None
    last_enqueued: Integer | None = None
    last_started: Integer | None = None
    last_completed: Integer | None = None
    other_rank: Integer | None = None
    # collective_mismatch where Gloo says it: bytes that came from a peer, and that the rank's own call had room for
    received: Count | None = None
    awaited: Count | None = None
    # exception: errors that its log printed before
    order: Count | None = None


class Sample(Record):
    """One sample as it was seen: ``length`` in tokens, ``loss`` in nats a token over ``loss_tokens`` of them."""

    id: str | None = None
    sha256: str | None = None
    split: str | None = None
    source: str | None = None
    domain: str | None = None
    length: Count | None = None
    image_size: list[Count] | dict[str, Count] | Count | None = None
    truncated: bool | None = None
    epoch: float | None = None
    loss: float | None = None
    loss_tokens: Count | None = None
    text: str | None = None


class Microbatch(Record):
    """One micro-batch: ``tokens`` are the supervised ones, ``window`` the configured accumulation."""

    micro: Count | None = None
    tokens: Count | None = None
    loss_sum: float | None = None
    loss_mean: float | None = None
    window: Count | None = None


class MomentState(Part):
    """One tensor of an optimizer's state."""

    dtype: str | None = None
    rms: float | None = None


class ParamGroup(Record):
    """One parameter with its group, norms and optimizer state."""

    group: Count | str | None = None
    name: str | None = None
    shape: list[Count] | None = None
    dtype: str | None = None
    requires_grad: bool | None = None
    weight_decay: float | None = None
    lr: float | None = None
    has_grad: bool | None = None
    grad_norm: float | None = None
    update_norm: float | None = None
    weight_absmedian: float | None = None
    moved_fraction: float | None = None
    state: dict[str, MomentState] | None = None
    state_step: Count | None = None
    master_dtype: str | None = None
    adapter: bool | str | None = None
    shared_with: str | list[str] | None = None
    in_optimizer: bool | None = None
    optimizer: str | None = None


class Checksum(Record):
    """Digest of one tensor on one rank."""

    name: str | None = None
    sha256: str | None = None
    kind: Kind | None = None
    side: str | None = None


class Recompute(Record):
    """A checkpointed module: random state and outputs of the forward pass and of its recomputation."""

    module: str | None = None
    forward_rng_sha256: str | None = None
    recompute_rng_sha256: str | None = None
    max_abs_difference: float | None = None
