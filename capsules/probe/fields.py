"""Looks at one batch of any make: its fields by name, what each is, and the samples in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..recorder.batch import find

#: Fields of a batch that are listed.
MOST_FIELDS = 64
#: Names under which loaders hand out the names of samples.
_ID_NAMES = ("sample_ids", "sample_id", "example_ids", "example_id", "uid", "uids", "guid")
_IMAGES = ("pixel_values", "images", "image", "img", "pixels")


def named(batch: Any) -> dict[str, Any]:
    """The fields of a batch by name; what has no names gets its place (``[0]``), nested ones a dotted name."""
    fields: dict[str, Any] = {}
    _collect("", batch, fields, 0)
    return fields


def _collect(prefix: str, value: Any, fields: dict[str, Any], depth: int) -> None:
    if len(fields) >= MOST_FIELDS:
        return
    parts = (_parts(value) or (_places(value) if not prefix else None)) if depth < 4 else None
    if parts is None:
        fields[prefix or "batch"] = value
        return
    for name, part in parts:
        _collect(
            f"{prefix}.{name}" if prefix and not name.startswith("[") else f"{prefix}{name}", part, fields, depth + 1
        )


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """The named parts of a container of fields; None of a field."""
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return list(value._asdict().items())  # pyright: ignore
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    inner: Any = getattr(value, "data", None)
    if isinstance(inner, Mapping):  # BatchEncoding, BatchFeature
        return [(str(key), part) for key, part in inner.items()]
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        keys = dict.fromkeys(str(key) for each in value for key in each)
        return [(key, [each.get(key) for each in value]) for key in keys]
    if type(value).__module__ not in ("builtins", "torch", "numpy") and _plain_object(value):
        return [(key, part) for key, part in vars(value).items() if not key.startswith("_")]
    return None


def _places(value: Any) -> list[tuple[str, Any]] | None:
    """The parts of a batch without names: of a tuple, and of a list of tensors."""
    listed = isinstance(value, list) and bool(value) and all(hasattr(each, "shape") for each in value)
    return [(f"[{at}]", part) for at, part in enumerate(value)] if listed or isinstance(value, tuple) else None


def _plain_object(value: Any) -> bool:
    known = getattr(value, "__dict__", None)
    return isinstance(known, dict) and any(isinstance(part, Tensor) for part in known.values())


def describe(value: Any) -> dict[str, Any]:
    """What a field is: kind, dtype, shape, and a note on what is odd about it."""
    if isinstance(value, Tensor):
        return {
            "kind": "tensor",
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "note": "",
        }
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return {"kind": "array", "dtype": str(value.dtype), "shape": [int(each) for each in value.shape], "note": ""}
    if isinstance(value, (list, tuple)):
        kinds = sorted({type(each).__name__ for each in value})
        lengths = [len(each) for each in value if isinstance(each, (list, tuple, str))]
        note = " or ".join(kinds[:3])
        if len(lengths) == len(value) > 0:
            ragged = min(lengths) != max(lengths)
            note += f" of {min(lengths)} to {max(lengths)}" if ragged else f" of {lengths[0]}"
        return {"kind": type(value).__name__, "dtype": "", "shape": [len(value)], "note": note}
    note = "" if value is None else " ".join(str(value).split())[:80]
    return {"kind": "None" if value is None else type(value).__name__, "dtype": "", "shape": [], "note": note}


def arrays(fields: Mapping[str, Any]) -> list[tuple[str, dict[str, Tensor]]]:
    """The token ids, labels and masks of a batch, found as the recorder finds them.

    Returns:
        (prefix, arrays by their evidence names): one entry for most batches; one each for the parts of a batch of
        pairs (``chosen_``, ``rejected_``).
    """
    tensors = {
        name.rpartition(".")[2]: tensor for name, value in fields.items() if (tensor := as_tensor(value)) is not None
    }
    prefixes = [name.removesuffix("input_ids") for name in tensors if name.endswith("_input_ids")]
    found: list[tuple[str, dict[str, Tensor]]] = []
    given = tensors if not any(name.startswith("[") for name in fields) else tuple(tensors.values())
    whole = find(given, (), {}, nn.Identity())
    if whole:
        found.append(("", whole))
    for prefix in prefixes:
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        part = find(own, (), {}, nn.Identity())
        if part and not (prefix == "decoder_" and whole):
            found.append((prefix, part))
    return found


def as_tensor(value: Any) -> Tensor | None:
    """A field as a tensor on the host: tensors, arrays, and lists of numbers of one length; None of anything else."""
    try:
        if isinstance(value, Tensor):
            return value.detach().cpu()
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return torch.as_tensor(value)
        if isinstance(value, (list, tuple)) and value and _rectangular(value):
            return torch.stack([*value]).cpu() if isinstance(value[0], Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return None


def _rectangular(value: Sequence[Any]) -> bool:
    if all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        return True
    rows = [each for each in value if isinstance(each, (list, tuple))]
    if len(rows) == len(value) and len({len(each) for each in rows}) == 1:
        return all(isinstance(number, int) for row in rows for number in row)
    return all(isinstance(each, Tensor) for each in value) and len({tuple(each.shape) for each in value}) == 1


def ragged(fields: Mapping[str, Any]) -> list[list[int]]:
    """Token ids of samples that are not of one length; empty where there are none."""
    for name, value in fields.items():
        if name.rpartition(".")[2] not in ("input_ids", "tokens", "ids", "token_ids"):
            continue
        if isinstance(value, (list, tuple)) and as_tensor(value) is None:
            rows = [each.tolist() if hasattr(each, "tolist") else each for each in value]
            if rows and all(isinstance(row, list) and all(isinstance(each, int) for each in row) for row in rows):
                return rows
    return []


def sample_ids(fields: Mapping[str, Any], rows: int) -> list[str] | None:
    """Names of the samples, where the batch carries them."""
    for name, value in fields.items():
        if name.rpartition(".")[2] in _ID_NAMES:
            listed = value.tolist() if hasattr(value, "tolist") else value
            if isinstance(listed, (list, tuple)) and len(listed) == rows:
                return [str(each) for each in listed]
    return None


def image_sizes(fields: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(width, height) of each image of a batch: tensors [B, C, H, W] or [B, H, W, C], and images of PIL."""
    for name, value in fields.items():
        if name.rpartition(".")[2] not in _IMAGES:
            continue
        listed = list(value) if isinstance(value, (list, tuple)) else [value]
        found: list[tuple[int, int]] = []
        for each in listed:
            shape = [int(size) for size in getattr(each, "shape", ())]
            if not shape and isinstance(getattr(each, "size", None), tuple):  # PIL
                found.append((int(each.size[0]), int(each.size[1])))
            elif len(shape) >= 3:
                height, width = shape[-3:-1] if shape[-1] in (1, 3, 4) and shape[-3] not in (1, 3, 4) else shape[-2:]
                images = 1
                for size in shape[:-3]:
                    images *= size
                found += [(width, height)] * images
        return found
    return []


def counts(tensor: Tensor) -> dict[str, Any] | None:
    """A row of statistics of a floating-point input; None of other tensors and empty ones."""
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    values = tensor.float()
    finite = values[torch.isfinite(values)]
    some = finite.numel() > 0
    row: dict[str, Any] = {
        "role": "input", "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape),
        "numel": tensor.numel(), "nan": int(torch.isnan(values).sum()),
        "posinf": int((values == float("inf")).sum()), "neginf": int((values == -float("inf")).sum()),
    }  # fmt: skip
    if some:
        row |= {
            "min": float(finite.min()), "max": float(finite.max()), "absmax": float(finite.abs().max()),
            "mean": float(finite.mean()), "std": float(finite.std(correction=0)),
            "rms": float(finite.square().mean().sqrt()),
        }  # fmt: skip
    return row
