"""Norms and full statistics of one tensor: exact, without random numbers, without a synchronisation on a device.

The norm is cheap and carries NaN and Inf, so it is taken of every tensor at every step. The full set costs several
passes and is taken every N steps, and of the tensors whose norm was not finite.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from .internals import stands_in

Numbers = dict[str, float]

COUNTS = ("nan", "posinf", "neginf", "zeros", "subnormals")
COLUMNS = (*COUNTS, "min", "max", "absmax", "absmean", "mean", "std", "rms")

# Elements taken at once: on a CPU a piece and its scratch stay in the second-level cache, on a device the
# temporary copies stay small beside the tensor.
CPU_PIECE = 1 << 16
DEVICE_PIECE = 1 << 24
_ROW = 8192

Array = np.ndarray[Any, Any]


_PLAIN = (Tensor, torch.nn.Parameter)


def is_readable(tensor: Tensor) -> bool:
    """Whether values can be read: dense, real floating point, with storage; a shard is, a tracer's stand-in is not."""
    return (
        (type(tensor) in _PLAIN or hasattr(tensor, "to_local"))
        and tensor.is_floating_point()
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not stands_in(tensor)
    )


def is_shard(parameter: Tensor) -> bool:
    """Whether a parameter stands for a part of one: a DTensor, or what FSDP of the first generation has flattened."""
    return hasattr(parameter, "to_local") or getattr(parameter, "_fsdp_flattened", False)


def at_hand(tensor: Tensor) -> bool:
    """Whether reading a value costs nothing: on a device it would wait for everything before it."""
    return tensor.is_cpu


def local(tensor: Tensor) -> Tensor:
    """The part that lives on this rank, detached; a DTensor gives its shard and starts no collective."""
    if type(tensor) in _PLAIN:
        return tensor.detach() if tensor.requires_grad else tensor
    to_local = getattr(tensor, "to_local", None)
    return (tensor if to_local is None else cast(Tensor, to_local())).detach()


def norm(tensor: Tensor) -> Tensor:
    """‖tensor‖₂ as a 0-d tensor on the tensor's device, accumulated in float32 or wider (fp16 would overflow)."""
    if tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous():
        return _square(tensor).sqrt_()
    if tensor.dtype in (torch.float32, torch.float64):
        return torch.linalg.vector_norm(tensor)
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()
    return torch.linalg.vector_norm(tensor, dtype=torch.float32)


def norm_at_hand(tensor: Tensor) -> float:
    """The norm of a tensor on a CPU as a number: of every tensor of every step, so each operation on it counts."""
    if tensor.dtype is torch.float32 and tensor.is_contiguous():
        return math.sqrt(_square(tensor).item())
    return norm(tensor).item()


def _square(tensor: Tensor) -> Tensor:
    """‖tensor‖₂² of a contiguous float32 tensor on a CPU.

    BLAS takes half the time of vector_norm while the tensor is in the cache. Where the square overflows the result is
    Inf, and whoever sees a norm that is not finite looks closer.
    """
    flat = tensor.view(-1)
    return torch.dot(flat, flat)


def nonfinite_counts(tensor: Tensor) -> Tensor:
    """(NaN, +Inf, -Inf) counts, int64 [3], on the tensor's device."""
    return torch.stack(((tensor != tensor).sum(), (tensor == math.inf).sum(), (tensor == -math.inf).sum()))


def full(tensor: Tensor) -> Numbers | Tensor:
    """All statistics of one plain tensor.

    Returns:
        On a CPU the numbers by the names in ``COLUMNS``. On a device a float64 tensor [12] in that order, still on the
        device, for ``unpack`` after the one transfer of the step. Moments cover the finite elements; NaN where there
        are none. ``subnormals`` are judged by the tensor's own dtype.
    """
    flat = _flat(tensor)
    if not at_hand(flat):
        return _full_on_device(flat)
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN are what this looks for
        return _finish(_full_on_cpu(flat))


def norm_of(numbers: Numbers, numel: int) -> float:
    """The norm that belongs to full statistics on the host: NaN or Inf where an element is."""
    if numbers["nan"]:
        return math.nan
    if numbers["posinf"] or numbers["neginf"]:
        return math.inf
    return numbers["rms"] * math.sqrt(numel) if numel else 0.0


def unpack(row: list[float]) -> Numbers:
    """The twelve numbers of a device result by name."""
    return dict(zip(COLUMNS, row, strict=True))


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    # A transposed tensor holds the same elements in another order, which no statistic here depends on.
    if _is_dense(tensor):
        return torch.as_strided(tensor, (tensor.numel(),), (1,))
    return tensor.reshape(-1)


def _is_dense(tensor: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


class _Sums:
    """Running sums over pieces of one tensor, in Python floats."""

    __slots__ = ("absolute", "finite", "high", "low", "neginf", "posinf", "square", "subnormals", "sum", "zeros")

    def __init__(self) -> None:
        self.finite = self.posinf = self.neginf = self.zeros = self.subnormals = 0
        self.sum = self.absolute = self.square = 0.0
        self.low, self.high = math.inf, -math.inf


def _full_on_cpu(flat: Tensor) -> tuple[_Sums, int, float]:
    """Sums of a 1-D CPU tensor, its size and its variance, piece by piece through numpy, which is fastest there."""
    sums, size = _Sums(), flat.numel()
    tiny = torch.finfo(flat.dtype).tiny
    scratch = np.empty(min(size, CPU_PIECE), np.float64 if flat.dtype is torch.float64 else np.float32)
    for piece in flat.split(CPU_PIECE) if size else ():
        _add(sums, _array(piece), scratch, tiny)
    if not sums.finite:
        return sums, size, math.nan
    mean = sums.sum / sums.finite
    variance = sums.square / sums.finite - mean * mean
    if variance < 1e-3 * mean * mean:  # the difference above has lost its digits: a norm's weights near 1, say
        variance = _centred_square(flat, mean) / sums.finite
    return sums, size, variance


def _array(piece: Tensor) -> Array:
    return piece.numpy() if piece.dtype in (torch.float32, torch.float64) else piece.float().numpy()


def _add(sums: _Sums, values: Array, scratch: Array, tiny: float) -> None:
    square = _product(values, values)
    if not math.isfinite(square):
        finite = np.isfinite(values)
        if not finite.all():
            sums.posinf += int(np.count_nonzero(values == math.inf))
            sums.neginf += int(np.count_nonzero(values == -math.inf))
            values = values[finite]
            if not values.size:
                return
        values = values.astype(np.float64)  # large values whose squares leave float32
        scratch = np.empty(values.size, np.float64)
        square = _product(values, values)
    magnitudes = np.abs(values, out=scratch[: values.size])
    sums.finite += values.size
    sums.square += square
    sums.sum += _product(values, None)
    sums.absolute += _product(magnitudes, None)
    sums.low = min(sums.low, float(values.min()))
    sums.high = max(sums.high, float(values.max()))
    if float(magnitudes.min()) < tiny:
        zeros = int(np.count_nonzero(magnitudes == 0))
        sums.zeros += zeros
        sums.subnormals += int(np.count_nonzero(magnitudes < tiny)) - zeros


_ONES: dict[str, Array] = {kind: np.ones(_ROW, kind) for kind in ("f", "d")}


def _product(a: Array, b: Array | None) -> float:
    """Σ a·b, or Σ a, in rows short enough that BLAS wakes no threads for them: the job's own work needs the cores."""
    ones = _ONES[a.dtype.char]
    rows = a.size // _ROW
    head = rows * _ROW
    total = 0.0
    if rows:
        column = ones.reshape(1, _ROW, 1) if b is None else b[:head].reshape(rows, _ROW, 1)
        total = float(np.matmul(a[:head].reshape(rows, 1, _ROW), column).ravel().dot(ones[:rows]))
    if head == a.size:
        return total
    rest = a[head:]
    return total + float(rest.dot(ones[: rest.size] if b is None else b[head:]))


def _centred_square(flat: Tensor, mean: float) -> float:
    total = 0.0
    for start in range(0, flat.numel(), CPU_PIECE):
        piece = flat[start : start + CPU_PIECE].double().numpy()
        centred = piece[np.isfinite(piece)] - mean
        total += float(np.dot(centred, centred))
    return total


def _finish(result: tuple[_Sums, int, float]) -> Numbers:
    sums, size, variance = result
    nan = size - sums.finite - sums.posinf - sums.neginf
    counts: Numbers = {
        "nan": nan,
        "posinf": sums.posinf,
        "neginf": sums.neginf,
        "zeros": sums.zeros,
        "subnormals": sums.subnormals,
    }
    if not sums.finite:
        return counts | dict.fromkeys(COLUMNS[len(COUNTS) :], math.nan)
    return counts | {
        "min": sums.low,
        "max": sums.high,
        "absmax": max(-sums.low, sums.high),
        "absmean": sums.absolute / sums.finite,
        "mean": sums.sum / sums.finite,
        "std": math.sqrt(max(variance, 0.0)),
        "rms": math.sqrt(sums.square / sums.finite),
    }


def _full_on_device(flat: Tensor) -> Tensor:
    """The same numbers with device operations only; a second pass over the pieces centres the deviation."""
    tiny = torch.finfo(flat.dtype).tiny
    zero = torch.zeros((), dtype=torch.float64, device=flat.device)
    nan, posinf, neginf, zeros, subnormals, total, absolute, square, deviation = (zero.clone() for _ in range(9))
    low, high = zero + math.inf, zero - math.inf
    pieces = flat.split(DEVICE_PIECE)
    for piece in pieces:
        x = piece if piece.dtype.itemsize >= 4 else piece.float()
        finite = torch.isfinite(x)
        magnitude = x.abs()
        nan += (x != x).sum()
        posinf += (x == math.inf).sum()
        neginf += (x == -math.inf).sum()
        is_zero = (x == 0).sum()
        zeros += is_zero
        subnormals += (magnitude < tiny).sum() - is_zero
        clean = torch.where(finite, x, 0)
        total += clean.sum(dtype=torch.float64)
        absolute += clean.abs().sum(dtype=torch.float64)
        square += clean.double().square().sum()
        low = torch.minimum(low, torch.where(finite, x, math.inf).amin().double())
        high = torch.maximum(high, torch.where(finite, x, -math.inf).amax().double())
    finite_count = flat.numel() - nan - posinf - neginf
    mean = total / finite_count
    for piece in pieces:
        x = piece.double()
        deviation += torch.where(torch.isfinite(x), x - mean, 0).square().sum()
    empty = finite_count == 0
    low, high = (torch.where(empty, math.nan, bound) for bound in (low, high))
    return torch.stack(
        (
            *(nan, posinf, neginf, zeros, subnormals, low, high),
            torch.maximum(-low, high),
            absolute / finite_count,
            mean,
            torch.sqrt(deviation / finite_count),
            torch.sqrt(square / finite_count),
        )
    )


def describe(tensor: Tensor) -> dict[str, Any]:
    """The columns that need no reading: dtype, shape, stride, device and number of elements of the local part."""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": tuple(tensor.shape),
        "stride": tuple(tensor.stride()),
        "device": str(tensor.device),
        "numel": tensor.numel(),
    }
