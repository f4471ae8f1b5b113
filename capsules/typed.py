"""Checking plain JSON against types: an error names field, value and expectation; reading keeps all that is right."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from .errors import EvidenceError
from .jsonio import NON_FINITE, plain

T = TypeVar("T")

_PATH = re.compile(r" - at `(?P<path>[^`]*)`$")
_PARTS = re.compile(r"\.([^.\[]+)|\[(\d+)\]|(\[\.\.\.\])")
_MAX_FAULTS = 200


def check(value: Any, kind: type[T], where: str) -> tuple[dict[str, Any], T]:
    """Validate an object that is about to be written.

    Args:
        value: a mapping; numpy scalars and the strings for non-finite numbers are accepted.
        kind: a Struct type; fields it does not know are kept.
        where: what the error names as the place.

    Returns:
        The mapping to write, of builtins where it had foreign values, and the typed value.

    Raises:
        EvidenceError: naming field, value and what was expected.
    """
    try:
        return value, msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError):
        mapping = floats(plain(value), kind)
    try:
        return mapping, msgspec.convert(mapping, kind)
    except msgspec.ValidationError as error:
        fault = _fault(mapping, error)
        raise EvidenceError(fault.sentence, where) from None


def salvage(value: dict[str, Any], kind: type[T]) -> tuple[T, list[str]]:
    """Read an object as far as its fields have the right types.

    Args:
        value: a decoded JSON object; fields of a wrong type are taken out of it, non-finite strings become floats.
        kind: a Struct type with a default for every field.

    Returns:
        The typed value, and one sentence for each field that was left out.
    """
    floats(value, kind)
    sentences: list[str] = []
    for _ in range(_MAX_FAULTS):
        try:
            return msgspec.convert(value, kind), sentences
        except msgspec.ValidationError as error:
            fault = _fault(value, error)
            sentences.append(fault.sentence)
            fault.remove()
    value.clear()
    return msgspec.convert(value, kind), [*sentences, "too many fields have a wrong type; none was read"]


class _Fault:
    """The field that an error of msgspec is about."""

    def __init__(self, root: Any, path: list[str | int], expected: str) -> None:
        self.chain: list[tuple[Any, Any]] = []  # (holder, key) from the root to the field
        value = root
        seen = ""
        for part in path:
            if part == "[...]":  # msgspec does not say which value of a mapping
                part = next((key for key, item in value.items() if not _fits(item, expected)), next(iter(value)))
            self.chain.append((value, part))
            value = value[part]
            seen += f"[{part}]" if isinstance(part, int) else f".{part}" if seen else str(part)
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        self.sentence = f"field {seen or '(the whole)'} is {shown}, expected {expected}"

    def remove(self) -> None:
        """Take the field out; a list with one wrong element goes as a whole, since positions mean something."""
        for holder, key in reversed(self.chain):
            if isinstance(holder, dict):
                del holder[key]
                return


def _fits(value: Any, expected: str) -> bool:
    """Whether a value is surely of the expected kind; only used to name the likely culprit in a mapping."""
    word = re.match(r"(int|float|str|bool|array|object)", expected)
    kinds: dict[str, tuple[type, ...]] = {
        "int": (int,),
        "float": (int, float),
        "str": (str,),
        "bool": (bool,),
        "array": (list,),
        "object": (dict,),
    }
    if word is None or isinstance(value, bool) != (word[1] == "bool"):
        return False
    if word[1] == "int" and ">= 0" in expected and isinstance(value, int) and value < 0:
        return False
    return isinstance(value, kinds[word[1]])


def _fault(root: Any, error: msgspec.ValidationError) -> _Fault:
    text = str(error)
    found = _PATH.search(text)
    path: list[str | int] = []
    if found:
        text = text[: found.start()]
        for name, index, anything in _PARTS.findall(found["path"]):
            path.append(int(index) if index else "[...]" if anything else name)
    expected = text.removeprefix("Expected ").partition(", got ")[0].replace("`", "").replace(" | null", "")
    if expected.startswith("Invalid enum value"):
        expected = "one of the words of the format"
    return _Fault(root, path, expected)


Convert = Callable[[Any], Any]


def floats(value: Any, kind: type[Any]) -> Any:
    """Turn the strings NaN, Infinity and -Infinity into floats in every field that holds a number; in place."""
    converter = _converter_of(kind)
    return converter(value) if converter else value


@cache
def _converter_of(kind: type[Any]) -> Convert | None:
    return _converter(inspect.type_info(kind))


def _converter(info: inspect.Type) -> Convert | None:
    """A function that converts a value of this type, or None where the type holds no float."""
    if isinstance(info, inspect.FloatType):
        return lambda value: NON_FINITE.get(value, value) if type(value) is str else value
    if isinstance(info, inspect.StructType):
        fields = {each.encode_name: found for each in info.fields if (found := _converter(each.type))}
        return _in_struct(fields) if fields else None
    if isinstance(info, inspect.ListType | inspect.VarTupleType):
        inner = _converter(info.item_type)
        return _in_list(inner) if inner else None
    if isinstance(info, inspect.DictType):
        inner = _converter(info.value_type)
        return _in_dict(inner) if inner else None
    if isinstance(info, inspect.UnionType):
        inside = [found for each in info.types if (found := _converter(each))]
        return _in_union(inside) if inside else None
    return None


def _in_struct(fields: dict[str, Convert]) -> Convert:
    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            mapping = cast("dict[str, Any]", value)
            for name, inner in fields.items():
                if name in mapping:
                    mapping[name] = inner(mapping[name])
        return cast("Any", value)

    return convert


def _in_list(inner: Convert) -> Convert:
    return lambda value: [inner(each) for each in value] if isinstance(value, list) else value


def _in_dict(inner: Convert) -> Convert:
    def convert(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: inner(each) for key, each in cast("dict[str, Any]", value).items()}

    return convert


def _in_union(inside: list[Convert]) -> Convert:
    def convert(value: Any) -> Any:
        for inner in inside:
            value = inner(value)
        return value

    return convert
