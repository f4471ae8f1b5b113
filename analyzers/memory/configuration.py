"""From the manifest to what the memory model asks for; what the manifest leaves open becomes alternatives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from ..reference.memory_job import STATE_BYTES, Checkpointing, Job, Precision, Shape, parameters
from .records import mappings, positive
from .thresholds import MOST_BATCHES, MOST_LAYERS, SAME_PARAMETERS

if TYPE_CHECKING:
    from ...capsules import Capsule
    from ...capsules.manifest import Model, Training

#: Words by which jobs name their optimizers, as the model knows them; the first that is part of the name counts.
_OPTIMIZERS = (
    *(("8bit", "adamw8bit"), ("adafactor", "adafactor"), ("adagrad", "adagrad"), ("rmsprop", "rmsprop")),
    *(("muon", "muon"), ("lion", "lion"), ("lamb", "lamb"), ("adan", "adan"), ("adam", "adamw"), ("sgd", "momentum")),
)
_FULLY_SHARDED = ("fsdp", "full_shard", "fully_shard", "hybrid_shard", "zero3", "zero-3", "zero_3")
_HALVES = ("bfloat16", "float16")
#: Names by which configurations declare the dtype that sharded weights are gathered in, and short names of dtypes.
_PARAMETER_DTYPES = frozenset({"mixed_precision_param", "param_dtype", "fsdp_param_dtype"})
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
#: What fields are called in a sentence.
_SPOKEN = (
    ("model.", "the sizes of the model"),
    ("training.micro_batch", "the rows of a batch"),
    ("training.max_length", "their length"),
    ("training.optimizer", "the optimizer"),
    ("training.precision", "the precision"),
    ("training.sharding", "how the ranks share the work"),
)


@dataclass(frozen=True)
class Plan:
    """What is configured: every reading of it that the manifest admits, and what it lacks for there to be any.

    ``open`` are the fields whose absence makes more than one reading; ``beyond`` says why the model does not apply.
    """

    readings: tuple[tuple[Shape, Job], ...] = ()
    missing: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    beyond: str = ""

    @property
    def lacking(self) -> str:
        """Why there is no reading, in words; the names of the fields are in ``missing``."""
        words = (word for start, word in _SPOKEN if any(each.startswith(start) for each in self.missing))
        return self.beyond or f"not on record are {', '.join(words)}"


_PLANS: WeakKeyDictionary[Capsule, Plan] = WeakKeyDictionary()


def plan(capsule: Capsule) -> Plan:
    """The configuration of a training job, for ``reference.memory_model.estimate``."""
    if capsule not in _PLANS:
        _PLANS[capsule] = _plan(capsule)
    return _PLANS[capsule]


def _plan(capsule: Capsule) -> Plan:
    manifest = capsule.manifest
    model, training = manifest.model, manifest.training
    batch, length = _batch(capsule)
    vocabulary = (model.embedding_rows or model.vocab_size) if model is not None else None
    needed = {
        "model.layers": model.layers if model is not None else None,
        "model.hidden": model.hidden if model is not None else None,
        "model.heads": model.heads if model is not None else None,
        "model.vocab_size": vocabulary,
        "training.micro_batch": batch,
        "training.max_length": length,
        "training.optimizer.name": _optimizer(training),
    }
    missing = [name for name, value in needed.items() if not value]
    sharded = _sharding(capsule)
    precisions = _precisions(capsule, whole=sharded is None or sharded[0] < 3)
    if not precisions:
        missing.append("training.precision")
    if sharded is None:
        missing.append("training.sharding")
    if model is None or missing or sharded is None:
        return Plan(missing=tuple(missing))
    if beyond := _beyond(capsule, model):
        return Plan(beyond=beyond)
    shapes, unknown = _shapes(model, vocabulary or 0)
    if not shapes:
        stated = (
            f"{model.parameters:,} parameters are stated" if model.parameters else "sizes that do not fit each other"
        )
        return Plan(beyond=f"{stated}, which is no decoder-only transformer of these sizes")
    recomputed: tuple[Checkpointing, ...] = _checkpointing(capsule)
    if len(recomputed) > 1:
        unknown.append("training.activation_checkpointing")
    if len(precisions) > 1:
        unknown.append("training.precision" if "half-gathered" in precisions else "model.dtype")
    tensor = (training.tensor_parallel if training is not None else None) or 1
    along = (False, True) if tensor > 1 else (False,)
    jobs = [
        Job(
            batch=batch or 1,
            length=length or 1,
            precision=precision,
            optimizer="none" if sharded[2] else _optimizer(training),
            dropout=_dropout(capsule, model),
            checkpointing=checkpointing,
            accumulating=bool(training is not None and (training.accumulation_steps or 1) > 1),
            stage=sharded[0],
            data_parallel=sharded[1],
            tensor_parallel=tensor,
            sequence_parallel=sequence,
            pipeline_parallel=(training.pipeline_parallel if training is not None else None) or 1,
            buckets=sharded[0] == 0 and sharded[1] > 1,
            foreach=_device(capsule) == "cuda",
            device=_device(capsule),
        )
        for precision, checkpointing, sequence in itertools.product(precisions, recomputed, along)
    ]
    return Plan(readings=tuple(itertools.product(shapes, jobs)), open=tuple(unknown))


def _shapes(model: Model, vocabulary: int) -> tuple[list[Shape], list[str]]:
    """The shapes that a manifest admits, and the fields it leaves open; the number of parameters decides among them."""
    layers, hidden, heads = model.layers or 1, model.hidden or 1, model.heads or 1
    unknown: list[str] = []
    kinds: tuple[Literal["gelu", "gelu-written-out", "gated"], ...] = ("gelu", "gated")
    if model.mlp in (*kinds, "gelu-written-out"):
        kinds = (model.mlp,)
    ways: tuple[Literal["fused", "materialised"], ...] = ("fused", "materialised")
    if model.attention in ways:
        ways = (model.attention,)
    else:
        unknown.append("model.attention")
    found: list[Shape] = []
    for mlp, tied, learned in itertools.product(kinds, _either(model.tied_embeddings), (False, True)):
        norm: Literal["layer", "rms"] = (
            "rms" if (model.norm or ("rms" if mlp == "gated" else "layer")) == "rms" else "layer"
        )
        for bias in _either(False if mlp == "gated" else None):
            shape = Shape(
                layers=layers,
                hidden=hidden,
                heads=heads,
                kv_heads=model.kv_heads or heads,
                head_dim=model.head_dim or 0,
                intermediate=model.intermediate or (8 * hidden // 3 if mlp == "gated" else 4 * hidden),
                vocabulary=vocabulary,
                positions=(model.max_positions or 0) if learned else 0,
                tied=tied,
                bias=bias,
                norm=norm,
                mlp=mlp,
            )
            if shape.head_width and shape.heads % shape.kv_heads == 0:
                found.append(shape)
    if model.parameters:
        stated = float(model.parameters)
        off = {shape: abs(parameters(shape) / stated - 1) for shape in found}
        best = min(off.values(), default=math.inf)
        found = [shape for shape in found if off[shape] == best] if best <= SAME_PARAMETERS else []
    else:
        unknown.append("model.parameters")
    distinct = list(dict.fromkeys(found))
    return [shape.changed(attention=way) for shape in distinct for way in ways], unknown


def _batch(capsule: Capsule) -> tuple[int | None, int | None]:
    """Rows and length of the largest micro-batch on record, else as they are configured."""
    training = capsule.manifest.training
    largest: tuple[int, int] | None = None
    for batch in capsule.batches()[:MOST_BATCHES]:
        ids = batch.arrays.get("input_ids")
        if ids is not None and len(ids.shape) == 2 and batch.split != "validation":
            rows, length = ids.shape
            if largest is None or rows * length > largest[0] * largest[1]:
                largest = rows, length
    if largest is not None and min(largest) > 0:
        return largest
    if training is None:
        return None, None
    return positive(training.micro_batch), positive(training.max_length)


def _optimizer(training: Training | None) -> str:
    name = training.optimizer.name if training is not None and training.optimizer is not None else None
    lowered = (name or "").lower().replace("_", "").replace("-", "")
    if (
        "sgd" in lowered
        and training is not None
        and training.optimizer is not None
        and training.optimizer.betas is None
    ):
        return "sgd" if lowered == "sgd" else "momentum"
    found = next((known for part, known in _OPTIMIZERS if part in lowered), "")
    return found if found in STATE_BYTES or found == "adafactor" else ""


def _precisions(capsule: Capsule, *, whole: bool) -> tuple[Precision, ...]:
    """How the job computes; mixed precision keeps float32 either in the weights or in copies of them.

    Where the ranks do not hold their weights ``whole``, what they gather may be in 16 bits, and so all they compute.
    """
    manifest = capsule.manifest
    precision = manifest.training.precision if manifest.training is not None else None
    dtype = manifest.model.dtype if manifest.model is not None else None
    words = (precision or "").lower().replace("bfloat16", "bf16").replace("float16", "fp16").replace("float32", "fp32")
    if any(record.get("master_dtype") for record in capsule.records("param_groups")[:MOST_BATCHES]):
        return ("half-master",)
    if any(word in words for word in ("pure", "true", "full")) and "32" not in words:
        return ("half",)
    if "mixed" in words or words in ("bf16", "fp16", "amp"):
        if dtype in _HALVES:
            return ("half-master",)
        beside: tuple[Precision, ...] = () if dtype == "float32" else ("half-master",)
        return (("autocast",) if whole else _of_shards(capsule)) + beside
    if "fp32" in words or words in ("32", "32-true") or (not words and dtype == "float32"):
        return ("fp32",)
    return ("half", "half-master") if not words and dtype in _HALVES else ()


def _of_shards(capsule: Capsule) -> tuple[Precision, ...]:
    """How sharded weights of float32 are computed with: as declared, else as what ran shows, else either way."""
    declared = _gathered_in(capsule.manifest.config)
    computed = {declared} if declared is not None else set(capsule.stats(role="activation").dtype.tolist())
    if computed and computed <= set(_HALVES):  # autocast leaves sums and norms in float32
        return ("half-gathered",)
    return ("autocast",) if declared is not None else ("half-gathered", "autocast")


def _gathered_in(config: Any) -> str | None:
    """The dtype that weights are gathered in, where the configuration declares it (FSDP's mixed precision)."""
    named = (
        str(value).lower().rpartition(".")[2]
        for key, value in _settings(config)
        if key.lower() in _PARAMETER_DTYPES and isinstance(value, str)
    )
    return next((_DTYPES.get(name, name) for name in named), None)


def _sharding(capsule: Capsule) -> tuple[int, int, bool] | None:
    """(stage, data-parallel ranks, offloaded); None where several ranks work and nothing says how."""
    manifest = capsule.manifest
    training = manifest.training
    world = positive(manifest.run.world_size) if manifest.run is not None else None
    others = 1
    if training is not None:
        others = (training.tensor_parallel or 1) * (training.pipeline_parallel or 1)
    ranks = (training.data_parallel if training is not None else None) or max(1, (world or 1) // others)
    sharding = training.sharding if training is not None else None
    if sharding is None or (sharding.kind is None and sharding.stage is None):
        return None if ranks > 1 else (0, 1, False)
    kind = (sharding.kind or "").lower()
    stage = sharding.stage
    if stage is None:
        stage = 2 if "grad_op" in kind else 3 if any(word in kind for word in _FULLY_SHARDED) else 0
    return min(3, stage), ranks, bool(sharding.offload) and str(sharding.offload).lower() not in ("none", "false")


def _checkpointing(capsule: Capsule) -> tuple[Checkpointing, ...]:
    training, trigger = capsule.manifest.training, capsule.manifest.trigger
    given = training.activation_checkpointing if training is not None else None
    if given is None:
        # The recorder sees a forward that is run again; a log may just not say it.
        imported = trigger is not None and trigger.kind == "imported"
        return ("none", "full") if imported else ("none",)
    if isinstance(given, str) and given.lower() not in ("full", "true", "block", "yes"):
        return ("none",) if given.lower() in ("none", "false", "no", "") else ("selective",)
    return ("full",) if given else ("none",)


def _beyond(capsule: Capsule, model: Model) -> str:
    """Why the memory model does not speak of this job."""
    if (model.layers or 0) > MOST_LAYERS:
        return "more layers than any model has"
    if model.experts:
        return "a mixture of experts, whose activations depend on the routing"
    if model.vision is not None:
        return "a model with a vision tower"
    frozen = [each for each in capsule.records("param_groups")[:MOST_BATCHES] if each.get("requires_grad") is False]
    identity = capsule.manifest.identity
    if frozen or (identity is not None and identity.adapter is not None):
        return "a model of which only a part is trained"
    return ""


def _dropout(capsule: Capsule, model: Model) -> bool:
    """Whether there is any: as recorded, else by the usual names in the configuration."""
    if model.dropout is not None:
        return model.dropout > 0
    return any(
        isinstance(value, float | int) and 0 < value < 1
        for key, value in _settings(capsule.manifest.config)
        if "dropout" in key or key.endswith("pdrop")
    )


def _settings(config: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(config, dict):
        for key, value in list(config.items())[:1000]:  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            yield str(key), value  # pyright: ignore[reportUnknownArgumentType]
            if depth < 3:
                yield from _settings(value, depth + 1)


def _device(capsule: Capsule) -> Literal["cuda", "cpu"]:
    """Where the ranks compute; a device where nothing says so."""
    placement: Any = capsule.manifest.placement
    ranks: Any = placement.get("ranks") if isinstance(placement, dict) else None  # pyright: ignore[reportUnknownMemberType]
    named = {str(each.get("device")) for each in mappings(ranks)}
    return "cpu" if named == {"cpu"} else "cuda"


def _either(known: bool | None) -> tuple[bool, ...]:
    return (False, True) if known is None else (known,)
