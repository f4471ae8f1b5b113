"""Record streams: the fields of each, as types that are checked when a record is written and when it is read."""

from __future__ import annotations

from .application import (
    AgentOutcome,
    AgentStep,
    Codebook,
    Diffusion,
    MediaSample,
    ModalLoss,
    RagDocument,
    RagQuery,
)
from .base import Record
from .machine import Allocation, Collective, KernelCheck, Memory, Profile, RankSummary, Scaling, Segment
from .serving import Counter, Environment, Evaluation, Generation, KvEvent, Request
from .training import Checksum, Event, Microbatch, ParamGroup, Recompute, Sample

#: name of a stream → the type of its records
STREAMS: dict[str, type[Record]] = {
    "events": Event,
    "samples": Sample,
    "microbatches": Microbatch,
    "param_groups": ParamGroup,
    "checksums": Checksum,
    "recompute": Recompute,
    "collectives": Collective,
    "ranks": RankSummary,
    "scaling": Scaling,
    "memory": Memory,
    "allocations": Allocation,
    "segments": Segment,
    "kernel_checks": KernelCheck,
    "requests": Request,
    "counters": Counter,
    "kv_events": KvEvent,
    "generations": Generation,
    "evaluations": Evaluation,
    "environments": Environment,
    "profile": Profile,
    "rag_documents": RagDocument,
    "rag_queries": RagQuery,
    "agent_steps": AgentStep,
    "agent_outcomes": AgentOutcome,
    "media_samples": MediaSample,
    "modal_losses": ModalLoss,
    "codebooks": Codebook,
    "diffusion": Diffusion,
}


def stream_type(name: str) -> type[Record]:
    """The type of a stream's records; of a stream this format does not know, one that checks step, rank and t."""
    return STREAMS.get(name, Record)


__all__ = ["STREAMS", "Record", "stream_type"]
