"""Activation checkpointing beside a key-value cache that the forward pass fills."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..finding import Evidence, Finding
from ..registry import rule
from .evaluations import PHASES
from .oom import gib
from .records import whole

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "memory/checkpointing-with-cache",
    stage="runtime",
    kind="hygiene",
    severity="warning",
    needs=("manifest.training.activation_checkpointing", "manifest.model.use_cache"),
)
def checkpointing_with_cache(capsule: Capsule) -> Iterator[Finding]:
    """Activation checkpointing is on, and the model keeps a key-value cache in training.

    What it checks:
        activation_checkpointing and use_cache in the manifest, and bytes of a key-value cache in phases of training.
    Why it matters:
        The cache keeps keys and values of every layer alive, which checkpointing was to let go, and the recomputation
        fills it a second time: memory is lost, and attention may see each key twice.
    How it decides:
        Both are on in a training job. Likely; confirmed where a cache was measured in forward, backward or optimizer.
    Looks like it but is not:
        Hugging Face models, whose configuration says use_cache and which switch it off themselves under gradient
        checkpointing (quiet, unless a cache was measured); evaluation, generation and serving, which need the cache.
    What to try next:
        Print type(outputs.past_key_values) after a training forward; compare the peak with use_cache=False.
    Fix:
        model.config.use_cache = False while training.
    """
    manifest = capsule.manifest
    if manifest.phase not in (None, "training", "multimodal"):
        return
    training, model = manifest.training, manifest.model
    on = training.activation_checkpointing if training is not None else None
    if model is None or model.use_cache is not True or not on or str(on).lower() in ("none", "false", "no"):
        return
    cache = max(
        (
            size
            for each in capsule.records("memory")
            if str(each.get("phase") or "").lower() not in (*PHASES, "prefill", "decode", "generation")
            if (size := whole(each.get("kv_cache")))
        ),
        default=0,
    )
    if not cache and _switched_off(capsule):
        return
    measured = f" {gib(cache)} of it were measured in training." if cache else ""
    yield Finding(
        confidence="confirmed" if cache else "likely",
        title="Activation checkpointing beside a key-value cache",
        summary=f"activation_checkpointing is {on} and use_cache is true in a training job.{measured}",
        evidence=(
            Evidence(name="use_cache", value=True, expected=False),
            Evidence(name="checkpointing", value=on, note="training.activation_checkpointing"),
            *([Evidence(name="kv_cache", value=cache, expected=0, unit="B")] if cache else []),
        ),
        cause="the forward pass returns a cache of keys and values that training has no use for",
        next=("compare the peak with use_cache=False",),
        fix=("use_cache = False while training",),
    )


def _switched_off(capsule: Capsule) -> bool:
    """Whether the model's library does it itself: it said so, or the model is one of transformers."""
    for event in capsule.records("events"):
        words = str(event.get("message") or "")
        if "use_cache" in words and ("Setting `use_cache=False`" in words or "use_cache=False" in words):
            return True
    model, config = capsule.manifest.model, capsule.manifest.config
    if model is not None and model.library == "transformers":
        return True
    return isinstance(config, dict) and "transformers_version" in config
