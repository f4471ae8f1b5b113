"""The standard name of what people call their metrics, where the format prescribes none: CSV, JSON lines, own prints.

Only unmistakable names are translated; every other one is kept as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_SPELLINGS: dict[str, tuple[str, ...]] = {
    "loss": (
        "loss",
        "train_loss",
        "training_loss",
        "train/loss",
        "loss/train",
        "lm_loss",
        "train/lm_loss",
        "loss_train",
        "reduced_train_loss",
        "total_loss",
        "train/total_loss",
        "loss/train/total",
        "train/loss_step",
        "train_loss_step",
        "training/loss",
        "batch_loss",
        "avg_loss",
        "avr_loss",
        "loss_mean",
        "epoch_loss",
        "train/ce_loss",
        "train/crossentropyloss",
    ),
    "eval_loss": (
        "eval_loss",
        "val_loss",
        "valid_loss",
        "validation_loss",
        "eval/loss",
        "val/loss",
        "loss/val",
        "loss/eval",
        "valid/loss",
        "validation/loss",
        "test_loss",
        "test/loss",
        "dev_loss",
        "val/loss_epoch",
        "val_loss_epoch",
        "eval/eval_loss",
    ),
    "grad_norm": ("grad_norm", "gradient_norm", "gnorm", "train/grad_norm", "total_grad_norm", "norm"),
    "learning_rate": ("learning_rate", "lr", "train/lr", "train/learning_rate"),
    "loss_scale": ("loss_scale", "train/loss_scale"),
    "throughput": ("tokens_per_second", "tokens_per_sec", "tok/sec", "tok/s", "tokens/s", "tokens/sec", "tps"),
    "step_time": ("step_time", "step_time_s", "iter_time", "dt"),
}
_STANDARD = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings}
_SUREST = {spelling: place for spellings in _SPELLINGS.values() for place, spelling in enumerate(spellings)}
#: What monitors make of an optimizer's class: ``lr-AdamW``, ``lr-AdamW/pg1``, ``lr-DecoupledAdamW/group0``.
_RATE = re.compile(r"(?:train/)?lr-[A-Z]\w{0,60}(?:/(?:pg1|group0|0))?$")
#: A unit behind a name that is the standard one, too: ``loss (nats)``.
_UNIT = re.compile(r"[ _]?[(\[](?:nats|nats/token|sec|seconds|s)[)\]]$")

#: Names of the column or field that counts optimizer steps, the surest first.
STEPS = (
    "global_step",
    "step",
    "_step",
    "train/global_step",
    "num_updates",
    "current_steps",
    "global_step/max_steps",
    "iteration",
    "iter",
    "steps",
    "update",
    "it",
)
#: What is noted where ``EpochSteps`` had something to count on.
BEGAN_ANEW = "the steps begin anew with each epoch: they are counted on"
#: Names of the field that holds a time, Unix seconds.
TIMES = ("_timestamp", "timestamp", "time", "wall_time", "ts")


def folded(name: str) -> str:
    """A name as it is compared: lower case, blanks and hyphens as underscores."""
    return name.strip().lower().replace(" ", "_").replace("-", "_")


def standard(name: str) -> str:
    """The standard name, or the name itself."""
    return _STANDARD.get(_UNIT.sub("", folded(name))) or ("learning_rate" if _RATE.match(name.strip()) else name)


def is_loss(name: str) -> bool:
    """Whether a name says that it is a loss."""
    return "loss" in name.lower()


class EpochSteps:
    """Steps that begin anew with every epoch, counted on."""

    def __init__(self) -> None:
        self._offsets: dict[int, int] = {}
        self._last: tuple[int, int] | None = None  # epoch, and step within it
        self.began_anew = False

    def step(self, epoch: int, step: int, total: int = 0) -> int:
        """The step since the beginning; ``total`` is how many an epoch has, where that is known."""
        if self._last is not None and epoch > self._last[0] and epoch not in self._offsets:
            before, reached = self._last
            offset = self._offsets.get(before, 0)
            if step < reached:
                self.began_anew = True
                offset += (epoch - before) * max(total, reached + 1)
            self._offsets[epoch] = offset
        self._last = (epoch, step)
        if len(self._offsets) > 100_000:
            self._offsets.clear()
        return step + self._offsets.setdefault(epoch, 0)


class Naming:
    """Names for one file: two of its metrics never share a standard name, the surest or the first one has it."""

    def __init__(self) -> None:
        self._named: dict[str, str] = {}
        self._taken: dict[str, str] = {}

    def settle(self, names: Iterable[str], before: str = "") -> None:
        """Give names that are known together: of ``total_loss`` and ``loss`` the latter is the loss."""
        for name in sorted(names, key=lambda each: _SUREST.get(folded(each), len(_SUREST))):
            self(name, before)

    def __call__(self, name: str, before: str = "") -> str:
        """The name under which a metric is kept; ``before`` is put before it, as ``eval_``."""
        given = before + name
        named = self._named.get(given)
        if named is None:
            wanted = standard(name)
            wanted = standard(before + (wanted if wanted == "loss" else name)) if before else wanted
            named = wanted
            while self._taken.setdefault(named, given) != given:
                named = given if named != given and given not in self._taken else f"{named} (too)"
            if len(self._named) < 50_000:
                self._named[given] = named
        return named
