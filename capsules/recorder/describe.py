"""The parts of the manifest that model, optimizer, tokenizer and configuration show by themselves."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from . import statistics

# Elements of each parameter that enter the model's digest: a changed checkpoint changes them, and reading all
# weights of a large model at start would take minutes.
DIGEST_ELEMENTS = 4096

_MODEL_FIELDS: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size", "n_vocab", "padded_vocab_size"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers", "depth"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "hidden"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "intermediate"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "heads"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "n_query_groups", "kv_heads"),
    "head_dim": ("head_dim",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "experts"),
    "tied_embeddings": ("tie_word_embeddings", "tied_embeddings", "weight_tying"),
    "norm_eps": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps"),
    "max_positions": ("max_position_embeddings", "n_positions", "block_size", "max_seq_len", "context_length"),
    "sliding_window": ("sliding_window",),
    "use_cache": ("use_cache",),
}


def as_mapping(config: Any) -> dict[str, Any]:
    """A configuration of any usual kind (mapping, dataclass, namespace, Hugging Face) as a dictionary."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return {str(key): value for key, value in config.items()}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    for method in ("to_dict", "model_dump"):
        if callable(getattr(config, method, None)):
            return dict(getattr(config, method)())
    return {key: value for key, value in getattr(config, "__dict__", {}).items() if not key.startswith("_")}


def merged(found: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Nested mappings joined; what the user gave has the last word."""
    result = dict(found)
    for key, value in given.items():
        known = result.get(key)
        result[key] = merged(known, dict(value)) if isinstance(known, dict) and isinstance(value, Mapping) else value
    return result


def plain(value: Any, depth: int = 0) -> Any:
    """JSON-like data; anything else as text, so that a configuration never stops a recording."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth < 8 and isinstance(value, Mapping):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if depth < 8 and isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, depth + 1) for item in value]
    if depth < 8 and dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value), depth + 1)
    return str(value)[:1000]


def step_number(given: Any) -> int:
    """The number of an optimizer window as the loop gave it."""
    number = int(given)
    if number < 0:
        raise ValueError(f"step {number} is negative")
    return number


def names(given: Any) -> list[str]:
    """Names of samples as text, from any iterable, a tensor of numbers too."""
    listed = given.tolist() if hasattr(given, "tolist") else given
    return [name if isinstance(name, str) else str(name) for name in listed]


def cursor(given: Any) -> dict[str, Any]:
    """Where the data stands, as a mapping; a bare position is put into one."""
    return plain(given) if isinstance(given, Mapping) else {"position": plain(given)}


def model_facts(model: nn.Module, config: dict[str, Any]) -> dict[str, Any]:
    """The manifest's ``model``: what the model's own configuration says, then the user's, then the modules."""
    own = as_mapping(getattr(model, "config", None))
    facts: dict[str, Any] = {}
    for field, names in _MODEL_FIELDS.items():
        for source in (own, config):
            value = next((source[name] for name in names if source.get(name) is not None), None)
            if isinstance(value, (int, float)) and (isinstance(value, bool) or value >= 0):
                facts[field] = value
                break
    parameters = [parameter for parameter in model.parameters() if not is_lazy(parameter)]
    facts["parameters"] = sum(parameter.numel() for parameter in parameters)
    if parameters:
        facts["dtype"] = str(parameters[0].dtype).removeprefix("torch.")
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if embedding is not None:
        rows = facts["embedding_rows"] = embedding.num_embeddings
        heads = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == rows]
        if heads:
            facts.setdefault("vocab_size", rows)
            facts.setdefault("tied_embeddings", any(head.weight is embedding.weight for head in heads))
    if facts.get("tied_embeddings") not in (True, False):
        facts.pop("tied_embeddings", None)
    rope = _rope(own)
    return facts | ({"rope": rope} if rope else {}) | _makes(model)


def _makes(model: nn.Module) -> dict[str, Any]:
    """What decides how much a layer keeps for its backward: kind of norm and of attention, and dropout."""
    modules = list(model.modules())
    found: dict[str, Any] = {"dropout": max((each.p for each in modules if isinstance(each, nn.Dropout)), default=0.0)}
    names = {type(each).__name__.lower() for each in modules}
    if any("rmsnorm" in name for name in names):
        found["norm"] = "rms"
    elif "layernorm" in names:
        found["norm"] = "layer"
    if any("newgelu" in name for name in names):
        found["mlp"] = "gelu-written-out"
    if any(base.__module__.partition(".")[0] == "transformers" for each in modules for base in type(each).__mro__):
        found["library"] = "transformers"
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)  # to_dict leaves it out
    if isinstance(attention, str):
        found["attention"] = "materialised" if attention == "eager" else "fused"
    return found


#: Parts of the names of Hugging Face's classes, and what a model of that class is trained to do.
_OBJECTIVES = {
    "ForMaskedLM": "masked-lm",
    "ForPreTraining": "masked-lm",
    "Classification": "classification",
    "ForQuestionAnswering": "classification",
}

#: What an encoder-decoder calls its two inputs.
_SOURCES = frozenset({"src", "source", "src_ids", "src_tokens", "encoder_input_ids", "input_ids"})
_TARGETS = frozenset({"tgt", "trg", "tgt_in", "tgt_ids", "tgt_tokens", "prev_output_tokens", "decoder_input_ids"})


def objective_of(model: nn.Module) -> str | None:
    """What a model is trained to do, where its class or configuration leaves no choice; never a next-token loss.

    Labels of an encoder-decoder are the decoder's own tokens: it is given them shifted to the right, and what its
    encoder reads has nothing to do with them.
    """
    names = [type(each).__name__ for each in (model, getattr(model, "base_model", None)) if each is not None]
    found = next((kind for part, kind in _OBJECTIVES.items() if any(part in name for name in names)), None)
    if found is None and getattr(getattr(model, "config", None), "is_encoder_decoder", None) is True:
        return "seq2seq"
    try:
        asked = set(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        asked = set[str]()
    two = bool(asked & _SOURCES and asked & _TARGETS) or any(
        isinstance(each, nn.Transformer) for each in model.modules()
    )
    return "seq2seq" if found is None and two else found


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    parameters = config.get("rope_parameters") or {}
    found: dict[str, Any] = {}
    theta = config.get("rope_theta", parameters.get("rope_theta") if isinstance(parameters, Mapping) else None)
    if isinstance(theta, (int, float)):
        found["theta"] = float(theta)
    scaling = config.get("rope_scaling") or parameters
    kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else None
    if kind and kind != "default":
        found["scaling"] = plain({key: value for key, value in scaling.items() if key != "rope_theta"}) | {"type": kind}
    return found


def optimizer_facts(optimizers: list[Any]) -> dict[str, Any]:
    """The manifest's ``training.optimizer``, from the first group of the first optimizer."""
    if not optimizers:
        return {}
    optimizer = optimizers[0]
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    found: dict[str, Any] = {"name": type(optimizer).__name__}
    for name in ("lr", "eps", "weight_decay"):
        if isinstance(group.get(name), (int, float, Tensor)):  # Adafactor has two epsilons, some a schedule for a rate
            found[name] = float(group[name])
    if "betas" in group:
        found["betas"] = [float(beta) for beta in group["betas"]]
    if (decoupled := decoupled_decay(optimizer, group)) is not None:
        found["decoupled"] = decoupled
    return found


def decoupled_decay(optimizer: Any, group: Mapping[str, Any]) -> bool | None:
    """Whether weight decay is taken from the weights beside Adam's step; None where neither group nor class says it.

    A class called AdamW says so by its name. That one called Adam adds decay to the gradient is certain of torch's own
    only: others (apex, DeepSpeed, 8-bit ones) decouple it by default.
    """
    kind = type(optimizer)
    if isinstance(told := group.get("decoupled_weight_decay"), bool):
        return told
    if "adamw" in kind.__name__.lower():
        return True
    own = kind.__module__.startswith("torch.optim.") and kind.__name__ in ("Adam", "NAdam", "RAdam")
    return False if own else None


def tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    """The manifest's ``tokenizer`` from the attributes that tokenizers share."""
    found: dict[str, Any] = {}
    for field, names in {
        "vocab_size": ("vocab_size", "n_vocab"),
        "bos_id": ("bos_token_id", "bos_id"),
        "eos_id": ("eos_token_id", "eos_id", "eot_token"),
        "pad_id": ("pad_token_id", "pad_id"),
    }.items():
        value = next((getattr(tokenizer, name) for name in names if hasattr(tokenizer, name)), None)
        value = value() if callable(value) else value
        if isinstance(value, int) and not isinstance(value, bool):
            found[field] = value
    if hasattr(tokenizer, "__len__"):
        found["vocab_size"] = max(len(tokenizer), found.get("vocab_size", 0))
    return found


def identity(model: nn.Module, tokenizer: Any) -> dict[str, Any]:
    """The manifest's ``identity``: names and SHA-256 digests of model, adapter, tokenizer and chat template."""
    config = getattr(model, "config", None)
    found: dict[str, Any] = {
        "model": {
            "name": getattr(config, "_name_or_path", "") or type(model).__name__,
            "revision": getattr(config, "_commit_hash", None),
            "sha256": weights_digest(model, adapter=False),
        }
    }
    if any("lora_" in name for name, _ in model.named_parameters()):
        found["adapter"] = {"name": type(model).__name__, "sha256": weights_digest(model, adapter=True)}
    if tokenizer is not None:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        found["tokenizer"] = {"name": str(name), "sha256": tokenizer_digest(tokenizer)}
        template = getattr(tokenizer, "chat_template", None)
        if isinstance(template, str):
            found["chat_template"] = {"name": str(name), "sha256": hashlib.sha256(template.encode()).hexdigest()}
    return {part: {key: value for key, value in fields.items() if value is not None} for part, fields in found.items()}


@torch.no_grad()
def weights_digest(model: nn.Module, adapter: bool) -> str:
    """SHA-256 over name, dtype, shape and the leading elements of each parameter of this rank, in order of name."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if ("lora_" in name) != adapter or is_lazy(parameter):
            continue
        part = statistics.local(parameter)
        digest.update(f"{name} {part.dtype} {tuple(parameter.shape)}\n".encode())
        if part.device.type != "meta" and part.numel():
            leading = part.reshape(-1)[:DIGEST_ELEMENTS] if part.is_contiguous() else part[:1].reshape(-1)
            digest.update(leading[:DIGEST_ELEMENTS].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str | None:
    """SHA-256 of the vocabulary as lines ``id TAB token`` in order of id; None where there is no vocabulary to read."""
    vocabulary: Any = getattr(tokenizer, "get_vocab", None)
    vocabulary = vocabulary() if callable(vocabulary) else getattr(tokenizer, "vocab", None)
    if not isinstance(vocabulary, Mapping):
        return None
    lines = sorted((int(number), str(token)) for token, number in vocabulary.items())
    return hashlib.sha256(
        "".join(f"{number}\t{token}\n" for number, token in lines).encode("utf-8", "replace")
    ).hexdigest()
