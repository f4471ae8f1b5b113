"""One random incident: micro-batches with logits, and the loss that a torch job with one fault would have printed.

Every loss here is computed with ``torch.nn.functional`` in the job's dtype and the way a training script would write
it. Nothing of the package is used, so agreement with its FP64 reference means something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


@dataclass(frozen=True)
class Micro:
    """One micro-batch as the job holds it, labels unshifted."""

    logits: Tensor  # [B, T, V] in the dtype of the model's output
    ids: Tensor  # [B, T]
    labels: Tensor  # [B, T], IGNORE on prompt, tool results, first tokens of packed documents, and padding
    mask: Tensor  # [B, T]
    roles: Tensor | None = None  # [B, T]
    segments: Tensor | None = None  # [B, T]


@dataclass(frozen=True)
class Step:
    micros: list[Micro]
    configured: int
    others: list[Micro]  # of the second rank, where there is one


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
    stored: torch.dtype | None = None  # what the capture keeps, where that is narrower
    compact: bool = False  # log-sum-exp and three target logits instead of whole logits


PAD, USER, ASSISTANT, TOOL = 0, 2, 3, 4


def make_step(generator: torch.Generator, mode: Mode, shape: dict[str, int]) -> Step:
    micros = [make_micro(generator, mode.logits, shape) for _ in range(shape["micros"])]
    others = [make_micro(generator, mode.logits, shape) for _ in range(shape["micros"] * (shape["ranks"] - 1))]
    return Step(micros, shape["configured"], others)


def make_micro(generator: torch.Generator, dtype: torch.dtype, shape: dict[str, int]) -> Micro:
    """Rows of prompt, response and right padding; logits that favour the next token a little, as a model's do."""
    batch, length, vocabulary = shape["batch"], shape["length"], shape["vocabulary"]

    def below(high: int, size: tuple[int, ...] = ()) -> Tensor:
        return torch.randint(0, max(high, 1), size, generator=generator)

    ids = 1 + below(vocabulary - 1, (batch, length))
    labels, mask = ids.clone(), torch.ones_like(ids)
    roles = torch.full_like(ids, ASSISTANT) if shape["roles"] else None
    segments = torch.zeros_like(ids) if shape["packed"] else None
    for row in range(batch):
        prompt, padding = int(below(length // 3 + 1)) + (row == 0), int(below(length // 3 + 1))
        labels[row, :prompt] = IGNORE
        if roles is not None:
            tool = length // 3 + 1 + int(below(length // 4))
            labels[row, tool : tool + 1 + int(below(3))] = IGNORE
            roles[row] = torch.where(labels[row] == IGNORE, TOOL, ASSISTANT)
            roles[row, :prompt] = USER
            if padding:
                roles[row, -padding:] = PAD
        if segments is not None:
            for start in sorted({1 + int(below(length - 1)) for _ in range(1 + int(below(3)))}):
                segments[row, start:] += 1
                labels[row, start] = IGNORE
        if padding:
            ids[row, -padding:] = 0
            labels[row, -padding:] = IGNORE
            mask[row, -padding:] = 0
    spread = 0.5 + 3 * float(torch.rand((), generator=generator))
    logits = spread * torch.randn(batch, length, vocabulary, generator=generator)
    lean = 2 * float(torch.rand((), generator=generator))
    following = torch.roll(ids, -1, dims=1)
    logits.scatter_add_(2, following[..., None], torch.full((batch, length, 1), lean))
    return Micro(logits.to(dtype), ids, labels, mask, roles, segments)


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


def with_prompt(micro: Micro) -> Tensor:
    real = micro.mask == 1 if micro.roles is None else micro.roles == USER
    return torch.where(real, micro.ids, micro.labels)


def with_starts(micro: Micro) -> Tensor:
    assert micro.segments is not None
    start = torch.zeros_like(micro.mask, dtype=torch.bool)
    start[:, 1:] = (micro.segments[:, 1:] != micro.segments[:, :-1]) & (micro.mask[:, 1:] == 1)
    return torch.where(start, micro.ids, micro.labels)


HEALTHY: Callable[[Step], Tensor] = over_labels(lambda m: m.labels)

#: The catalogue's faults as a training script would commit them.
FAULTS: dict[str, Callable[[Step], Tensor]] = {
    "labels-not-shifted": over_pairs(lambda m: (m.logits, m.labels)),
    "labels-shifted-twice": over_pairs(lambda m: (m.logits[:, :-2], m.labels[:, 2:])),
    "labels-shifted-twice-flattened": over_pairs(lambda m: (flat_logits(m)[:-2], m.labels.reshape(-1)[2:])),
    "labels-shifted-twice-into-next-row": over_pairs(into_next_row),
    "labels-shifted-twice-cut-rows": over_pairs(cut_rows),
    "pad-in-loss": over_labels(lambda m: torch.where(m.mask == 0, m.ids, m.labels)),
    "prompt-in-loss": over_labels(lambda m: with_prompt(m)),
    "tool-in-loss": over_labels(lambda m: torch.where(m.roles == TOOL, m.ids, m.labels)),  # type: ignore[arg-type]
    "document-boundary-in-loss": over_labels(lambda m: with_starts(m)),
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
    "one-rank-denominator": lambda step: (
        sum(next_token(each, reduction="sum") for each in [*step.micros, *step.others])
        / sum(count(each) for each in step.micros)
    ),
    "times-world-size": lambda step: HEALTHY(step) * 2,
    "divided-by-world-size": lambda step: HEALTHY(step) / 2,
}

#: What labels ask for, how they are paired with logits, and how token losses are reduced: two slips at once are two of
#: these, written as scripts write them.
LABELS: dict[str, Callable[[Micro], Tensor]] = {
    "": lambda m: m.labels,
    "pad-in-loss": lambda m: torch.where(m.mask == 0, m.ids, m.labels),
    "prompt-in-loss": with_prompt,
    "ignored-positions-scored": lambda m: m.ids,
}
PAIRING: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "": lambda logits, labels: (logits[:, :-1], labels[:, 1:]),
    "labels-not-shifted": lambda logits, labels: (logits, labels),
    "labels-shifted-twice": lambda logits, labels: (logits[:, :-2], labels[:, 2:]),
}


def rows_of(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    rows = [(x, y) for logits, labels in pairs for x, y in zip(logits, labels, strict=True) if (y != IGNORE).any()]
    return torch.stack([cross_entropy(x, y) for x, y in rows]).mean()


def tokens_of(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    return sum((labels != IGNORE).sum() for _, labels in pairs)  # type: ignore[return-value]


def summed(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    return sum(cross_entropy(x, y, "sum") for x, y in pairs)  # type: ignore[return-value]


REDUCE: dict[str, Callable[[list[tuple[Tensor, Tensor]]], Tensor]] = {
    "": lambda pairs: summed(pairs) / tokens_of(pairs),
    "sum": summed,
    "sequence-mean": rows_of,
    "mean-of-micro-batch-means": lambda pairs: torch.stack([cross_entropy(x, y) for x, y in pairs]).mean(),
    "accumulation-not-divided": lambda pairs: torch.stack([cross_entropy(x, y) for x, y in pairs]).sum(),
    "ignored-in-denominator": lambda pairs: summed(pairs) / sum(labels.numel() for _, labels in pairs),
}


def composed(labels: str, pairing: str, reduce: str) -> Callable[[Step], Tensor]:
    return lambda step: REDUCE[reduce]([PAIRING[pairing](m.logits, LABELS[labels](m)) for m in step.micros])


#: Two faults at once, by their names joined with " + ".
PAIRS: dict[str, Callable[[Step], Tensor]] = {
    " + ".join(name for name in (labels, pairing, reduce) if name): composed(labels, pairing, reduce)
    for labels in LABELS
    for pairing in PAIRING
    for reduce in REDUCE
    if [labels, pairing, reduce].count("") == 1
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


def clipped(step: Step) -> Tensor:
    losses = torch.cat([cross_entropy(m.logits[:, :-1], m.labels[:, 1:], "none") for m in step.micros])
    return losses.clamp(max=3.0).sum() / sum(count(each) for each in step.micros)


def entropy_bonus(step: Step) -> Tensor:
    spread = torch.stack([torch.special.entr(m.logits.softmax(-1)).sum(-1).mean() for m in step.micros]).mean()
    return HEALTHY(step) - 0.01 * spread


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
    "perplexity": lambda step: torch.exp(HEALTHY(step)),
    "sum-over-rows": lambda step: (
        sum(next_token(each, reduction="sum") for each in step.micros) / sum(len(each.ids) for each in step.micros)
    ),
    "two-heads": lambda step: (HEALTHY(step) + FAULTS["labels-shifted-twice"](step)) / 2,
    "clipped": clipped,
    "entropy-bonus": entropy_bonus,
    "moving-average": lambda step: 0.9 * HEALTHY(step) + 0.1 * 2.9,
    "other-logits": over_pairs(lambda m: (torch.roll(m.logits, 2, dims=1)[:, :-1], m.labels[:, 1:])),
}


def make(seed: int, mode: Mode, truth: str) -> Incident:
    """A random incident with the given truth: "healthy", a name of ``FAULTS`` or ``PAIRS``, or "unknown:…"."""
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
        "ranks": 2 if "world" in truth or "rank" in truth else 1,
        "packed": int(truth.startswith("document") or (truth == "healthy" and between(0, 3) == 0)),
        "roles": int("tool" in truth),
    }
    if not shape["packed"] and truth in ("healthy", "prompt-in-loss", "pad-in-loss", "ignored-positions-scored"):
        shape["roles"] = int(between(0, 2) == 0)
    loss = {"healthy": HEALTHY, **FAULTS, **PAIRS, **{f"unknown:{name}": each for name, each in UNKNOWN.items()}}[truth]
    steps = [make_step(generator, mode, shape) for _ in range(mode.steps)]
    reported: list[float] = []
    for step in steps:
        micros, others = (
            [replace(each, logits=each.logits.to(mode.loss)) for each in several]
            for several in (step.micros, step.others)
        )
        cast = Step(micros, step.configured, others)
        value = float(loss(cast).to(mode.loss))
        reported.append(value if mode.decimals is None else float(f"{value:.{mode.decimals}f}"))
    return Incident(truth, steps, reported, mode.decimals, str(mode.logits)[6:], str(mode.loss)[6:])
