"""One optimizer window as it unfolds: what the loop did, and numbers that may still wait on a device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .internals import stands_in
from .ring import Micro
from .tape import Row, Tape
from .triggers import Trigger


@dataclass
class Window:
    """What is known of the window that is being recorded."""

    step: int
    everything: bool  # full statistics of all tensors
    due: bool  # the ring of batches is written
    began: float = field(default_factory=time.perf_counter)
    data_time: float = 0.0
    micros: list[Micro] = field(default_factory=list[Micro])
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    requests: list[Trigger] = field(default_factory=list[Trigger])
    logged: dict[str, Any] = field(default_factory=dict[str, Any])
    losses: list[Row] = field(default_factory=list[Row])
    recomputed: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    gradients: dict[str, Row] = field(default_factory=dict[str, Row])
    local_norms: list[Tensor] = field(default_factory=list[Tensor])
    # The scaler: its scale, and (scaled, unscaled) losses.
    scale: Tensor | None = None
    scaled: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    found_inf: list[Tensor] = field(default_factory=list[Tensor])
    total_norm: Tensor | None = None
    max_norm: float | None = None
    learning_rate: Any = None
    stepped: bool = False
    unscaled: bool = False
    skipped: bool = False
    backwards: int = 0
    backward_began: float = 0.0  # Unix seconds, the last one
    unreduced: int | None = None  # reductions that had been called when ``local_norms`` were taken by hand
    reduction_wait: float = 0.0  # seconds in backward after the last gradient was there: for the other ranks
    cleared: str = (
        ""  # gradients were zeroed with no step since backward: "after" it, or "before" that of another batch
    )
    # Read at the end:
    sharded: bool = False
    overflowed: bool = False
    numbers: dict[str, float] = field(default_factory=dict[str, float])
    local_values: list[float] = field(default_factory=list[float])
    parameter_values: list[float] = field(default_factory=list[float])
    update_values: list[float] = field(default_factory=list[float])
    waiting: list[tuple[Tensor, Callable[[list[float]], None]]] = field(
        default_factory=list[tuple[Tensor, Callable[[list[float]], None]]]
    )

    @property
    def micro(self) -> Micro:
        """The micro-batch at work, or the last one."""
        return self.micros[-1]

    @property
    def over(self) -> bool:
        """Whether the optimizer has stepped or was left out, or nothing was there to step for."""
        return self.stepped or self.skipped or self.backwards == 0

    @property
    def cursor(self) -> Any:
        """Where the data stands after this window, where the loop said so."""
        return next((micro.cursor for micro in reversed(self.micros) if micro.cursor is not None), None)

    def log(self, level: str, message: str) -> dict[str, Any]:
        """An event with words from the recorder itself, not yet among ``events``."""
        fields = {"level": level, "logger": "llmconsole.recorder", "message": message}
        return {"kind": "log", "step": self.step, "t": time.time(), **fields}

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Note that something happened now."""
        event = {
            "kind": kind,
            "step": self.step,
            "micro": self.micros[-1].index if self.micros else 0,
            "t": time.time(),
        }
        event |= {name: value for name, value in fields.items() if value is not None}
        self.events.append(event)
        return event

    def later(self, value: Any, sink: Callable[[float], None]) -> None:
        """Hand a number to ``sink``: now where it is one, with the window's one read where it is on a device."""
        if isinstance(value, Tensor):
            self.waiting.append((value, lambda values: sink(values[0])))
        elif value is not None:
            sink(float(value))

    def read(self, tape: Tape) -> None:
        """Take everything over from the devices, and give the numbers to those who asked for them."""
        waiting, self.waiting = self.waiting, []
        for (_, sink), values in zip(waiting, tape.read([tensor for tensor, _ in waiting]), strict=True):
            sink(values)


def number(value: Any) -> float | Tensor:
    """A number the loop hands over, copied where it is a tensor, into which the loop may go on writing.

    Raises:
        TypeError, ValueError: it is none.
    """
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1 or value.is_complex() or value.is_meta or stands_in(value):
        raise TypeError(f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device} is no number")
    return value.detach().clone()


def root_sum_square(values: list[float]) -> float | None:
    """√Σx², which carries NaN and Inf; None of nothing."""
    if not values:
        return None
    largest = max(values)
    if not math.isfinite(largest) or any(math.isnan(value) for value in values):
        return math.nan if any(math.isnan(value) for value in values) else math.inf
    return math.sqrt(math.fsum(value * value for value in values))
