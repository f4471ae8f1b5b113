"""nvidia-smi's table amid a training log: what each device holds, and who is on it, at the step that was reached."""

from __future__ import annotations

from ..gpu_monitor.nvidia import Table
from ..gpu_monitor.samples import Samples
from .log import Log

FORMAT = ""
NEEDED = b""
SIGN = b""


class Lines:
    """Reads them as the monitor's own log is read."""

    open = False
    marks = (b"NVIDIA-SMI", b"00000000:", b"0000:", b"MiB ", b"MiB|", b"Processes:")

    def __init__(self, log: Log) -> None:
        self._log = log
        self._samples = Samples(log.run)
        self._table = Table(self._samples)

    def take(self, line: str) -> bool:
        """Use one line."""
        if not line.startswith("|"):
            return False
        # A table before the first step belongs to none; who is on the device is told all the same.
        self._samples.step = -1 if self._log.step is None else self._log.step
        return self._table.take(line)

    def close(self) -> None:
        """The log ends here."""
        self._table.close()
