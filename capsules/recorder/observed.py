"""Facts for the manifest that only running shows: precision, accumulation, clipping, checkpointing."""

from __future__ import annotations

from typing import Any

from . import parallel
from .loop import Loop
from .window import Window


def observed_facts(window: Window, loop: Loop, before: dict[str, Any]) -> dict[str, Any]:
    """Parts of the manifest as this window shows them; what the user gave in the manifest is not among them.

    Args:
        window: the window just finished.
        loop: with the rows of that window still on its tape.
        before: what an earlier window showed, which stays where this one is silent.
    """
    training: dict[str, Any] = dict(before.get("training", {}))
    stepped = window.stepped or window.skipped
    if stepped:
        training["accumulation_steps"] = len(window.micros)
    if window.max_norm is not None and window.max_norm != float("inf"):
        training["max_grad_norm"] = window.max_norm
    if loop.hooks.recomputes:
        training["activation_checkpointing"] = True
    shared = parallel.facts(loop.hooks) if loop.hooks.several else {}
    training |= shared.get("training", {})
    precision = _precision(window, loop)
    if precision is not None:
        training["precision"] = precision
    given = loop.given.get("training", {})
    facts: dict[str, Any] = {"training": {name: value for name, value in training.items() if name not in given}}
    if "placement" in shared and "mesh" not in (loop.given.get("placement") or {}):
        facts["placement"] = shared["placement"]
    # Scores of tags or classes say nothing of the vocabulary: their labels are no tokens of the row.
    scored = (micro for micro in window.micros if micro.layout is not None or "labels" not in micro.arrays)
    readings = next((micro.readings for micro in scored if micro.readings is not None), None)
    if readings is not None and "vocab_size" not in loop.given.get("model", {}) | before.get("model", {}):
        facts["model"] = {"vocab_size": readings.vocabulary}
    elif "model" in before:
        facts["model"] = before["model"]
    return facts


def _precision(window: Window, loop: Loop) -> str | None:
    parameters = {str(parameter.dtype) for parameter in loop.hooks.root.parameters()}
    computed = {row.about["dtype"] for row in loop.tape.rows if row.role == "activation"}
    if "float16" in computed:
        return "fp16-mixed"
    if "bfloat16" in computed:
        return "bf16-pure" if parameters == {"torch.bfloat16"} else "bf16-mixed"
    return "fp32" if computed and computed <= {"float32", "?"} else None
