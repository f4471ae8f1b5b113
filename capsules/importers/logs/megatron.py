"""Lines of Megatron-LM and its forks: iterations, validation, timers, memory."""

from __future__ import annotations

import math
import re

from ..names import standard
from .log import Log, Stateless, count, number

FORMAT = "Megatron-LM"
NEEDED = b""
SIGN = (
    rb"iteration\s{1,20}\d{1,19}\s{0,20}/\s{0,20}\d{1,19}\s{0,20}\|[^\n]{0,200}?"
    rb"(?:consumed|elapsed time per iteration|learning rate|lr:)"
)

_ITERATION = re.compile(r"\biteration\s+(\d+)\s*/\s*(\d+)\s*\|(.*)")
_VALIDATION = re.compile(r"validation loss at (?:iteration\s+(\d+)|the end of training)([^|]*)\|(.*)")
_TIMERS = re.compile(r"time \(ms\) \|(.*)")
_MEMORY = re.compile(r"(?:\[Rank (\d+)\] )?\(after (\d+) iterations\) memory \(MB\) \|(.*)")
#: What a key is called here, with the factor to the unit and the unit.
_NAMES: dict[str, tuple[str, float, str]] = {
    "lm loss": ("loss", 1.0, ""),
    "lm-loss": ("loss", 1.0, ""),
    "loss": ("loss", 1.0, ""),
    "grad norm": ("grad_norm", 1.0, ""),
    "learning rate": ("learning_rate", 1.0, ""),
    "loss scale": ("loss_scale", 1.0, ""),
    "params norm": ("param_norm", 1.0, ""),
    "elapsed time per iteration (ms)": ("step_time", 1e-3, "s"),
    "elapsed time per iteration (s)": ("step_time", 1.0, "s"),
    "number of skipped iterations": ("overflow", 1.0, ""),
}
_NAN_ITERATIONS = "number of nan iterations"
#: A megabyte of Megatron's memory report is 1024 × 1024 bytes.
_MEMORY_NAMES = {"allocated": "memory_allocated", "max allocated": "memory_peak", "reserved": "memory_reserved"}
_MIB = float(1 << 20)


class Lines(Stateless):
    """Reads them. Megatron prints from the last rank; a line that names no rank is rank 0's here."""

    marks = (b"iteration", b"time (ms) |")

    def __init__(self, log: Log) -> None:
        self._log = log
        self._stated = False

    def take(self, line: str) -> bool:
        """Use one line."""
        if (found := _ITERATION.search(line)) is not None:
            return self._iteration(line, found)
        if (found := _VALIDATION.search(line)) is not None:
            return self._validation(line, found)
        if (found := _MEMORY.search(line)) is not None:
            return self._memory(found)
        if (found := _TIMERS.search(line)) is not None:
            return self._timers(found[1])
        return False

    def _iteration(self, line: str, found: re.Match[str]) -> bool:
        step = count(found[1])
        if step is None:
            return False
        log = self._log
        log.reached(step, FORMAT)
        time = log.time(line)
        values: dict[str, float] = {}
        scalar, rank = log.run.scalar, log.rank
        for field in found[3].split("|"):
            name, colon, text = field.partition(":")
            if not colon:  # the oldest versions print "lm loss 6.9E+00"
                name, _, text = field.strip().rpartition(" ")
            if (value := number(text)) is None:
                continue
            name = name.strip()
            values[name] = value
            named, factor, unit = _NAMES.get(name) or (standard(name), 1.0, "")
            scalar(named, step, value * factor, time, unit, None, rank)
        if values.get(_NAN_ITERATIONS) and "lm loss" not in values and "lm-loss" not in values:
            log.scalar("loss", step, math.nan, time)  # Megatron leaves the loss out of the line where it is NaN
        if not self._stated:
            self._stated = True
            log.run.manifest({"config": {"train_iters": count(found[2])}})
        return True

    def _validation(self, line: str, found: re.Match[str]) -> bool:
        step = count(found[1]) if found[1] else self._log.step
        if step is None:
            return False
        where = found[2].strip().removeprefix("on").strip()
        which = "" if where in ("", "validation set") else f" ({where})"
        time = self._log.time(line)
        for field in found[3].split("|"):
            name, _, text = field.partition(":")
            if (value := number(text)) is not None:
                name = name.strip()
                plain = name.replace("-", " ").removesuffix(" value") == "lm loss" and not which
                self._log.scalar("eval_loss" if plain else f"validation {name}{which}", step, value, time)
        return True

    def _memory(self, found: re.Match[str]) -> bool:
        rank, step = count(found[1]) if found[1] else self._log.rank, count(found[2])
        if rank is None or step is None:
            return False
        for field in found[3].split("|"):
            name, _, text = field.partition(":")
            if (value := number(text)) is not None:
                name = name.strip()
                self._log.run.scalar(_MEMORY_NAMES.get(name, f"memory {name}"), step, value * _MIB, unit="B", rank=rank)
        return True

    def _timers(self, fields: str) -> bool:
        step = self._log.step
        if step is None:  # timers of the set-up
            return True
        for field in fields.split("|"):
            name, _, text = field.partition(":")
            if (value := number(text)) is not None:
                self._log.scalar(f"time {name.strip()}", step, value * 1e-3, unit="s")
        return True
