"""One random incident: micro-batches with logits, and the loss that a torch job with one fault would have printed.

Every loss here is computed with ``torch.nn.functional`` in the job's dtype and the way a training script would write
it. Nothing of the package is used, so agreement with its FP64 reference means something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


@dataclass(frozen=True)
class Micro:
    """One micro-batch as the job holds it, labels unshifted."""

    logits: Tensor  # [B, T, V] in the dtype of the model's output
    ids: Tensor  # [B, T]
    labels: Tensor  # [B, T], IGNORE on prompt and padding
    mask: Tensor  # [B, T]


@dataclass(frozen=True)
class Step:
    micros: list[Micro]
    configured: int


@dataclass(frozen=True)
class Incident:
    """``truth``: the fault of the catalogue, "healthy", or a name starting with "unknown:"."""

    truth: str
    steps: list[Step]
    reported: list[float]
    decimals: int | None
    logits_dtype: str
    loss_dtype: str


@dataclass(frozen=True)
class Mode:
    """How the job computes and prints."""

    name: str
    logits: torch.dtype = torch.float32
    loss: torch.dtype = torch.float32
    decimals: int | None = None
    steps: int = 1


def make_step(generator: torch.Generator, mode: Mode, shape: dict[str, int]) -> Step:
    micros = [make_micro(generator, mode.logits, shape) for _ in range(shape["micros"])]
    return Step(micros, shape["configured"])


def make_micro(generator: torch.Generator, dtype: torch.dtype, shape: dict[str, int]) -> Micro:
    """Rows of prompt, response and right padding; logits that favour the next token a little, as a model's do."""
    batch, length, vocabulary = shape["batch"], shape["length"], shape["vocabulary"]

    def below(high: int, size: tuple[int, ...] = ()) -> Tensor:
        return torch.randint(0, max(high, 1), size, generator=generator)

    ids = 1 + below(vocabulary - 1, (batch, length))
    labels, mask = ids.clone(), torch.ones_like(ids)
    for row in range(batch):
        prompt, padding = int(below(length // 3 + 1)), int(below(length // 3 + 1))
        labels[row, :prompt] = IGNORE
        if padding:
            ids[row, -padding:] = 0
            labels[row, -padding:] = IGNORE
            mask[row, -padding:] = 0
    spread = 0.5 + 3 * float(torch.rand((), generator=generator))
    logits = spread * torch.randn(batch, length, vocabulary, generator=generator)
    lean = 2 * float(torch.rand((), generator=generator))
    following = torch.roll(ids, -1, dims=1)
    logits.scatter_add_(2, following[..., None], torch.full((batch, length, 1), lean))
    return Micro(logits.to(dtype), ids, labels, mask)


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "mean", **options: float) -> Tensor:
    vocabulary = logits.shape[-1]
    return F.cross_entropy(
        logits.reshape(-1, vocabulary), labels.reshape(-1), ignore_index=IGNORE, reduction=reduction, **options
    )


def next_token(micro: Micro, labels: Tensor | None = None, reduction: str = "mean") -> Tensor:
    """The usual loss: logits at t against the label at t + 1."""
    labels = micro.labels if labels is None else labels
    return cross_entropy(micro.logits[:, :-1], labels[:, 1:], reduction)


def count(micro: Micro) -> Tensor:
    return (micro.labels[:, 1:] != IGNORE).sum()


def token_mean(micros: list[Micro], loss_sum: Callable[[Micro], Tensor], counted: Callable[[Micro], Tensor]) -> Tensor:
    return sum(loss_sum(each) for each in micros) / sum(counted(each) for each in micros)


def over_labels(make: Callable[[Micro], Tensor]) -> Callable[[Step], Tensor]:
    """Token mean of the window with labels rebuilt by ``make``."""
    return lambda step: token_mean(
        step.micros, lambda m: next_token(m, make(m), "sum"), lambda m: (make(m)[:, 1:] != IGNORE).sum()
    )


def over_pairs(pairs: Callable[[Micro], tuple[Tensor, Tensor]]) -> Callable[[Step], Tensor]:
    """Token mean of the window over (logits, labels) pairs."""

    def loss(step: Step) -> Tensor:
        made = [pairs(each) for each in step.micros]
        total = sum(cross_entropy(logits, labels, "sum") for logits, labels in made)
        return total / sum((labels != IGNORE).sum() for _, labels in made)

    return loss


def flat_logits(micro: Micro) -> Tensor:
    return micro.logits.reshape(-1, micro.logits.shape[-1])


def into_next_row(micro: Micro) -> tuple[Tensor, Tensor]:
    """Each row's last scored position takes the first token of the next row."""
    following = torch.cat([micro.labels[1:, :1], torch.full((1, 1), IGNORE)])
    return micro.logits[:, :-1], torch.cat([micro.labels[:, 2:], following], dim=1)


def cut_rows(micro: Micro) -> tuple[Tensor, Tensor]:
    """A model that cuts and flattens, and a loss function that shifts the flat labels again."""
    vocabulary = micro.logits.shape[-1]
    labels = F.pad(micro.labels[:, 1:].reshape(-1), (0, 1), value=IGNORE)[1:]
    return micro.logits[:, :-1].reshape(-1, vocabulary), labels


def sequence_mean(step: Step) -> Tensor:
    rows = [
        cross_entropy(micro.logits[row, :-1], micro.labels[row, 1:])
        for micro in step.micros
        for row in range(len(micro.ids))
        if (micro.labels[row, 1:] != IGNORE).any()
    ]
    return torch.stack(rows).mean()


HEALTHY: Callable[[Step], Tensor] = over_labels(lambda m: m.labels)

#: The catalogue's faults as a training script would commit them.
FAULTS: dict[str, Callable[[Step], Tensor]] = {
    "labels-not-shifted": over_pairs(lambda m: (m.logits, m.labels)),
    "labels-shifted-twice": over_pairs(lambda m: (m.logits[:, :-2], m.labels[:, 2:])),
    "labels-shifted-twice-flattened": over_pairs(lambda m: (flat_logits(m)[:-2], m.labels.reshape(-1)[2:])),
    "labels-shifted-twice-into-next-row": over_pairs(into_next_row),
    "labels-shifted-twice-cut-rows": over_pairs(cut_rows),
    "pad-in-loss": over_labels(lambda m: torch.where(m.mask == 0, m.ids, m.labels)),
    "prompt-in-loss": over_labels(lambda m: torch.where(m.mask == 1, m.ids, m.labels)),
    "ignored-positions-scored": over_labels(lambda m: m.ids),
    "ignored-in-denominator": lambda step: token_mean(
        step.micros, lambda m: next_token(m, reduction="sum"), lambda m: torch.tensor(m.ids[:, 1:].numel())
    ),
    "ignored-in-denominator-full-rows": lambda step: token_mean(
        step.micros, lambda m: next_token(m, reduction="sum"), lambda m: torch.tensor(m.ids.numel())
    ),
    "attended-in-denominator": lambda step: token_mean(
        step.micros, lambda m: next_token(m, reduction="sum"), lambda m: m.mask[:, 1:].sum()
    ),
    "sequence-mean": sequence_mean,
    "sum": lambda step: sum(next_token(each, reduction="sum") for each in step.micros),  # type: ignore[return-value]
    "mean-of-micro-batch-means": lambda step: torch.stack([next_token(each) for each in step.micros]).mean(),
    "accumulation-not-divided": lambda step: torch.stack([next_token(each) for each in step.micros]).sum(),
    "configured-window": lambda step: torch.stack([next_token(each) / step.configured for each in step.micros]).sum(),
    "times-accumulation": lambda step: HEALTHY(step) * len(step.micros),
}


def smoothed(step: Step) -> Tensor:
    total = sum(cross_entropy(m.logits[:, :-1], m.labels[:, 1:], "sum", label_smoothing=0.1) for m in step.micros)
    return total / sum(count(m) for m in step.micros)


def with_z_loss(step: Step) -> Tensor:
    z = torch.stack([(m.logits[:, :-1].logsumexp(-1) ** 2).mean() for m in step.micros]).mean()
    return HEALTHY(step) + 1e-3 * z


def focal(step: Step) -> Tensor:
    def one(m: Micro) -> Tensor:
        loss = cross_entropy(m.logits[:, :-1], m.labels[:, 1:], "none")
        return ((1 - torch.exp(-loss)) ** 2 * loss).sum()

    return token_mean(step.micros, one, count)


def class_weighted(step: Step) -> Tensor:
    total, weight_sum = torch.zeros(()), torch.zeros(())
    for m in step.micros:
        vocabulary = m.logits.shape[-1]
        weight = torch.linspace(0.5, 1.5, vocabulary, dtype=m.logits.dtype)
        labels = m.labels[:, 1:].reshape(-1)
        logits = m.logits[:, :-1].reshape(-1, vocabulary)
        total = total + F.cross_entropy(logits, labels, weight=weight, ignore_index=IGNORE, reduction="sum")
        weight_sum = weight_sum + weight[labels[labels != IGNORE]].sum()
    return total / weight_sum


def transformed(change: Callable[[Tensor], Tensor]) -> Callable[[Step], Tensor]:
    """The logits are changed after they were captured."""
    return over_pairs(lambda m: (change(m.logits)[:, :-1], m.labels[:, 1:]))


def dropped_positions(step: Step) -> Tensor:
    generator = torch.Generator().manual_seed(int(step.micros[0].ids.sum()))

    def labels(m: Micro) -> Tensor:
        drop = torch.rand(m.labels.shape, generator=generator) < 0.2
        return torch.where(drop, torch.full_like(m.labels, IGNORE), m.labels)

    made = [labels(m) for m in step.micros]
    total = sum(next_token(m, each, "sum") for m, each in zip(step.micros, made, strict=True))
    return total / sum((each[:, 1:] != IGNORE).sum() for each in made)


def hardest_half(step: Step) -> Tensor:
    losses = torch.cat([cross_entropy(m.logits[:, :-1], m.labels[:, 1:], "none") for m in step.micros])
    return losses.topk(max(1, len(losses) // 2)).values.mean()


def position_weighted(step: Step) -> Tensor:
    def one(m: Micro) -> Tensor:
        loss = cross_entropy(m.logits[:, :-1], m.labels[:, 1:], "none").reshape(len(m.ids), -1)
        return (loss * torch.linspace(0.5, 1.5, loss.shape[1], dtype=loss.dtype)).sum()

    return token_mean(step.micros, one, count)


def first_half(micro: Micro) -> tuple[Tensor, Tensor]:
    half = micro.ids.shape[1] // 2
    return micro.logits[:, :half], micro.labels[:, 1 : half + 1]


#: Causes outside the catalogue. The only right answer to them is undetermined.
UNKNOWN: dict[str, Callable[[Step], Tensor]] = {
    "label-smoothing": smoothed,
    "z-loss": with_z_loss,
    "focal-loss": focal,
    "class-weights": class_weighted,
    "soft-cap": transformed(lambda x: 5 * torch.tanh(x / 5)),
    "temperature": transformed(lambda x: x / 0.9),
    "auxiliary-term": lambda step: HEALTHY(step) + 0.02 * torch.stack([m.logits.std() for m in step.micros]).mean(),
    "dropped-positions": dropped_positions,
    "hardest-half": hardest_half,
    "position-weights": position_weighted,
    "shifted-three-times": over_pairs(lambda m: (m.logits[:, :-3], m.labels[:, 3:])),
    "shifted-backwards": over_pairs(lambda m: (m.logits[:, 1:], m.labels[:, :-1])),
    "labels-of-the-next-row": over_labels(lambda m: torch.roll(m.labels, 1, dims=0)),
    "bits-per-token": lambda step: HEALTHY(step) / 0.6931471805599453,
    "first-half-only": over_pairs(
        lambda m: (m.logits[:, : m.ids.shape[1] // 2], m.labels[:, 1 : m.ids.shape[1] // 2 + 1])
    ),
    "moving-average": lambda step: 0.9 * HEALTHY(step) + 0.1 * 2.9,
    "other-logits": over_pairs(lambda m: (torch.roll(m.logits, 2, dims=1)[:, :-1], m.labels[:, 1:])),
}


def make(seed: int, mode: Mode, truth: str) -> Incident:
    """A random incident with the given truth: "healthy", a name of ``FAULTS``, or "unknown:" and one of ``UNKNOWN``."""
    generator = torch.Generator().manual_seed(seed)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    micros = (
        between(2, 4) if "micro" in truth or "accumulation" in truth or truth == "configured-window" else between(1, 3)
    )
    shape = {
        "batch": between(2, 5),
        "length": between(10, 40),
        "vocabulary": between(13, 80),
        "micros": micros,
        "configured": micros + (between(1, 3) if truth == "configured-window" else 0),
    }
    loss = {"healthy": HEALTHY, **FAULTS, **{f"unknown:{name}": each for name, each in UNKNOWN.items()}}[truth]
    steps = [make_step(generator, mode, shape) for _ in range(mode.steps)]
    reported: list[float] = []
    for step in steps:
        cast = Step([Micro(m.logits.to(mode.loss), m.ids, m.labels, m.mask) for m in step.micros], step.configured)
        value = float(loss(cast).to(mode.loss))
        reported.append(value if mode.decimals is None else float(f"{value:.{mode.decimals}f}"))
    return Incident(truth, steps, reported, mode.decimals, str(mode.logits)[6:], str(mode.loss)[6:])
