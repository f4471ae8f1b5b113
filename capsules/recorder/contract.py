"""What inference has to know of a checkpoint, as a small JSON file beside it: written where asked for, read at a load.

Tokenizer and template by digest, dtype, special ids and the generation settings: the things that differ unnoticed
between training, evaluation and serving.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import EvidenceError
from ..jsonio import decode_object, encode
from ..storage import replace
from . import describe

NAME = "llmconsole-contract.json"
FORMAT = "llmconsole.contract/1"
MOST_BYTES = 1 << 20


def contract(model: nn.Module, tokenizer: Any, manifest: dict[str, Any]) -> dict[str, Any]:
    """The contract of ``model`` as it is now."""
    found: dict[str, Any] = {"format": FORMAT}
    identity = manifest.get("identity", {})
    for part in ("tokenizer", "chat_template", "adapter"):
        if part in identity:
            found[part] = identity[part]
    parameter = next(model.parameters(), None)
    if parameter is not None:
        found["dtype"] = str(parameter.dtype).removeprefix("torch.")
        found["model"] = {"name": identity.get("model", {}).get("name", type(model).__name__)}
        found["model"]["sha256"] = describe.weights_digest(model, adapter=False)
    if manifest.get("tokenizer"):
        found["special_ids"] = manifest["tokenizer"]
    generation = describe.as_mapping(getattr(model, "generation_config", None))
    sampling = {key: value for key, value in generation.items() if value is not None and not key.startswith("_")}
    return found | ({"generation": describe.plain(sampling)} if sampling else {})


def write_beside(path: str, found: dict[str, Any]) -> None:
    """Write the contract into a checkpoint's directory, or that of its file."""
    directory = Path(path) if os.path.isdir(path) else Path(path).parent
    if directory.is_dir():
        replace(directory / NAME, encode(found))


def read_beside(path: str) -> dict[str, Any] | None:
    """The contract beside a checkpoint; None where there is none, or nothing that is one."""
    directory = Path(path) if os.path.isdir(path) else Path(path).parent
    file = directory / NAME
    try:
        if file.is_symlink() or file.stat().st_size > MOST_BYTES:
            return None
        found = decode_object(file.read_bytes(), str(file))
    except (OSError, EvidenceError):
        return None
    return found if found.get("format") == FORMAT else None
