"""How long the samples are: a ledger, not a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..finding import Evidence, Finding
from ..registry import rule

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "data/lengths",
    stage="data",
    kind="hygiene",
    severity="info",
    needs=("records.samples|records.media_samples|batches.input_ids",),
    report=True,
)
def lengths(capsule: Capsule) -> Iterator[Finding]:
    """How long the samples are.

    What it checks:
        Lengths in tokens of the samples on record (of the rows of captured batches where there are no records), and
        pixels, width and height of the images.

    Why it matters:
        Memory, padding and truncation follow the longest samples, throughput follows the mean. A distribution that is
        not the expected one is the cheapest sign of wrong data.

    How it decides:
        It only reports: count, mean, deviation, minimum, maximum, 95th and 99th percentile.

    Looks like it but is not:
        A fixed length means packed or cut rows, which is how pre-training data looks.

    What to try next:
        Compare with the lengths of the data set; look at the longest sample.

    Fix:
        None: this is a ledger.
    """
    records = capsule.records("samples")
    tokens = np.array([each["length"] for each in records if isinstance(each.get("length"), int)], np.int64)
    source = "sample records"
    if not tokens.size:
        rows = [_row_lengths(batch) for batch in capsule.batches()]
        tokens = np.concatenate(rows) if rows else tokens
        source = "captured batches"
    given = [each.get("image_size") for each in records] + [
        each.get("image") for each in capsule.records("media_samples")
    ]
    images = [size for each in given if (size := _size(each)) is not None]
    sizes = np.array([width * height for width, height in images], np.float64)
    evidence: list[Evidence] = []
    if tokens.size:
        evidence += _distribution("length", tokens.astype(np.float64), "tokens", source)
    if images:
        evidence += _distribution("image size", sizes, "pixels", "sample records")
        for at, name in enumerate(("image width", "image height")):
            edges = np.array([size[at] for size in images], np.float64)
            # One size says it all; of several the ends and the tail tell.
            kept = ("min", "max", "p95", "p99") if len(set(edges.tolist())) > 1 else ("max",)
            measured = _distribution(name, edges, "pixels", "sample records")
            evidence += [each for each in measured if each.name.removeprefix(f"{name} ") in kept]
    if not evidence:
        return
    if tokens.size:
        summary = (
            f"{tokens.size} samples of {tokens.min()} to {tokens.max()} tokens, mean {tokens.mean():.4g}, "
            f"95 % within {np.percentile(tokens, 95):.4g} ({source})."
        )
    else:
        summary = f"{sizes.size} images of {sizes.min():.4g} to {sizes.max():.4g} pixels, mean {sizes.mean():.4g}."
    yield Finding(title="Sample lengths", summary=summary, evidence=tuple(evidence), confidence="confirmed")


def _distribution(name: str, values: NDArray[np.float64], unit: str, source: str) -> list[Evidence]:
    measures = {
        "samples": float(values.size),
        "mean": float(values.mean()),
        "deviation": float(values.std()),
        "min": float(values.min()),
        "max": float(values.max()),
        "p95": float(np.percentile(values, 95)),
        "p99": float(np.percentile(values, 99)),
    }
    return [
        Evidence(name=f"{name} {measure}", value=value, unit="" if measure == "samples" else unit, note=source)
        for measure, value in measures.items()
    ]


def _row_lengths(batch: Any) -> NDArray[np.int64]:
    """Length of every sample of a batch: documents of packed rows, else unmasked tokens, else the row itself."""
    if batch.cu_seqlens is not None:
        return np.diff(np.asarray(batch.cu_seqlens, np.int64))
    mask = batch.attention_mask
    if mask is not None and np.ndim(mask) == 2:
        return (np.asarray(mask) > 0).sum(axis=1).astype(np.int64)
    if batch.input_ids is None:
        return np.zeros(0, np.int64)
    shape = np.shape(batch.input_ids)
    return np.full(shape[0], shape[-1], np.int64)


def _size(size: Any) -> tuple[float, float] | None:
    """(width, height) of an image given as [width, height], as the shape of a tensor, as a mapping, or as one edge."""
    if isinstance(size, dict):
        size = [size.get("width"), size.get("height")]
    if isinstance(size, int) and not isinstance(size, bool):
        size = [size, size]
    if not isinstance(size, list | tuple) or not all(isinstance(each, int | float) and each > 0 for each in size):
        return None
    if len(size) == 3:  # channels first or last
        height, width = size[1:] if size[0] in (1, 3, 4) else size[:2]
        return float(width), float(height)
    return (float(size[0]), float(size[1])) if len(size) == 2 else None
