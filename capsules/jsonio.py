"""JSON as this product writes and reads it: no number is lost, no input can do more than be refused.

Non-finite numbers are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` (msgspec's own encoder
would write null) and read in either form; numpy scalars, arrays and tensors become plain numbers and lists.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import math
import types
from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec

from .errors import EvidenceError
from .limits import MAX_JSON_DEPTH

NON_FINITE: dict[str, float] = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def builtin(value: Any) -> Any:
    """Turn one foreign value (numpy scalar or array, tensor, path) into what JSON has; the last resort is ``str``."""
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return value.detach().tolist() if hasattr(value, "detach") else value.tolist()
    if isinstance(value, Mapping):
        return dict(cast("Mapping[Any, Any]", value))
    if isinstance(value, range | frozenset | Iterable) and not isinstance(value, str | bytes):
        return list(cast("Iterable[Any]", value))
    return str(value)


#: Types that need no look inside, and those of them that can be no NaN.
_BUILTIN = frozenset((type(None), bool, int, float, str))
_NEVER_NAN = _BUILTIN - {float}

_encoder = msgspec.json.Encoder(enc_hook=builtin)
_decoder = msgspec.json.Decoder()


def encode(value: Any, nulls: int | None = None) -> bytes:
    """Encode a value as compact UTF-8 JSON on one line.

    Args:
        value: anything; see ``builtin``.
        nulls: how often None is in it, where the caller knows that, and that it is nested no deeper than the limit.

    Raises:
        EvidenceError: the value is nested deeper than the limit or contains itself.
    """
    try:
        data = _encoder.encode(value)
        if nulls is not None and data.count(b"null") == nulls:
            return data  # as many as there were: no NaN became one
        if b"null" not in data and data.count(b"[") + data.count(b"{") <= MAX_JSON_DEPTH:
            return data  # msgspec writes NaN as null: where there is none, there was no NaN
        return _encoder.encode(_written(value, MAX_JSON_DEPTH))
    except (TypeError, ValueError, OverflowError, RecursionError):  # lone surrogates, odd keys, depth
        return json.dumps(_written(value, MAX_JSON_DEPTH), separators=(",", ":")).encode("ascii")


def decode(data: bytes | str, where: str = "") -> Any:
    """Decode one JSON value; bare ``NaN`` and ``Infinity`` are accepted as floats.

    Args:
        data: UTF-8 bytes or text.
        where: what the error names as the place.

    Raises:
        EvidenceError: not JSON, not UTF-8, or nested deeper than ``MAX_JSON_DEPTH``.
    """
    try:
        try:
            value = _decoder.decode(data)
        except msgspec.DecodeError:
            value = json.loads(data.decode("utf-8") if isinstance(data, bytes) else data)
    except RecursionError:
        raise EvidenceError(f"JSON is nested deeper than {MAX_JSON_DEPTH} levels", where) from None
    except ValueError as error:  # malformed JSON, bad UTF-8, integers of thousands of digits
        raise EvidenceError(f"not valid JSON ({str(error)[:120]})", where) from None
    raw = data if isinstance(data, bytes) else data.encode("utf-8", "replace")
    if raw.count(b"[") + raw.count(b"{") > MAX_JSON_DEPTH and not _shallow(value, MAX_JSON_DEPTH):
        raise EvidenceError(f"JSON is nested deeper than {MAX_JSON_DEPTH} levels", where)
    return value


def decode_object(data: bytes | str, where: str = "") -> dict[str, Any]:
    """Decode JSON that must be an object.

    Raises:
        EvidenceError: see ``decode``; or the value is of another type.
    """
    value = decode(data, where)
    if not isinstance(value, dict):
        raise EvidenceError(f"expected a JSON object, found {type(value).__name__}", where)
    return cast("dict[str, Any]", value)


def present(mapping: dict[str, Any]) -> dict[str, Any]:
    """The members that are not null: null means absent."""
    return {name: value for name, value in mapping.items() if value is not None}


def number(value: Any, where: str = "") -> float:
    """A float from a number or from one of the strings that stand for non-finite numbers.

    Raises:
        EvidenceError: the value is neither.
    """
    if isinstance(value, str) and value in NON_FINITE:
        return NON_FINITE[value]
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise EvidenceError(f"expected a number, found {value!r:.60}", where)
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise EvidenceError(f"expected a number, found {value!r:.60} ({error})", where) from None


def plain(value: Any) -> Any:
    """The value as builtins only: dicts with text or integer keys, lists, text, bool, int, float, None.

    Non-finite floats stay floats.

    Raises:
        EvidenceError: nested deeper than ``MAX_JSON_DEPTH``, or containing itself.
    """
    return _plain(value, MAX_JSON_DEPTH)


def _plain(value: Any, depth: int) -> Any:
    if type(value) in _BUILTIN:
        return value
    if depth == 0:
        raise EvidenceError(f"a value is nested deeper than {MAX_JSON_DEPTH} levels")
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {_key(key): _plain(item, depth - 1) for key, item in items}
    if isinstance(value, list | tuple | set | frozenset):
        members = cast("Iterable[Any]", value)
        # A generator's state is a list of hundreds of integers: looking at their types alone takes a fraction.
        if not set(map(type, members)) - _BUILTIN:
            return list(members)
        return [_plain(item, depth - 1) for item in members]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, enum.Enum):
        return _plain(value.value, depth - 1)
    if isinstance(value, msgspec.Struct):
        fields = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        return {encoded: _plain(getattr(value, name), depth - 1) for encoded, name in fields}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name), depth - 1) for each in dataclasses.fields(value)}
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return _plain(vars(value), depth)
    return _plain(builtin(value), depth - 1)


def _key(key: Any) -> str | int:
    return int(key) if hasattr(key, "__index__") and not isinstance(key, bool) else str(key)


def _written(value: Any, depth: int) -> Any:
    """``plain`` with non-finite floats as strings."""
    return _spelled(_plain(value, depth))


def _spelled(value: Any) -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _spelled(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        listed = cast("list[Any]", value)
        return [_spelled(item) for item in listed] if set(map(type, listed)) - _NEVER_NAN else listed
    return value


def _shallow(value: Any, depth: int) -> bool:
    if isinstance(value, dict):
        return depth > 0 and all(_shallow(item, depth - 1) for item in cast("dict[str, Any]", value).values())
    if isinstance(value, list):
        listed = cast("list[Any]", value)
        flat = not set(map(type, listed)) - _BUILTIN
        return depth > 0 and (flat or all(_shallow(item, depth - 1) for item in listed))
    return True


def paired(value: Any) -> Any:
    """The value with U+FFFD for every lone half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {paired(key): paired(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [paired(item) for item in cast("list[Any]", value)]
    return value
