"""Blocks of OLMo and OLMo-core: ``[step=5/1000,epoch=1]`` and one indented ``name=value`` a line below it."""

from __future__ import annotations

import re

from .log import NUMBER, Log, Stateless, count, number

FORMAT = "OLMo"
NEEDED = b""
SIGN = rb"\[step=[\d,]+(?:/[\d,]+)?(?:,[^\]\n]{0,200})?\][^\n]*\n[^\n]{0,200}?[ \t]{2,}[\w/ ().-]{1,120}=[-+\d.na]"

_STEP = re.compile(r"\[step=(\d[\d,]*?)(?:/(\d[\d,]*?))?(?:,epoch=(\d+)[^\]]*|,[a-z][^\]]*)?\]")
_FIELD = re.compile(rf"\s{{2,20}}(\S[^=]{{0,199}}?)=({NUMBER})%?\s*$")

_NAMES = {
    "train/CE loss": "loss",
    "train/CrossEntropyLoss": "loss",
    "optim/total grad norm": "grad_norm",
    "optim/total_grad_norm": "grad_norm",
    "optim/LR (group 0)": "learning_rate",
    "optim/LR": "learning_rate",
    "optim/learning_rate_group0": "learning_rate",
    "optim/step skipped": "overflow",
    "throughput/device/TPS": "throughput",
    "throughput/device/tokens_per_second": "throughput",
    "eval/CE loss": "eval_loss",
    "eval/CrossEntropyLoss": "eval_loss",
}


class Lines(Stateless):
    """Reads them."""

    marks = (b"[step=",)
    open = False

    def __init__(self, log: Log) -> None:
        self._log = log
        self._step: int | None = None
        self._time: float | None = None
        self._rank = 0

    def take(self, line: str) -> bool:
        """Use one line."""
        if (found := _STEP.search(line)) is not None:
            self._step, self._time, self._rank = count(found[1]), self._log.time(line), self._log.rank
            self.open = self._step is not None
            return self.open
        if not self.open:
            return False
        found = _FIELD.search(line)
        value = number(found[2]) if found else None
        if found is None or value is None or self._step is None:
            # A line of another rank may come between; one without indentation ends the block.
            self.open = self._log.rank != self._rank or line[:1] in (" ", "\t")
            return False
        name = _NAMES.get(found[1], found[1])
        if name == "loss":
            self._log.reached(self._step, FORMAT)
        self._log.scalar(name, self._step, value, self._time)
        return True
