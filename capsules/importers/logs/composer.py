"""Blocks of Composer (LLM Foundry): ``[batch=5/4800]:`` and one indented ``Train name: value`` a line below it."""

from __future__ import annotations

import re

from .log import NUMBER, Log, Stateless, count, number

FORMAT = "Composer"
NEEDED = b""
SIGN = rb"\[batch=\d+/\d+\]:?[ ]*\r?\n[^\n]{0,80}?[ \t]Train [\w/.-]{1,120}: "

_BLOCK = re.compile(r"\[(Eval )?batch=(\d{1,18})/\d{1,18}\]")
_FIELD = re.compile(rf"\s(Train|Eval) ([\w/.\-]{{1,200}}): ({NUMBER})\s*$")
_HELD_OUT = re.compile(r"metrics/.{1,100}/(?:LanguageCrossEntropy|CrossEntropy)$|loss/eval/total$")
_NAMES = {
    "loss/train/total": "loss",
    "throughput/tokens_per_sec": "throughput",
    "l2_norm/grad/global": "grad_norm",
    "time/remaining_estimate": "",
}


class Lines(Stateless):
    """Reads them. Where a block counts batches within its epoch, its ``time/batch`` counts all that came before."""

    marks = (b"batch=",)
    open = False

    def __init__(self, log: Log) -> None:
        self._log = log
        self._step = 0

    def take(self, line: str) -> bool:
        """Use one line."""
        if (found := _BLOCK.search(line)) is not None:
            step = count(found[2])
            if not found[1] and step is not None:
                self._step = step
            self.open = step is not None
            return self.open
        found = _FIELD.search(line) if self.open else None
        value = number(found[3]) if found else None
        if found is None or value is None:
            self.open = self.open and line[:1] in (" ", "\t")
            return False
        held_out, name = found[1] == "Eval", str(found[2])
        if name == "time/batch" and not held_out and 0 <= value < 2**53:
            self._step = int(value) + 1
        if held_out:
            name = "eval_loss" if _HELD_OUT.match(name) else f"eval/{name}"
        elif name.startswith("lr-"):
            name = "learning_rate"
        name = _NAMES.get(name, name)
        if name == "loss":
            self._log.reached(self._step, FORMAT)
        if name:
            self._log.scalar(name, self._step, value, self._log.time(line))
        return True
