"""Sizes of the vocabulary, and the table that input and output share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import rule
from .loss_batch import is_shifted
from .thresholds import UNTRAINED_ROW

if TYPE_CHECKING:
    from ...capsules import Capsule

_INPUT = re.compile(
    r"(^|\.)(wte|embed_tokens|tok_embeddings|word_embeddings|embed_in|embedding|embeddings|shared)\.weight$"
)
_OUTPUT = re.compile(r"(^|\.)(lm_head|embed_out|output|output_layer|unembed|head)\.weight$")


def tables(capsule: Capsule) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """(input embeddings, output heads): names of whole two-dimensional parameters with their shapes."""
    shapes = {
        str(each["name"]): tuple(int(size) for size in each["shape"])
        for each in capsule.records("param_groups")
        if each.get("name") and each.get("shape")
    }
    rows = capsule.stats(role="parameter")
    shapes |= {str(name): tuple(shape) for name, shape in zip(rows.name, rows.shape, strict=True)}
    pairs = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    return (
        {name: shape for name, shape in pairs.items() if _INPUT.search(name)},
        {name: shape for name, shape in pairs.items() if _OUTPUT.search(name)},
    )


def _is_sharded(capsule: Capsule) -> bool:
    """Whether a rank may hold a part of the tables only."""
    training = capsule.manifest.training
    if training is None:
        return False
    return (training.tensor_parallel or 1) > 1 or training.sharding is not None


@rule(
    "objective/vocabulary-mismatch",
    stage="objective",
    needs=(
        "manifest.tokenizer.vocab_size|tensors.embedding/row_norm|batches.logits|records.param_groups|manifest.model.vocab_size",
    ),
    cases=("loaded-model-random-output",),
)
def vocabulary_mismatch(capsule: Capsule) -> Iterator[Finding]:
    """Tokenizer, embedding and output do not have the same vocabulary.

    What it checks:
        The tokenizer's size against the rows of the embedding and the columns of the logits, those two against each
        other, and the norms of embedding rows of special tokens that are in use.
    Why it matters:
        An id without a row raises or reads foreign memory; a token without a logit can never be produced; a special
        token whose row was never trained makes templates noise. All of it looks like a badly trained model.
    How it decides:
        Tokenizer larger than embedding or logits: a warning, critical and confirmed where a captured batch holds such
        an id. Embedding and logits of different sizes: a warning, critical and confirmed where they are declared to be
        one table. A special token that occurs in a batch while the norm of its embedding row is below a tenth of the
        median row: a warning, a remark while that table is being trained. Sharded tables are left alone.
    Looks like it but is not:
        An embedding padded to a round number: rows beyond the tokenizer that no id uses. All rows of an untrained model
        have one norm.
    What to try next:
        Compare len(tokenizer) (which counts added tokens) with the rows of the embedding; decode the ids in question.
    Fix:
        Resize embedding and output together after adding tokens; train the rows of new tokens; take the tokenizer that
        belongs to the checkpoint.
    """
    model, tokenizer = capsule.manifest.model, capsule.manifest.tokenizer
    words = tokenizer.vocab_size if tokenizer is not None else None
    inputs, _ = tables(capsule)
    sharded = _is_sharded(capsule)
    rows = model.embedding_rows if model is not None else None
    if rows is None and not sharded and len(inputs) == 1:
        rows = next(iter(inputs.values()))[0]
    declared = model.vocab_size if model is not None else None
    columns = {int(each.arrays["logits"].shape[-1]) for each in capsule.batches() if "logits" in each.arrays}
    logits = columns.pop() if len(columns) == 1 and not sharded else None
    sizes = {"tokenizer": words, "embedding rows": rows or declared, "logits": logits}
    evidence = tuple(Evidence(name=name, value=size, unit="tokens") for name, size in sizes.items() if size)

    short = [(name, size) for name, size in (("embedding rows", rows or declared), ("logits", logits)) if size]
    if words is not None and (smaller := [each for each in short if each[1] < words]):
        name, size = smaller[0]
        used = _largest_id(capsule)
        seen = used is not None and used >= size
        yield Finding(
            title=f"The tokenizer has {words - size:,} tokens more than {name}",
            summary=f"The tokenizer has {words:,} tokens, the {name} are {size:,}: "
            + (f"the id {used:,} is in a captured batch." if seen else "no captured batch uses one of those ids."),
            severity="critical" if seen else "warning",
            confidence="confirmed" if seen else "likely",
            where=Where(step=0),
            evidence=(*evidence, Evidence(name="largest_id", value=used, expected=size - 1, note="at most")),
            cause="tokens were added and the model was not resized, or the tokenizer is another model's",
            next=("decode the ids from the smaller size on", "compare len(tokenizer) with the embedding's rows"),
            fix=("resize embedding and output to the tokenizer, or load the tokenizer of the checkpoint",),
        )
    elif rows is not None and logits is not None and rows != logits and _over_tokens(capsule, rows, logits):
        tied = model is not None and bool(model.tied_embeddings)
        yield Finding(
            title="Embedding and logits have different sizes",
            summary=f"The embedding has {rows:,} rows and the logits {logits:,} columns.",
            severity="critical" if tied else "warning",
            confidence="confirmed" if tied else "likely",
            where=Where(step=0),
            evidence=evidence,
            cause="one of the two was resized and the other was not",
            next=("look at the shapes of embedding and output head",),
            fix=("resize both together",),
        )
    yield from _untrained(capsule)


def _over_tokens(capsule: Capsule, rows: int, columns: int) -> bool:
    """Whether logits score tokens, and not tags or classes: by the labels, without any by their number."""
    seen = [(each.input_ids, each.labels) for each in capsule.batches() if each.labels is not None]
    for ids, labels in seen:
        if ids is None or np.shape(ids) != np.shape(labels) or np.ndim(ids) != 2:
            continue
        tokens, named = np.asarray(ids, np.int64), np.asarray(labels, np.int64)
        if is_shifted(tokens, named, named >= 0, None) is not None:
            return True
    return not seen and 2 * columns >= rows


def _largest_id(capsule: Capsule) -> int | None:
    found = [
        int(np.max(each.input_ids)) for each in capsule.batches() if each.input_ids is not None and each.input_ids.size
    ]
    return max(found, default=None)


def _untrained(capsule: Capsule) -> Iterator[Finding]:
    """Special tokens in use whose embedding rows stand out as never trained."""
    norms = [each.array() for each in capsule.tensors("embedding/row_norm")]
    tokenizer, model = capsule.manifest.tokenizer, capsule.manifest.model
    if not norms or tokenizer is None or (model is not None and model.initialised == "random"):
        return
    norm = np.asarray(norms[0], np.float64).ravel()
    special = set((tokenizer.special_ids or {}).values()) | {*(tokenizer.stop_ids or ())}
    special |= {each for each in (tokenizer.bos_id, tokenizer.eos_id) if each is not None}
    special -= {tokenizer.pad_id}
    used = {
        int(each) for batch in capsule.batches() if batch.input_ids is not None for each in np.unique(batch.input_ids)
    }
    finite = norm[np.isfinite(norm)]
    usual = float(np.median(finite)) if finite.size else 0.0
    poor = sorted(
        each
        for each in special & used
        if 0 <= each < len(norm) and not norm[each] > UNTRAINED_ROW * usual and usual > 0
    )
    if not poor:
        return
    inputs, _ = tables(capsule)
    groups = {str(each.get("name")): each for each in capsule.records("param_groups")}
    trained = any(groups.get(name, {}).get("in_optimizer") for name in inputs)
    names = {value: name for name, value in (tokenizer.special_ids or {}).items()}
    first = poor[0]
    yield Finding(
        title="Special tokens in use were never trained",
        summary=f"{len(poor)} special tokens occur whose embedding rows are next to nothing: {names.get(first, first)} "
        f"has the norm {norm[first]:.3g}, the median row {usual:.3g}.",
        severity="info" if trained else "warning",
        confidence="likely",
        where=Where(step=0),
        evidence=(
            Evidence(name="row_norm", value=float(norm[first]), expected=UNTRAINED_ROW * usual, note=f"id {first}"),
            Evidence(name="untrained_ids", value=poor[:16], note="in captured batches"),
        ),
        cause="the template uses tokens that the base model never saw",
        next=("use the template of the tuned model, or train the embedding and the output with the adapter",),
        fix=("initialise the rows of new tokens from the mean of others and train them, or use trained tokens",),
    )


@rule(
    "objective/tying-broken",
    stage="objective",
    needs=("manifest.model.tied_embeddings", "records.param_groups|records.checksums|stats.parameter"),
    cases=("loaded-model-random-output",),
)
def tying_broken(capsule: Capsule) -> Iterator[Finding]:
    """The table of input and output should be one and is two.

    What it checks:
        A model that declares tied embeddings: whether input embedding and output head are one storage, and whether
        their checksums or statistics agree.
    Why it matters:
        The two drift apart: half of the gradient trains each, and a checkpoint that keeps one of them loads as another
        model.
    How it decides:
        Two checksums, or two sets of statistics, that differ at one step: confirmed, critical. Two parameters that
        share no storage and were not seen to differ: likely, a warning.
    Looks like it but is not:
        Pipeline stages that each hold a copy, whose checksums agree; models that declare untied tables.
    What to try next:
        Compare the data pointers of both parameters after loading, after wrapping and after moving to the device.
    Fix:
        Tie the weights again after loading or wrapping, before the optimizer is built.
    """
    model = capsule.manifest.model
    if model is None or not model.tied_embeddings:
        return
    digests: dict[tuple[int, str], dict[str, set[str]]] = {}
    for each in capsule.records("checksums"):
        name, digest = str(each.get("name") or ""), each.get("sha256")
        side = "input" if _INPUT.search(name) else "output" if _OUTPUT.search(name) else None
        if side and digest:
            at = digests.setdefault((int(each.get("step") or 0), str(each.get("side") or "")), {})
            at.setdefault(side, set()).add(str(digest))
    for (step, _), sides in sorted(digests.items()):
        if len(sides) == 2 and not sides["input"] & sides["output"] and not _is_sharded(capsule):
            yield _broken(step, "checksums", "differ", "equal", sure=True)
            return
    if any("input" in sides and "output" in sides for sides in digests.values()):
        return
    inputs, outputs = tables(capsule)
    if len(inputs) != 1 or len(outputs) != 1:
        return
    (one, shape), (other, second) = next(iter(inputs.items())), next(iter(outputs.items()))
    if shape != second:
        return
    rows = capsule.stats(role="parameter")
    for step in np.unique(rows.step):
        at = {str(name): rms for name, rms, s in zip(rows.name, rows.rms, rows.step, strict=True) if s == step}
        if one in at and other in at and np.isfinite([at[one], at[other]]).all() and at[one] != at[other]:
            yield _broken(int(step), "root mean square", float(at[other]), float(at[one]), sure=True)
            return
    shared = {
        str(each["name"]): each.get("shared_with") for each in capsule.records("param_groups") if each.get("name")
    }
    if one in shared and other in shared and not (shared[one] or shared[other]):
        yield _broken(0, "storages", 2, 1, sure=False)


def _broken(step: int, name: str, value: object, expected: object, sure: bool) -> Finding:
    return Finding(
        title="Tied embeddings are two tables",
        summary="The model declares tied embeddings; input embedding and output head "
        + (f"differ at step {step:,}." if sure else "are two parameters that share no storage."),
        severity="critical" if sure else "warning",
        confidence="confirmed" if sure else "likely",
        where=Where(step=step),
        evidence=(Evidence(name=name, value=value, expected=expected, note="output head beside input embedding"),),
        cause="the weights were not tied again after loading, wrapping or moving the model",
        next=("compare the data pointers of both after each of those steps",),
        fix=("tie the weights before the optimizer is built",),
    )
