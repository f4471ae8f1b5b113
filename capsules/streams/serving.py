"""Records of serving, generation and evaluation. Times and intervals in seconds."""

from __future__ import annotations

from typing import Any

from .base import Count, Integer, Part, Record


class Interval(Part):
    """An interval that says on which clock and between which events it was taken."""

    value: float | None = None
    clock: str | None = None
    start_event: str | None = None
    end_event: str | None = None


Seconds = float | Interval


class Request(Record):
    """One request; ``itl`` are the gaps between its tokens."""

    id: str | None = None
    arrival: float | None = None
    first_token: float | None = None
    finished: float | None = None
    queue: Seconds | None = None
    tokenize: Seconds | None = None
    prefill: Seconds | None = None
    transfer: Seconds | None = None
    install: Seconds | None = None
    sample: Seconds | None = None
    network: Seconds | None = None
    ttft: Seconds | None = None
    e2e: Seconds | None = None
    server_e2e: Seconds | None = None
    itl: list[float] | None = None
    prompt_tokens: Count | None = None
    output_tokens: Count | None = None
    max_tokens: Count | None = None
    cached_tokens: Count | None = None
    prompt_sha256: str | None = None
    block_hashes: list[str | int] | None = None
    tenant: str | None = None
    priority: float | str | None = None
    worker: str | int | None = None
    gpu: str | int | None = None
    rack: str | int | None = None
    network_path: str | None = None
    compile_bucket: str | int | None = None
    batch_size: Count | None = None
    concurrent_decodes: Count | None = None
    preemptions: Count | None = None
    migrations: Count | None = None
    retries: Count | None = None
    cold: bool | None = None
    status: str | int | None = None
    weight_version: str | int | None = None
    temperature: float | None = None
    output_sha256: str | None = None


class Counter(Record):
    """One sample of a counter or gauge; ``value`` of a histogram maps its bucket bounds to counts."""

    name: str | None = None
    value: float | dict[str, float] | None = None
    labels: dict[str, str] | None = None


class KvKey(Part):
    """Everything two requests must share before they may share a cached block."""

    model: str | None = None
    tokenizer: str | None = None
    template: str | None = None
    rope: Any = None
    dtype: str | None = None
    adapter: str | None = None
    weight_version: str | int | None = None
    security_domain: str | None = None
    media: Any = None


class KvEvent(Record):
    """One event in the life of key-value cache blocks."""

    kind: str | None = None
    request: str | None = None
    blocks: list[Integer | str] | None = None
    block_size: Count | None = None
    refcount: Integer | list[Integer] | dict[str, Integer] | None = None
    hash: str | int | None = None
    parent_hash: str | int | None = None
    tokens: list[Integer] | Count | None = None
    matched_tokens: Count | None = None
    key: KvKey | None = None
    event_id: str | int | None = None
    descriptor: Any = None
    checksum: str | int | None = None
    layers: list[Integer] | Count | None = None
    total_blocks: Count | None = None
    engine_step: Count | None = None
    free: Count | None = None
    referenced: Count | None = None
    cached: Count | None = None


class Sampling(Part):
    """How the next token is drawn."""

    temperature: float | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: Count | None = None
    beams: Count | None = None


class Generation(Record):
    """One generated output; log-probabilities in nats."""

    id: str | None = None
    prompt_ids: list[Integer] | None = None
    output: str | None = None
    output_ids: list[Integer] | None = None
    finish_reason: str | None = None
    sampling: Sampling | None = None
    stop_ids: list[Integer] | None = None
    logprobs: list[float] | None = None
    reference_logprobs: list[float] | None = None
    reference_output: str | None = None
    training_mode: bool | None = None
    cached_tokens: Count | None = None
    image_present: bool | None = None
    image_blank: bool | None = None
    correct: bool | None = None


class Evaluation(Record):
    """One result of one evaluation suite on one slice."""

    name: str | None = None
    suite: str | None = None
    slice: str | None = None
    value: float | None = None
    n: Count | None = None
    stderr: float | None = None
    repeat: Count | None = None
    checkpoint_sha256: str | None = None
    harness: str | None = None
    harness_version: str | None = None
    template_sha256: str | None = None
    preprocessing_sha256: str | None = None
    training_mode: bool | None = None
    dtype: str | None = None
    higher_is_better: bool | None = None


class Environment(Record):
    """The environment of one side of a comparison: training, inference, working or failing."""

    side: str | None = None
    packages: dict[str, str] | None = None
    libraries: Any = None
    cuda: str | None = None
    cudnn: str | None = None
    driver: str | None = None
    gpu: str | None = None
    container: str | None = None
    dtype: str | None = None
    quantisation: Any = None
    flags: Any = None
