"""Standard names of what training programs log under tags of their own (event files, W&B)."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..limits import GIB


class Named(NamedTuple):
    """Name of a series, the factor that brings its values to the standard unit, and a unit that is not standard."""

    name: str
    factor: float = 1.0
    unit: str = ""


#: Tags by producer. Where one name is given several times, the first tag met in a file gets it.
_STANDARD: dict[str, Named] = {
    # any loop
    **{tag: Named("loss") for tag in ("loss", "train_loss", "training_loss", "loss/train", "train/loss_step")},
    **{tag: Named("eval_loss") for tag in ("eval_loss", "val_loss", "validation_loss", "valid_loss", "loss/val")},
    **{
        tag: Named("eval_loss") for tag in ("val/loss", "valid/loss", "validation/loss", "loss/validation", "loss/eval")
    },
    **{tag: Named("learning_rate") for tag in ("lr", "learning_rate", "train/lr", "lr-adamw", "lr-adam", "lr-sgd")},
    **{tag: Named("grad_norm") for tag in ("grad_norm", "gradient_norm", "train/gradnorm", "train/gradient_norm")},
    # transformers, trl, accelerate
    "train/loss": Named("loss"),
    "eval/loss": Named("eval_loss"),
    "train/grad_norm": Named("grad_norm"),
    "train/learning_rate": Named("learning_rate"),
    # Megatron-LM and its forks
    "lm loss": Named("loss"),
    "lm-loss": Named("loss"),
    "lm loss validation": Named("eval_loss"),
    "grad-norm": Named("grad_norm"),
    "learning-rate": Named("learning_rate"),
    "loss-scale": Named("loss_scale"),
    "params-norm": Named("param_norm"),
    "iteration-time": Named("step_time"),
    "mem-allocated-bytes": Named("memory_allocated"),
    "mem-max-allocated-bytes": Named("memory_peak"),
    "mem-reserved-bytes": Named("memory_reserved"),
    # NeMo
    "reduced_train_loss": Named("loss"),
    "train_step_timing in s": Named("step_time"),
    # torchtitan
    "loss_metrics/global_avg_loss": Named("loss"),
    "validation_metrics/loss": Named("eval_loss"),
    "throughput(tps)": Named("throughput"),
    "time_metrics/end_to_end(s)": Named("step_time"),
    "time_metrics/data_loading(s)": Named("data_time"),
    "memory/max_active(gib)": Named("memory_peak", float(GIB)),
    "memory/max_reserved(gib)": Named("memory_reserved", float(GIB)),
    "memory/num_alloc_retries": Named("alloc_retries"),
    # OLMo
    "train/ce loss": Named("loss"),
    "train/crossentropyloss": Named("loss"),
    "optim/total grad norm": Named("grad_norm"),
    "optim/total_grad_norm": Named("grad_norm"),
    "optim/learning_rate_group0": Named("learning_rate"),
    "optim/lr (group 0)": Named("learning_rate"),
}
#: Tags that look standard and are not: the name, with a unit that says so.
_OWN: dict[str, Named] = {
    "throughput": Named("throughput (TFLOP/s/GPU)", unit="TFLOP/s/GPU"),  # Megatron-LM
}


class Names:
    """Names of the tags of one file; two tags never share a series."""

    def __init__(self) -> None:
        self._known: dict[str, Named] = {}
        self._taken: dict[str, str] = {}

    def of(self, tag: str) -> Named:
        """The series of a tag: a standard one, or the tag itself."""
        named = self._known.get(tag)
        if named is None:
            lower = re.sub(r"\s+", " ", tag.strip().lower())
            nested = lower.replace(".", "/")  # W&B joins nested keys by dots
            named = _OWN.get(lower) or _STANDARD.get(lower) or _STANDARD.get(nested) or Named(tag or "(no tag)")
            if self._taken.setdefault(named.name, tag) != tag:
                named = Named(tag)
                self._taken.setdefault(tag, tag)
            self._known[tag] = named
        return named
