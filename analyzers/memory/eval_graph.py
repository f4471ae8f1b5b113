"""Memory that rises in evaluation and nowhere else: a graph that is kept, or outputs that are collected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import NotJudged, rule
from ..series import Floats
from .allocator import located, of_devices
from .evaluation_trace import Kept, holds_evaluations, kept
from .evaluations import Levels, levels
from .oom import Failure, failures, gib
from .records import positive, whole
from .thresholds import (
    EVAL_BATCHES,
    EVAL_BYTES,
    EVAL_COPIES,
    EVAL_FIT,
    EVAL_POINTS,
    EVAL_RISE,
    EVAL_RISING,
    EVAL_TRAINING,
)

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Names that configurations give to the rows of an evaluation, their batch, and their length.
_SAMPLES: Final = ("eval_samples", "max_eval_samples", "num_eval_samples", "validation_samples", "eval_size")
_BATCH: Final = ("per_device_eval_batch_size", "eval_batch_size", "validation_batch_size", "val_batch_size")
_LENGTH: Final = ("seq", "max_seq_length", "max_length", "seq_length", "sequence_length", "block_size", "seq_len")
_VOCABULARY: Final = ("vocab", "vocab_size")
_WIDTHS: Final = {"float16": 2, "bfloat16": 2, "fp16": 2, "bf16": 2, "half": 2, "float32": 4, "fp32": 4, "float64": 8}


@dataclass(frozen=True)
class _Outputs:
    """Bytes of the logits of a batch of the evaluation and of all of it, as far as the configuration says."""

    batch: int | None
    whole: int | None
    words: str


@rule(
    "memory/eval-graph",
    stage="runtime",
    severity="warning",
    needs=(
        "records.memory|scalars.memory_allocated|scalars.memory_reserved|scalars.memory_peak|records.events"
        "|tensors.allocator/action|files.snapshot",
    ),
    cases=("out-of-memory-after-hours",),
)
def eval_graph(capsule: Capsule) -> Iterator[Finding]:
    """Memory rises in evaluation only.

    What it checks:
        Measurements of memory inside passes of evaluation (records of the phase eval, or curves by the times of
        eval_begin and eval_end) beside those of training; whether gradients were enabled; the bytes of the logits. In
        an allocator's trace, blocks of the last evaluation, known by the functions of its stacks, that stay with each
        batch. In a log, the frames of a failure.
    Why it matters:
        Logits of a large vocabulary are gigabytes a batch. A loop that collects them for a metric, or that keeps their
        graph, runs out of memory at the first evaluation, hours into the run.
    How it decides:
        The level rises in at least 80 % of three or more steps of a pass, by 5 % and 16 MiB in all, and training does
        not rise like it. Collected outputs: the rise a batch is B·T·V·bytes, once to three times (concatenating
        copies), or the rise of the pass is that of all its rows. A graph: gradients were enabled. Likely; undetermined
        where neither is on record. A failure in evaluation counts too, with gradients enabled or where it joins the
        outputs of its batches (likely), or where the logits of all its rows exceed the device (undetermined).
        Trace: over 8 batches or more, between two steps of training or behind the last one, stacks keep 80 % of what
        they make, or join it to what they have, 16 MiB and 5 % of the level in all. A graph: half of the lines of the
        forward pass stay, and two or more. Outputs: a third of them at most. Outputs that one evaluation collects
        without a failure are a remark, since they may be given back at its end. Undetermined where the batches may be
        the layers of one, or a store by its name.
    Looks like it but is not:
        A larger batch in evaluation (a higher level that stays), a level that rises in training as well (a leak), the
        first batch of a pass, generation with a key-value cache that is given back.
    What to try next:
        Log the allocated bytes after each batch of an evaluation, once with the metric and once without.
    Fix:
        Run it under torch.no_grad() or inference_mode. Reduce logits before they are collected (arg-max, the loss of
        each row): preprocess_logits_for_metrics, or eval_accumulation_steps in the Hugging Face trainer.
    """
    found = levels(capsule)
    enabled = [each for each in capsule.records("events") if each.get("kind") == "eval_begin"]
    enabled = [each for each in enabled if each.get("grad_enabled") is True]
    out = [each for each in failures(capsule) if (each.phase or "").lower().startswith(("eval", "valid"))]
    traced = kept(capsule)
    if not found and not out and not holds_evaluations(capsule):
        raise NotJudged(
            "memory measured inside an evaluation: records of the phase eval, curves with times, or an allocator's "
            f"trace of {EVAL_BATCHES} batches of one"
        )
    outputs = _outputs(capsule)
    for each in found:
        rise = _rise(each)
        if rise is not None:
            yield _finding(each, rise, outputs, bool(enabled))
            return
    if traced is not None:
        yield _traced(capsule, traced, outputs)
        return
    joins = next((each for each in out if each.collects is not None), None)
    if joins is not None:
        yield _joined(joins, outputs)
    elif out and (enabled or _exceeds(outputs, out[0])):
        yield _failed(out[0], bool(enabled), outputs)


#: What is kept of the batches of an evaluation: why, and what helps.
_GRAPH_KEPT: Final = ("what is kept of each batch keeps its graph", "torch.no_grad() or inference_mode around it")
_COLLECTED: Final = (
    "the outputs of every batch are kept on the device until the evaluation ends",
    "reduce logits before they are collected (arg-max, or the loss of each row): preprocess_logits_for_metrics in the "
    "Hugging Face trainer",
    "move them to the host as they come: .cpu(), eval_accumulation_steps in the Hugging Face trainer",
)


def _traced(capsule: Capsule, found: Kept, outputs: _Outputs) -> Finding:
    each = found.size / found.batches
    lines = f"{len(found.stacks)} stacks, {found.place} first" if len(found.stacks) > 1 else found.place
    words = (
        f"An evaluation keeps {gib(found.size)} in {len(found.blocks):,} blocks of {lines}: {gib(each)} a batch over "
        f"{found.batches:,} batches, from {gib(found.start)} on"
    )
    words += ", until the device is full." if found.failed else "."
    cause, fix = None, _GRAPH_KEPT[1:] + _COLLECTED[1:]
    if found.what == "graph":
        words += " Most of what the forward pass makes stays: its graph is kept."
        cause, *fix = _GRAPH_KEPT
    elif found.what == "outputs":
        words += " The rest of each batch is given back: outputs are collected."
        cause, *fix = _COLLECTED
        if _copies(each, outputs.batch) == 1:
            words += f" Logits of a batch are {gib(outputs.batch)} ({outputs.words})."
    if found.given_back:
        words += " They are given back afterwards."
    if found.passes > 1:
        words += f" Those of {found.passes} evaluations are still there, {gib(found.held)}."
    if not found.sure:
        words += " They may be layers of one batch, or a store that fills up." if cause else ""
        cause = None
    lawful = found.what == "outputs" and found.sure and not found.failed and found.passes == 1
    return Finding(
        severity="info" if lawful else None,
        confidence="likely" if cause else "undetermined",
        title="An evaluation collects outputs" if lawful else "Memory rises in evaluation only",
        summary=words + of_devices(capsule, found.history, 1),
        where=located(capsule, found.rank),
        evidence=(
            Evidence(name="kept in evaluation", value=found.size, expected=0, unit="B", note=found.place),
            Evidence(name="blocks that are kept", value=len(found.blocks), expected=0),
            Evidence(name="batches", value=found.batches, expected=f"< {EVAL_BATCHES}"),
            Evidence(name="kept a batch", value=round(each), expected=outputs.batch or 0, unit="B"),
            Evidence(name="allocated before it", value=found.start, unit="B"),
            *_predicted(outputs),
        ),
        cause=cause,
        next=("run the same evaluation under torch.no_grad(), and without its metric",),
        fix=tuple(fix),
    )


def _joined(failure: Failure, outputs: _Outputs) -> Finding:
    return Finding(
        severity="info" if failure.caught else None,
        confidence="likely",
        title="Out of memory in evaluation",
        summary=(
            f"The device ran out of memory where an evaluation joins the outputs of its batches ({failure.collects}): "
            f"{gib(failure.requested)} were asked for, {gib(failure.allocated)} are in use. What is collected grows "
            "with every batch."
        ),
        where=Where(step=failure.step, rank=failure.rank),
        evidence=(
            Evidence(name="requested", value=failure.requested, unit="B", note=failure.collects or ""),
            Evidence(name="allocated", value=failure.allocated, unit="B"),
            *_predicted(outputs),
        ),
        cause=_COLLECTED[0],
        next=("log the allocated bytes after each batch of an evaluation, with the metric and without",),
        fix=_COLLECTED[1:],
    )


@dataclass(frozen=True)
class _Rise:
    """A pass in which the level rose: from where, by how much in all and in a usual step, in how many steps."""

    start: float
    total: float
    each: float
    steps: int


def _rise(levels: Levels) -> _Rise | None:
    """The largest rise inside a pass, where training has none like it."""
    best: _Rise | None = None
    for values in levels.inside:
        steps = np.diff(values)
        if len(values) < EVAL_POINTS:
            continue
        total = float(values[-1] - values[0])
        if total < max(EVAL_BYTES, EVAL_RISE * float(values[0])) or float((steps > 0).mean()) < EVAL_RISING:
            continue
        # One jump is a new size, not something that is collected.
        if float(steps.max()) > 0.7 * total and len(steps) > 2:
            continue
        if best is None or total > best.total:
            best = _Rise(float(values[0]), total, float(np.median(steps)), len(steps))
    if best is None or _training_rises(levels.training, best):
        return None
    return best


def _training_rises(values: Floats, rise: _Rise) -> bool:
    """Whether the level of training goes up by as much: then it is no matter of evaluation."""
    values = values[np.isfinite(values)]
    if len(values) < EVAL_POINTS:
        return False
    half = len(values) // 2
    gained = float(np.median(values[half:]) - np.median(values[:half]))
    steps = float((np.diff(values) > 0).mean())
    return gained > EVAL_TRAINING * rise.total and steps > 0.5


def _finding(levels: Levels, rise: _Rise, outputs: _Outputs, enabled: bool) -> Finding:
    copies = _copies(rise.each, outputs.batch) or _copies(rise.total, outputs.whole)
    collected = copies is not None
    words = (
        f"Inside one evaluation the level rises from {gib(rise.start)} by {gib(rise.total)} in {rise.steps} steps, "
        f"{gib(rise.each)} each; training has no such rise."
    )
    if collected:
        words += f" Logits of a batch are {gib(outputs.batch)} ({outputs.words}): they are collected"
        words += f", {copies} times over." if copies and copies > 1 else "."
    if enabled:
        words += " Gradients are enabled in it: each output that is kept keeps its graph."
    cause = None
    if collected:
        cause = "the logits of every batch are kept until the evaluation ends"
    elif enabled:
        cause = "gradients are enabled in evaluation, and what is kept of each batch keeps its graph"
    return Finding(
        confidence="likely" if cause else "undetermined",
        title="Memory rises in evaluation only",
        summary=words,
        where=Where(step=levels.step, rank=levels.rank),
        evidence=(
            Evidence(name="rise a step", value=round(rise.each), expected=outputs.batch if collected else 0, unit="B"),
            Evidence(
                name="rise of the pass", value=round(rise.total), expected=0, unit="B", note=f"{rise.steps} steps"
            ),
            *_predicted(outputs),
            Evidence(name="gradients enabled", value=enabled, expected=False),
        ),
        cause=cause,
        next=("log the allocated bytes after each batch of an evaluation, with the metric and without",),
        fix=("reduce logits before they are collected (arg-max, or the loss of each row)", "torch.no_grad() around it"),
    )


def _exceeds(outputs: _Outputs, failure: Failure) -> bool:
    return outputs.whole is not None and failure.capacity is not None and outputs.whole > failure.capacity


def _failed(failure: Failure, enabled: bool, outputs: _Outputs) -> Finding:
    words = "The device ran out of memory in an evaluation"
    if enabled:
        words += " in which gradients are enabled: forward keeps its graph."
    else:
        words += (
            f"; the logits of all its rows are {gib(outputs.whole)}, more than the device has, if a metric keeps them."
        )
    return Finding(
        confidence="likely" if enabled else "undetermined",
        title="Out of memory in evaluation",
        summary=words,
        where=Where(step=failure.step, rank=failure.rank),
        evidence=(Evidence(name="gradients enabled", value=enabled, expected=False), *_predicted(outputs)),
        cause="evaluation keeps the graph of a training step" if enabled else None,
        next=("run the same evaluation under torch.no_grad(), and without its metric",),
        fix=("torch.no_grad() or inference_mode around the evaluation; reduce logits before they are collected",),
    )


def _predicted(outputs: _Outputs) -> Iterator[Evidence]:
    if outputs.batch is not None:
        yield Evidence(name="logits of a batch, predicted", value=outputs.batch, unit="B", note=outputs.words)
    if outputs.whole is not None:
        yield Evidence(name="logits of the evaluation, predicted", value=outputs.whole, unit="B")


def _copies(rise: float, predicted: int | None) -> int | None:
    """How many copies of the predicted bytes the rise is; None where no whole number of a few of them fits."""
    if not predicted:
        return None
    for copies in EVAL_COPIES:
        if abs(rise / (copies * predicted) - 1) <= EVAL_FIT:
            return copies
    return None


def _outputs(capsule: Capsule) -> _Outputs:
    manifest = capsule.manifest
    settings: dict[str, Any] = {}
    if isinstance(manifest.config, dict):
        config: dict[str, Any] = manifest.config
        for part in (*(value for value in config.values() if isinstance(value, dict)), config):
            settings |= {str(key).lower(): value for key, value in part.items()}
    model, training = manifest.model, manifest.training
    vocabulary = (model.vocab_size or model.embedding_rows) if model is not None else None
    vocabulary = vocabulary or _first(settings, _VOCABULARY)
    shapes = [
        each.arrays["input_ids"].shape
        for each in capsule.batches()[:256]
        if each.split == "validation" and "input_ids" in each.arrays and len(each.arrays["input_ids"].shape) == 2
    ]
    rows = _first(settings, _BATCH) or (shapes[0][0] if shapes else None)
    length = shapes[0][1] if shapes else None
    if training is not None:
        rows = rows or training.micro_batch
        length = length or training.max_length
    length = length or _first(settings, _LENGTH)
    if not vocabulary or not length:
        return _Outputs(None, None, "")
    width = _width(capsule, settings)
    samples = _first(settings, _SAMPLES)
    each = rows * length * vocabulary * width if rows else None
    words = f"{rows}·{length}·{vocabulary}·{width} B" if rows else ""
    return _Outputs(each, samples * length * vocabulary * width if samples else None, words)


def _width(capsule: Capsule, settings: dict[str, Any]) -> int:
    """Bytes of a logit; float32, into which losses and trainers turn them, where nothing is known."""
    named = next((each.logits_dtype for each in capsule.batches()[:256] if each.logits_dtype), None)
    return _WIDTHS.get(str(named or settings.get("dtype") or "float32").lower().removeprefix("torch."), 4)


def _first(settings: dict[str, Any], names: tuple[str, ...]) -> int | None:
    return next((value for name in names if (value := positive(whole(settings.get(name))))), None)
