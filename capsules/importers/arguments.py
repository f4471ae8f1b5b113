"""What a job's arguments say about it: Megatron-LM's, DeepSpeed's and transformers' names to fields of the manifest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

#: Manifest field by argument. Names that mean the same in both libraries stand once.
_FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {}


def stated_by(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Manifest fields that the arguments state; what they leave open is left out.

    Args:
        arguments: by name; values as logged, numbers and booleans also as text ("None" is absent).
    """
    stated: dict[str, Any] = {}
    for argument, (place, convert) in _FIELDS.items():
        value = convert(arguments.get(argument))
        if value is not None:
            _put(stated, place, value)
    _put(stated, "training.precision", _precision(arguments))
    _put(stated, "training.accumulation_steps", _accumulation(arguments))
    tied = _flag(arguments.get("tie_word_embeddings"))
    untied = _flag(arguments.get("untie_embeddings_and_output_weights"))
    _put(stated, "model.tied_embeddings", tied if untied is None else not untied)
    _put(stated, "training.schedule.total_steps", _count(arguments.get("lr_decay_iters")) or None)
    _put(stated, "training.schedule.warmup_steps", _warmup_by_share(arguments))
    beta1, beta2 = _number(arguments.get("adam_beta1")), _number(arguments.get("adam_beta2"))
    if beta1 is not None and beta2 is not None:
        _put(stated, "training.optimizer.betas", [beta1, beta2])
    return stated


def _precision(arguments: Mapping[str, Any]) -> str | None:
    fp16 = _either(arguments, "fp16", "fp16_enabled")
    bf16 = _either(arguments, "bf16", "bfloat16_enabled")
    if fp16 is None and bf16 is None:
        return None
    return "fp16-mixed" if fp16 else "bf16-mixed" if bf16 else "fp32"


def _accumulation(arguments: Mapping[str, Any]) -> int | None:
    """Micro-batches a step: stated by transformers, what global over micro-batch and ranks leaves in Megatron-LM."""
    given = _count(arguments.get("gradient_accumulation_steps"))
    if given is not None:
        return given
    names = ("global_batch_size", "micro_batch_size", "data_parallel_size")
    whole, micro, ranks = (_count(arguments.get(name)) for name in names)
    ramps = arguments.get("rampup_batch_size") not in (None, "None")
    if not whole or not micro or not ranks or ramps or whole % (micro * ranks):
        return None
    return whole // (micro * ranks)


def _warmup_by_share(arguments: Mapping[str, Any]) -> int | None:
    """Megatron-LM's share of the decay that is warm-up, in steps."""
    share = _number(arguments.get("lr_warmup_fraction"))
    total = _count(arguments.get("lr_decay_iters")) or _count(arguments.get("train_iters"))
    return round(share * total) if share is not None and 0 <= share <= 1 and total else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def _count(value: Any) -> int | None:
    found = _number(value)
    return int(found) if found is not None and found.is_integer() and 0 <= found < 2**63 else None


def _flag(value: Any) -> bool | None:
    return {"true": True, "false": False}.get(str(value).lower()) if isinstance(value, bool | str) else None


def _either(arguments: Mapping[str, Any], *names: str) -> bool | None:
    found = [flag for name in names if (flag := _flag(arguments.get(name))) is not None]
    return any(found) if found else None


def _words(value: Any) -> str | None:
    return value[:200] if isinstance(value, str) and value and value != "None" else None


def _positive(value: Any) -> int | None:
    return _count(value) or None


def _above_zero(value: Any) -> float | None:
    found = _number(value)
    return found if found is not None and found > 0 else None


def _put(mapping: dict[str, Any], place: str, value: Any) -> None:
    if value is None:
        return
    *parents, name = place.split(".")
    for parent in parents:
        mapping = mapping.setdefault(parent, {})
    mapping[name] = value


_FIELDS.update(
    {
        # model
        "num_layers": ("model.layers", _count),
        "num_hidden_layers": ("model.layers", _count),
        "hidden_size": ("model.hidden", _count),
        "ffn_hidden_size": ("model.intermediate", _count),
        "intermediate_size": ("model.intermediate", _count),
        "num_attention_heads": ("model.heads", _count),
        "num_key_value_heads": ("model.kv_heads", _count),
        "max_position_embeddings": ("model.max_positions", _count),
        "num_experts": ("model.experts", _count),
        "padded_vocab_size": ("model.embedding_rows", _positive),
        "vocab_size": ("model.vocab_size", _positive),
        "use_cache": ("model.use_cache", _flag),
        # training
        "micro_batch_size": ("training.micro_batch", _count),
        "per_device_train_batch_size": ("training.micro_batch", _count),
        "seq_length": ("training.max_length", _count),
        "train_micro_batch_size_per_gpu": ("training.micro_batch", _count),
        "gradient_clipping": ("training.max_grad_norm", _above_zero),
        "decoupled_weight_decay": ("training.optimizer.decoupled", _flag),
        "clip_grad": ("training.max_grad_norm", _above_zero),
        "max_grad_norm": ("training.max_grad_norm", _above_zero),
        "num_train_epochs": ("training.epochs", _above_zero),
        "optimizer": ("training.optimizer.name", _words),
        "optim": ("training.optimizer.name", _words),
        "lr": ("training.optimizer.lr", _number),
        "learning_rate": ("training.optimizer.lr", _number),
        "weight_decay": ("training.optimizer.weight_decay", _number),
        "adam_eps": ("training.optimizer.eps", _number),
        "adam_epsilon": ("training.optimizer.eps", _number),
        "lr_decay_style": ("training.schedule.name", _words),
        "lr_scheduler_type": ("training.schedule.name", _words),
        "lr_warmup_iters": ("training.schedule.warmup_steps", _positive),
        "warmup_steps": ("training.schedule.warmup_steps", _positive),
        "train_iters": ("training.schedule.total_steps", _positive),
        "max_steps": ("training.schedule.total_steps", _positive),
        "data_parallel_size": ("training.data_parallel", _count),
        "tensor_model_parallel_size": ("training.tensor_parallel", _count),
        "pipeline_model_parallel_size": ("training.pipeline_parallel", _count),
        "gradient_checkpointing": ("training.activation_checkpointing", _flag),
        # run
        "seed": ("run.seed", _count),
        "world_size": ("run.world_size", _count),
        "run_name": ("run.name", _words),
    }
)
