"""The log of llm.c, and of modded-nanogpt in its form: ``s:12 trl:9.79 lr:0.000012 norm:2.70``."""

from __future__ import annotations

import re

from .log import NUMBER, Log, Stateless, count, number

FORMAT = "llm.c"
NEEDED = b""
SIGN = rb"(?:^|[\n ])s:\d+ (?:trl|tel|eel):"

_LINE = re.compile(r"(?:^|\s)s:(\d+) ((?:\w{1,40}:\S{1,40}(?:\s{1,9}|$)){1,40})$")
_FIELD = re.compile(rf"\b(\w{{1,40}}):({NUMBER})(?=\s|$)")
#: trl: training loss; tel: loss on the validation split; eel: accuracy on HellaSwag.
_NAMES = {"trl": "loss", "tel": "eval_loss", "lr": "learning_rate", "norm": "grad_norm"}


class Lines(Stateless):
    """Reads them."""

    marks = (b"s:",)

    def __init__(self, log: Log) -> None:
        self._log = log

    def take(self, line: str) -> bool:
        """Use one line."""
        found = _LINE.search(line)
        step = count(found[1]) if found else None
        if found is None or step is None:
            return False
        time = self._log.time(line)
        for name, text in _FIELD.findall(found[2]):
            if (value := number(text)) is None:
                continue
            if name == "trl":
                self._log.reached(step, FORMAT)
            self._log.scalar(_NAMES.get(name, name), step, value, time)
        return True
