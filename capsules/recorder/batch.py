"""Finds token ids, labels and masks in whatever a loop calls a batch, and what the model's logits say about them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .internals import stands_in
from .statistics import is_readable

# The names of evidence, and what data collators and hand-written loops call the same thing.
ALIASES: dict[str, tuple[str, ...]] = {
    "input_ids": ("input_ids", "idx", "tokens", "token_ids", "ids", "inputs", "input", "x", "src"),
    "labels": ("labels", "targets", "target", "label", "y", "tgt"),
    "attention_mask": ("attention_mask", "mask", "padding_mask"),
    "position_ids": ("position_ids", "positions", "input_pos"),
    "segment_ids": ("segment_ids", "document_ids", "seq_idx"),
    "cu_seqlens": ("cu_seqlens", "cu_seq_lens_q"),
    "loss_mask": ("loss_mask", "label_mask", "target_mask"),
    "roles": ("roles",),
}
# Those that may come as floating-point numbers: 1 and 0, 0 and a large negative number, or weights.
MASKS = ("attention_mask", "loss_mask")
# A look at all logits at once would need a float32 copy of them; this many elements are taken at a time.
PIECE = 1 << 25


def find(batch: Any, inputs: tuple[Any, ...], keywords: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """The arrays of a batch by their evidence names.

    Args:
        batch: what the loop gave: a mapping, (inputs, targets), (inputs, mask, targets), an object with fields, a
            tensor, or None.
        inputs: positional arguments of the model's forward, which fill in what the batch did not give.
        keywords: its keyword arguments.
        model: the model, whose forward names its positional arguments.

    Returns:
        Tensors as they are, on their device, [B, T] where they hold one value a token.
    """
    seen = _named(dict(keywords) | _positional(inputs, model))
    if "input_ids" not in seen and inputs and _is_ids(inputs[0]):
        seen["input_ids"] = inputs[0]
    fields = _fields(batch)
    if fields is not None:
        given = _named(fields)
    elif isinstance(batch, (tuple, list)):
        given = _placed([value for value in batch if _is_ids(value)])
    elif _is_ids(batch):
        given = {"input_ids": batch}
        fed = seen.get("input_ids")
        # nanoGPT-like loops cut x and y from one row of T + 1 tokens: what the model was fed is the input.
        if fed is not None and fed.shape != batch.shape:
            given = {"input_ids": fed}
            if fed.ndim == 2 and batch.shape == (fed.shape[0], fed.shape[1] + 1):
                given["labels"] = batch[:, 1:]
    else:
        given = {}
    found = seen | given
    ids = found.get("input_ids")
    if ids is None:
        return {}
    if ids.ndim == 1:
        found = {name: value[None] if value.shape == ids.shape else value for name, value in found.items()}
        ids = ids[None]
    found["input_ids"] = ids
    return {name: value for name, value in found.items() if _fits(name, value, ids)}


def keys_of(batch: Any) -> list[str] | None:
    """The names that the collator produced, where it produced names."""
    fields = _fields(batch)
    return None if fields is None else [str(key) for key in fields]


def _fields(batch: Any) -> Mapping[Any, Any] | None:
    """A batch that has names as a mapping: a dictionary, a named tuple, a data class, any object with token ids."""
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        return batch._asdict()  # pyright: ignore
    known = getattr(batch, "__dict__", None)
    if isinstance(known, dict) and any(alias in known for alias in ALIASES["input_ids"]):
        return known
    return None


def _placed(ids: list[Tensor]) -> dict[str, Tensor]:
    """What unnamed tensors of token ids are by their place: inputs first, targets last, a mask of 0 and 1 between."""
    masks = [each for each in ids[1:] if len(ids) > 2 and each.device.type == "cpu" and _is_flags(each)]
    others = [each for each in ids if not any(each is mask for mask in masks)]
    named = dict(zip(("input_ids", "labels"), others, strict=False))
    return named | ({"attention_mask": masks[0]} if masks else {})


def _is_flags(value: Tensor) -> bool:
    return bool(((value == 0) | (value == 1)).all())


def _positional(inputs: tuple[Any, ...], model: nn.Module) -> dict[str, Any]:
    if not inputs:
        return {}
    bound = getattr(model.forward, "__func__", None)
    names = _parameters_of(model.forward) if bound is None else _parameters_of(bound)[1:]
    return dict(zip(names, inputs, strict=False))


# Names of the parameters of functions: to look them up takes longer than all else that is done with a batch.
_parameters: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()


def _parameters_of(function: Any) -> list[str]:
    with contextlib.suppress(TypeError):  # some callables cannot be remembered
        if (known := _parameters.get(function)) is not None:
            return known
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        names = []
    with contextlib.suppress(TypeError):
        _parameters[function] = names
    return names


def _named(values: Mapping[Any, Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, aliases in ALIASES.items():
        for alias in aliases:
            value = values.get(alias)
            if not isinstance(value, Tensor) or value.is_meta or stands_in(value):
                continue
            if name in MASKS:
                found[name] = _mask(value)
                if name == "loss_mask" and value.is_floating_point():
                    found["loss_weights"] = value
                break
            if _has_integers(value):
                found[name] = value
                break
    return found


def _mask(value: Tensor) -> Tensor:
    """A mask of any kind as [B, T] or [B, T, T] of integers or bools, without waiting for a device.

    Of floating-point masks those that are added to scores hold 0 where a token is seen and a large negative number
    where it is not; those that are multiplied, and weights, hold 0 where it is not.
    """
    if value.ndim == 4 and value.shape[1] == 1:  # [B, 1, T, T] or [B, 1, 1, T]
        value = value[:, 0, 0] if value.shape[2] == 1 else value[:, 0]
    if value.is_floating_point() and value.numel():
        value = value.detach()
        return torch.where(value.amin() < -1, value > -1, value != 0)
    return value


def _is_ids(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.ndim not in (1, 2) or value.dtype not in (torch.int64, torch.int32):
        return False
    return _has_integers(value)


def _has_integers(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex() or value.is_meta or stands_in(value))


def _fits(name: str, value: Tensor, ids: Tensor) -> bool:
    if name == "cu_seqlens":
        return value.ndim == 1
    if name == "attention_mask" and value.ndim == 3:
        return value.shape == (*ids.shape, ids.shape[1])
    return value.shape == ids.shape


def logits_in(output: Any, depth: int = 0) -> Tensor | None:
    """The logits in what a model returned: a tensor, an attribute or key ``logits``, or the first that looks so."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() and output.ndim in (2, 3) else None
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, Tensor):
        return logits_in(named)
    if depth < 2 and isinstance(output, (tuple, list)):
        return next((found for each in output if (found := logits_in(each, depth + 1)) is not None), None)
    return None


def loss_in(output: Any) -> Tensor | None:
    """The loss in what a model returned: an attribute or key ``loss``, or a single number among several results."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    candidates = [named] if named is not None else list(output) if isinstance(output, (tuple, list)) else []
    for each in candidates:
        if isinstance(each, Tensor) and each.numel() == 1 and each.is_floating_point() and not each.is_meta:
            return each
    return None


class Layout(NamedTuple):
    """Which token a label names, "unshifted" the one at its position, "shifted" the next; and the rows that differ."""

    name: str | None
    odd: list[int]


def label_layout(ids: Tensor, labels: Tensor, ignore_index: int) -> Layout:
    """The layout that more than half of the rows show, which one garbled row must not hide; None for neither or both.

    Reads the values, so on a device it waits for them.
    """
    ids = ids.to(labels.device)
    if ids.shape != labels.shape or ids.ndim != 2 or not ids.numel():
        return Layout(None, [])
    supervised = labels != ignore_index
    same = ((labels == ids) | ~supervised).all(1) & supervised.any(1)
    # Cut from longer rows and padded, the last label of a row is a token that its inputs do not hold: the position
    # before the run of equal tokens that ends the row says nothing.
    ends = (ids == ids[:, -1:]).flip(1).cumprod(1).flip(1).bool()
    following = supervised[:, :-1] & ~(ends[:, 1:] & ~ends[:, :-1])
    told = following.any(1)
    shifted = ((labels[:, :-1] == ids[:, 1:]) | ~following).all(1) & told
    neither = supervised.any(1) & ~same & ~shifted & told
    either = same & shifted  # one token all along
    votes = {"unshifted": same & ~either, "shifted": shifted & ~either}
    counts = [int(each.sum()) for each in (*votes.values(), neither)]
    name = next((name for name, count in zip(votes, counts, strict=False) if 2 * count > sum(counts)), None)
    if name is None:
        return Layout(None, [])
    other = "shifted" if name == "unshifted" else "unshifted"
    odd = (neither | votes[other]).nonzero().view(-1).tolist() if sum(counts) > max(counts) else []
    return Layout(name, odd)


def targets_of(labels: Tensor, layout: str | None, ignore_index: int) -> Tensor:
    """[B, T]: the token to predict from each position, ``ignore_index`` where there is none."""
    if layout == "shifted":
        return labels
    end = torch.full_like(labels[:, :1], ignore_index)
    return torch.cat((labels[:, 1:], end), dim=1)


class Readings:
    """What is kept of the logits of one micro-batch, on their device.

    Attributes:
        logsumexp: float32 [B, T].
        target_logits: float32 [B, T, 3]; [b, t, o] is the logit at (b, t) for token ``ids.flat[b·T + t + o]``, NaN
            past the end and for ids outside the vocabulary.
        token_loss: float32 [B, T] cross-entropy of each position's target, NaN where there is none; None without
            labels.
        counted: bool [B, T], where there is a target; None without labels.
        dtype: of the logits.
        vocabulary: V.
    """

    __slots__ = ("counted", "dtype", "logsumexp", "target_logits", "token_loss", "vocabulary")

    def __init__(self, logits: Tensor, ids: Tensor, targets: Tensor | None, ignore_index: int) -> None:
        rows, vocabulary = logits.shape[0] * logits.shape[1], logits.shape[2]
        flat = logits.detach().reshape(rows, vocabulary)
        self.dtype, self.vocabulary = logits.dtype, vocabulary
        self.logsumexp = torch.cat([torch.logsumexp(piece.float(), 1) for piece in _pieces(flat)]).view(ids.shape)
        sequence = ids.reshape(-1).to(logits.device, torch.int64)
        wanted = torch.stack([_ahead(sequence, offset) for offset in range(3)], dim=1)
        self.target_logits = _pick(flat, wanted).view(*ids.shape, 3)
        self.token_loss: Tensor | None = None
        self.counted: Tensor | None = None
        if targets is not None:
            targets = targets.to(logits.device, torch.int64)
            self.counted = targets != ignore_index
            wanted = torch.where(self.counted, targets, -1).reshape(-1, 1)
            self.token_loss = self.logsumexp - _pick(flat, wanted).view(ids.shape)

    def per_row(self) -> tuple[Tensor, Tensor] | None:
        """Mean loss [B] and number of targets [B] of each row; None without labels.

        A NaN loss of a real target stays NaN: which positions count comes from the targets.
        """
        if self.token_loss is None or self.counted is None:
            return None
        counted = self.counted.sum(dim=1)
        total = torch.where(self.counted, self.token_loss, 0).sum(dim=1)
        return total / counted.clamp(min=1), counted


def readings_of(
    output: Any, ids: Tensor, labels: Tensor | None, layout: str | None, ignore_index: int
) -> tuple[Tensor, Readings] | None:
    """The logits in what a model returned, and what is kept of them; None where they do not belong to ``ids``."""
    logits = logits_in(output)
    if logits is None:
        return None
    if logits.ndim == 2 and logits.shape[0] == ids.numel():
        logits = logits.view(*ids.shape, -1)
    if logits.ndim != 3 or logits.shape[:2] != ids.shape or not is_readable(logits):
        return None
    targets = None if labels is None or layout is None else targets_of(labels, layout, ignore_index)
    return logits, Readings(logits, ids, targets, ignore_index)


def _pieces(flat: Tensor) -> tuple[Tensor, ...]:
    return flat.split(max(1, PIECE // flat.shape[1]))


def _ahead(sequence: Tensor, offset: int) -> Tensor:
    """The token ``offset`` places later, -1 past the end."""
    if not offset:
        return sequence
    past = sequence.new_full((min(offset, len(sequence)),), -1)
    return torch.cat((sequence[offset:], past))


def _pick(flat: Tensor, wanted: Tensor) -> Tensor:
    """flat[i, wanted[i, j]] as float32, NaN for tokens outside the vocabulary (which must not reach a device)."""
    inside = (wanted >= 0) & (wanted < flat.shape[1])
    picked = flat.gather(1, torch.where(inside, wanted, 0)).float()
    return torch.where(inside, picked, torch.nan)
