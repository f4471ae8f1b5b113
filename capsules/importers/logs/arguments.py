"""The configuration that Megatron and DeepSpeed print at the start: ``  micro_batch_size ........ 4``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .log import Log, Stateless, number

FORMAT = ""
SIGN = b""

_LINE = re.compile(r"^(?:\[[^\]]*\] ?)*\s+(\w{1,100}) \.{2,100} ?(.{0,400})$")
_MOST = 3000

#: Argument → field of the manifest.
_FIELDS: dict[str, tuple[str, ...]] = {
    "micro_batch_size": ("training", "micro_batch"),
    "train_micro_batch_size_per_gpu": ("training", "micro_batch"),
    "gradient_accumulation_steps": ("training", "accumulation_steps"),
    "seq_length": ("training", "max_length"),
    "clip_grad": ("training", "max_grad_norm"),
    "gradient_clipping": ("training", "max_grad_norm"),
    "data_parallel_size": ("training", "data_parallel"),
    "tensor_model_parallel_size": ("training", "tensor_parallel"),
    "pipeline_model_parallel_size": ("training", "pipeline_parallel"),
    "optimizer": ("training", "optimizer", "name"),
    "lr": ("training", "optimizer", "lr"),
    "adam_eps": ("training", "optimizer", "eps"),
    "weight_decay": ("training", "optimizer", "weight_decay"),
    "decoupled_weight_decay": ("training", "optimizer", "decoupled"),
    "lr_decay_style": ("training", "schedule", "name"),
    "num_layers": ("model", "layers"),
    "hidden_size": ("model", "hidden"),
    "ffn_hidden_size": ("model", "intermediate"),
    "num_attention_heads": ("model", "heads"),
    "max_position_embeddings": ("model", "max_positions"),
    "padded_vocab_size": ("model", "embedding_rows"),
    "seed": ("run", "seed"),
    "world_size": ("run", "world_size"),
}


class Lines(Stateless):
    """Reads them, and states at the end what they say of the job."""

    marks = (b" ..",)

    def __init__(self, log: Log) -> None:
        self._log = log
        self._found: dict[str, Any] = {}

    def take(self, line: str) -> bool:
        """Use one line."""
        found = _LINE.match(line)
        if found is None:
            return False
        if len(self._found) < _MOST:
            self._found.setdefault(found[1], _value(found[2].strip()))
        return True

    def close(self) -> None:
        """The log ends here."""
        if not self._found:
            return
        stated: dict[str, Any] = {"config": self._found}
        for name, path in _FIELDS.items():
            value = self._found.get(name)
            if value is None or isinstance(value, list):
                continue
            place = stated
            for part in path[:-1]:
                place = place.setdefault(part, {})
            place.setdefault(path[-1], value)
        self._log.run.manifest(stated)
        self._log.run.manifest({"training": _derived(self._found)})


def _derived(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that two or three arguments say together."""
    betas = [arguments.get("adam_beta1"), arguments.get("adam_beta2")]
    derived: dict[str, Any] = {"optimizer": {"betas": betas}} if all(type(each) is float for each in betas) else {}
    if arguments.get("fp16") is True or arguments.get("fp16_enabled") is True:
        derived["precision"] = "fp16-mixed"
    elif arguments.get("bf16") is True or arguments.get("bfloat16_enabled") is True:
        derived["precision"] = "bf16-mixed"
    sizes = [arguments.get(name) for name in ("global_batch_size", "micro_batch_size", "data_parallel_size")]
    if all(type(each) is int and each > 0 for each in sizes) and arguments.get("rampup_batch_size") is None:
        whole, micro, parallel = (int(each) for each in sizes if each is not None)
        if whole % (micro * parallel) == 0:
            derived["accumulation_steps"] = whole // (micro * parallel)
    total = arguments.get("lr_decay_iters") or arguments.get("train_iters")
    if type(total) is int and total > 0:
        share, warmup = arguments.get("lr_warmup_fraction"), arguments.get("lr_warmup_iters")
        steps = round(share * total) if isinstance(share, float) and 0 <= share <= 1 else warmup
        derived["schedule"] = {"total_steps": total} | ({"warmup_steps": steps} if type(steps) is int else {})
    return derived


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    if text in ("None", ""):
        return None
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    value = number(text)
    return text if value is None else value
