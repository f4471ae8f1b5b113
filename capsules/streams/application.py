"""Records of retrieval, agents, media and diffusion."""

from __future__ import annotations

from typing import Any, Literal

from .base import Count, Integer, Part, Record


class Chunk(Part):
    """A piece of a document; ``start`` and ``end`` are character offsets."""

    id: str | int | None = None
    start: Count | None = None
    end: Count | None = None
    text: str | None = None
    tokens: Count | None = None


class Embedder(Part):
    """The model that makes vectors."""

    model: str | None = None
    revision: str | None = None
    prefix: str | None = None
    max_tokens: Count | None = None


class RagDocument(Record):
    """One document of the index."""

    id: str | int | None = None
    sha256: str | None = None
    text: str | None = None
    tokens: Count | None = None
    acl: list[str] | str | None = None
    valid_from: str | float | None = None
    valid_to: str | float | None = None
    chunks: list[Chunk] | None = None
    embedder: Embedder | None = None


class Hit(Part):
    """One chunk at one stage of a query."""

    id: str | int | None = None
    score: float | None = None
    start: Count | None = None
    end: Count | None = None


class Claim(Part):
    """One claim of an answer and what supports it."""

    text: str | None = None
    support: list[str | int] | None = None
    supported: bool | None = None


class Citation(Part):
    """One citation of an answer."""

    document: str | int | None = None
    start: Count | None = None
    end: Count | None = None
    quote: str | None = None


class RagQuery(Record):
    """One query through the stages of retrieval."""

    id: str | int | None = None
    text: str | None = None
    time: str | float | None = None
    principal: str | list[str] | None = None
    gold: list[str | int] | None = None
    stages: dict[str, list[Hit]] | None = None
    threshold: float | None = None
    context_limit: Count | None = None
    answer: str | None = None
    expected_answer: str | None = None
    answer_correct: bool | None = None
    claims: list[Claim] | None = None
    citations: list[Citation] | None = None
    embedder: Embedder | None = None
    reported: dict[str, float] | None = None


class StepChecks(Part):
    """What was checked before a tool ran."""

    schema: Any = None
    business: Any = None
    permission: Any = None


class MemoryItem(Part):
    """A remembered value that a step read; times in Unix seconds."""

    key: str | None = None
    written_at: float | None = None
    expires_at: float | None = None
    domain: str | None = None


class AgentStep(Record):
    """One step of an agent's run."""

    run: str | int | None = None
    turn: Count | None = None
    kind: Literal["model", "tool_call", "tool_result", "message", "cancel", "memory_read"] | None = None
    call_id: str | None = None
    parent_call_id: str | None = None
    attempt: Count | None = None
    tool: str | None = None
    arguments: Any = None
    effect: Literal["read", "write"] | None = None
    idempotency_key: str | None = None
    checks: StepChecks | None = None
    status: Literal["ok", "error", "timeout", "cancelled"] | None = None
    outcome: Literal["applied", "not_applied", "unknown"] | None = None
    result: Any = None
    error: Any = None
    control_from_result: Any = None
    environment_sha256: str | None = None
    resources: Any = None
    memory: MemoryItem | None = None
    domain: str | None = None
    tokens: Count | None = None


class Predicate(Part):
    """The check that decides whether a run reached its goal."""

    name: str | None = None
    reads_environment: bool | None = None
    value: Any = None


class ClaimedAction(Part):
    """Something the agent says it did."""

    action: str | None = None
    target: Any = None


class ExpectedWrite(Part):
    """A write the task demands."""

    tool: str | None = None
    arguments: Any = None


class AgentOutcome(Record):
    """How a run ended, as claimed and as checked."""

    run: str | int | None = None
    claimed_success: bool | None = None
    claims: list[ClaimedAction] | None = None
    predicate: Predicate | None = None
    expected_writes: list[ExpectedWrite] | None = None
    reward: float | None = None
    resources_open: Any = None


class Size(Part):
    """Pixels."""

    width: Count | None = None
    height: Count | None = None


class Video(Part):
    """A video as it was sampled; times in seconds."""

    frames: Count | None = None
    fps: float | None = None
    grid: list[Count] | None = None
    sampled_indices: list[Integer] | None = None
    timestamps: list[float] | None = None
    duration: float | None = None
    events: Any = None
    query_time: float | None = None


class AudioChunk(Part):
    """One piece of an audio stream; times in seconds."""

    start: float | None = None
    end: float | None = None
    state_in_sha256: str | None = None
    state_out_sha256: str | None = None
    text: str | None = None


class Audio(Part):
    """An audio stream; rates in Hz."""

    sample_rate: float | None = None
    expected_sample_rate: float | None = None
    chunks: list[AudioChunk] | None = None


class MediaSample(Record):
    """One sample with image, video or audio and what preprocessing made of it."""

    id: str | int | None = None
    image: Size | None = None
    resized: Size | list[Count] | None = None
    crop: Any = None
    boxes_source: list[list[float]] | None = None
    boxes_model: list[list[float]] | None = None
    box_convention: Literal["original", "resized", "thousand"] | None = None
    placeholders: Count | list[Count] | None = None
    features: Count | list[Count] | None = None
    patch: Any = None
    merge: Any = None
    has_cls: bool | None = None
    patch_order: Any = None
    tile_order: Any = None
    tubelet_order: Any = None
    media_sha256: list[str] | str | None = None
    feature_sha256: list[str] | str | None = None
    padding_mask_sum: Count | None = None
    valid_length: Count | None = None
    video: Video | None = None
    audio: Audio | None = None


class ModalLoss(Record):
    """The loss of one modality in one step."""

    modality: str | None = None
    loss_sum: float | None = None
    tokens: Count | None = None
    reported: float | None = None


class Codebook(Record):
    """Use of a codebook; ``counts`` per entry."""

    size: Count | None = None
    counts: list[Count] | None = None
    tokens: Count | list[Integer] | None = None
    latent_scale: float | None = None
    expected_latent_scale: float | None = None


class Diffusion(Record):
    """How noise is scheduled and predicted."""

    prediction_type: str | None = None
    sampler_prediction_type: str | None = None
    alpha_bar_last: float | None = None
    zero_terminal_snr: bool | None = None
    sampler: str | None = None
