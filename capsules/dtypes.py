"""Element types of stored arrays: NumPy's own, and bfloat16 and float8, which are kept as raw bits with their name.

Tensors of torch are recognised by their methods, so that this module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import EvidenceError
from .jsonio import decode, encode

Array = np.ndarray[Any, Any]

_NATIVE = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)

#: name → (exponent bits, mantissa bits, exponent bias, kind of special values)
_FLOAT8: dict[str, tuple[int, int, int, str]] = {
    "float8_e4m3fn": (4, 3, 7, "fn"),  # no infinities; all exponent and mantissa bits set is NaN
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),  # no infinities, no negative zero; its pattern is NaN
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
}

#: dtype name → how it lies in the file. ``string``: UTF-8 bytes of a JSON list of the elements in row order.
STORED: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name).newbyteorder("<") for name in _NATIVE},
    "bool": np.dtype("u1"),
    "bfloat16": np.dtype("<u2"),
    **{name: np.dtype("u1") for name in (*_FLOAT8, "float8_e8m0fnu")},
    "string": np.dtype("u1"),
}
BITS = ("bfloat16", *_FLOAT8, "float8_e8m0fnu")


@dataclass
class Plain:
    """An array ready to be stored: little-endian or raw bits, with its dtype's name and where it came from."""

    data: Array
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    device: str | None


def plain_array(value: Any, where: str, dtype: str | None = None) -> Plain:
    """Take a NumPy array, a torch tensor or nested lists of numbers as an array to store.

    Args:
        value: the array; a tensor is detached, taken to the host, and only its local shard is used.
        where: name for errors.
        dtype: name of the dtype; needed where ``value`` holds raw bits (bfloat16 as uint16, float8 as uint8).

    Raises:
        EvidenceError: not an array, an unsupported dtype, or ``dtype`` contradicts the data.
    """
    device: str | None = None
    stride: tuple[int, ...] | None = None
    name = dtype
    if hasattr(value, "detach"):
        try:
            tensor = value.detach()
            if hasattr(tensor, "to_local"):  # a DTensor: the whole would take a collective
                tensor = tensor.to_local()
            device, stride = str(tensor.device), tuple(int(each) for each in tensor.stride())
            own = str(tensor.dtype).removeprefix("torch.")
            array = _tensor_bits(tensor.cpu(), own)
        except (TypeError, RuntimeError) as error:  # sparse, quantised, complex, meta
            raise EvidenceError(f"a tensor of {value.dtype} cannot be stored ({str(error)[:80]})", where) from None
        name = name or own
    else:
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise EvidenceError(f"expected an array of numbers ({str(error)[:80]})", where) from None
        if array.dtype.name in BITS:  # ml_dtypes
            name = name or array.dtype.name
            array = array.view(STORED[array.dtype.name])
    name = "string" if array.dtype.kind == "U" else name or array.dtype.name
    if stride is None:
        stride = tuple(each // max(1, array.itemsize) for each in array.strides)
    if name not in STORED:
        raise EvidenceError(f"dtype {name} cannot be stored, expected one of {', '.join(STORED)}", where)
    stored = STORED[name]
    shape = array.shape
    if name == "string":
        array = np.frombuffer(encode(array.reshape(-1).tolist()), np.uint8)
    elif name in BITS:
        if array.dtype.itemsize != stored.itemsize or array.dtype.kind not in "iu":
            raise EvidenceError(f"dtype {name} expects raw bits as {stored.name}, found {array.dtype.name}", where)
        array = array.view(stored)
    elif array.dtype.name != name:
        raise EvidenceError(f"dtype {name} was given for an array of {array.dtype.name}", where)
    return Plain(array.astype(stored, copy=False), name, shape, stride, device)


def _tensor_bits(tensor: Any, name: str) -> Array:
    """The elements of a tensor on the host; raw bits where NumPy has no such dtype."""
    if name not in BITS:
        return tensor.resolve_neg().numpy()
    import torch  # the value is a tensor, so torch is loaded

    return tensor.contiguous().view(torch.int16 if name == "bfloat16" else torch.uint8).numpy()


def decoded(bits: Array, dtype: str, shape: tuple[int, ...]) -> Array:
    """Stored bits as values: bool as bool, bfloat16 and float8 widened to float32 exactly, the rest as it is."""
    if dtype == "string":
        return np.array(decode(bits.tobytes()), dtype=np.str_).reshape(shape)
    if dtype == "bool":
        return bits.astype(np.bool_)
    if dtype == "bfloat16":
        return np.asarray(np.left_shift(bits, 16, dtype=np.uint32)).view(np.float32)
    if dtype in BITS:
        return np.asarray(_float8_table(dtype)[bits])
    return bits


def _float8_table(name: str) -> Array:
    """All 256 values of an 8-bit float as float32 (OCP 8-bit floating point; FNUZ as in LLVM's APFloat)."""
    codes = np.arange(256)
    if name == "float8_e8m0fnu":  # OCP microscaling: a power of two, 255 is NaN
        values = np.ldexp(1.0, codes - 127)
        values[255] = np.nan
        return values.astype(np.float32)
    exponent_bits, mantissa_bits, bias, special = _FLOAT8[name]
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    values = sign * np.where(
        exponent == 0,
        np.ldexp(fraction, 1 - bias),
        np.ldexp(1.0 + fraction, exponent - bias),
    )
    top = exponent == (1 << exponent_bits) - 1
    if special == "ieee":
        values[top] = np.where(mantissa[top] == 0, sign[top] * np.inf, np.nan)
    elif special == "fn":
        values[top & (mantissa == (1 << mantissa_bits) - 1)] = np.nan
    else:
        values[0x80] = np.nan
    return values.astype(np.float32)


#: Scalar types whose C++ names, in lower case, are not their names in torch.
_SCALAR_TYPES = {
    **{"byte": "uint8", "char": "int8", "short": "int16", "int": "int32", "long": "int64"},
    **{"half": "float16", "float": "float32", "double": "float64"},
    **{"complexhalf": "complex32", "complexfloat": "complex64", "complexdouble": "complex128"},
}


def torch_name(printed: str) -> str:
    """The name in torch of a scalar type as C++ prints it: ``BFloat16`` is bfloat16, ``Float`` float32."""
    bare = printed.removeprefix("torch.").lower()
    return _SCALAR_TYPES.get(bare, bare)
