"""Made-up text that a small model learns in a few dozen steps, and the ways in which jobs batch it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

PAD, BOS, EOS, USER, ASSISTANT = range(5)
VOCABULARY = 96
WORDS = range(5, 80)  # the others stand for what only a broken file holds
IGNORE = -100

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Sample:
    """A document or a conversation; the first ``prompt`` tokens are not to be learned."""

    id: str
    tokens: tuple[int, ...]
    prompt: int = 0


@lru_cache(maxsize=8)
def _language(seed: int) -> tuple[tuple[int, ...], ...]:
    """For each word, five words that may follow it; the first far more often than the last."""
    draw = random.Random(seed)
    return tuple(tuple(draw.sample(WORDS, 5)) for _ in range(VOCABULARY))


def _sentence(draw: random.Random, language: Sequence[Sequence[int]], length: int) -> list[int]:
    words = [draw.choice(WORDS)]
    while len(words) < length:
        words.append(draw.choices(language[words[-1]], weights=(8, 4, 2, 1, 1))[0])
    return words


def documents(count: int, seed: int, shortest: int = 10, longest: int = 30) -> list[Sample]:
    """``count`` documents, each between the signs for its beginning and its end."""
    draw, language = random.Random(seed), _language(seed)
    lengths = [draw.randint(shortest, longest) for _ in range(count)]
    return [
        Sample(f"doc-{index}", (BOS, *_sentence(draw, language, length), EOS)) for index, length in enumerate(lengths)
    ]


def conversations(count: int, seed: int) -> list[Sample]:
    """``count`` turns of a user with an answer; the answer continues the question's last word."""
    draw, language = random.Random(seed), _language(seed)
    found: list[Sample] = []
    for index in range(count):
        asked = draw.randint(4, 14)
        words = _sentence(draw, language, asked + draw.randint(6, 18))
        tokens = (BOS, USER, *words[:asked], ASSISTANT, *words[asked:], EOS)
        found.append(Sample(f"chat-{index}", tokens, prompt=asked + 3))
    return found


def stream(count: int, seed: int, length: int) -> list[Sample]:
    """``count`` rows of one length cut from one endless document, as in pre-training on long texts."""
    words = _sentence(random.Random(seed), _language(seed), count * length)
    return [Sample(f"row-{index}", tuple(words[index * length : (index + 1) * length])) for index in range(count)]


def padded(samples: Sequence[Sample]) -> Batch:
    """Rows as long as the longest; padding and prompts have no label."""
    length = max(len(sample.tokens) for sample in samples)
    ids = torch.full((len(samples), length), PAD)
    labels = torch.full((len(samples), length), IGNORE)
    mask = torch.zeros(len(samples), length, dtype=torch.long)
    for row, sample in enumerate(samples):
        tokens = torch.tensor(sample.tokens)
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
        labels[row, sample.prompt : len(tokens)] = tokens[sample.prompt :]
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def whole(samples: Sequence[Sample]) -> Batch:
    """Rows of one length, all of which is text."""
    ids = torch.tensor([sample.tokens for sample in samples])
    return {"input_ids": ids, "labels": ids.clone()}


def packed(samples: Sequence[Sample], length: int = 64) -> Batch:
    """Documents one after another in rows of ``length``, each with its own positions and its own number."""
    rows: list[list[Sample]] = [[]]
    for sample in samples:
        if sum(len(each.tokens) for each in rows[-1]) + len(sample.tokens) > length:
            rows.append([])
        rows[-1].append(sample)
    shape = (len(rows), length)
    ids, labels = torch.full(shape, PAD), torch.full(shape, IGNORE)
    mask, positions, segments = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    for row, held in enumerate(rows):
        at = 0
        for number, sample in enumerate(held, start=1):
            tokens = torch.tensor(sample.tokens)
            place = slice(at, at + len(tokens))
            ids[row, place] = tokens
            labels[row, place] = tokens
            labels[row, at] = IGNORE  # nothing predicts the beginning of a document
            mask[row, place] = 1
            positions[row, place] = torch.arange(len(tokens))
            segments[row, place] = number
            at += len(tokens)
    return {
        "input_ids": ids, "labels": labels, "attention_mask": mask, "position_ids": positions, "segment_ids": segments,
    }  # fmt: skip


def packed_behind_mask(samples: Sequence[Sample]) -> Batch:
    """As ``packed``, with a mask [B, T, T] in the place of the documents' numbers."""
    batch = packed(samples)
    segments = batch.pop("segment_ids")
    length = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    batch["attention_mask"] = (same & torch.ones(length, length, dtype=torch.bool).tril()).long()
    return batch


def batches(samples: Sequence[Sample], size: int, seed: int) -> Iterator[tuple[int, list[Sample]]]:
    """(epoch, ``size`` samples) without end, each epoch in an order of its own; the rest of an epoch is left out."""
    epoch = 0
    while True:
        order = list(samples)
        random.Random(f"{seed} {epoch}").shuffle(order)
        for start in range(0, len(order) - size + 1, size):
            yield epoch, order[start : start + size]
        epoch += 1
