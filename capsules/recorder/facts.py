"""The manifest as it can be written at the start: each part for itself, so that one that fails costs only itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from . import describe, environment


def manifest(
    model: nn.Module,
    optimizers: list[Any],
    config: Any,
    tokenizer: Any,
    given: Mapping[str, Any],
    ranks: tuple[int, int],
    attempt: Callable[[str, Callable[[], None]], None],
) -> dict[str, Any]:
    """What model, optimizers, configuration, tokenizer and environment show; what the user gave has the last word.

    Args:
        model: the model, maybe wrapped.
        optimizers: those that were named.
        config: the resolved configuration.
        tokenizer: or None.
        given: the user's own fields.
        ranks: this rank and the number of ranks.
        attempt: runs a part and disables it where it raises.
    """
    resolved = describe.as_mapping(config)
    found: dict[str, Any] = {}

    def add(part: str, make: Callable[[], Any]) -> None:
        def run() -> None:
            found[part] = make()

        attempt(part, run)

    add("run", lambda: environment.run(*ranks))
    add("environment", environment.environment)
    add("placement", lambda: environment.placement(model, ranks[0]))
    add("config", lambda: describe.plain(resolved))
    if any(True for _ in model.parameters()):
        add("identity", lambda: describe.identity(model, tokenizer))
        add("model", lambda: describe.model_facts(model, resolved))
    if tokenizer is not None:
        add("tokenizer", lambda: describe.tokenizer_facts(tokenizer))
    add("training", lambda: training_facts(model, optimizers))
    training = given.get("training")
    meant = training.get("optimizer") if isinstance(training, Mapping) else None
    name = meant.get("name") if isinstance(meant, Mapping) else None
    if name and optimizers and name != type(optimizers[0]).__name__:
        # What this class does with weight decay says nothing of what was meant.
        found.get("training", {}).get("optimizer", {}).pop("decoupled", None)
    return describe.merged({part: value for part, value in found.items() if value}, dict(given))


def training_facts(model: nn.Module, optimizers: list[Any]) -> dict[str, Any]:
    """The manifest's ``training``: the optimizer, and the objective where the model's class leaves no choice."""
    objective = describe.objective_of(model)
    found: dict[str, Any] = {"objective": objective} if objective else {}
    return found | ({"optimizer": describe.optimizer_facts(optimizers)} if optimizers else {})
