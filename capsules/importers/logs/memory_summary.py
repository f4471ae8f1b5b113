"""The table of torch.cuda.memory_summary(), in a file of its own or amid a log: one ``memory`` record a device."""

from __future__ import annotations

import re
from typing import Any

from .log import Log, count, size

FORMAT = "torch.cuda.memory_summary"
NEEDED = b"memory summary"
SIGN = rb"PyTorch \w{2,8} memory summary, device ID \d"

_TITLE = re.compile(r"PyTorch \w{2,8} memory summary, device ID (\d{1,4})")
_COUNTS = re.compile(r"\b(?:\w{2,6}) OOMs: (\d{1,12}).{0,60}?[Mm]alloc retries: (\d{1,12})")
_ROW = re.compile(r"^\|\s{1,12}([A-Za-z][\w -]{2,40}?)\s*\|(.*)\|\s*$")
_CELL = re.compile(r"\s*(-?\d{1,18})\s*([KMGTPE]?i?B)?\s*$")
#: Rows in torch's words, and what the current and the highest value of each are called here.
_NAMES: dict[str, tuple[str, str]] = {
    "allocated memory": ("allocated", "peak"),
    "active memory": ("active", "peak_active"),
    "requested memory": ("requested", "peak_requested"),
    "gpu reserved memory": ("reserved", "peak_reserved"),
    "reserved memory": ("reserved", "peak_reserved"),
    "non-releasable memory": ("fragmentation", "peak_fragmentation"),
}
#: Lines of one table, pools of both sizes included.
_LONGEST = 80


class Lines:
    """Reads them: what the allocator holds, its peaks, and how often it had to give its cache back."""

    marks = (b"memory summary, device ID",)

    def __init__(self, log: Log) -> None:
        self._log = log
        self._found: dict[str, Any] | None = None
        self._rank, self._lines = 0, 0
        self._step: int | None = None

    @property
    def open(self) -> bool:
        """Whether a table has begun."""
        return self._found is not None

    def take(self, line: str) -> bool:
        """Use one line."""
        if (title := _TITLE.search(line)) is not None:
            self.close()
            device = int(title[1])
            self._rank = self._log.rank if self._log.told else device
            # The table is of the step before it, and ends only where another line comes.
            self._found, self._lines, self._step = {"device": device}, 0, self._log.step
            return True
        if self._found is None:
            return False
        text = line.strip()
        self._lines += 1
        if not text.startswith("|") or self._lines > _LONGEST:
            if text:
                self.close()
            return False
        if (counts := _COUNTS.search(text)) is not None:
            self._found |= {"ooms": count(counts[1]), "retries": count(counts[2])}
        elif (row := _ROW.match(text)) is not None and (names := _NAMES.get(row[1].lower())) is not None:
            for name, cell in zip(names, row[2].split("|"), strict=False):
                if (value := _CELL.match(cell)) is not None and value[2]:
                    self._found.setdefault(name, size(value[1], value[2]))
        return True

    def close(self) -> None:
        """The table ends here."""
        found, self._found = self._found, None
        if found is None or not {"allocated", "reserved"} & found.keys():
            return
        self._log.run.record("memory", {"step": self._step, **found}, self._rank)
        if self._step is not None and found.get("retries") is not None:
            self._log.run.scalar("alloc_retries", self._step, float(found["retries"]), rank=self._rank)
