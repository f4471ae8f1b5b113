"""Lines of DeepSpeed: overflows and loss scales, the engine's own steps, throughput and memory.

DeepSpeed prints beside a trainer that prints the same numbers; its learning rate and loss scale carry the side
``DeepSpeed``, so that no point counts twice.
"""

from __future__ import annotations

import re

from .log import NUMBER, Log, Stateless, count, number, size

FORMAT = "DeepSpeed"
NEEDED = b""
SIGN = (
    rb"\[(?:deepspeed|deepscale)\] OVERFLOW!|\[Rank \d+\] step=\d+, skipped=\d+, lr=|OVERFLOW! Rank \d+ Skipping step"
)

_OVERFLOW = re.compile(
    rf"OVERFLOW! Rank (\d+) Skipping step\.(?: Attempted loss scale: ({NUMBER}),"
    rf" (?:reducing to ({NUMBER})|but hysteresis is (\d+)))?"
)
_STEP = re.compile(r"(?:\[Rank (\d+)\] )?step=(\d+), skipped=(\d+), lr=\[([^\]]*)\]")
_SPEED = re.compile(r"(?:epoch=(\d+)/)?micro_step=(\d+)/global_step=(\d+), (.*)")
_PAIR = re.compile(rf"\b(\w{{1,60}})=({NUMBER})(GB|MB)?(?=,|\s|$)")
_USAGE = re.compile(r"\bMA ([\d.]+) GB\s+Max_MA ([\d.]+) GB\s+CA ([\d.]+) GB\s+Max_CA ([\d.]+) GB")
_PHASE = re.compile(r"see_memory_usage\] (.{1,200})$")
_NUMBER = re.compile(NUMBER)
_SPEED_NAMES = {"MemAllocated": "memory_allocated", "MaxMemAllocated": "memory_peak"}


class Lines(Stateless):
    """Reads them. An overflow names no step: those after the last logged step count on from it, a rank each."""

    marks = (b"OVERFLOW!", b"skipped=", b"global_step=", b"Max_MA ", b"see_memory_usage]")

    def __init__(self, log: Log) -> None:
        self._log = log
        self._after: dict[int, tuple[int, int]] = {}
        self._phase = ""

    def take(self, line: str) -> bool:
        """Use one line."""
        if (found := _OVERFLOW.search(line)) is not None:
            return self._overflow(line, found)
        if (found := _STEP.search(line)) is not None:
            return self._step(line, found)
        if (found := _SPEED.search(line)) is not None:
            return self._speed(line, found)
        if (found := _USAGE.search(line)) is not None:
            return self._usage(found)
        if (found := _PHASE.search(line)) is not None and "Virtual Memory" not in line:
            self._phase = found[1].strip()
            return True
        return False

    def _overflow(self, line: str, found: re.Match[str]) -> bool:
        log, rank = self._log, count(found[1]) or 0
        last = log.step or 0
        seen = self._after.get(rank, (last, 0))
        nth = seen[1] + 1 if seen[0] == last else 1
        self._after[rank] = (last, nth)
        step, time = last + nth, log.time(line)
        log.run.scalar("overflow", step, 1.0, time, side=FORMAT, rank=rank)
        before, after = (number(each) if each else None for each in (found[2], found[3]))
        log.event("optimizer_step_skipped", rank=rank, step=step, t=time, message=found[0])
        if before is not None:
            log.run.scalar("loss_scale", step, before, time, side=FORMAT, rank=rank)
            kept = before if found[4] else after
            log.event("scaler_update", rank=rank, step=step, t=time, scale_before=before, scale_after=kept)
        return True

    def _step(self, line: str, found: re.Match[str]) -> bool:
        step, skipped = count(found[2]), count(found[3])
        if step is None or skipped is None:
            return False
        log, time = self._log, self._log.time(line)
        rank = count(found[1]) if found[1] else None
        log.run.scalar("skipped steps", step, float(skipped), time, side=FORMAT, rank=rank)
        rates = [
            rate for each in _NUMBER.findall(found[4].replace("float64", "")) if (rate := number(each)) is not None
        ]
        if rates:
            log.run.scalar("learning_rate", step, rates[0], time, side=FORMAT, rank=rank)
        if log.step is None or step > log.step:
            log.reached(step, FORMAT)
        return True

    def _speed(self, line: str, found: re.Match[str]) -> bool:
        micro, step = count(found[2]), count(found[3])
        if micro is None or step is None:
            return False
        if step and micro % step == 0:
            self._log.run.manifest({"training": {"accumulation_steps": micro // step}})
        time = self._log.time(line)
        for pair in _PAIR.finditer(found[4]):
            name, text, unit = str(pair[1]), str(pair[2]), pair[3]
            value = size(text, unit) if unit else number(text)
            if value is not None:
                side = FORMAT if name in _SPEED_NAMES else None
                self._log.scalar(_SPEED_NAMES.get(name, name), step, value, time, "B" if unit else "", side)
        return True

    def _usage(self, found: re.Match[str]) -> bool:
        allocated, peak, reserved = (size(found[at], "GiB") for at in (1, 2, 3))
        entry = {"step": self._log.step, "allocated": allocated, "peak": peak, "reserved": reserved}
        self._log.run.record("memory", {**entry, "phase": self._phase or None}, self._log.rank)
        return True
