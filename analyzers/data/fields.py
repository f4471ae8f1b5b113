"""What the loader hands out: fields that are absent or misnamed, and inputs that are no numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..finding import Evidence, Finding, Severity, Where
from ..registry import rule
from .rows import BIDIRECTIONAL, NEXT_TOKEN, TRAIN, Rows, objective, rows_of

if TYPE_CHECKING:
    from ...capsules import Capsule
    from ...capsules.batches import Batch

#: What loops call the fields on purpose: these names are not slips of the pen.
MEANT: dict[str, frozenset[str]] = {
    "input_ids": frozenset({"idx", "tokens", "token_ids", "ids", "inputs", "input", "x", "src", "text"}),
    "labels": frozenset({"targets", "target", "y", "tgt", "next_tokens", "label_ids_shifted", "shift_labels"}),
    "attention_mask": frozenset({"mask", "padding_mask", "key_padding_mask", "segment_ids", "cu_seqlens"}),
}
#: Slips that are further than one letter from the name.
SLIPS: dict[str, frozenset[str]] = {
    "input_ids": frozenset({"inputid", "inputsid", "ids_input"}),
    "labels": frozenset({"labelids", "labelid"}),
    "attention_mask": frozenset({"attnmask", "attnmasks", "attmask", "attentionmsk", "attentions"}),
}
#: Other inputs that a model can take in place of token ids.
OTHER_INPUTS = ("embeds", "pixel", "features", "values", "image", "audio", "video", "waveform")
_CONTRACTS = ("input_ids", "labels", "attention_mask")
_OUTPUTS = frozenset({"token_loss", "logsumexp", "target_logits", "logits"})
_MASKS = re.compile(r"mask|bias|logp|logit", re.IGNORECASE)


@rule("data/missing-field", stage="data", severity="warning", needs=("batches.keys|batches.input_ids",))
def missing_field(capsule: Capsule) -> Iterator[Finding]:
    """A field that training needs is absent from the batch, or misnamed.

    What it checks:
        The names that the collator produced against input_ids, labels and attention_mask, and what was captured.

    Why it matters:
        A model ignores a keyword argument that it does not know, or takes a default for one that it misses: without a
        mask it attends to padding, without labels it computes no loss.

    How it decides:
        The field is absent and a name one letter away from it, or known as its misspelling (input_id, label,
        attn_mask), is there: warning, info where the recorder found the array under that name all the same. Labels are
        absent, the objective is next-token prediction and no loss is on record: warning. There is padding (to the left,
        or under an objective that reads both ways) and no mask: warning; elsewhere info.

    Looks like it but is not:
        Loops with names of their own (x and y, idx and targets); models that compute their labels, as in preference
        or policy training; rows without padding, which need no mask; padding to the right whose labels are ignored,
        which causal attention never sees; chosen_input_ids and the like; images, audio and embeddings.

    What to try next:
        Print the keys and shapes of one batch (`llmconsole probe module:loader`); look at the signature of forward.

    Fix:
        Rename the field in the collator; build the mask where the padding is made.
    """
    said: set[str] = set()
    batches = [each for each in capsule.batches() if each.split in TRAIN]
    for batch in batches:
        keys = [key for key in batch.keys or [] if key]
        for field in _CONTRACTS:
            slip = _slip(field, keys)
            if slip is not None and field not in said and not _among(field, keys):
                said.add(field)
                yield _misnamed(batch, field, slip, keys)
    first = next((each for each in batches if each.keys or "input_ids" in each.arrays), None)
    if first is None:
        return
    if "labels" not in said and (finding := _no_labels(capsule, batches, first)) is not None:
        yield finding
    if "attention_mask" not in said:
        yield from _no_mask(capsule)


def _normal(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _among(field: str, keys: Sequence[str]) -> bool:
    """Whether the field is there by name, under a prefix or suffix (chosen_input_ids), or under a name of a loop."""
    return any(key == field or key.endswith(f"_{field}") or key.startswith(f"{field}_") for key in keys) or any(
        key.lower() in MEANT[field] for key in keys
    )


def _slip(field: str, keys: Sequence[str]) -> str | None:
    """The first key that is a misspelling of the field."""
    wanted = _normal(field)
    for key in keys:
        found = _normal(key)
        if key != field and (found == wanted or found in SLIPS[field] or _one_edit(found, wanted)):
            return key
    return None


def _one_edit(left: str, right: str) -> bool:
    """Whether one insertion, deletion, replacement or exchange of neighbours turns one word into the other."""
    if left == right or abs(len(left) - len(right)) > 1 or min(len(left), len(right)) < 5:
        return False
    at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    rest, other = left[at:], right[at:]
    exchanged = len(rest) > 1 and len(other) > 1 and rest[:2] == other[1::-1] and rest[2:] == other[2:]
    return rest[1:] == other or rest == other[1:] or rest[1:] == other[1:] or exchanged


def _misnamed(batch: Batch, field: str, slip: str, keys: Sequence[str]) -> Finding:
    found = field in batch.arrays
    severity: Severity | None = "info" if found else None
    return Finding(
        severity=severity,
        title=f"{field} is called {slip}",
        summary=f"The batch of step {batch.step} has no {field} but a field {slip}, which is not read for it.",
        where=Where(step=batch.step, rank=batch.rank, tensor=field),
        evidence=(
            Evidence(name="field", value=slip, expected=field, note="keys: " + ", ".join(keys[:12])),
            Evidence(name="found by the recorder", value="yes" if found else "no", note="under a name it knows"),
        ),
        cause=f"the collator writes {slip} where the model reads {field}",
        next=("print the keys of one batch beside the parameters of forward",),
        fix=(f"rename {slip} to {field} in the collator",),
    )


def _no_labels(capsule: Capsule, batches: Sequence[Batch], first: Batch) -> Finding | None:
    """Labels that nobody provides, where the job is one that needs them."""
    keys = first.keys or []
    if _among("labels", keys) or _slip("labels", keys) or any("labels" in each.arrays for each in batches):
        return None
    made_from = any("loss_mask" in each.arrays for each in batches) or any(
        "completion" in key or "response" in key or "loss_mask" in key for key in keys
    )
    loss = capsule.scalars("loss")
    computed = bool(len(loss) and np.isfinite(loss.value).any()) or any(
        each.reported_loss is not None for each in batches
    )
    declared = objective(capsule)
    ids = _among("input_ids", keys) or any("input_ids" in each.arrays for each in batches)
    if made_from or computed or not ids or (declared is not None and declared not in NEXT_TOKEN):
        return None
    return Finding(
        severity=None if declared in NEXT_TOKEN else "info",
        confidence="likely" if declared in NEXT_TOKEN else "undetermined",
        title="The batch has no labels",
        summary=f"The batch of step {first.step} holds no labels, and no loss is on record: "
        + ("next-token training needs them." if declared in NEXT_TOKEN else "the loop must make them itself."),
        where=Where(step=first.step, rank=first.rank, tensor="labels"),
        evidence=(
            Evidence(name="labels", value="absent", expected="present", note="keys: " + (", ".join(keys[:12]) or "?")),
        ),
        cause="the collator makes no labels",
        next=("look where the loss is computed, and what it is given as target",),
        fix=("let the collator copy input_ids into labels, ignored at padding and prompt",),
    )


def _no_mask(capsule: Capsule) -> Iterator[Finding]:
    """Padding in rows that come without a mask."""
    worst: tuple[Rows, bool, int] | None = None
    both_ways = objective(capsule) in BIDIRECTIONAL
    for rows in rows_of(capsule):
        batch = rows.batch
        if batch.attention_mask is not None or rows.special.pad_says_nothing or rows.packed:
            continue
        if _among("attention_mask", batch.keys or []):
            continue
        leading, trailing = rows.runs
        left, right = int((leading & ~trailing).sum()), int((trailing & ~leading).sum())
        inside = int(((rows.ids == rows.special.pad) & rows.real).sum())
        if left + right < 4 * inside:
            continue  # the id is a token in its own right
        ignored = rows.asked is None or not bool((rows.asked & trailing).any())
        if left >= 2 or right >= 2:
            harmful = left >= 2 or both_ways
            if not harmful and ignored and (rows.asked is not None or rows.same("loss_mask") is not None):
                continue  # causal attention never looks to the right, and the loss leaves it out
            if worst is None or harmful > worst[1]:
                worst = (rows, harmful, left + right)
    if worst is None:
        return
    rows, harmful, count = worst
    yield Finding(
        severity=None if harmful else "info",
        title="Padded rows come without an attention mask",
        summary=f"The batch of step {rows.batch.step} holds {count} padding tokens and no attention_mask: "
        + ("real tokens attend to them." if harmful else "only causal attention keeps them from being seen."),
        where=Where(step=rows.batch.step, rank=rows.batch.rank, tensor="attention_mask"),
        evidence=(
            Evidence(name="padding tokens", value=count, expected=0, unit="tokens", note=f"id {rows.special.pad}"),
            Evidence(name="attention_mask", value="absent", expected="present"),
        ),
        cause="the collator pads and makes no mask",
        next=("check whether the model makes a mask from the padding id itself",),
        fix=("return attention_mask from the collator",),
    )


@rule(
    "data/nonfinite-input",
    stage="data",
    needs=("stats.input|tensors.media/*|batches",),
    cases=("nan-at-first-step",),
)
def nonfinite_input(capsule: Capsule) -> Iterator[Finding]:
    """An input of the model holds NaN or Inf.

    What it checks:
        Statistics of input tensors, captured pixels and features, and floating-point fields of the captured batches.

    Why it matters:
        Everything that is computed from such an input is lost, and the first layer that shows it is innocent.

    How it decides:
        One NaN is enough; one Inf, too, where the tensor is no mask. The first by step and execution order is named.

    Looks like it but is not:
        −Inf in an additive attention mask or in log-probabilities; inputs of a layer inside the model, which carry on
        what an earlier layer made (numerics/first-nonfinite names that one).

    What to try next:
        Find the sample by its row; load it alone and look at it before and after preprocessing.

    Fix:
        Drop or repair it; check for division by a zero deviation, for logarithms of silence, for damaged files.
    """
    found = [each for each in (_in_stats(capsule), _in_batches(capsule), _in_media(capsule)) if each is not None]
    if not found:
        return
    step, order, rank, name, counts, row = min(found, key=lambda each: (each[0], each[1]))
    words = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    yield Finding(
        confidence="confirmed",
        title="An input is not finite",
        summary=f"{name} holds {words} in step {step}"
        + (f", first in {row}" if row else "")
        + ": it came so from the data.",
        where=Where(step=step, rank=rank, tensor=name, sample=row, order=order),
        evidence=tuple(
            Evidence(name=kind, value=count, expected=0, unit="elements", note=name)
            for kind, count in counts.items()
            if count
        ),
        cause="a sample, or its preprocessing, is broken",
        next=("load the sample alone and look at it before and after preprocessing",),
        fix=("drop or repair the sample", "guard divisions and logarithms in preprocessing"),
    )


_Place = tuple[int, int, int | None, str, dict[str, int], str | None]


def _in_stats(capsule: Capsule) -> _Place | None:
    if not capsule.has("stats.input"):
        return None
    stats = capsule.stats(role="input")
    for at in range(len(stats)):
        name = str(stats.name[at])
        infinite = 0 if _MASKS.search(name) else max(0, int(stats.posinf[at])) + max(0, int(stats.neginf[at]))
        counts = {"NaN": max(0, int(stats.nan[at])), "Inf": infinite}
        if any(counts.values()):
            return int(stats.step[at]), int(stats.order[at]), int(stats.rank[at]), name, counts, None
    return None


def _in_batches(capsule: Capsule) -> _Place | None:
    from ...capsules.batches import BATCH_ARRAYS

    for batch in capsule.batches():
        for name, info in batch.arrays.items():
            if name in BATCH_ARRAYS or name in _OUTPUTS or "float" not in info.dtype or _MASKS.search(name):
                continue
            counts, row = _count(batch.array(name))
            if any(counts.values()):
                names = batch.sample_ids or ()
                sample = None if row is None else str(names[row]) if row < len(names) else f"row {row}"
                return batch.step, -1, batch.rank, name, counts, sample
    return None


def _in_media(capsule: Capsule) -> _Place | None:
    for pattern in ("media/pixels*", "media/patches*"):
        for tensor in capsule.tensors(pattern):
            try:
                counts, _ = _count(tensor.array())
            except Exception:  # what cannot be read is damage, and said elsewhere
                continue
            if any(counts.values()):
                return tensor.step, tensor.order or 0, tensor.rank, tensor.name, counts, None
    return None


def _count(array: Any) -> tuple[dict[str, int], int | None]:
    """Counts of NaN and Inf, and the first row that has one."""
    if array is None or np.asarray(array).dtype.kind != "f":
        return {}, None
    values = np.asarray(array)
    bad = ~np.isfinite(values)
    if not bad.any():
        return {}, None
    nan = int(np.isnan(values).sum())
    row = int(np.argwhere(bad)[0][0]) if values.ndim > 1 else None
    return {"NaN": nan, "Inf": int(bad.sum()) - nan}, row
