"""The corpus: every text file of a directory, cut into windows of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

#: Bytes that plain English text and source code are made of.
PLAIN_TEXT = frozenset(range(0x20, 0x7F)) | frozenset(b"\t\n\r")


@dataclass(frozen=True)
class Sample:
    """A window of one document; ``id`` is ``FILE:OFFSET``."""

    id: str
    input_ids: Tensor  # [T] int64


def is_text(content: bytes) -> bool:
    """Whether every byte is printable ASCII, a tab or a line end: all that this model reads."""
    return PLAIN_TEXT.issuperset(content)


def load_corpus(directory: Path, length: int) -> list[Sample]:
    """Windows of ``length`` bytes over all text files, in the order of their names; a rest is dropped."""
    samples: list[Sample] = []
    for path in sorted(each for each in directory.iterdir() if each.is_file()):
        content = path.read_bytes()
        if not is_text(content):
            continue
        for start in range(0, len(content) - length + 1, length):
            window = torch.frombuffer(bytearray(content[start : start + length]), dtype=torch.uint8)
            samples.append(Sample(f"{path.name}:{start}", window.long()))
    return samples


def batches(samples: list[Sample], size: int, seed: int) -> Iterator[list[Sample]]:
    """Batches without end, every epoch in a new order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(samples), generator=generator).tolist()
        for start in range(0, len(order) - size + 1, size):
            yield [samples[index] for index in order[start : start + size]]
