"""The parameter records of a capsule, window by window, with fields of the right type or None."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ...capsules import Capsule

LOW_PRECISION = ("bfloat16", "float16")


@dataclass(frozen=True)
class Parameter:
    """One parameter in one window; None where the record does not say.

    ``state`` maps the name of an optimizer's tensor to its dtype and root mean square.
    """

    step: int
    rank: int
    name: str
    group: str | None
    shape: tuple[int, ...] | None
    dtype: str | None
    trained: bool | None
    owned: bool | None
    optimizer: str | None
    has_grad: bool | None
    grad_norm: float | None
    update_norm: float | None
    moved: float | None
    absmedian: float | None
    lr: float | None
    decay: float | None
    count: int | None
    master: str | None
    adapter: bool
    shared_with: tuple[str, ...]
    state: dict[str, tuple[str | None, float | None]]

    @property
    def size(self) -> int:
        """Elements; 0 where the shape is not known."""
        return math.prod(self.shape) if self.shape is not None else 0


def windows(capsule: Capsule) -> dict[tuple[int, int], list[Parameter]]:
    """Parameters by (step, rank) in order; the last record of a name in a window counts."""
    found: dict[tuple[int, int], dict[str, Parameter]] = defaultdict(dict)
    for record in capsule.records("param_groups"):
        name, step = record.get("name"), record.get("step")
        if isinstance(name, str) and name:
            parameter = _parsed(record, name, step if isinstance(step, int) else 0)
            found[parameter.step, parameter.rank][name] = parameter
    return {key: list(rows.values()) for key, rows in sorted(found.items())}


def by_name(rows: Iterable[list[Parameter]]) -> dict[str, list[Parameter]]:
    """Records of each parameter over the windows."""
    found: dict[str, list[Parameter]] = defaultdict(list)
    for window in rows:
        for parameter in window:
            found[parameter.name].append(parameter)
    return dict(found)


def shown(names: Iterable[str], most: int) -> list[str]:
    """Names for an evidence row, the rest as a count."""
    listed = list(names)
    return listed if len(listed) <= most else [*listed[:most], f"… and {len(listed) - most} more"]


def overflowed(capsule: Capsule) -> frozenset[int]:
    """Steps that a scaler skipped, or may have."""
    flags = capsule.scalars("overflow")
    steps = {int(step) for step in flags.step[flags.value > 0]}
    for event in capsule.records("events"):
        if event.get("kind") == "optimizer_step_skipped" and isinstance(event.get("step"), int):
            steps.add(event["step"])
    return frozenset(steps)


def rate_at(capsule: Capsule, step: int) -> float | None:
    """The learning rate of a step, None where it is not known."""
    series = capsule.scalars("learning_rate")
    at = np.flatnonzero(series.step == step)
    return float(series.value[at[-1]]) if len(at) and math.isfinite(series.value[at[-1]]) else None


def _parsed(record: dict[str, Any], name: str, step: int) -> Parameter:
    shape, state, shared = record.get("shape"), record.get("state"), record.get("shared_with")
    return Parameter(
        step=step,
        rank=record["rank"],
        name=name,
        group=None if record.get("group") is None else str(record["group"]),
        shape=tuple(shape) if isinstance(shape, list) and all(type(each) is int for each in shape) else None,
        dtype=_text(record.get("dtype")),
        trained=_flag(record.get("requires_grad")),
        owned=_flag(record.get("in_optimizer")),
        optimizer=_text(record.get("optimizer")),
        has_grad=_flag(record.get("has_grad")),
        grad_norm=_number(record.get("grad_norm")),
        update_norm=_number(record.get("update_norm")),
        moved=_number(record.get("moved_fraction")),
        absmedian=_number(record.get("weight_absmedian")),
        lr=_number(record.get("lr")),
        decay=_number(record.get("weight_decay")),
        count=record["state_step"] if type(record.get("state_step")) is int else None,
        master=_text(record.get("master_dtype")),
        adapter=bool(record.get("adapter")) or "lora_" in name,
        shared_with=(shared,)
        if isinstance(shared, str)
        else tuple(map(str, shared))
        if isinstance(shared, list)
        else (),
        state={
            str(key): (_text(value.get("dtype")), _number(value.get("rms")))
            for key, value in (state.items() if isinstance(state, dict) else ())
            if isinstance(value, dict)
        },
    )


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return value.removeprefix("torch.") if isinstance(value, str) else None
