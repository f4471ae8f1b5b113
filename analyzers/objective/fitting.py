"""A training set that was learned by heart, and a single batch that was not."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..finding import Evidence, Finding, Severity, Where
from ..registry import NotJudged, rule
from ..series import Curve, curve
from .level import log_vocabulary
from .loss_batch import NEXT_TOKEN_OBJECTIVES
from .supervision import supervised_targets
from .thresholds import (
    ALIKE_OPENINGS,
    BY_HEART,
    DISTINCT,
    ENTROPY_WITHIN,
    FEW_SAMPLES,
    FLOOR,
    GENERALISES,
    MANY_EPOCHS,
    OVERFIT_STEPS,
    RECITES,
    STILL_FALLING,
)

if TYPE_CHECKING:
    from ...capsules import Capsule
    from ...capsules.batches import Batch

#: Tokens of an answer that make its opening, answers from which variety can be told, tokens of a sequence.
_OPENING, _ANSWERS, _GRAM = 5, 8, 4


def passes(capsule: Capsule) -> tuple[float | None, int | None]:
    """(passes over the data so far, samples in it), None where unknown; what was seen goes before what was planned."""
    training, position = capsule.manifest.training, capsule.manifest.position
    seen = [
        str(each["id"]) for each in capsule.records("samples") if each.get("id") and each.get("split") != "validation"
    ]
    logged = curve(capsule, "epoch").finite()
    known = [float(logged.value.max())] if len(logged) else []
    known += [position.epoch] if position is not None and position.epoch else []
    known += [len(seen) / len(set(seen))] if seen else []
    if not known and training is not None and training.epochs:
        known = [training.epochs]
    samples = training.dataset_samples if training is not None else None
    if samples is None and seen and len(seen) >= 2 * len(set(seen)):
        samples = len(set(seen))
    return max(known, default=None), samples


def variety(capsule: Capsule) -> tuple[float, float] | None:
    """(share of answers with the commonest opening, share of distinct four-token sequences); None for few answers."""
    answers = [_tokens(each) for each in capsule.records("generations")]
    answers = [each for each in answers if len(each) >= _OPENING]
    if len(answers) < _ANSWERS:
        return None
    openings = Counter(tuple(each[:_OPENING]) for each in answers)
    grams = [tuple(each[at : at + _GRAM]) for each in answers for at in range(len(each) - _GRAM + 1)]
    return openings.most_common(1)[0][1] / len(answers), len(set(grams)) / len(grams)


def _tokens(record: dict[str, Any]) -> Sequence[Any]:
    return record.get("output_ids") or str(record.get("output") or "").split()


@rule(
    "objective/memorised",
    stage="objective",
    severity="warning",
    needs=(
        "scalars.loss",
        "manifest.training.epochs|manifest.position.epoch|records.samples|manifest.training.dataset_samples",
    ),
    cases=("parrot-after-finetuning",),
)
def memorised(capsule: Capsule) -> Iterator[Finding]:
    """The training set was learned by heart.

    What it checks:
        The level of the training loss at the end, the number of samples and of passes over them, the evaluation loss,
        and the variety of generated answers where there are any.
    Why it matters:
        The model recites: every answer opens alike or is a training sample, and the training loss has never looked
        better.
    How it decides:
        The last tenth of the losses lies below 0.2 nats a token and a quarter of the first ones, after four passes or
        more over at most 10,000 samples. A warning below 0.1 nats, where the evaluation loss stays far above it, or
        where half of the answers open alike or fewer than 30 % of their four-token sequences are distinct; a remark
        otherwise.
    Looks like it but is not:
        An evaluation loss as low as the training loss (within twice and 0.2 nats): the task is easy. A run that
        overfits on purpose. A reinforcement or preference objective, whose loss is no nats a token.
    What to try next:
        Compare an answer with its nearest training sample; look at the evaluation loss where the training loss passed
        0.5.
    Fix:
        One to three passes, a lower learning rate, fewer duplicates, more data.
    """
    run, training = capsule.manifest.run, capsule.manifest.training
    objective = training.objective if training is not None else None
    loss = curve(capsule, "loss").finite()
    if (run is not None and run.overfit) or (objective is not None and objective not in NEXT_TOKEN_OBJECTIVES):
        return
    if len(loss) < 10:
        return
    end, start = float(np.median(loss.value[-max(5, len(loss) // 10) :])), float(np.median(loss.value[:5]))
    if end > RECITES or end > start / 4 or end < 0:
        return
    epochs, samples = passes(capsule)
    if epochs is None or samples is None:
        raise NotJudged("training.dataset_samples and the passes over them (training.epochs, or samples with ids)")
    if epochs < MANY_EPOCHS or samples > FEW_SAMPLES:
        return
    evaluation, spread = curve(capsule, "eval_loss").finite(), variety(capsule)
    held_out = float(evaluation.value[-1]) if len(evaluation) else None
    if held_out is not None and held_out <= GENERALISES * end + RECITES:
        return
    collapsed = spread is not None and (spread[0] >= ALIKE_OPENINGS or spread[1] < DISTINCT)
    varied = spread is not None and not collapsed
    severity: Severity = "warning" if collapsed or held_out is not None or (end <= BY_HEART and not varied) else "info"
    low = np.flatnonzero(loss.value > RECITES)
    step = int(loss.step[min(low[-1] + 1, len(loss) - 1)]) if len(low) else int(loss.step[0])
    evidence = [
        Evidence(
            name="loss", value=end, expected=RECITES, unit="nats/token", note="median of the last tenth, at least"
        ),
        Evidence(name="epochs", value=epochs, expected=MANY_EPOCHS, note="fewer than"),
        Evidence(name="samples", value=samples, expected=FEW_SAMPLES, unit="samples", note="more than"),
    ]
    if held_out is not None:
        limit = GENERALISES * end + RECITES
        evidence.append(Evidence(name="eval_loss", value=held_out, expected=limit, unit="nats/token", note="at most"))
    if spread is not None:
        evidence.append(Evidence(name="alike_openings", value=spread[0], expected=ALIKE_OPENINGS, note="less than"))
        evidence.append(Evidence(name="distinct_4", value=spread[1], expected=DISTINCT, note="at least"))
    yield Finding(
        title="The training set was learned by heart",
        summary=(
            f"The training loss ends at {end:.3g} nats a token after {epochs:.3g} passes over {samples:,} samples"
            + (f"; the evaluation loss is {held_out:.3g}." if held_out is not None else ".")
        ),
        severity=severity,
        confidence="likely",
        where=Where(step=step),
        evidence=tuple(evidence),
        cause="few samples were seen too often",
        next=("compare an answer with its nearest training sample", "evaluate on held-out samples"),
        fix=("one to three passes, a lower learning rate, fewer duplicates, more data",),
    )


def _is_one_batch(capsule: Capsule) -> tuple[bool, int]:
    """(whether the run trains on one batch, number of different batches seen where that is known, else 0)."""
    events = [
        each for each in capsule.records("events") if each.get("kind") == "step_begin" and each.get("batch_sha256")
    ]
    digests = {str(each["batch_sha256"]) for each in events}
    run = capsule.manifest.run
    if run is not None and run.overfit:
        return True, len(digests)
    return len(digests) == 1 and len(events) >= OVERFIT_STEPS, len(digests)


@rule(
    "objective/single-batch-floor",
    stage="objective",
    severity="warning",
    needs=("scalars.loss", "manifest.run.overfit|records.events.batch_sha256"),
    explained_by=(
        *("objective/labels-not-shifted", "objective/labels-shifted-twice", "objective/pad-in-loss"),
        *(
            "objective/ignore-index-missing",
            "objective/prompt-in-loss",
            "objective/reduction",
            "data/labels-misaligned",
        ),
        *(
            "optimizer/gradient-chain-cut",
            "optimizer/not-owned",
            "optimizer/frozen-not-frozen",
            "numerics/learning-rate",
        ),
        *("optimizer/no-master-weights", "objective/all-masked"),
    ),
    cases=("one-batch-not-overfitted",),
)
def single_batch_floor(capsule: Capsule) -> Iterator[Finding]:
    """A run on one batch does not reach zero.

    What it checks:
        The end of the loss of a run that trains on one batch on purpose (declared, or the same digest in every step).
    Why it matters:
        One batch leaves little to blame: whatever keeps the loss up will keep it up in the real run, too.
    How it decides:
        After 50 steps or more the last fifth of the losses lies above 0.05 nats a token and less than 10 % below the
        fifth before it. The suspects are looked at in this order: labels (same context, other answer: the entropy of
        what is captured), loss (its level against ln V), preprocessing (other digests: not one batch), gradient chain
        (parameters without a gradient), capacity (fewer parameters than targets). The first that explains the floor is
        named, likely; else it is undetermined, with what each of them said.
    Looks like it but is not:
        A run that is still falling; a run on one batch with dropout, which keeps a floor by design; label smoothing,
        whose floor is not 0.
    What to try next:
        Read the token with the largest remaining loss in its context.
    Fix:
        What the named suspect says. Not the learning rate: two rates that end at one value make it a property of data.
    """
    one, digests = _is_one_batch(capsule)
    loss = curve(capsule, "loss")
    if not one or len(loss) < OVERFIT_STEPS or not np.isfinite(loss.value[-len(loss) // 3 :]).all():
        return
    fifth = len(loss) // 5
    end, earlier = float(np.median(loss.value[-fifth:])), float(np.median(loss.value[-2 * fifth : -fifth]))
    if end <= FLOOR or earlier - end > STILL_FALLING * earlier:
        return
    rows, cause, fix = _suspects(capsule, loss, end, digests)
    yield Finding(
        title=f"One batch is not learned: the loss stays at {end:.3g}",
        summary=f"The run on one batch ends at {end:.4g} nats a token after {len(loss):,} steps and no longer falls.",
        confidence="undetermined" if cause is None else "likely",
        where=Where(step=int(loss.step[-2 * fifth])),
        evidence=(
            Evidence(
                name="loss", value=end, expected=FLOOR, unit="nats/token", note="median of the last fifth, at most"
            ),
            *rows,
        ),
        cause=cause,
        next=(
            "read the token with the largest remaining loss in its context",
            "check in this order: labels, loss, preprocessing, gradient chain, capacity",
            "run once with a rate ten times smaller: an equal floor is a property of the data",
        ),
        fix=(fix,),
    )


def _suspects(capsule: Capsule, loss: Curve, end: float, digests: int) -> tuple[list[Evidence], str | None, str]:
    """What each suspect says, in order, and the first that explains the floor."""
    named: list[tuple[str, str]] = []
    rows: list[Evidence] = []
    batches = [each for each in capsule.batches() if each.split in (None, "train")]
    entropy = contradiction(capsule, batches[-1]) if batches else None
    rows.append(
        Evidence(name="labels", value=entropy, expected=end, unit="nats/token", note="entropy of equal contexts")
    )
    if entropy is not None and abs(entropy - end) <= max(ENTROPY_WITHIN * end, FLOOR):
        named.append(
            ("equal contexts have different labels, and the floor is their entropy", "remove one of the answers")
        )
    nats = log_vocabulary(capsule)
    rows.append(
        Evidence(name="loss", value=end, expected=nats, unit="nats/token", note="ln V: nothing at all is learned")
    )
    rows.append(Evidence(name="preprocessing", value=digests or None, expected=1, note="different batches seen"))
    if digests > 1:
        named.append(("the batch is not the same in every step", "fix shuffling and augmentation for the test"))
    groups = [each for each in capsule.records("param_groups") if each.get("name")]
    latest = [each for each in groups if each.get("step") == max(int(g.get("step") or 0) for g in groups)]
    still = [
        str(each["name"]) for each in latest if each.get("has_grad") is False or each.get("requires_grad") is False
    ]
    norm = curve(capsule, "grad_norm").finite()
    note = f"of {len(latest)} parameters have no gradient" if latest else "gradients are not on record"
    rows.append(Evidence(name="gradient_chain", value=len(still) if latest else None, expected=0, note=note))
    if (latest and len(still) * 2 > len(latest)) or (len(norm) and float(np.median(norm.value[-10:])) == 0.0):
        named.append(
            ("most parameters receive no gradient", "reconnect the detached part, or unfreeze it for the test")
        )
    model = capsule.manifest.model
    size = model.parameters if model is not None else None
    known = [supervised_targets(capsule, each) for each in batches if each.step == batches[-1].step]
    tokens = sum(int(each[0].sum()) for each in known if each is not None) or None
    rows.append(Evidence(name="capacity", value=size, expected=tokens, unit="parameters", note="targets, at least"))
    if size is not None and tokens is not None and size < tokens:
        named.append(("the model has fewer parameters than targets", "take a larger model or fewer samples"))
    cause, fix = named[0] if named else (None, "none before the suspect is known")
    return rows, cause, fix


def contradiction(capsule: Capsule, batch: Batch) -> float | None:
    """Mean entropy of the targets that follow one and the same beginning of a row, in nats a supervised token.

    No model can go below it. None where the batch has no labels or token ids.
    """
    known, ids = supervised_targets(capsule, batch), batch.input_ids
    if known is None or ids is None or ids.shape != known[0].shape or not known[0].any():
        return None
    (asked, target), tokens = known, np.asarray(ids, np.int64)
    contexts: dict[int, Counter[int]] = defaultdict(Counter)
    for row in range(len(tokens)):
        state = 0
        for at in range(tokens.shape[1]):
            state = hash((state, int(tokens[row, at])))
            if asked[row, at]:
                contexts[state][int(target[row, at])] += 1
    total = 0.0
    for counts in contexts.values():
        number = np.array(list(counts.values()), np.float64)
        total -= float((number * np.log(number / number.sum())).sum())
    return total / int(asked.sum())
