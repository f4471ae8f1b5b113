"""Checkpoints as the loop saves and loads them: which file, what it holds, and what of it reached the model.

``torch.save`` and ``torch.load``, safetensors' writing and reading, and the ``load_state_dict`` of modules, optimizers,
schedulers and scalers are replaced while anyone watches. Nothing is opened or read for it: what passes through is
looked at, and names are all that is kept of it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from .internals import inside_backward
from .replaced import Function, Replaced

# Keys looked at in one mapping, names listed of those that did not match, and files remembered between two windows.
MOST_KEYS, MOST_NAMES, MOST_FILES = 4096, 100, 1000
# Words of a key that say what it holds where the value itself does not.
_WORDS = {"rng": "rng", "random": "rng", "step": "step", "iter": "step", "epoch": "step"}
# Files that the trainers of Hugging Face and accelerate write beside the weights.
_BESIDE = {
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "scaler": "scaler",
    "rng_state": "rng",
    "random_st": "rng",
}


class Checkpoints:
    """What was saved and loaded since ``take`` was last asked.

    Args:
        model: whose weights count; without one those of any module do.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model
        self._files: dict[str, list[tuple[str, list[str]]]] = {"saved": [], "read": []}
        self._loaded: dict[str, dict[str, Any]] = {}

    def watch(self) -> None:
        """See what is saved and loaded from now on."""
        if not _watching:
            _install()
        _watching.append(weakref.ref(self))  # whoever forgets to end it keeps no model alive

    def end(self) -> None:
        """Stop; with the last watcher everything replaced is put back."""
        left = [each for each in _watching if each() not in (None, self)]
        if _watching and not left:
            _replaced.put_back()
        _watching[:] = left

    # -- what the replaced functions tell

    def file(self, kind: str, file: Any, parts: list[str]) -> None:
        """A file was ``saved`` or ``read``; ``parts`` as ``contents`` names them."""
        path = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
        if parts and isinstance(path, (str, os.PathLike)) and len(self._files[kind]) < MOST_FILES:
            self._files[kind].append((os.path.abspath(os.fsdecode(path)), parts))

    def module(self, module: nn.Module, found: Mapping[str, Any], result: Any) -> None:
        """Weights were put into ``module``."""
        if self.model is not None and not _related(self.model, module):
            return
        missing, unexpected = (list(getattr(result, name, ())) for name in ("missing_keys", "unexpected_keys"))
        own = len(module.state_dict(keep_vars=True))
        counts = {"expected": own, "loaded": max(len(found) - len(unexpected), 0)}
        about = {"missing": missing[:MOST_NAMES], "unexpected": unexpected[:MOST_NAMES]}
        self._loaded["model"] = {**counts, **{name: names for name, names in about.items() if names}}

    def part(self, name: str, owner: Any, state: Any) -> None:
        """An optimizer, scheduler, scaler or generator took over a state.

        One that is as new (accelerate gives a fresh optimizer its own state back) restores nothing.
        """
        fresh = {"optimizer": ("state", {}), "scheduler": ("last_epoch", 0)}.get(name)
        if fresh is not None and isinstance(state, Mapping) and state.get(fresh[0]) == fresh[1]:
            return
        if name == "optimizer" and self.model is not None:
            own = {id(parameter) for parameter in self.model.parameters()}
            if not any(id(each) in own for group in owner.param_groups for each in group["params"]):
                return
        self._loaded.setdefault(name, {})

    # -- what the recorder asks

    def take(self) -> list[dict[str, Any]]:
        """Events ``checkpoint_saved``, ``checkpoint_loaded`` and ``weights_loaded`` since the last call, without steps.

        Files of one directory count as one checkpoint. Something read that nothing took over is no event, and neither
        is a state that an optimizer took over while no file was read.
        """
        saved, read = _grouped(self._files["saved"]), _grouped(self._files["read"])
        loaded, self._loaded = self._loaded, {}
        self._files = {"saved": [], "read": []}
        now = time.time()
        events: list[dict[str, Any]] = [
            {"kind": "checkpoint_saved", "t": now, "path": path, "contents": parts} for path, parts in saved.items()
        ]
        if "model" in loaded or (read and loaded.keys() - {"rng"}):
            event: dict[str, Any] = {"kind": "checkpoint_loaded", "t": now, "loaded": sorted(loaded)}
            if read:
                path = next((path for path, parts in read.items() if set(parts) & loaded.keys()), next(iter(read)))
                event |= {"path": path, "contents": sorted({*read[path], *_beside(path)})}
            events.append(event)
            if "model" in loaded:
                where = {"path": event["path"]} if "path" in event else {}
                events.append({"kind": "weights_loaded", "t": now, **where, **loaded["model"]})
        return events


def contents(found: Any, depth: int = 0) -> list[str]:
    """What a saved object holds: model, optimizer, scheduler, scaler, rng, step; nothing for what is no checkpoint."""
    if not isinstance(found, Mapping) or not found or len(found) > MOST_KEYS * 16:
        return []
    keys = [key for key in list(found)[:MOST_KEYS] if isinstance(key, str)]
    if {"state", "param_groups"} <= found.keys():
        return ["optimizer"]
    if {"last_epoch", "_step_count"} <= found.keys():
        return ["scheduler"]
    if {"scale", "growth_factor"} <= found.keys():
        return ["scaler"]
    if {"python", "cpu"} <= found.keys() or {"python", "numpy"} <= found.keys():
        return ["rng"]
    if any(isinstance(found[key], Tensor) and key.endswith((".weight", ".bias")) for key in keys):
        return ["model"]
    parts: set[str] = set()
    if depth < 2:
        for key in keys[:64]:
            parts.update(contents(found[key], depth + 1))
        if parts:  # a number of steps alone makes no checkpoint
            parts.update(part for word, part in _WORDS.items() for key in keys[:64] if word in key.lower())
    return sorted(parts)


def _related(model: nn.Module, module: nn.Module) -> bool:
    return any(each is model for each in module.modules()) or any(each is module for each in model.modules())


def _grouped(files: list[tuple[str, list[str]]]) -> dict[str, list[str]]:
    """Checkpoint → what it holds; several files of one directory are the directory."""
    directories: dict[str, dict[str, set[str]]] = {}
    for path, parts in files:
        directories.setdefault(os.path.dirname(path), {}).setdefault(path, set()).update(parts)
    found: dict[str, list[str]] = {}
    for directory, inside in directories.items():
        same = len(inside) > 1 and len(set(map(frozenset, inside.values()))) > 1  # parts of one, not one a step
        for path, parts in {directory: set[str]().union(*inside.values())}.items() if same else inside.items():
            found[path] = sorted(parts)
    return found


def _beside(path: str) -> set[str]:
    """What the files beside a file of weights, or in the directory of a checkpoint, are called."""
    directory = Path(path) if os.path.isdir(path) else Path(path).parent
    try:
        names = [entry.name for entry in os.scandir(directory)][:MOST_FILES]
    except OSError:
        return set()
    whole = os.path.isdir(path) or any(name in ("config.json", "trainer_state.json") for name in names)
    return {part for word, part in _BESIDE.items() for name in names if whole and name.startswith(word)}


_watching: list[weakref.ref[Checkpoints]] = []
_replaced = Replaced()


def _tell(tell: Callable[[Checkpoints], None]) -> None:
    for each in list(_watching):
        try:
            if (watcher := each()) is not None:
                tell(watcher)
        except Exception:  # an odd object costs only its own event, never the job
            continue


def _install() -> None:
    _replaced.put(torch, "save", _save)
    _replaced.put(torch, "load", _load)
    _replaced.put(nn.Module, "load_state_dict", _load_module)
    _replaced.put(torch.optim.Optimizer, "load_state_dict", _load_part("optimizer"))
    _replaced.put(torch.amp.GradScaler, "load_state_dict", _load_part("scaler"))
    for scheduler in {each for each in vars(lr_scheduler).values() if isinstance(each, type)}:
        if "load_state_dict" in vars(scheduler):
            _replaced.put(scheduler, "load_state_dict", _load_part("scheduler"))
    for module in (torch, torch.random):
        _replaced.put(module, "set_rng_state", _load_part("rng"))
    if "safetensors" in sys.modules or importlib.util.find_spec("safetensors") is not None:
        import safetensors.torch

        # Names bound earlier (``from safetensors.torch import save_file``) end in this one, too.
        _replaced.put(safetensors.torch, "serialize_file", _serialize)
        _replaced.put(safetensors.torch, "load_file", _load)


def _save(original: Function) -> Function:
    def save(*arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)
        given = dict(zip(("obj", "f"), arguments, strict=False)) | keywords
        _tell(lambda each: each.file("saved", given.get("f"), contents(given.get("obj"))))
        return result

    return save


def _serialize(original: Function) -> Function:
    def serialize_file(tensors: Any, filename: Any, *arguments: Any, **keywords: Any) -> Any:
        result = original(tensors, filename, *arguments, **keywords)
        weights = any(str(name).endswith((".weight", ".bias")) for name in list(tensors)[:MOST_KEYS])
        _tell(lambda each: each.file("saved", filename, ["model"] if weights else []))
        return result

    return serialize_file


def _load(original: Function) -> Function:
    def load(*arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)
        file = arguments[0] if arguments else keywords.get("f", keywords.get("filename"))
        _tell(lambda each: each.file("read", file, contents(result)))
        return result

    return load


def _load_module(original: Function) -> Function:
    def load_state_dict(self: nn.Module, state_dict: Any, *arguments: Any, **keywords: Any) -> Any:
        result = original(self, state_dict, *arguments, **keywords)
        _tell(lambda each: each.module(self, state_dict, result))
        return result

    return load_state_dict


def _load_part(name: str) -> Callable[[Function], Function]:
    def wrap(original: Function) -> Function:
        def load(*arguments: Any, **keywords: Any) -> Any:
            result = original(*arguments, **keywords)
            if not inside_backward():  # activation checkpointing sets generators there
                state = next(iter(keywords.values()), arguments[-1] if arguments else None)
                _tell(lambda each: each.part(name, arguments[0] if arguments else None, state))
            return result

        return load

    return wrap
