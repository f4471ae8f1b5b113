"""The eight items that a failure needs to be replayed, and which of them a capsule lacks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from .manifest import Artifact

if TYPE_CHECKING:
    from .reader import Capsule

#: Pairs of evidence for the same result: a trusted path beside the one in use.
_TRUSTED_PAIRS = (
    ("tensors.reference/*", "tensors.observed/*"),
    ("tensors.decode/full_logits", "tensors.decode/cached_logits|tensors.decode/chunked_logits"),
)


class ReplayItem(msgspec.Struct, frozen=True, kw_only=True):
    """One of the eight: whether it is there, and what of it is missing, as names of evidence."""

    name: str
    present: bool
    missing: tuple[str, ...] = ()


def replay_items(capsule: Capsule) -> tuple[ReplayItem, ...]:
    """The eight items, in the order in which a replay needs them."""
    return (
        _item("samples and token ids", _missing(capsule, "batches.input_ids", "batches.sample_ids|records.samples")),
        _item("digests of tokenizer, template, model and adapter", _missing_digests(capsule)),
        _item(
            "global step, token count, data cursor and random state",
            _missing(
                capsule,
                "manifest.position.global_step",
                "manifest.position.tokens_seen",
                "manifest.position.data_cursor",
                "rng",
            ),
        ),
        _item("shape, stride, dtype, device and placement", _missing_layout(capsule)),
        _item("resolved configuration", _missing(capsule, "manifest.config")),
        _item("statistics around the first anomaly", _missing_statistics(capsule)),
        _item("output of a trusted path beside the path in use", _missing_trusted(capsule)),
        _item(
            "errors, logs, traces and environment",
            _missing(capsule, "manifest.environment", "files.log|files.trace|records.events"),
        ),
    )


def _item(name: str, missing: Iterable[str]) -> ReplayItem:
    missing = tuple(missing)
    return ReplayItem(name=name, present=not missing, missing=missing)


def _missing(capsule: Capsule, *needs: str) -> list[str]:
    return [need for need in needs if not capsule.has(need)]


def _missing_digests(capsule: Capsule) -> list[str]:
    """A digest or revision of each; one that the job has none of is named "none", and an adapter may be left out."""
    identity = capsule.manifest.identity
    missing: list[str] = []
    for name in ("tokenizer", "chat_template", "model", "adapter"):
        artifact: Artifact | None = getattr(identity, name, None)
        if artifact is None:
            if name != "adapter" or capsule.has("tensors.adapter/*"):
                missing.append(f"manifest.identity.{name}")
        elif not artifact.sha256 and not artifact.revision and artifact.name != "none":
            missing.append(f"manifest.identity.{name}.sha256")
    return missing


def _missing_layout(capsule: Capsule) -> list[str]:
    stats = capsule.stats()
    described = any(stats.stride) and any(stats.device) if len(stats) else False
    described = described or any(
        array.stride is not None and array.device is not None
        for batch in capsule.batches()
        for array in batch.arrays.values()
    )
    return ([] if described else ["stats.stride|stats.device"]) + _missing(capsule, "manifest.placement")


def _missing_statistics(capsule: Capsule) -> list[str]:
    """Statistics of the trigger's step and of one before it; of any two steps where nothing triggered."""
    trigger = capsule.trigger
    steps = sorted(set(capsule.stats().step.tolist()))
    if not steps:
        return ["stats"]
    if trigger is None or trigger.step is None:
        return []
    missing: list[str] = []
    if trigger.step not in steps:
        missing.append(f"stats at step {trigger.step}")
    if trigger.step > 0 and steps[0] >= trigger.step:
        missing.append(f"stats before step {trigger.step}")
    return missing


def _missing_trusted(capsule: Capsule) -> list[str]:
    if any(capsule.has(trusted) and capsule.has(used) for trusted, used in _TRUSTED_PAIRS):
        return []
    if capsule.has("records.kernel_checks.reference") or capsule.has("records.generations.reference_output"):
        return []
    return ["tensors.reference/* and tensors.observed/*"]
