"""Lines that a training loop of one's own prints: a step, and numbers with names, a loss among them.

``step 120/5000 | loss: 3.21 | lr 6.0e-04 | norm: 0.9 | dt: 338ms``, ``step:100/5100 train_loss:5.1 step_avg:12ms``, the
numbers in front of and behind a tqdm bar, ``Epoch: [1][ 20/5005] Loss 6.9``, and epochs alone. Asked last.
"""

from __future__ import annotations

import re

from ..names import BEGAN_ANEW, EpochSteps, is_loss, standard
from .log import NUMBER, Log, Stateless, count, number

FORMAT = "own prints"
NEEDED = b"oss"
SIGN = (
    rb"(?:^|[\r\n])\s{0,9}\d{1,9}/\d{1,9} (?:\[[=>.]{2}|- \d|\xe2\x94\x81)[^\n]{0,400}?\bloss: [\d.n]"
    rb"|num_updates=\d+,|\bIter\(train\) \[ *\d+/|\d\|\d{1,18}\|Loss: [\d.n]"
    rb"|\b(?:[Gg]lobal[_ ][Ss]tep|[Ii]teration|[Ii]ter|[Ss]tep|[Ee]poch)\b(?:\.\.\. \()?\s*[:=#]?\s*\[?\d[\d,]{0,25}\]?"
    rb"(?:\s{0,9}/\s{0,9}\d{1,25})?[^\n]{0,200}?"
    rb"\b(?:\w{1,20}[_ /])?[Ll]oss\b(?: train)?\s*[:=]?\s*(?:tensor\(|np\.float\d\d\()?(?:[-+.\d]|[Nn]a[Nn]|[Ii]nf)"
    rb"|\b\d{1,18}/\d{1,18} \[[\d:]{1,12}<[^\]\n]{0,80}loss\s*=\s*[\d.n]"
    rb"|[Ll]oss\s?[:=]\s?[\d.n][^\n]{0,80}?\d{1,3}%\|[^\n|]{0,400}\|\s*\d{1,18}/\d{1,18} \["
)

_STEP = re.compile(
    r"(?<![\w/])([Gg]lobal[_ ]?[Ss]tep|num_updates|[Ss]tep|[Ii]teration|[Ii]ter|[Bb]atch)(?:\(train\)\s{0,4}\[)?"
    r"(?:\.{3} \()?\s{0,8}[:=#]?\s{0,8}\[?(\d[\d,]{0,25}(?:\.0)?)(?:\s{0,8}/\s{0,8}(\d[\d,]{0,25}))?\]?(?![\w.])"
)
_EPOCH = re.compile(r"(?<![\w/])[Ee]poch\s{0,4}[:=#]?\s{0,4}\[?(\d{1,9})(?:\s{0,4}/\s{0,4}\d{1,9})?\]?(?![\w.])")
#: Where an epoch's line stands in its epoch: ``Epoch: [1][ 20/5005]``, ``Train Epoch: 1 [640/60000 (1%)]``.
_WITHIN = re.compile(r"\s{0,4}\[\s{0,9}(\d{1,18})\s{0,4}/\s{0,4}(\d{1,18})(\s\()?")
#: Of several counts in one line, an optimizer step is meant before an iteration, which may be a micro-batch.
_SUREST = ("g", "n", "s", "i", "b")
#: A line about held-out data; and fairseq's means over an epoch, which are no step's numbers.
_HELD_OUT = re.compile(r"(?<![\w/])(?:eval|evaluation|val|valid|validation|test)(?![\w/=])", re.IGNORECASE)
_TRAIN = re.compile(r"train", re.IGNORECASE)
_MEANS = re.compile(r"\| train \| epoch \d")
_WORD = r"[A-Za-z_][\w/.\-]{0,40}"
_PAIR = re.compile(rf"(?<![\w.])({_WORD}(?: {_WORD}){{0,2}})(\s{{0,4}}[:=]\s{{0,4}}| )({NUMBER})\s?(ms|s|%)?(?![\w.:])")
#: Words that stand in sentences and in no name of a number.
_PROSE = frozenset({
    "a", "an", "and", "around", "as", "at", "before", "below", "by", "differs", "fell", "falls", "for", "from", "in",
    "is", "it", "its", "of", "on", "or", "rises", "rose", "than", "that", "the", "then", "this", "to", "until",
    "was", "were", "where", "which", "with",
})  # fmt: skip
_BAR = re.compile(r"\b(\d{1,18})/(\d{1,18}) \[[\d:]+<[^\],]{0,40}(?:,[^\],]{0,40})?(?:, (.*))?\]")
_PERCENT = re.compile(r":?\s{0,4}\d{1,3}$")
#: Keras: ``50/50 [=====] - 3s 10ms/step - loss: 0.52 - val_loss: 0.61``; the loss is the mean of the epoch so far.
_KERAS = re.compile(r"^\s{0,9}(\d{1,9})/(\d{1,9}) (?:\[[=>.]{2,100}\]|[━╸╺ ]{2,200}|-) (.*\bloss: .*)")
#: torchtune's bar: epoch, step and loss in front of it.
_COUNTED_BAR = re.compile(rf"(?<!\d)\d{{1,9}}\|(\d{{1,18}})\|Loss: ({NUMBER})")

#: A number that is printed with its type around it.
_WRAPPED = re.compile(rf"(?:tensor|np\.float\d\d)\(({NUMBER})[^()]{{0,80}}(?:\([^()]{{0,40}}\)[^()]{{0,80}})?\)")

_Values = dict[str, tuple[float, str]]


class Lines(Stateless):
    """Reads them. Where another reader knows the log's training lines, these carry a side of their own.

    Steps that begin anew with every epoch are counted on.
    """

    marks = (b"oss",)

    def __init__(self, log: Log) -> None:
        self._log = log
        self._bar: tuple[int, _Values] | None = None
        self._stepped = False
        self._counted = EpochSteps()
        self._bars, self._inside, self._epochs = False, False, 0

    def take(self, line: str) -> bool:
        """Use one line."""
        if (counted := _COUNTED_BAR.search(line)) is not None:
            return self._painted(count(counted[1]), {"loss": (float(counted[2].replace(",", "")), "")})
        if "/" in line and "<" in line and (bar := _BAR.search(line)) is not None:
            return self._progress(line, bar)
        if (painted := _KERAS.match(line)) is not None:
            return self._keras(painted)
        found = min(_STEP.finditer(line), key=lambda each: _SUREST.index(each[1][0].lower()), default=None)
        step = count(found[2].removesuffix(".0")) if found else None
        epoch = _EPOCH.search(line)
        if found is None or step is None:
            return epoch is not None and self._epoch(line, epoch)
        values = _judged(line, line[: found.start()] + " | " + line[found.end() :])
        if not any(is_loss(name) for name in values):
            return False
        if epoch is not None and found[1][0].lower() != "g":
            step = self._counted.step(count(epoch[1]) or 0, step, (count(found[3]) if found[3] else None) or 0)
            if self._counted.began_anew:
                self._log.run.note(BEGAN_ANEW, 0)
        self._stepped = True
        self._write(step, values, self._log.time(line), "epochs" if _MEANS.search(line) else None)
        return True

    def close(self) -> None:
        """The log ends here."""
        if self._bar is not None:
            self._write(*self._bar, None)
            self._bar = None

    def _epoch(self, line: str, epoch: re.Match[str]) -> bool:
        """A line that names an epoch and no step."""
        within = _WITHIN.match(line, epoch.end())
        values = _judged(line, line[: epoch.start()] + " | " + line[(within or epoch).end() :])
        at, side = count(epoch[1]), None
        if at is None or not any(is_loss(name) for name in values):
            return False
        if within is not None:
            whole = count(within[2])
            at = at * (whole or 0) + (count(within[1]) or 0)
            if within[3]:
                self._log.run.note("the lines count samples, not steps: a step is a sample")
            self._stepped = True
        elif self._stepped or self._log.leader not in ("", FORMAT):
            side = "epochs"  # means beside the steps themselves
        else:
            self._log.run.note("the lines name epochs and no steps: a step is an epoch")
        self._write(at, values, self._log.time(line), side)
        return True

    def _progress(self, line: str, bar: re.Match[str]) -> bool:
        """The numbers in front of and behind a bar."""
        at, total = count(bar[1]), count(bar[2])
        before = _PERCENT.sub("", line[: bar.start()].partition("%|")[0])
        values = _judged(before, bar[3] or "")
        values |= {name: value for name, value in _judged(before, before).items() if is_loss(name)}
        if at is None or total is None or not any(is_loss(name) for name in values):
            return False
        epoch = _EPOCH.search(before)
        step = at + (count(epoch[1]) or 0) * total if epoch else at
        if (stated := values.pop("global_step", None)) is not None and 0 <= stated[0] < 2**53:
            step = int(stated[0])
        return self._painted(step, values)

    def _keras(self, found: re.Match[str]) -> bool:
        """The last line of an epoch, which a bar paints more than once; what comes before is a mean of too little."""
        if count(found[1]) != count(found[2]):
            self._bars, self._inside = True, True
            return True
        self._epochs += self._inside or not self._bars
        self._inside = False
        self._log.run.note("the lines name epochs and no steps: a step is an epoch")
        return self._painted(self._epochs, _values(found[3].replace(" - ", " | ")))

    def _painted(self, step: int | None, values: _Values) -> bool:
        """A bar is painted many times a step: what it shows last counts."""
        if step is None:
            return False
        if self._bar is not None and self._bar[0] != step:
            self._write(*self._bar, None)
        self._bar = (step, values)
        return True

    def _write(self, step: int, values: _Values, time: float | None, side: str | None = None) -> None:
        log = self._log
        if side is None and log.leader not in ("", FORMAT):
            side = "own prints"
        train = any(standard(name) == "loss" for name in values)
        if train and side is None:
            log.reached(step, FORMAT)
        for name, (value, unit) in values.items():
            named = standard(name)
            if named == "step_time" or unit == "ms":
                value, unit = value * (1e-3 if unit == "ms" else 1.0), "s"
            log.scalar(named, step, value, time, unit, side)


def _judged(line: str, text: str) -> _Values:
    """The pairs of a text; those of a line about held-out data under names that say so."""
    values = _values(text)
    if _HELD_OUT.search(line) and not _TRAIN.search(line) and any(standard(name) == "loss" for name in values):
        return {f"eval_{standard(name)}": value for name, value in values.items()}
    return values


def _values(text: str) -> _Values:
    """Names with value and unit."""
    found: _Values = {}
    if "(" in text:
        text = _WRAPPED.sub(r"\1", text)
    for name, parted, printed, unit in _PAIR.findall(text):
        if not parted.strip() and not _PROSE.isdisjoint(name.lower().split()):
            continue  # "the loss rises from 11.87"
        if (value := number(printed)) is not None:
            found.setdefault(name, (value, unit))
    return found
