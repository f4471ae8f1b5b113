"""Says which parts of a model the hooks could not see, so that silence there is not taken for health."""

from __future__ import annotations

from typing import Any

from .hooks import ModuleHooks, clean_name, has_children
from .window import Window

# Names in the message; the rest is a number.
MOST_NAMES = 8


def coverage(hooks: ModuleHooks, window: Window) -> list[dict[str, Any]]:
    """Events for the first window: layers in compiled regions, and layers that no hook saw."""
    compiled = {hooks.modules[slot] for slot in hooks.compiled.seen}
    layers = [
        clean_name(name)
        for name, module in hooks.root.named_modules()
        if module is not hooks.root and not has_children(module) and any(True for _ in module.parameters(recurse=False))
    ]
    found: list[dict[str, Any]] = []
    if compiled:
        found.append(
            window.log(
                "info",
                f"coverage: {len(compiled)} modules run inside compiled regions, where norms and largest values of"
                " outputs are taken, but neither counts nor gradients of outputs",
            )
        )
    unseen = [name for name in layers if name not in hooks.fired and name not in compiled]
    if unseen and window.backwards:
        names = ", ".join(unseen[:MOST_NAMES]) + (", …" if len(unseen) > MOST_NAMES else "")
        found.append(
            window.log(
                "warning",
                f"coverage: outputs of {len(unseen)} of {len(layers)} layers were not seen (not called, or compiled"
                f" before the recorder was attached): {names}",
            )
        )
    return found
