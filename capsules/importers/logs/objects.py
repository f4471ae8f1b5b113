"""JSON objects with a loss in them, behind what a logger puts before: ``INFO | train_inner | {"loss": "5.1", …}``."""

from __future__ import annotations

import re

from ..json_lines import Records, object_of
from ..names import is_loss
from .log import Log, Stateless

FORMAT = "JSON objects"
NEEDED = b"oss"
SIGN = rb"\{\"[^\n{}]{0,1000}?[Ll]oss[^\n\"{}]{0,40}\": ?\"?[-+.\dnN]"

_NAME = re.compile(r'"([^"]{0,120}loss[^"]{0,120})": ?"?[-+.\dnN]', re.IGNORECASE)


class Lines(Stateless):
    """Reads them, each as a line of a file of JSON lines is read."""

    marks = (b'{"',)

    def __init__(self, log: Log) -> None:
        self._log = log
        self._records = Records(log.run)

    def take(self, line: str) -> bool:
        """Use one line."""
        if not _NAME.search(line):
            return False
        record = object_of(line[line.index('{"') :].strip().encode())
        if record is None or not any(is_loss(name) for name in record):
            return False
        self._records.take(record, self._log.rank)
        if not any("val" in name for name in record):
            self._log.reached(self._records.step, FORMAT)
        return True
