"""What the demo trains on: the text of this very package, and one file that is only half text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from .. import paths

#: Bytes of text in the corpus: with windows of 128 bytes, one epoch is about as long as the run.
CORPUS_BYTES = 200_000

#: No document gives more than this, so that the corpus is not a few long files.
DOCUMENT_BYTES = 8_000

_PACKAGES = ("llmconsole.analyzers", "llmconsole.app", "llmconsole.capsules")


def write_corpus(directory: Path) -> None:
    """Fill ``directory`` with the sources of the installed package and its seed cases, as plain ASCII.

    Beside them lies ``embeddings.nrrd``, a text header with int8 numbers behind it. A loader that looks at the whole
    file leaves it out.
    """
    directory.mkdir()
    left = CORPUS_BYTES
    for name, text in _documents():
        # The model reads ASCII; signs beyond it are rare here and would each be a surprise of several bytes.
        content = text.encode("ascii", "ignore")[: min(DOCUMENT_BYTES, left)]
        (directory / name).write_bytes(content)
        left -= len(content)
        if not left:
            break
    (directory / "embeddings.nrrd").write_bytes(_half_text())


def _documents() -> Iterator[tuple[str, str]]:
    """File name and text of every document, the seed cases first, then the modules by name."""
    yield "debug-cases.md", paths.seed_cases()
    for package in _PACKAGES:
        for name, module in sorted(_modules(files(package), package.partition(".")[2])):
            yield name, module.read_text(encoding="utf-8")


def _modules(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _modules(entry, f"{prefix}.{entry.name}")
        elif entry.name.endswith(".py") and entry.name != "__init__.py":
            yield f"{prefix}.{entry.name}", entry


def _half_text() -> bytes:
    """A text header of 640 bytes, then 384 int8 numbers: five windows of text and three of something else."""
    header = "NRRD0004\n# Embeddings of the examples, quantised to int8, row by row.\n"
    fields = "type: int8\ndimension: 2\nsizes: 32 12\nencoding: raw\n"
    fill = "# The rows are in the order of the file names.\n"
    text = (header + fields + fill * 20)[:639] + "\n"
    numbers = random.Random(0)
    return text.encode() + bytes(round(numbers.gauss(0, 6)) & 0xFF for _ in range(384))
