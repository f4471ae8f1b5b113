"""Lines that a training loop of one's own prints: a step, and numbers with names, a loss among them.

``step 120/5000 | loss: 3.21 | lr 6.0e-04 | norm: 0.9 | dt: 338ms``, ``step:100/5100 train_loss:5.1 step_avg:12ms``, and
the numbers behind a tqdm bar. Asked last.
"""

from __future__ import annotations

import re

from ..names import is_loss, standard
from .log import NUMBER, Log, Stateless, count, number

FORMAT = "own prints"
SIGN = (
    rb"num_updates=\d+,|\bIter\(train\) \[ *\d+/"
    rb"|\b(?:[Gg]lobal[_ ][Ss]tep|[Ii]teration|[Ii]ter|[Ss]tep)\b\s*[:=#]?\s*\d[\d,]{0,25}"
    rb"(?:\s{0,9}/\s{0,9}\d{1,25})?[^\n]{0,80}?"
    rb"\b(?:\w{1,20}[_ /])?[Ll]oss\b(?: train)?\s*[:=]?\s*(?:[-+.\d]|nan|inf)"
    rb"|\b\d{1,18}/\d{1,18} \[[\d:]{1,12}<[^\]\n]{0,80}loss\s*=\s*[\d.n]"
)

_STEP = re.compile(
    r"(?<![\w/])([Gg]lobal[_ ]?[Ss]tep|num_updates|[Ss]tep|[Ii]teration|[Ii]ter)(?:\(train\)\s{0,4}\[)?"
    r"\s{0,8}[:=#]?\s{0,8}(\d[\d,]{0,25}(?:\.0)?)(?:\s{0,8}/\s{0,8}(\d[\d,]{0,25}))?\]?(?![\w.])"
)
#: Of several counts in one line, an optimizer step is meant before an iteration, which may be a micro-batch.
_SUREST = ("g", "n", "s", "i")
_WORD = r"[A-Za-z_][\w/.\-]{0,40}"
_PAIR = re.compile(
    rf"(?<![\w.])({_WORD}(?: {_WORD}){{0,2}})(?:\s{{0,4}}[:=]\s{{0,4}}| )({NUMBER})\s?(ms|s|%)?(?![\w.:])"
)
_BAR = re.compile(
    r"(?:[Ee]poch (\d{1,9})[^|]{0,40}:\s.{0,200}?)?\b(\d{1,18})/(\d{1,18}) \[[\d:]+<[^\],]{0,40},[^\],]{0,40}, (.*)\]"
)


class Lines(Stateless):
    """Reads them. Where another reader knows the log's training lines, these carry a side of their own."""

    marks = (b"oss",)

    def __init__(self, log: Log) -> None:
        self._log = log
        self._bar: tuple[int, dict[str, tuple[float, str]]] | None = None

    def take(self, line: str) -> bool:
        """Use one line."""
        if "/" in line and "<" in line and (bar := _BAR.search(line)) is not None:
            return self._progress(bar)
        found = min(_STEP.finditer(line), key=lambda each: _SUREST.index(each[1][0].lower()), default=None)
        step = count(found[2].removesuffix(".0")) if found else None
        if found is None or step is None:
            return False
        values = _values(line[: found.start()] + " | " + line[found.end() :])
        if not any(is_loss(name) for name in values):
            return False
        self._write(step, values, self._log.time(line))
        return True

    def close(self) -> None:
        """The log ends here."""
        if self._bar is not None:
            self._write(*self._bar, None)
            self._bar = None

    def _progress(self, bar: re.Match[str]) -> bool:
        """A bar is painted many times a step: what it shows last counts."""
        at, total = count(bar[2]), count(bar[3])
        values = _values(bar[4])
        if at is None or total is None or not any(is_loss(name) for name in values):
            return False
        step = at + (count(bar[1]) or 0) * total if bar[1] else at
        if (stated := values.pop("global_step", None)) is not None and 0 <= stated[0] < 2**53:
            step = int(stated[0])
        if self._bar is not None and self._bar[0] != step:
            self._write(*self._bar, None)
        self._bar = (step, values)
        return True

    def _write(self, step: int, values: dict[str, tuple[float, str]], time: float | None) -> None:
        log = self._log
        side = "own prints" if log.leader not in ("", FORMAT) else None
        train = any(standard(name) == "loss" for name in values)
        if train and side is None:
            log.reached(step, FORMAT)
        for name, (value, unit) in values.items():
            named = standard(name)
            if named == "step_time" or unit == "ms":
                value, unit = value * (1e-3 if unit == "ms" else 1.0), "s"
            log.scalar(named, step, value, time, unit, side)


def _values(text: str) -> dict[str, tuple[float, str]]:
    """Names with value and unit."""
    found: dict[str, tuple[float, str]] = {}
    for name, printed, unit in _PAIR.findall(text):
        if (value := number(printed)) is not None:
            found.setdefault(name, (value, unit))
    return found
