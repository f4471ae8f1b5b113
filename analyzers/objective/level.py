"""The level of the loss against ln V, the loss of a model that knows nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import rule
from .thresholds import INITIAL_WITHIN, UNIFORM_SHARE, UNIFORM_STEPS, UNIFORM_WITHIN

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Steps at whose loss a model has hardly been trained.
FIRST_STEPS = (0, 1)


def log_vocabulary(capsule: Capsule) -> float | None:
    """Natural logarithm of the vocabulary size (the model's, else the tokenizer's), None where unknown."""
    for part in (capsule.manifest.model, capsule.manifest.tokenizer):
        size = part.vocab_size if part is not None else None
        if size is not None and size > 1:
            return math.log(size)
    return None


def first_loss(capsule: Capsule) -> tuple[int, float] | None:
    """(step, loss) of an untrained model: the first of the series, where the run starts at its beginning."""
    series = capsule.scalars("loss")
    if len(series) == 0 or int(series.step[0]) not in FIRST_STEPS or not np.isfinite(series.value[0]):
        return None
    return int(series.step[0]), float(series.value[0])


#: Objectives whose classes are no tokens.
NO_TOKENS = ("classification", "regression", "reward", "embedding")


def _is_random(capsule: Capsule) -> bool:
    model = capsule.manifest.model
    return model is not None and model.initialised == "random"


@rule(
    "objective/uniform-guess",
    stage="objective",
    severity="warning",
    needs=("scalars.loss", "manifest.model.vocab_size|manifest.tokenizer.vocab_size"),
    explained_by=(
        "objective/labels-shifted-twice",
        "objective/ignore-index-missing",
        "numerics/learning-rate",
    ),
    cases=("loss-stuck-at-ln-v",),
)
def uniform_guess(capsule: Capsule) -> Iterator[Finding]:
    """The loss stays at ln V: the model guesses among all tokens alike.

    What it checks:
        The last 80 % of a loss of at least 50 steps against ln V.
    Why it matters:
        Nothing is being learned: no gradient arrives, the learning rate is zero, or the targets have nothing to do
        with the inputs.
    How it decides:
        At least 95 % of the finite losses in the last 80 % of the run lie within 2 % of ln V (nats per token).
    Looks like it but is not:
        A run that starts at ln V and falls; random data on purpose; a loss near ln V of another vocabulary.
    What to try next:
        Overfit one batch; look at the gradient norms layer by layer; compare input and target of one row.
    Fix:
        Reconnect what is cut: a detached output, frozen parameters, a zero learning rate, labels of other samples.
    """
    nats, series = log_vocabulary(capsule), capsule.scalars("loss")
    if nats is None or len(series) < UNIFORM_STEPS:
        return
    start = len(series) - math.floor(UNIFORM_SHARE * len(series))
    tail = np.asarray(series.value)[start:]
    finite = tail[np.isfinite(tail)]
    if len(finite) < 0.5 * len(tail) or np.mean(np.abs(finite - nats) <= UNIFORM_WITHIN * nats) < 0.95:
        return
    level = float(np.median(finite))
    yield Finding(
        title="The loss stays at ln V",
        summary=(
            f"Over the last {len(tail)} of {len(series)} steps the loss stays at {level:.5g}, within 2 % of ln V = "
            f"{nats:.5g}: every token is as likely as any other."
        ),
        where=Where(step=int(series.step[start])),
        evidence=(
            Evidence(name="loss_median", value=level, expected=nats, unit="nats/token", note="last 80 % of the run"),
            Evidence(name="steps", value=len(series), expected=UNIFORM_STEPS, unit="steps", note="at least"),
        ),
        cause="the model's output does not depend on what it is trained on",
        next=("overfit one batch", "look at the gradient norm of each layer", "print input and target of one row"),
        fix=("reconnect the gradient, the learning rate, or the labels",),
    )


def _captured_loss(capsule: Capsule, step: int) -> float | None:
    """Mean next-token cross-entropy of the batches captured at ``step``, in nats; None where none was."""
    losses: list[np.ndarray[Any, Any]] = []
    for batch in capsule.batches(step=step):
        if batch.logsumexp is not None and batch.target_logits is not None:
            losses.append((np.asarray(batch.logsumexp) - np.asarray(batch.target_logits)[..., 1]).ravel())
        elif batch.token_loss is not None:
            losses.append(np.asarray(batch.token_loss).ravel())
    values = np.concatenate(losses) if losses else np.empty(0)
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


@rule(
    "objective/initial-loss",
    stage="objective",
    severity="warning",
    needs=("scalars.loss", "manifest.model.initialised", "manifest.model.vocab_size|manifest.tokenizer.vocab_size"),
    explained_by=(
        "objective/labels-not-shifted",
        "objective/labels-shifted-twice",
        "objective/pad-in-loss",
        "objective/ignore-index-missing",
        "objective/reduction",
    ),
)
def initial_loss(capsule: Capsule) -> Iterator[Finding]:
    """The first loss of a randomly initialised model is not ln V.

    What it checks:
        The loss of the first step of a model declared as randomly initialised.
    Why it matters:
        Untrained logits should be small and say nothing. A higher loss means logits that are too large (an embedding
        that is tied to the output and was not initialised for it); a lower one means that the answer leaks, that
        weights were loaded after all, or that positions that are easy are counted.
    How it decides:
        The first loss, at step 0 or 1, is more than 0.5 nats from ln V.
    Looks like it but is not:
        A classifier; a pretrained model, a run that continues a checkpoint, a loss that is declared to be a sum, or one
        that is reported in another way than per token while the captured logits give ln V.
    What to try next:
        Look at the standard deviation of the output logits (about 0.02 · √hidden is usual) and of the embedding.
    Fix:
        Initialise the output layer, or the tied embedding, with a standard deviation near 0.02; remove the leak.
    """
    first, nats = first_loss(capsule), log_vocabulary(capsule)
    training = capsule.manifest.training
    summed = training is not None and training.reduction == "sum"
    if first is None or nats is None or summed or not _is_random(capsule) or abs(first[1] - nats) <= INITIAL_WITHIN:
        return
    if training is not None and training.objective in NO_TOKENS:
        return
    step, loss = first
    computed = _captured_loss(capsule, step)
    if computed is not None and abs(computed - nats) <= INITIAL_WITHIN:
        return  # the logits are as they should be: it is the reported number that is made in another way
    too_high = loss > nats
    evidence = [Evidence(name="first_loss", value=loss, expected=nats, unit="nats/token", note=f"ln V, step {step}")]
    parameters = capsule.stats(role="parameter", step=step)
    for name, spread in zip(parameters.name, parameters.std, strict=True):
        if any(part in name for part in ("embed", "wte", "lm_head")) and np.isfinite(spread):
            evidence.append(Evidence(name="parameter_std", value=float(spread), expected=0.02, note=str(name)))
    yield Finding(
        title=f"The first loss is {abs(loss - nats):.2g} nats {'above' if too_high else 'below'} ln V",
        summary=(
            f"A randomly initialised model starts at {loss:.5g}; guessing among all tokens gives ln V = {nats:.5g}."
        ),
        where=Where(step=step),
        evidence=tuple(evidence[:6]),
        cause="the initial logits are too large" if too_high else "the target leaks, or easy positions count",
        next=("look at the standard deviation of logits and embedding at step 0",)
        if too_high
        else ("print input and target of one row", "check that no weights were loaded"),
        fix=("initialise the output layer or the tied embedding with a standard deviation near 0.02",)
        if too_high
        else ("remove the leak, or declare the model as pretrained",),
    )
