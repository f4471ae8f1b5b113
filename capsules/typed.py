"""Checking plain JSON against types: an error names field, value and expectation; reading keeps all that is right."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from .errors import EvidenceError
from .jsonio import NON_FINITE, paired, plain

T = TypeVar("T")

_PATH = re.compile(r" - at `(?:key` in `)?(?P<path>[^`]*)`$")
_PARTS = re.compile(r"\.([^.\[]+)|\[(\d+)\]|(\[\.\.\.\])")
_MISSING = re.compile(r"Object missing required field `([^`]*)`")
#: Faults of one object that are named one by one; after them a wrong field takes its whole top-level field along.
_MAX_FAULTS = 50


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
        raise EvidenceError(_fault(mapping, kind, error).sentence, where) from None


def salvage(value: dict[str, Any], kind: type[T], spelled: bool = True) -> tuple[T, list[str]]:
    """Read an object as far as its fields have the right types.

    Args:
        value: a decoded JSON object; fields of a wrong type are taken out of it, non-finite strings become floats.
        kind: a Struct type with a default for every field.
        spelled: whether the object may hold non-finite numbers as strings.

    Returns:
        The typed value, and one sentence for each field that was left out.
    """
    if spelled:
        floats(value, kind)
    sentences: list[str] = []
    while True:
        try:
            return msgspec.convert(value, kind), sentences
        except UnicodeEncodeError:  # half of a surrogate pair where msgspec compares words
            whole = cast("dict[str, Any]", paired(value))
            value.clear()
            value.update(whole)
        except msgspec.ValidationError as error:
            fault = _fault(value, kind, error)
            sentences.append(fault.sentence)
            fault.remove(whole=len(sentences) > _MAX_FAULTS)


class _Fault:
    """The field that an error of msgspec is about."""

    def __init__(self, root: dict[str, Any], path: list[str | int], expected: str, missing: str = "") -> None:
        self.chain: list[tuple[Any, Any]] = []  # (holder, key) from the root to the field
        value: Any = root
        seen = ""
        for part in path:
            if part == "[...]":  # msgspec does not say which value of a mapping
                part = next((key for key, item in value.items() if not _fits(item, expected)), next(iter(value)))
            self.chain.append((value, part))
            value = value[part]
            seen += f"[{part}]" if isinstance(part, int) else f".{part}" if seen else str(part)
        self._root = root
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        self.sentence = f"field {seen or '(the whole)'} is {shown}, expected {expected}"
        if missing:
            self.sentence = f"field {seen}{'.' if seen else ''}{missing} is missing"

    def remove(self, whole: bool) -> None:
        """Take the field out; a list with one wrong element goes as a whole, since positions mean something."""
        for holder, key in self.chain[:1] if whole else reversed(self.chain):
            if isinstance(holder, dict):
                del holder[key]
                return
        self._root.clear()


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


def _fault(root: dict[str, Any], kind: type[Any], error: msgspec.ValidationError) -> _Fault:
    text = str(error)
    found = _PATH.search(text)
    path: list[str | int] = []
    if found:
        text = text[: found.start()]
        for name, index, anything in _PARTS.findall(found["path"]):
            path.append(int(index) if index else "[...]" if anything else name)
    if missing := _MISSING.match(text):
        return _Fault(root, path, "", missing[1])
    expected = text.removeprefix("Expected ").partition(", got ")[0].replace("`", "").replace(" | null", "")
    if expected.startswith("Invalid enum value"):
        expected = _words(inspect.type_info(kind), path)
    elif "out of range" in expected:
        expected = "a number that fits 64 bits"
    return _Fault(root, path, expected)


def _words(info: inspect.Type, path: list[str | int]) -> str:
    """The words that are allowed at a path, for the message."""
    if isinstance(info, inspect.UnionType):
        return next((words for each in info.types if (words := _words(each, path))), "")
    if isinstance(info, inspect.LiteralType):
        return " or ".join(str(each) for each in info.values)
    if path and isinstance(info, inspect.StructType):
        return next((_words(each.type, path[1:]) for each in info.fields if each.encode_name == path[0]), "")
    if path and isinstance(info, inspect.ListType | inspect.VarTupleType):
        return _words(info.item_type, path[1:])
    if path and isinstance(info, inspect.DictType):
        return _words(info.value_type, path[1:])
    return ""


Convert = Callable[[Any], Any]


def floats(value: Any, kind: type[Any]) -> Any:
    """Turn the strings NaN, Infinity and -Infinity into floats, in place.

    In fields that hold a number, and in fields that ``kind`` does not know; text and free-form fields stay.
    """
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
        return _in_struct({each.encode_name: _converter(each.type) for each in info.fields})
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


def _in_struct(fields: dict[str, Convert | None]) -> Convert:
    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            mapping = cast("dict[str, Any]", value)
            for name, item in mapping.items():
                inner = fields.get(name, all_floats)
                if inner is not None:
                    mapping[name] = inner(item)
        return cast("Any", value)

    return convert


def all_floats(value: Any) -> Any:
    """A JSON value with every string NaN, Infinity or -Infinity as a float."""
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: all_floats(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [all_floats(item) for item in cast("list[Any]", value)]
    return value


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
