"""Whether held-out samples go through the same preprocessing as training samples, and always the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..finding import Evidence, Finding, Where
from ..registry import NotCaptured, rule
from ..scores import records
from . import thresholds as T

if TYPE_CHECKING:
    from ...capsules import Capsule
    from ...capsules.batches import Batch

#: Batches of a split that are read.
_MOST_BATCHES = 64
_HELD_OUT = re.compile(r"(?:^|[^a-z])(?:val|valid|validation|eval|evaluation|dev|test|all|both)(?:[^a-z]|$)")
_SPLIT_KEYS = ("split", "splits", "applies_to", "apply_to", "on", "phases", "stages")
#: Steps of a pipeline that do the same to a sample each time, unless "random" is in their name; and averages over
#: several views, which are meant.
_FIXED = re.compile(
    r"^(?:resiz|rescal|scal|center|centre|normali[sz]|standardi[sz]|to_?|pad|convert|decod|tokeni[sz]|truncat|collat|none"
    r"|identity|off|false|no(?:$|ne)|five_?crop|ten_?crop|tta|test_?time)"
)
#: Words for what is done at random, where a key may as well be a size.
_RANDOM = re.compile(
    r"aug|rand|flip|jitter|crop|mix|eras|noise|drop|rotat|blur|perturb|shuffl|mask|distort|warp|affine|swap|cutout"
)
_NAME_KEYS = ("name", "type", "kind", "transform", "op")


@rule(
    "numerics/eval-preprocessing",
    stage="numerics",
    severity="warning",
    needs=(
        "manifest.training.preprocessing_sha256|manifest.training.augmentation|records.evaluations|batches|records.samples",
    ),
    cases=("validation-jumps-training-fine", "boxes-shifted-after-resize"),
)
def eval_preprocessing(capsule: Capsule) -> Iterator[Finding]:
    """Evaluation data is prepared in another way than training data, or at random.

    What it checks:
        Digests of the deterministic part of preprocessing in training and in each evaluation; augmentation that is
        declared for validation; one validation sample that comes with other tokens or another image size the next
        time; the token that rows of each split open with.

    Why it matters:
        A model is measured on inputs of a kind that it was not trained on, or on another draw each time. The score is
        then about the preprocessing.

    How it decides:
        Two digests that differ are confirmed, and likely where a harness of its own prepared the evaluation. A sample
        is changed where its id comes back in an evaluation of the same name with at least half of its tokens equal and
        the rest not. Openings differ where nine tenths of at least 8 rows of one split begin with the text's beginning
        and at most a tenth of the other do.

    Looks like it but is not:
        Augmentation in training only; a resize, a center crop or a normalisation in validation, which are the same each
        time; masked-language models, whose masks are drawn anew; ids that are row numbers of different sets; several
        views averaged on purpose (ten crops).

    What to try next:
        Put one sample through both pipelines and compare the tensors; twice through the validation one.

    Fix:
        One function for the deterministic part, called in both places; augmentation behind a flag that is off in
        validation.
    """
    training = capsule.manifest.training
    own = training.preprocessing_sha256 if training is not None else None
    augmentation = training.augmentation if training is not None else None
    digests = [each for each in records(capsule) if each.get("preprocessing_sha256")]
    batches = [each for each in capsule.batches() if "input_ids" in each.arrays]
    held = [each for each in batches if each.split == "validation"][:_MOST_BATCHES]
    trained = [each for each in batches if each.split in (None, "train")][:_MOST_BATCHES]
    sizes = [
        each for each in capsule.records("samples") if each.get("split") == "validation" and each.get("image_size")
    ]
    if not (digests and (own or len(digests) > 1)) and augmentation is None and not held and not sizes:
        raise NotCaptured(
            "a digest of the preprocessing on both sides, declared augmentation, or captured validation rows"
        )
    yield from _other_digest(own, digests, bool(augmentation))
    if names := _random_in_validation(augmentation):
        yield _augmented(names)
    yield from _changed_sample(capsule, held)
    yield from _changed_size(sizes)
    yield from _other_opening(capsule, trained, held)


def _other_digest(own: str | None, digests: list[dict[str, Any]], augmented: bool) -> Iterator[Finding]:
    """Evaluations that went through another pipeline than training, or than one another."""
    groups: dict[Any, Counter[str]] = {}
    for each in digests:
        groups.setdefault((each.get("name"), each.get("suite")), Counter())[each["preprocessing_sha256"]] += 1
    for each in digests:
        found = each["preprocessing_sha256"]
        among = groups[each.get("name"), each.get("suite")]
        expected = own or (among.most_common(1)[0][0] if len(among) > 1 else found)
        if found == expected:
            continue
        foreign = bool(each.get("harness")) or own is None or augmented
        label = " ".join(str(word) for word in (each.get("suite"), each.get("name")) if word)
        yield Finding(
            confidence="likely" if foreign else "confirmed",
            title="Evaluation data is prepared in another way than training data"
            if own
            else "One evaluation is prepared in two ways",
            summary=f"The preprocessing of {label or 'an evaluation'} has the digest {found[:12]}, "
            + (f"that of training {expected[:12]}." if own else f"in other checkpoints it has {expected[:12]}."),
            where=Where(step=each.get("step")),
            evidence=(
                Evidence(
                    name="preprocessing of the evaluation",
                    value=found,
                    expected=expected,
                    note=label + (f", harness {each['harness']}" if each.get("harness") else ""),
                ),
                Evidence(
                    name="evaluations with another preprocessing",
                    value=sum(each["preprocessing_sha256"] != expected for each in digests),
                    expected=0,
                    note=f"of {len(digests)}",
                ),
            ),
            cause="the deterministic part of preprocessing is not one function for both",
            next=("put one sample through both pipelines and compare the tensors",),
            fix=("call one function for the deterministic part in both places",),
        )
        return


def _random_in_validation(value: Any, held_out: bool = False, depth: int = 0) -> list[str]:
    """Names of the random steps that a declaration gives to validation, in any of the usual shapes."""
    if depth > 6 or not value:
        return []
    if isinstance(value, dict):
        split = next((value[key] for key in _SPLIT_KEYS if value.get(key)), None)
        here = held_out or bool(_HELD_OUT.search(str(split).lower()) if split is not None else False)
        found: list[str] = []
        for key, each in value.items():
            name = str(key).lower()
            if key in _SPLIT_KEYS:
                continue
            if _HELD_OUT.search(name):
                found += ["augmentation"] if each is True else _random_in_validation(each, True, depth + 1)
            elif name in ("train", "training") or not each:
                continue
            elif here and _RANDOM.search(name):
                found += [str(key)] if not _is_fixed(name) and not _is_fixed(str(each).lower()) else []
            elif isinstance(each, dict | list) or name in _NAME_KEYS:
                found += _random_in_validation(each, here, depth + 1)
        return found
    if isinstance(value, list):
        return [name for each in value for name in _random_in_validation(each, held_out, depth + 1)]
    return [str(value)] if held_out and not _is_fixed(str(value).lower()) else []


def _is_fixed(name: str) -> bool:
    return "rand" not in name and bool(_FIXED.match(name))


def _augmented(names: list[str]) -> Finding:
    return Finding(
        title="Augmentation is active in validation",
        summary=f"The configuration augments validation samples: {', '.join(names[:6])}.",
        evidence=(Evidence(name="augmentation in validation", value=", ".join(names[:12]), expected="none"),),
        cause="the training pipeline, or its random part, is used for validation",
        next=("evaluate one checkpoint twice: two numbers show it",),
        fix=("keep random steps behind a flag that is off in validation",),
    )


def _changed_sample(capsule: Capsule, held: list[Batch]) -> Iterator[Finding]:
    """One validation sample, by its id, with other tokens the next time."""
    objective = capsule.manifest.training.objective if capsule.manifest.training is not None else None
    if "mlm" in (objective or "").lower() or "mask" in (objective or "").lower():
        return
    tokenizer = capsule.manifest.tokenizer
    pad = tokenizer.pad_id if tokenizer is not None else None
    first: dict[tuple[str, str], tuple[int, NDArray[Any]]] = {}
    changed: list[tuple[str, int, int, float]] = []
    same = 0
    for batch in held:
        ids, names = batch.input_ids, batch.sample_ids or ()
        if ids is None or np.ndim(ids) != 2:
            continue
        mask = batch.attention_mask
        for row, name in enumerate(names[: len(ids)]):
            kept = (
                np.asarray(mask)[row] > 0 if mask is not None and np.shape(mask) == np.shape(ids) else ids[row] != pad
            )
            tokens = np.asarray(ids)[row][kept]
            key = (str(batch.attributes.get("evaluation")), name)
            if key not in first:
                first[key] = (batch.step, tokens)
                continue
            step, before = first[key]
            shorter = min(len(before), len(tokens))
            if not shorter:
                continue
            share = float((before[:shorter] == tokens[:shorter]).sum()) / max(len(before), len(tokens))
            if share == 1.0:
                same += 1
            elif share >= T.SAME_SAMPLE and not (before[:shorter] == tokens[:shorter]).all():
                changed.append((name, step, batch.step, share))
    if not changed:
        return
    name, step, again, share = changed[0]
    yield Finding(
        title="Validation samples come out otherwise the next time",
        summary=f"Validation sample {name} of step {again} shares {share:.0%} of its tokens with the same sample of "
        f"step {step}; {len(changed)} samples changed so, {same} did not.",
        where=Where(step=again, sample=name),
        evidence=(
            Evidence(name="equal tokens", value=share, expected=1.0, note=f"{name}, steps {step} and {again}"),
            Evidence(name="samples that changed", value=len(changed), expected=0, note=f"of {len(changed) + same}"),
        ),
        cause="augmentation (token dropout, noise, a random order) is active in validation",
        next=("take one validation sample twice from the loader and compare",),
        fix=("keep random steps behind a flag that is off in validation",),
    )


def _changed_size(sizes: list[dict[str, Any]]) -> Iterator[Finding]:
    """One validation image with another size the next time."""
    first: dict[Any, Any] = {}
    changed: list[dict[str, Any]] = []
    for each in sizes:
        name = each.get("id")
        if name is not None and first.setdefault((name, each.get("source")), each["image_size"]) != each["image_size"]:
            changed.append(each)
    # Ids that are row numbers come back with every set.
    all_changed = len({(each.get("id"), each.get("source")) for each in changed}) == len(first)
    if not changed or (all_changed and all(str(name).isdigit() for name, _ in first)):
        return
    each = changed[0]
    before = first[each["id"], each.get("source")]
    yield Finding(
        title="Validation samples come out otherwise the next time",
        summary=f"Validation sample {each['id']} has the size {each['image_size']} and had {before} before.",
        where=Where(step=each.get("step"), sample=str(each["id"])),
        evidence=(Evidence(name="image size", value=str(each["image_size"]), expected=str(before), unit="pixels"),),
        cause="a random crop or resize is active in validation",
        next=("take one validation sample twice from the loader and compare",),
        fix=("replace the random crop by a center crop in validation",),
    )


def _other_opening(capsule: Capsule, trained: list[Batch], held: list[Batch]) -> Iterator[Finding]:
    """Rows of one split begin with the beginning of text, those of the other do not."""
    tokenizer = capsule.manifest.tokenizer
    bos = tokenizer.bos_id if tokenizer is not None else None
    if bos is None:
        return
    pad = tokenizer.pad_id if tokenizer is not None else None
    shares = [_opening_share(batches, bos, pad) for batches in (trained, held)]
    (in_training, rows), (in_validation, others) = shares
    if min(rows, others) < T.OPENING_ROWS:
        return
    high, low = max(in_training, in_validation), min(in_training, in_validation)
    if high < T.OPENING_ALL or low > 1 - T.OPENING_ALL:
        return
    yield Finding(
        title="Rows of training and of validation open differently",
        summary=f"{in_training:.0%} of {rows} training rows and {in_validation:.0%} of {others} validation rows begin "
        f"with the beginning of text (id {bos}).",
        where=Where(step=held[0].step),
        evidence=(
            Evidence(name="validation rows that begin with it", value=in_validation, expected=in_training),
            Evidence(name="rows compared", value=others, expected=T.OPENING_ROWS, note=f"training: {rows}"),
        ),
        cause="the two splits are tokenised by different code",
        next=("print one decoded row of each split with its special tokens",),
        fix=("call one function to tokenise both splits",),
    )


def _opening_share(batches: list[Batch], bos: int, pad: int | None) -> tuple[float, int]:
    """Share of rows whose first real token is ``bos``, and their number."""
    opened = rows = 0
    for batch in batches:
        ids = batch.input_ids
        if ids is None or np.ndim(ids) != 2:
            continue
        matrix = np.asarray(ids)
        real = np.ones(matrix.shape, np.bool_) if pad is None or pad == bos else matrix != pad
        some = real.any(axis=1)
        start = np.argmax(real, axis=1)
        opened += int((matrix[np.arange(len(matrix)), start] == bos)[some].sum())
        rows += int(some.sum())
    return (opened / rows if rows else 0.0), rows
