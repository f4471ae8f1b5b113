"""What the console asks the worker to see: lists, curves, layers … each a small typed answer, cut to the screen.

Every look has a command that prints the same; none of them changes anything. One module a look, listed here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

#: Method → module of this package that holds a function of that name.
_MODULES = {
    "listing": "capsules",
    "contents": "capsules",
    "curves": "curves",
    "marks": "curves",
    "layers": "layers",
    "batch": "batch",
    "case_list": "cases",
    "case_card": "cases",
    "case_history": "cases",
    "resolve_draft": "resolving",
    "resolve_plan": "resolving",
    "resolve_commit": "resolving",
    "memory": "memory",
    "stacks": "stacks",
    "ranks": "ranks",
    "latency": "latency",
    "difference": "difference",
    "notebook": "incidents",
    "notebook_open": "incidents",
    "notebook_write": "incidents",
    "notebook_test": "incidents",
    "gate": "incidents",
    "gate_init": "incidents",
}


def find(method: str) -> Callable[..., Any] | None:
    """The function behind a method, imported when it is first asked for; None where there is no such look."""
    module = _MODULES.get(method)
    return None if module is None else getattr(import_module(f".{module}", __name__), method)
