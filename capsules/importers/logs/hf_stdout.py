"""What the Hugging Face Trainer prints: Python dicts, with numbers (version 4) or strings (version 5) as values."""

from __future__ import annotations

import re

from .log import NUMBER, Log, Stateless, number

FORMAT = "Hugging Face Trainer"
NEEDED = b""
SIGN = (
    rb"\{'(?:loss|eval_loss|train_runtime|grad_norm|eval_[\w/-]{1,80}|train_loss)': (?:'|tensor\(|np\.float\d\d\()?"
    rb"[-+]?(?:\d|nan|inf|\.\d).{0,4000}'(?:epoch|learning_rate)':"
)

_DICT = re.compile(r"""\{ ?(['"][\w/@.:%+() -]{1,200}['"]: .*)\}""")
_NAME = r"""['"]([\w/@.:%+() -]{1,200})['"]: """
_VALUE = rf"""['"]({NUMBER})['"]|({NUMBER})|(?:tensor|np\.float\d+)\(({NUMBER})[^)]{{0,80}}\)|['"](\d+)/\d+['"]"""
_ITEM = re.compile(rf"{_NAME}(?:{_VALUE})\s*(?:,|\}}|$)")
_KNOWN = frozenset({"loss", "grad_norm", "learning_rate", "epoch", "train_loss", "train_runtime", "eval_loss"})
_STEPS = ("step", "global_step", "global_step/max_steps")


class Lines(Stateless):
    """Reads them. The dicts name an epoch and no step: where they do not, a step is the count of training lines."""

    marks = (b"{'", b'{"')

    def __init__(self, log: Log) -> None:
        self._log = log
        self._lines = 0
        self._stepped = False

    def take(self, line: str) -> bool:
        """Use one line."""
        found = _DICT.search(line)
        if found is None:
            return False
        values: dict[str, float] = {}
        step: int | None = None
        for name, quoted, plain, wrapped, of in _ITEM.findall(found[1] + "}"):
            if name in _STEPS:
                whole = number(quoted or plain or of)
                step = int(whole) if whole is not None and whole == whole and 0 <= whole < 2**63 else None
            elif (value := number(quoted or plain or wrapped)) is not None:
                values[name] = value
        if not any(name in _KNOWN or name.startswith("eval_") for name in values) or len(values) < 2:
            return False
        evaluation = any(name.startswith("eval_") for name in values) and "loss" not in values
        at = self._step(step, counts="loss" in values and not evaluation)
        time = self._log.time(line)
        for name, value in values.items():
            self._log.scalar(name, at, value, time)
        return True

    def _step(self, given: int | None, *, counts: bool) -> int:
        """Where a line stands: the step it names, else how many lines of training there were."""
        if given is not None:
            self._stepped = True
        elif self._stepped:
            given = self._log.step or 0
        else:
            self._lines += counts
            given = self._lines
            self._log.run.note("the log names no steps: a step is the count of the lines that report a training loss")
        if counts:
            self._log.reached(given, FORMAT)
        return given
