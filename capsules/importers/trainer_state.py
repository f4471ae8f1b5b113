"""transformers' ``trainer_state.json``, or its ``log_history`` alone: rows of metrics by step.

Source of the schema: transformers/trainer_callback.py, class TrainerState. Evaluation rows carry the prefix of their
data set (``eval_loss``, ``eval_NAME_loss``), the last row sums the training up (``train_loss``, ``train_runtime``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, cast

from ..errors import EvidenceError
from ..limits import MIB
from .prefix import decode_prefix
from .run import Run
from .source import Source

FORMAT = "transformers trainer state"

_LARGEST = 512 * MIB
#: Settings that are kept under ``config.trainer_state``.
_SETTINGS = (
    "logging_steps",
    "eval_steps",
    "save_steps",
    "max_steps",
    "num_train_epochs",
    "train_batch_size",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
    "is_hyper_param_search",
    "trial_name",
    "trial_params",
)


def sniff(source: Source) -> bool:
    """Whether the file is an object with ``log_history``, or a list of rows that have step and epoch."""
    head = source.head.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    if head.startswith("{"):
        return re.search(r'"log_history"\s*:\s*\[', head) is not None
    if not head.startswith("["):
        return False
    first = head[1:].lstrip()
    try:
        row, _ = json.JSONDecoder().raw_decode(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and "step" in row and "epoch" in row


def read(source: Source, out: Run) -> None:
    """Write every number of every row under its own key, and what the state says of the run to the manifest."""
    state, whole = decode_prefix(source.read(_LARGEST), str(source.path))
    rows = cast("dict[str, Any]", state).get("log_history") if isinstance(state, dict) else state
    if not isinstance(rows, list):
        raise EvidenceError("log_history is no list of rows", str(source.path))
    if not whole:
        source.ends_early("what stands before the tear was read")
        if rows and isinstance(rows[-1], dict) and "step" not in rows[-1]:
            rows = cast("list[Any]", rows[:-1])  # keys are sorted: the tear took the row's step
    if isinstance(state, dict):
        out.manifest(_stated(cast("dict[str, Any]", state)))
    step = 0
    for row in cast("list[Any]", rows):
        if not isinstance(row, dict):
            out.note("rows that are no objects left out")
            continue
        step = _read_row(cast("dict[str, Any]", row), step, out)


def _read_row(row: dict[str, Any], step: int, out: Run) -> int:
    """Write one row; a row without a step is of the step before. Returns the row's step."""
    given = number(row.get("step"))
    if given is not None and 0 <= given < 2**63:
        step = int(given)
    for key, value in row.items():
        found = number(value)
        if key == "step":
            continue
        if found is None:
            out.note("values that are no numbers left out")
        else:
            out.scalar(key, step, found)
    return step


def number(value: Any) -> float | None:
    """A float from a number or from text that spells one; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _stated(state: Mapping[str, Any]) -> dict[str, Any]:
    """Manifest fields that the state has a value for."""
    tokens = _count(state.get("num_input_tokens_seen"))
    position = {
        "global_step": _count(state.get("global_step")),
        "epoch": number(state.get("epoch")),
        "tokens_seen": tokens or None,  # zero where it was not counted
    }
    steps = _count(state.get("max_steps"))
    training = {
        "micro_batch": _count(state.get("train_batch_size")),
        "epochs": number(state.get("num_train_epochs")),
        "schedule": {"total_steps": steps} if steps else None,
    }
    settings = {name: state[name] for name in _SETTINGS if state.get(name) is not None}
    parts: dict[str, dict[str, Any]] = {
        "position": position,
        "training": training,
        "config": {"trainer_state": settings},
    }
    return {name: {key: each for key, each in part.items() if each is not None} for name, part in parts.items()}


def _count(value: Any) -> int | None:
    found = number(value)
    return int(found) if found is not None and math.isfinite(found) and 0 <= found < 2**63 else None
