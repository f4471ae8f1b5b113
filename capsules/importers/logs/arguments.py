"""The configuration that Megatron and DeepSpeed print at the start: ``  micro_batch_size ........ 4``."""

from __future__ import annotations

import re
from typing import Any

from ..arguments import stated_by
from .log import Log, Stateless, number

FORMAT = ""
NEEDED = b""
SIGN = b""

_LINE = re.compile(r"^(?:\[[^\]]*\] ?)*\s+(\w{1,100}) \.{2,100} ?(.{0,400})$")
_MOST = 3000


class Lines(Stateless):
    """Reads them, and states at the end what they say of the job."""

    marks = (b" ..",)

    def __init__(self, log: Log) -> None:
        self._log = log
        self._found: dict[str, Any] = {}

    def take(self, line: str) -> bool:
        """Use one line."""
        found = _LINE.match(line)
        if found is None:
            return False
        if len(self._found) < _MOST:
            self._found.setdefault(found[1], _value(found[2].strip()))
        return True

    def close(self) -> None:
        """The log ends here."""
        if not self._found:
            return
        self._log.run.manifest({"config": self._found, **stated_by(self._found)})


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    if text in ("None", ""):
        return None
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    value = number(text)
    return text if value is None else value
