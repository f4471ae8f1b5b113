"""Batches and tensors: what a writer accepts for them, and what a reader hands out, loading arrays on demand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from .arrays import ArrayInfo, Description, Size
from .dtypes import STORED, Array, Plain, decoded, plain_array
from .errors import EvidenceError
from .jsonio import plain
from .limits import MAX_ARRAYS_BYTES, MAX_DIMENSIONS
from .typed import all_floats, check, salvage

#: Arrays of a batch: kind of numbers (i: integers, f: floats) and admitted shapes; a letter is one size per batch.
BATCH_ARRAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "input_ids": ("i", ("BT",)),
    "labels": ("i", ("BT",)),
    "attention_mask": ("i", ("BT", "BTT")),
    "position_ids": ("i", ("BT", "T", "*BT")),
    "segment_ids": ("i", ("BT",)),
    "cu_seqlens": ("i", ("*",)),
    "loss_mask": ("i", ("BT",)),
    "roles": ("i", ("BT",)),
    "token_loss": ("f", ("BT",)),
    "logsumexp": ("f", ("BT",)),
    "target_logits": ("f", ("BT3",)),
    "logits": ("f", ("BTV",)),
}


class BatchAttributes(msgspec.Struct, kw_only=True):
    """What is known of a batch beside its arrays."""

    split: Literal["train", "validation"] | None = None
    sample_ids: list[str] | None = None
    reported_loss: float | None = None
    reported_decimals: Annotated[int, Meta(ge=0, le=400)] | None = None
    label_layout: Literal["unshifted", "shifted"] | None = None
    keys: list[str] | None = None
    loss_dtype: str | None = None
    logits_dtype: str | None = None


_FIELDS = frozenset(BatchAttributes.__struct_fields__)
_MAX_NAME = 1000
_MAX_ROLE = 7  # 0 padding, 1 system, 2 user, 3 assistant, 4 tool, 5 image, 6 audio, 7 video


def check_batch(evidence: Mapping[str, Any]) -> tuple[dict[str, Plain], dict[str, Any]]:
    """Sort the keywords of ``CapsuleWriter.batch`` into arrays and attributes and validate both.

    Raises:
        EvidenceError: naming the field, what was found and what was expected.
    """
    arrays: dict[str, Plain] = {}
    attributes: dict[str, Any] = {}
    for name, value in evidence.items():
        if value is None:
            continue
        if name in BATCH_ARRAYS or (name not in _FIELDS and getattr(value, "ndim", 0) > 0):
            arrays[name] = plain_array(value, f"batch.{name}")
        else:
            attributes[name] = _plain_attribute(name, value)
    attributes, typed = check(attributes, BatchAttributes, "batch")
    sizes: dict[str, tuple[int, str]] = {}
    for name, (numbers, shapes) in BATCH_ARRAYS.items():
        if name in arrays:
            _check_array(name, arrays[name], numbers, shapes, sizes)
    rows, source = sizes.get("B", (None, ""))
    if typed.sample_ids is not None and rows is not None and len(typed.sample_ids) != rows:
        raise EvidenceError(f"{len(typed.sample_ids)} ids for {rows} rows of {source}", "batch.sample_ids")
    return arrays, attributes


def _check_array(
    name: str, array: Plain, numbers: str, shapes: tuple[str, ...], sizes: dict[str, tuple[int, str]]
) -> None:
    where = f"batch.{name}"
    integers = array.dtype == "bool" or array.dtype.startswith(("int", "uint"))
    if integers != (numbers == "i"):
        raise EvidenceError(f"found {array.dtype}, expected {'integers' if numbers == 'i' else 'floats'}", where)
    shape = next((each for each in shapes if len(each) == len(array.shape)), None)
    if shape is None:
        expected = " or ".join("[" + ", ".join(each) + "]" for each in shapes)
        raise EvidenceError(f"shape {list(array.shape)}, expected {expected}", where)
    for letter, size in zip(shape, array.shape, strict=True):
        known, source = (3, "the format") if letter == "3" else sizes.get(letter, (size, name))
        if letter != "*" and size != known:
            raise EvidenceError(f"shape {list(array.shape)}, but {letter} is {known} in {source}", where)
        if letter not in "*3":
            sizes.setdefault(letter, (size, name))
    if name == "roles" and array.data.size and not 0 <= array.data.min() <= array.data.max() <= _MAX_ROLE:
        raise EvidenceError(f"found {array.data.min()} to {array.data.max()}, expected 0 to {_MAX_ROLE}", where)


def _plain_attribute(name: str, value: Any) -> Any:
    """Ids and dtypes as text, whatever the loader and the job call them."""
    if name in ("sample_ids", "keys") and not isinstance(value, str):
        items = plain(value)
        return [str(each) for each in items] if isinstance(items, list) else items
    if name in ("loss_dtype", "logits_dtype"):
        return str(value).removeprefix("torch.")
    return plain(value)


def check_tensor(name: str, array: Any, dtype: str | None, attributes: dict[str, Any]) -> Plain:
    """Validate the keywords of ``CapsuleWriter.tensor``; takes ``stride`` and ``device`` out of ``attributes``.

    Raises:
        EvidenceError: the name is no path of words, or the array cannot be stored.
    """
    parts = name.split("/")
    if not name or len(name) > _MAX_NAME or any(part in ("", ".", "..") for part in parts) or not name.isprintable():
        raise EvidenceError(f"tensor name {name!r:.60} is not of the form group/name")
    stored = plain_array(array, f"tensor {name}", dtype)
    stored.device = str(attributes.pop("device", None) or stored.device or "") or None
    if (stride := attributes.pop("stride", None)) is not None:
        stored.stride = tuple(int(each) for each in stride)
    return stored


Load = Callable[[str], Array | None]


class _Stored:
    """Evidence of one arrays file: its description, and its arrays loaded when asked for."""

    def __init__(self, description: Description, rank: int, load: Load) -> None:
        self._description = description
        self._load = load
        self._loaded: dict[str, Array | None] = {}
        self.rank = rank
        self.step = description.step
        self.attributes: dict[str, Any] = all_floats(description.attributes)

    def _bits(self, key: str) -> Array | None:
        if key not in self._description.arrays:
            return None
        if key not in self._loaded:
            self._loaded[key] = self._load(key)
        return self._loaded[key]

    def _values(self, key: str) -> Array | None:
        bits = self._bits(key)
        info = self._description.arrays.get(key)
        return None if bits is None or info is None else decoded(bits, info.dtype, info.shape)


class _Named:
    """An array of a batch by the name of the attribute; None where it is absent or cannot be read."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, batch: Batch, owner: type[Batch]) -> Array | None:
        return batch.array(self._name)


class Batch(_Stored):
    """One micro-batch: its arrays (None where absent), its attributes, and the number the job reported for it.

    Attributes:
        attributes: every attribute that is not a field of its own.
        faults: one sentence for each attribute that was left out because its type is wrong.
    """

    def __init__(self, description: Description, rank: int, load: Load) -> None:
        super().__init__(description, rank, load)
        known, self.faults = salvage(self.attributes, BatchAttributes)
        self.attributes = {name: value for name, value in self.attributes.items() if name not in _FIELDS}
        self.micro: int = description.micro or 0
        self.split = known.split
        self.sample_ids = known.sample_ids
        self.reported_loss = known.reported_loss
        self.reported_decimals = known.reported_decimals
        self.label_layout = known.label_layout
        self.keys = known.keys
        self.loss_dtype = known.loss_dtype
        self.logits_dtype = known.logits_dtype

    @property
    def arrays(self) -> Mapping[str, ArrayInfo]:
        """dtype, shape, stride and device of every array, without loading any."""
        return self._description.arrays

    def array(self, name: str) -> Array | None:
        """Any array by name, also one that this format does not know; bfloat16 and float8 widened to float32."""
        return self._values(name)

    input_ids = _Named("int[B, T]")
    labels = _Named("int[B, T]")
    attention_mask = _Named("int[B, T] or int[B, T, T]")
    position_ids = _Named("int[B, T], int[T] or int[K, B, T]")
    segment_ids = _Named("int[B, T]: document number in a packed row")
    cu_seqlens = _Named("int[N + 1]")
    loss_mask = _Named("int[B, T]")
    roles = _Named("int[B, T]: 0 padding, 1 system, 2 user, 3 assistant, 4 tool, 5 image, 6 audio, 7 video")
    token_loss = _Named("float[B, T], at the predicting position")
    logsumexp = _Named("float[B, T]")
    target_logits = _Named("float[B, T, 3]: logits for the tokens at offsets 0, 1 and 2")
    logits = _Named("float[B, T, V]")


class Tensor(_Stored):
    """One full array under ``group/name``."""

    def __init__(self, description: Description, rank: int, load: Load, key: str = "data", start: int = 0) -> None:
        super().__init__(description, rank, load)
        self._key = key
        self._start = start
        info = description.arrays[key]
        self.name: str = description.name or ""
        self.order: int | None = description.order
        self.dtype: str = info.dtype
        self.shape: tuple[int, ...] = info.shape
        self.stride: tuple[int, ...] = info.stride or ()
        self.device: str | None = info.device

    @property
    def nbytes(self) -> int:
        """Bytes of the array as it is stored."""
        return math.prod(self.shape) * STORED[self.dtype].itemsize

    def array(self) -> Array:
        """The values; bfloat16 and float8 widened to float32 (exact), everything else in its own dtype.

        Raises:
            EvidenceError: the array cannot be read.
        """
        return decoded(self.bits(), self.dtype, self.shape)

    def bits(self) -> Array:
        """The stored bits: bfloat16 as uint16, float8 and bool as uint8, everything else as it is.

        Raises:
            EvidenceError: the array cannot be read.
        """
        bits = self._bits(self._key)
        if bits is None:
            raise EvidenceError("the array cannot be read", self.name, "damage() says why")
        if bits.shape == self.shape or self.dtype == "string":
            return bits
        return bits.reshape(-1)[self._start : self._start + math.prod(self.shape)].reshape(self.shape)


class _Piece(msgspec.Struct, array_like=True, frozen=True):
    """Where one of many tensors lies: index of its attributes, key of the array, its first element there."""

    name: str
    shared: Size
    key: str
    start: Size
    shape: Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMENSIONS)]


def pack(groups: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> tuple[dict[str, Plain], dict[str, Any]]:
    """Many small arrays as one array for each dtype and device, and the attributes that tell them apart again.

    Args:
        groups: (``group/name``, arrays by their last name, attributes that all of these share).

    Raises:
        EvidenceError: a name is no path of words, or an array cannot be stored.
    """
    kinds: dict[tuple[str, str | None], tuple[str, list[Array]]] = {}
    filled: dict[str, int] = {}
    pieces: list[_Piece] = []
    for index, (prefix, arrays, _) in enumerate(groups):
        for last, array in arrays.items():
            name = f"{prefix}/{last}"
            stored = check_tensor(name, array, None, {})
            if stored.dtype == "string":
                raise EvidenceError("texts cannot be packed with others", f"tensor {name}", "write them by tensor()")
            key, members = kinds.setdefault((stored.dtype, stored.device), (f"a{len(kinds)}", []))
            start = filled.get(key, 0)
            pieces.append(_Piece(name, index, key, start, stored.shape))
            members.append(stored.data.reshape(-1))
            filled[key] = start + stored.data.size
    packed = {
        key: Plain(np.concatenate(members), dtype, (filled[key],), (1,), device)
        for (dtype, device), (key, members) in kinds.items()
    }
    return packed, {"pieces": msgspec.to_builtins(pieces), "shared": [plain(attributes) for _, _, attributes in groups]}


def tensors_in(whole: Description) -> Iterator[tuple[Description, str, int]]:
    """The tensors of one arrays file: a description of each, the key of its array, and where it begins there.

    A file of kind ``tensors`` says in its attributes which part of which array has which name, shape and attributes;
    what points outside of an array is left out.
    """
    if whole.kind == "tensor" and "data" in whole.arrays:
        yield whole, "data", 0
    pieces, shared = (whole.attributes.get(each) for each in ("pieces", "shared"))
    if whole.kind != "tensors" or not isinstance(pieces, list) or not isinstance(shared, list):
        return
    for entry in pieces:
        try:
            piece = msgspec.convert(entry, _Piece)
        except msgspec.ValidationError:
            continue
        info = whole.arrays.get(piece.key)
        if info is None or info.dtype == "string" or piece.shared >= len(shared):
            continue
        room = math.prod(info.shape) - piece.start
        if math.prod(piece.shape) > room or math.prod(max(1, each) for each in piece.shape) > MAX_ARRAYS_BYTES:
            continue
        own = shared[piece.shared] if isinstance(shared[piece.shared], dict) else {}
        arrays = {piece.key: msgspec.structs.replace(info, shape=piece.shape, stride=None)}
        described = msgspec.structs.replace(whole, kind="tensor", name=piece.name, attributes=own, arrays=arrays)
        yield described, piece.key, piece.start


def pack_state(value: Any, arrays: dict[str, Plain]) -> Any:
    """A random-generator state as JSON, its bytes and arrays moved into ``arrays``; tuples stay tuples.

    Raises:
        EvidenceError: the state holds something else than numbers, text, bytes, arrays and containers of them.
    """
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else {"int": str(value)}
    if isinstance(value, bytes | bytearray):
        return {"bytes": _put(np.frombuffer(bytes(value), np.uint8), arrays)}
    if isinstance(value, tuple):
        if set(map(type, value)) == {int} and -(2**63) <= min(value) <= max(value) < 2**63:
            return {"tuple": list(value)}  # Python's generator: hundreds of words
        return {"tuple": [pack_state(each, arrays) for each in value]}
    if isinstance(value, list):
        return [pack_state(each, arrays) for each in value]
    if isinstance(value, Mapping):
        return {"dict": {str(key): pack_state(each, arrays) for key, each in value.items()}}
    if isinstance(value, np.generic):
        return pack_state(value.item(), arrays)
    kind = "bytes" if hasattr(value, "detach") else "array"  # a generator state of torch is a tensor of bytes
    return {kind: _put(value, arrays)}


def _put(value: Any, arrays: dict[str, Plain]) -> str:
    key = f"state{len(arrays)}"
    arrays[key] = plain_array(value, f"rng.{key}")
    return key


def unpack_state(value: Any, load: Callable[[str], Array]) -> Any:
    """The inverse of ``pack_state``."""
    if isinstance(value, list):
        return [unpack_state(each, load) for each in value]
    if not isinstance(value, dict):
        return value
    (kind, content), *rest = value.items() or [("", None)]
    if rest:
        raise EvidenceError("not a random-generator state", "rng")
    if kind == "tuple" and isinstance(content, list):
        return tuple(unpack_state(each, load) for each in content)
    if kind == "dict" and isinstance(content, dict):
        return {key: unpack_state(each, load) for key, each in content.items()}
    if kind == "int":
        return int(str(content))
    if kind in ("bytes", "array"):
        bits = load(str(content))
        return bits.tobytes() if kind == "bytes" else bits
    raise EvidenceError(f"not a random-generator state: {kind!r:.40}", "rng")
