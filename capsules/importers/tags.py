"""Standard names of what training programs log under tags of their own (event files, W&B)."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..limits import GIB
from .names import standard


class Named(NamedTuple):
    """Name of a series, the factor that brings its values to the standard unit, and a unit that is not standard."""

    name: str
    factor: float = 1.0
    unit: str = ""


#: Tags by producer; what several of them write (``train/loss``, ``lr``) is in ``names``.
_STANDARD: dict[str, Named] = {
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
            named = _OWN.get(lower) or _STANDARD.get(lower)
            if named is None:
                nested = lower.replace(".", "/")  # W&B joins nested keys by dots
                common = standard(nested)
                if common == nested and (common := standard(tag)) == tag:
                    common = tag or "(no tag)"
                named = Named(common)
            while self._taken.setdefault(named.name, tag) != tag:
                named = Named(tag if tag and tag not in self._taken else f"{named.name} (too)")
            self._known[tag] = named
        return named
