"""The standard name of what people call their metrics, where the format prescribes none: CSV, JSON lines, own prints.

Only unmistakable names are translated; every other one is kept as it stands.
"""

from __future__ import annotations

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
    ),
    "grad_norm": ("grad_norm", "gradient_norm", "gnorm", "train/grad_norm", "total_grad_norm", "norm"),
    "learning_rate": ("learning_rate", "lr", "train/lr", "train/learning_rate"),
    "loss_scale": ("loss_scale", "train/loss_scale"),
    "throughput": ("tokens_per_second", "tokens_per_sec", "tok/sec", "tok/s", "tokens/s", "tokens/sec", "tps"),
    "step_time": ("step_time", "step_time_s", "iter_time", "dt"),
}
_STANDARD = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings}

#: Names of the column or field that counts optimizer steps, the surest first.
STEPS = (
    "global_step",
    "step",
    "_step",
    "train/global_step",
    "num_updates",
    "current_steps",
    "iteration",
    "iter",
    "steps",
    "update",
    "it",
)
#: Names of the field that holds a time, Unix seconds.
TIMES = ("_timestamp", "timestamp", "time", "wall_time", "ts")


def folded(name: str) -> str:
    """A name as it is compared: lower case, blanks and hyphens as underscores."""
    return name.strip().lower().replace(" ", "_").replace("-", "_")


def standard(name: str) -> str:
    """The standard name, or the name itself."""
    return _STANDARD.get(folded(name), name)


def is_loss(name: str) -> bool:
    """Whether a name says that it is a loss."""
    return "loss" in name.lower()


class Naming:
    """Names for one file: two of its metrics never share a standard name, the first that claims it has it."""

    def __init__(self) -> None:
        self._named: dict[str, str] = {}
        self._taken: dict[str, str] = {}

    def __call__(self, name: str, before: str = "") -> str:
        """The name under which a metric is kept; ``before`` is put before it, as ``eval_``."""
        given = before + name
        named = self._named.get(given)
        if named is None:
            wanted = standard(name)
            wanted = standard(before + (wanted if wanted == "loss" else name)) if before else wanted
            named = wanted if self._taken.setdefault(wanted, given) == given else given
            if len(self._named) < 50_000:
                self._named[given] = named
        return named
