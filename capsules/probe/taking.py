"""Takes batches, writes each into the capsule, and keeps the numbers that sum them up."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import EvidenceError
from ..recorder.batch import keys_of, label_layout
from ..recorder.ring import digests
from ..writer import CapsuleWriter
from . import fields as looked

IGNORE_INDEX = -100
#: Samples whose text is shown, of each split.
SHOWN = 3
MOST_TEXT = 2_000
BINS = 32


class Taker:
    """What was taken so far; ``lock`` is held while a batch is written, so that a time limit never tears one.

    Args:
        writer: of the capsule.
        decode: token ids to text, or None without a tokenizer.
        pad: the padding id, where known.
    """

    def __init__(self, writer: CapsuleWriter, decode: Callable[[list[int]], str] | None, pad: int | None) -> None:
        self.writer = writer
        self.lock = threading.Lock()
        self.taken: Counter[str] = Counter()
        self._decode = decode
        self._pad = pad
        self._fields: dict[str, dict[str, Any]] = {}
        self._lengths: list[int] = []
        self._images: Counter[tuple[int, int]] = Counter()
        self._digests: dict[str, Counter[str]] = {}
        self._supervised = self._labelled = self._unsupervised_rows = self._labelled_rows = 0
        self._positions = self._padding = 0
        self._texts: list[dict[str, Any]] = []
        self._notes: dict[str, None] = {}
        self._step = 0

    def note(self, words: str) -> None:
        """Remember something that a reader should know, once."""
        self._notes.setdefault(words)

    def add(self, batch: Any, split: str) -> None:
        """Take one batch: look at it, write it, count it."""
        with self.lock:
            fields = looked.named(batch)
            self._describe(fields)
            step, self._step = self._step, self._step + 1
            self.taken[split] += 1
            parts = looked.arrays(fields)
            sizes = looked.image_sizes(fields)
            self._images.update(sizes)
            for micro, (prefix, arrays) in enumerate(parts):
                self._part(step, micro, prefix, arrays, fields, batch, split, sizes)
            if not parts:
                self._without_arrays(step, fields, split, sizes)
            rows = [
                {"step": step, "name": name, **row}
                for name, value in fields.items()
                if (tensor := looked.as_tensor(value)) is not None and (row := looked.counts(tensor)) is not None
            ]
            if rows:
                self.writer.stats(rows)

    def _describe(self, fields: dict[str, Any]) -> None:
        for name, value in fields.items():
            about = looked.describe(value)
            known = self._fields.setdefault(name[:200], {**about, "shapes": [], "seen": 0})
            known["seen"] += 1
            if about["shape"] not in known["shapes"] and len(known["shapes"]) < 8:
                known["shapes"].append(about["shape"])
            for part in ("kind", "dtype"):
                if about[part] != known[part] and about[part] not in known[part].split(" or "):
                    known[part] += f" or {about[part]}"

    def _part(
        self, step: int, micro: int, prefix: str, arrays: dict[str, Tensor],
        fields: dict[str, Any], batch: Any, split: str, sizes: list[tuple[int, int]],
    ) -> None:  # fmt: skip
        ids, labels, mask = arrays["input_ids"], arrays.get("labels"), arrays.get("attention_mask")
        names = looked.sample_ids(fields, len(ids))
        layout = label_layout(ids, labels, IGNORE_INDEX) if labels is not None else None
        shapes = {
            name: list(tensor.shape)
            for name in ("input_ids", "labels", "attention_mask")
            if (tensor := looked.as_tensor(fields.get(prefix + name))) is not None
        }
        keys = keys_of(batch) or [name for name in fields if not name.startswith("[")] or None
        evidence: dict[str, Any] = {
            name: array.numpy() for name, array in arrays.items() if array.dtype != torch.bfloat16
        }
        try:
            self.writer.batch(
                step=step, split=split, micro=micro, sample_ids=names, keys=keys, shapes=shapes or None,
                label_layout=getattr(layout, "name", layout), **evidence,
            )  # fmt: skip
        except EvidenceError as error:
            self.note(f"a batch could not be written whole: {error}")
            self.writer.batch(step=step, split=split, micro=micro, keys=keys, input_ids=ids.numpy())
        flat = mask if mask is not None and mask.shape == ids.shape else None
        padded = (flat == 0) if flat is not None else (ids == self._pad) if self._pad is not None else None
        self._positions += ids.numel()
        self._padding += 0 if padded is None else int(padded.sum())
        if labels is not None and labels.shape == ids.shape:
            asked = (labels != IGNORE_INDEX) & (labels >= 0)
            self._supervised += int(asked.sum())
            self._labelled += ids.numel() - (0 if padded is None else int(padded.sum()))
            self._unsupervised_rows += int((~asked.any(1)).sum())
            self._labelled_rows += len(ids)
        found, lengths = digests(ids, flat)
        if flat is None and padded is not None:
            lengths = (~padded).sum(1).tolist()
        rows = [
            row[keep] if keep is not None else row
            for row, keep in zip(ids, flat != 0 if flat is not None else [None] * len(ids), strict=True)
        ]
        self._samples(step, split, found, lengths, names, [row.tolist() for row in rows], sizes)
        begin = hashlib.sha256("\n".join(found).encode()).hexdigest()
        if split == "train":
            self.writer.record("events", {"kind": "step_begin", "step": step, "micro": micro, "batch_sha256": begin})

    def _without_arrays(self, step: int, fields: dict[str, Any], split: str, sizes: list[tuple[int, int]]) -> None:
        """A batch in which no token ids [B, T] were found: samples of different lengths, or none at all."""
        rows = looked.ragged(fields)
        keys = [name for name in fields if not name.startswith("[")] or None
        self.writer.batch(step=step, split=split, keys=keys)
        if rows:
            found = [hashlib.sha256(np.asarray(row, "<i8").tobytes()).hexdigest() for row in rows]
            names = looked.sample_ids(fields, len(rows))
            self._samples(step, split, found, [len(row) for row in rows], names, rows, sizes)
        else:
            if not sizes:
                self.note("no token ids [B, T] were found in a batch: see the fields")
            self.writer.records(
                "samples", [{"step": step, "split": split, "image_size": list(size)} for size in sizes[:4096]]
            )

    def _samples(
        self, step: int, split: str, found: list[str], lengths: list[int], names: list[str] | None,
        rows: list[list[int]], sizes: list[tuple[int, int]],
    ) -> None:  # fmt: skip
        self._lengths += lengths
        self._digests.setdefault(split, Counter()).update(found)
        shown = sum(each["split"] == split for each in self._texts)
        records: list[dict[str, Any]] = []
        for row, (digest, length) in enumerate(zip(found, lengths, strict=True)):
            record: dict[str, Any] = {"step": step, "split": split, "sha256": digest, "length": length}
            if names is not None:
                record["id"] = names[row]
            if len(sizes) == len(found):
                record["image_size"] = list(sizes[row])
            if shown < SHOWN and self._decode is not None:
                shown += 1
                record["text"] = self._text(rows[row])
                name = record.get("id") or f"batch {step} row {row}"
                self._texts.append({"split": split, "name": name, "tokens": length, "text": record["text"]})
            records.append(record)
        self.writer.records("samples", records)

    def _text(self, ids: list[int]) -> str:
        assert self._decode is not None
        try:
            return str(self._decode([each for each in ids if each >= 0]))[:MOST_TEXT]
        except Exception as error:  # the user's tokenizer: what it cannot decode is shown as ids
            self.note(f"the tokenizer could not decode a sample: {type(error).__name__}: {str(error)[:120]}")
            return " ".join(map(str, ids))[:MOST_TEXT]

    def summary(self) -> dict[str, Any]:
        """Everything counted so far, as plain data."""
        train, held = self._digests.get("train", Counter()), self._digests.get("validation", Counter())
        return {
            "batches": dict(self.taken),
            "fields": [{"name": name, **about} for name, about in self._fields.items()],
            "samples": self._texts,
            "lengths": _lengths(self._lengths),
            "images": [
                {"width": width, "height": height, "count": count}
                for (width, height), count in self._images.most_common(16)
            ],
            "supervised": {
                "tokens": self._supervised,
                "of": self._labelled,
                "rows": self._labelled_rows,
                "rows_without": self._unsupervised_rows,
            }
            if self._labelled_rows
            else None,
            "padding": {"positions": self._padding, "of": self._positions} if self._positions else None,
            "duplicates": {
                "within_train": sum(train.values()) - len(train),
                "train": sum(train.values()),
                "within_validation": sum(held.values()) - len(held),
                "validation": sum(held.values()),
                "between": len(train.keys() & held.keys()),
            },
            "notes": list(self._notes),
        }


def _lengths(found: list[int]) -> dict[str, Any] | None:
    """Distribution of lengths in tokens, with a histogram of equal bins from the least to the greatest."""
    if not found:
        return None
    values = np.asarray(found)
    bins = min(BINS, max(1, int(values.max() - values.min()) + 1))
    heights, edges = np.histogram(values, bins=bins)
    quantiles = {f"p{q}": float(np.percentile(values, q)) for q in (50, 95, 99)}
    return {
        "samples": len(found), "mean": float(values.mean()), "deviation": float(values.std()),
        "min": int(values.min()), "max": int(values.max()), **quantiles,
        "histogram": heights.tolist(), "from": float(edges[0]), "to": float(edges[-1]),
    }  # fmt: skip


def text_of(tokenizer: Any) -> Callable[[list[int]], str] | None:
    """A function that decodes ids with special tokens shown; None without a tokenizer."""
    decode = getattr(tokenizer, "decode", None)
    return decode if callable(decode) else None  # pyright: ignore


def adds_bos(tokenizer: Any, bos: int | None) -> bool | None:
    """Whether the tokenizer puts a beginning-of-text token before a plain word."""
    if bos is None or not callable(tokenizer):
        return None
    with contextlib.suppress(Exception):  # the user's tokenizer may be of any make
        encoded: Any = tokenizer("a")
        ids = encoded["input_ids"]
        return bool(len(ids) and ids[0] == bos)
    return None
