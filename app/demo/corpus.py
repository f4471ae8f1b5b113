"""What the demo trains on: the documentation of this very package, and one file that is only half text."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from .. import paths

#: Bytes of a training window; documents are cut to a multiple of it, so that the loader drops nothing.
WINDOW = 128

#: Windows of text. With the seven of the file below that makes an epoch of 180 steps, and the two windows of numbers
#: come between step 35 and step 147 under the seeds 0 to 9: when the model knows what text looks like.
TEXT_WINDOWS = 1432

_PACKAGES = ("llmconsole.analyzers", "llmconsole.app", "llmconsole.capsules")


def write_corpus(directory: Path) -> None:
    """Fill ``directory`` with the seed cases and the docstrings of the installed package, as plain ASCII.

    Beside them lies ``embeddings.nrrd``, a text header with int8 numbers behind it. A loader that looks at the whole
    file leaves it out.
    """
    directory.mkdir()
    left = TEXT_WINDOWS
    for name, text in _documents():
        # The model reads ASCII; signs beyond it are rare here and would each be a surprise of several bytes.
        content = text.encode("ascii", "ignore")
        windows = min(len(content) // WINDOW, left)
        if windows:
            (directory / name).write_bytes(content[: windows * WINDOW])
            left -= windows
    (directory / "embeddings.nrrd").write_bytes(_half_text())


def _documents() -> Iterator[tuple[str, str]]:
    """File name and text of every document, the seed cases first, then the modules by name."""
    yield "debug-cases.md", paths.seed_cases()
    for package in _PACKAGES:
        for name, module in sorted(_modules(files(package), package.partition(".")[2])):
            yield f"{name}.txt", _docstrings(module.read_text(encoding="utf-8"))


def _modules(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _modules(entry, f"{prefix}.{entry.name}")
        elif entry.name.endswith(".py"):
            yield f"{prefix}.{entry.name.removesuffix('.py')}", entry


def _docstrings(source: str) -> str:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return "\n\n".join(text for text in found if text) + "\n"


def _half_text() -> bytes:
    """A text header of five windows, then two windows of int8 numbers."""
    header = "NRRD0004\n# Embeddings of the examples, quantised to int8, row by row.\n"
    fields = "type: int8\ndimension: 2\nsizes: 32 8\nencoding: raw\n"
    fill = "# The rows are in the order of the file names.\n"
    text = (header + fields + fill * 20)[: 5 * WINDOW - 1] + "\n"
    numbers = random.Random(0)
    return text.encode() + bytes(round(numbers.gauss(0, 6)) & 0xFF for _ in range(2 * WINDOW))
