"""Finds the loader that ``module:name`` stands for, and takes batches from whatever kind of loader it is."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import EvidenceError


def resolve(spec: str, directory: str) -> Any:
    """The object behind ``module:attribute`` (dots in the attribute lead further in).

    Args:
        spec: as the user typed it; a path of a ``.py`` file may stand for the module.
        directory: where modules are looked for first, the user's working directory.

    Raises:
        EvidenceError: no such module or attribute, or it raised while it was imported.
    """
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise EvidenceError("a loader is named as module:attribute", spec, "for example train:train_loader")
    if module_name.endswith(".py"):
        directory = os.path.dirname(os.path.abspath(os.path.join(directory, module_name)))
        module_name = os.path.basename(module_name)[:-3]
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise EvidenceError(f"no module {module_name} in {directory} or on the path", spec) from None
        raise EvidenceError(_said("importing it", error), spec) from None
    except (Exception, SystemExit) as error:
        raise EvidenceError(_said("importing it", error), spec, _place(error)) from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name in dir(found) if not name.startswith("_")]
            import difflib

            near = difflib.get_close_matches(part, names, n=1)
            hint = f"did you mean {near[0]}?" if near else ""
            raise EvidenceError(f"{module_name} has nothing called {part}", spec, hint)
        found = getattr(found, part)
    return found


def loader_of(target: Any, spec: str) -> Any:
    """The loader itself: a function or class that makes one is called without arguments.

    Raises:
        EvidenceError: it is nothing that can be iterated over, or calling it raised.
    """
    if callable(target) and (isinstance(target, type) or not _is_iterable(target)):
        try:
            target = target()
        except (Exception, SystemExit) as error:
            raise EvidenceError(_said("calling it", error), spec, _place(error)) from None
    # A Lightning data module, say.
    make: Any = getattr(target, "train_dataloader", None)
    if not _is_iterable(target) and callable(make):
        target = make()
    if not _is_iterable(target):
        raise EvidenceError(
            f"is of type {type(target).__name__}, and nothing can be taken from it",
            spec,
            "name a DataLoader, an iterable or a function",
        )
    return target


def _is_iterable(value: Any) -> bool:
    if isinstance(value, (str, bytes, Mapping)):
        return False
    return isinstance(value, Iterable) or (hasattr(value, "__getitem__") and hasattr(value, "__len__"))


def take(loader: Any, count: int) -> Iterator[Any]:
    """The first batches of a loader; of its iterator, the next ones."""
    batches = iter(loader)
    for _ in range(count):
        try:
            batch = next(batches)
        except StopIteration:
            return
        yield batch


def tokenizer_in(loader: Any) -> Any:
    """A tokenizer that the loader, its data set or its collator carries under a usual name; None where none does."""
    owners = [loader, *(getattr(loader, name, None) for name in ("dataset", "collate_fn", "collator"))]
    for owner in owners:
        for name in ("tokenizer", "processing_class", "processor"):
            found = getattr(owner, name, None)
            found = getattr(found, "tokenizer", found)
            if callable(getattr(found, "decode", None)):
                return found
    return None


def _said(doing: str, error: BaseException) -> str:
    """An error in one line."""
    words = " ".join(str(error).split())[:300]
    return f"{doing} raised {type(error).__name__}" + (f": {words}" if words else "")


def said(doing: str, error: BaseException) -> str:
    """An error of the user's code in one line, with the line of that code where it was raised."""
    place = _place(error)
    return _said(doing, error) + (f" ({place})" if place else "")


def _place(error: BaseException) -> str:
    """The last line of the user's own code in a trace: not of a library, not of ours."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    own = [
        each
        for each in frames
        if "site-packages" not in each.filename and os.path.dirname(__file__) not in each.filename
    ]
    own = [each for each in own if "importlib" not in each.filename and not each.filename.startswith("<")]
    return f"at {os.path.basename(own[-1].filename)}, line {own[-1].lineno}" if own else ""
