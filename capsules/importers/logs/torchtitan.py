"""Lines of torchtitan: ``step: 10  loss: 8.1  grad_norm: 1.2  memory: 4.9GiB(6%)  tps: 28``, and of its validation."""

from __future__ import annotations

import re

from .log import NUMBER, Log, Stateless, count, number, size

FORMAT = "torchtitan"
NEEDED = b""
SIGN = rb"step:\s+\d+\s.{0,12}loss:\s+.{0,160}(?:tps|memory):"

_STEP = re.compile(r"(validate )?step:\s*(\d[\d,]*)\s+(\S+:\s.*)")
_FIELD = re.compile(
    rf"(?<![\w/()%.])([A-Za-z][\w/()%.]{{0,60}}):\s{{1,20}}({NUMBER})(?:(GiB|MiB|s|%)(?:\(({NUMBER})%\))?)?(?=\s|$)"
)
_SIZE = re.compile(r"Model (.+?) size: ([\d,]+) total parameters")
_SETUP = re.compile(
    r"local batch size:?\s+(\d+), global batch size:?\s+\d+, (?:gradient accumulation steps (\d+), )?"
    r"sequence length:?\s+(\d+), total steps:?\s+(\d+) \(warmup:?\s+(\d+)\)"
)
_DEVICE = re.compile(r"CUDA capacity: (.+?) with [\d.]+GiB memory")
_RETRIES = re.compile(r"\b(\d{1,9}) CUDA memory allocation retries")

_NAMES = {"tps": "throughput", "memory": "memory_reserved", "mfu": "mfu(%)"}
_UNITS = {"throughput": "tokens/s", "memory_reserved": "B", "mfu(%)": "%"}


class Lines(Stateless):
    """Reads them."""

    marks = (b"step:", b" total parameters", b"global batch size", b"CUDA capacity:", b"allocation retries")

    def __init__(self, log: Log) -> None:
        self._log = log

    def take(self, line: str) -> bool:
        """Use one line."""
        found = _STEP.search(line)
        return self._setup(line) if found is None else self._metrics(line, found)

    def _metrics(self, line: str, found: re.Match[str]) -> bool:
        step = count(found[2])
        fields = list(_FIELD.finditer(found[3]))
        if step is None or not any(str(each[1]).endswith("loss") for each in fields):
            return False
        log, before = self._log, "eval_" if found[1] else ""
        if not before:
            log.reached(step, FORMAT)
        time = log.time(line)
        for field in fields:
            name, text, unit, share = str(field[1]), str(field[2]), field[3] or "", field[4]
            value = size(text, unit) if unit in ("GiB", "MiB") else number(text)
            if value is None:
                continue
            named = _NAMES.get(name, name)
            log.scalar(f"{before}{named}", step, value, time, _UNITS.get(named, unit))
            if share and (part := number(share)) is not None:
                log.scalar(f"{before}{named}(%)", step, part, time, "%")
        return True

    def _setup(self, line: str) -> bool:
        run = self._log.run
        if (found := _SETUP.search(line)) is not None:
            batch, accumulation, length, total, warmup = (count(each) if each else None for each in found.groups())
            schedule = {"total_steps": total, "warmup_steps": min(warmup or 0, total or 0)}
            training = {"micro_batch": batch, "accumulation_steps": accumulation, "max_length": length}
            run.manifest({"training": {**training, "schedule": schedule}})
        elif (found := _SIZE.search(line)) is not None:
            run.manifest({"model": {"parameters": count(found[2])}, "identity": {"model": {"name": found[1][:200]}}})
        elif (found := _DEVICE.search(line)) is not None:
            run.manifest({"environment": {"gpu": found[1][:200]}})
        elif (found := _RETRIES.search(line)) is not None:
            # Printed just before the line of the step that it belongs to.
            step = (self._log.step or 0) + 1
            self._log.scalar("alloc_retries", step, float(found[1]), self._log.time(line))
            self._log.event("log", step=step, level="warning", logger="torchtitan", message=found[0])
        else:
            return False
        return True
