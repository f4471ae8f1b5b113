"""The manifest of a capsule (``capsule.json``) as types: every field is optional, unknown ones stay in ``raw``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from .limits import MAX_INT64

FORMAT = "llmconsole.capsule/1"

Count = Annotated[int, Meta(ge=0, le=MAX_INT64)]
Integer = Annotated[int, Meta(ge=-(2**63), le=MAX_INT64)]
Status = Literal["recording", "sealed", "crashed"]
Phase = Literal["training", "evaluation", "serving", "kernel", "rag", "agent", "multimodal"]
TriggerKind = Literal["nonfinite", "spike", "exception", "oom", "hang", "signal", "manual", "imported"]


class Part(msgspec.Struct, kw_only=True):
    """Base of every part of the manifest."""


class Trigger(Part):
    """What ended the recording, or made it look closer."""

    kind: TriggerKind | None = None
    step: Count | None = None
    rank: Count | None = None
    signal: str | None = None
    value: float | None = None
    message: str | None = None


class Writer(Part):
    """The process that created the capsule; ``started`` is RFC 3339, ``process_start`` what tells a reused pid."""

    host: str | None = None
    pid: Count | None = None
    started: str | None = None
    process_start: str | None = None


class Code(Part):
    """Revision of the job's code."""

    commit: str | None = None
    dirty: bool | None = None


class Run(Part):
    """The run this capsule belongs to."""

    id: str | None = None
    name: str | None = None
    host: str | None = None
    world_size: Count | None = None
    command: str | list[str] | None = None
    seed: Integer | None = None
    backend: str | None = None
    restart: Count | None = None
    code: Code | None = None
    overfit: bool | None = None


class Position(Part):
    """Where the run stood."""

    global_step: Count | None = None
    tokens_seen: Count | None = None
    epoch: float | None = None
    data_cursor: dict[str, Any] | None = None


class Artifact(Part):
    """A named thing with its digest."""

    name: str | None = None
    revision: str | None = None
    sha256: str | None = None


class Identity(Part):
    """What the job was made of."""

    model: Artifact | None = None
    adapter: Artifact | None = None
    tokenizer: Artifact | None = None
    chat_template: Artifact | None = None
    base_checkpoint: Artifact | None = None


class Tokenizer(Part):
    """The tokenizer's special ids."""

    vocab_size: Count | None = None
    bos_id: Integer | None = None
    eos_id: Integer | None = None
    pad_id: Integer | None = None
    stop_ids: list[Integer] | None = None
    special_ids: dict[str, Integer] | None = None
    adds_bos: bool | None = None
    response_template_ids: list[Integer] | None = None


class Rope(Part):
    """Rotary position embedding."""

    style: Literal["half", "interleaved"] | None = None
    theta: float | None = None
    scaling: dict[str, Any] | None = None


class Vision(Part):
    """The vision tower."""

    image: Any = None
    patch: Any = None
    merge: Any = None
    has_cls: bool | None = None
    features: Any = None


class Model(Part):
    """The model's architecture."""

    vocab_size: Count | None = None
    embedding_rows: Count | None = None
    layers: Count | None = None
    hidden: Count | None = None
    intermediate: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = None
    experts: Count | None = None
    tied_embeddings: bool | None = None
    norm_eps: float | None = None
    dtype: str | None = None
    max_positions: Count | None = None
    sliding_window: Count | None = None
    use_cache: bool | None = None
    attention: str | None = None  # fused, or materialised: whether scores of [T, T] are kept
    mlp: str | None = None  # gelu or gelu-written-out (two matrices), or gated (three)
    norm: str | None = None  # layer or rms
    dropout: float | None = None  # the largest
    library: str | None = None  # whose model it is, where a library made it: transformers
    rope: Rope | None = None
    causal_alignment: Literal["top-left", "bottom-right"] | None = None
    vision: Vision | None = None
    initialised: Literal["random", "pretrained"] | None = None
    parameters: Count | None = None


class Optimizer(Part):
    """The optimizer and its constants."""

    name: str | None = None
    lr: float | None = None
    betas: list[float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    decoupled: bool | None = None


class Schedule(Part):
    """The learning-rate schedule."""

    name: str | None = None
    warmup_steps: Count | None = None
    total_steps: Count | None = None


class DataLoader(Part):
    """The data loader."""

    workers: Count | None = None
    pin_memory: bool | None = None
    prefetch: Count | None = None


class Sharding(Part):
    """How parameters are sharded."""

    kind: str | None = None
    stage: Count | None = None
    offload: bool | str | None = None


class Training(Part):
    """How the job trains."""

    objective: str | None = None
    reduction: Literal["token-mean", "sequence-mean", "sum"] | None = None
    ignore_index: Integer | None = None
    accumulation_steps: Count | None = None
    micro_batch: Count | None = None
    max_length: Count | None = None
    precision: str | None = None
    optimizer: Optimizer | None = None
    schedule: Schedule | None = None
    max_grad_norm: float | None = None
    loss_masking: Literal["all", "response"] | None = None
    packing: bool | str | None = None
    epochs: float | None = None
    dataset_samples: Count | None = None
    preprocessing_sha256: str | None = None
    augmentation: Any = None
    dataloader: DataLoader | None = None
    sharding: Sharding | None = None
    activation_checkpointing: bool | str | None = None
    data_parallel: Count | None = None
    tensor_parallel: Count | None = None
    pipeline_parallel: Count | None = None


class Slo(Part):
    """Service-level objectives in seconds."""

    ttft: float | None = None
    tpot: float | None = None


class Serving(Part):
    """How the server is set up."""

    slo: Slo | None = None
    max_batch: Count | None = None
    chunk_size: Count | None = None
    buckets: list[Any] | None = None
    block_size: Count | None = None
    kv_dtype: str | None = None
    kv_scale: Any = None
    prefix_cache: bool | str | None = None


class Environment(Part):
    """Versions and hardware; peaks in FLOP/s and bytes/s."""

    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    driver: str | None = None
    nccl: str | None = None
    gpu: str | None = None
    peak_flops: float | None = None
    peak_bandwidth: float | None = None
    os: str | None = None
    container: str | None = None
    packages: dict[str, str] | None = None
    deterministic: Any = None


class AttachedFile(Part):
    """An original kept under ``files/``."""

    path: str | None = None
    kind: Literal["log", "trace", "snapshot", "config", "other"] | None = None
    bytes: Count | None = None
    sha256: str | None = None


class Manifest(Part, dict=True):
    """The whole manifest. ``placement``, ``config`` and a loaded checkpoint's ``contract`` are free-form mappings."""

    format: str = FORMAT
    id: str = ""
    title: str = ""
    status: Status = "recording"
    created: str | None = None
    producer: str | None = None
    writer: Writer | None = None
    phase: Phase | None = None
    run: Run | None = None
    trigger: Trigger | None = None
    position: Position | None = None
    identity: Identity | None = None
    identity_inference: Identity | None = None
    tokenizer: Tokenizer | None = None
    model: Model | None = None
    training: Training | None = None
    serving: Serving | None = None
    placement: Any = None
    config: Any = None
    contract: Any = None
    environment: Environment | None = None
    files: list[AttachedFile] | None = None

    @property
    def raw(self) -> dict[str, Any]:
        """The JSON object as it was read, with the fields this version does not know."""
        return self.__dict__.get("raw_mapping", {})


class RankState(Part):
    """``rank.json``: what one rank says of itself; ``heartbeat`` in Unix seconds of its host's clock."""

    format: str = "llmconsole.rank/1"
    rank: Count = 0
    host: str | None = None
    pid: Count | None = None
    process_start: str | None = None
    started: str | None = None
    heartbeat: float | None = None
    status: Status = "recording"
    trigger: Trigger | None = None
    step: Count | None = None
    files: list[AttachedFile] | None = None
