"""Other forms of the same faults, and honest runs of odd kinds; run by ``python -m benchmarks training``."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from . import data, faults, loop
from .data import EOS, IGNORE, Batch, Sample
from .faults import HONEST, Fault
from .loop import Lab, Window
from .model import GPT, Block

# -- data


def shifted_labels(samples: Sequence[Sample], lab: Lab) -> Batch:
    """Labels that name the next token."""
    batch = data.padded(samples)
    batch["labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)
    return batch


def labels_of_everything(samples: Sequence[Sample], lab: Lab) -> Batch:
    batch = data.padded(samples)
    batch["labels"] = batch["input_ids"].clone()
    return batch


def left_padded(samples: Sequence[Sample], lab: Lab) -> Batch:
    batch = data.padded(samples)
    for row, sample in enumerate(samples):
        missing = batch["input_ids"].shape[1] - len(sample.tokens)
        for values in batch.values():
            values[row] = values[row].roll(missing)
    return batch


def padded_with_eos(samples: Sequence[Sample], lab: Lab) -> Batch:
    """Padding is the end of text, and labels are masked by the attention mask: each row keeps one end to learn."""
    batch = data.padded(samples)
    batch["input_ids"].masked_fill_(batch["attention_mask"] == 0, EOS)
    return batch


def without_bos(samples: Sequence[Sample], lab: Lab) -> Batch:
    return data.padded([replace(each, tokens=each.tokens[1:], prompt=each.prompt - 1) for each in samples])


def first_half_again(samples: Sequence[Sample], epoch: int, lab: Lab) -> Iterator[tuple[list[Sample], Batch]]:
    """The loader was made anew in mid-epoch and begins at the beginning."""
    half = samples[: len(samples) // 2]
    pieces = [list(half[at : at + lab.batch]) for at in range(0, len(half) - lab.batch + 1, lab.batch)]
    return iter([(piece, lab.collate(piece, lab)) for piece in pieces * 2])


# -- losses


def own_mean(logits: Tensor, batch: Batch, window: Window) -> Tensor:
    return loop.loss_sum(logits, batch["labels"]) / loop.supervised(batch["labels"])


def mean_at_labels(logits: Tensor, batch: Batch, window: Window) -> Tensor:
    """For labels that name the next token."""
    return F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE)


def everything_scored(logits: Tensor, batch: Batch, window: Window) -> Tensor:
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def divided_by_all(logits: Tensor, batch: Batch, window: Window) -> Tensor:
    return loop.loss_sum(logits, batch["labels"]) / batch["labels"][:, 1:].numel()


def mean_of_sequences(logits: Tensor, batch: Batch, window: Window) -> Tensor:
    labels = batch["labels"][:, 1:]
    losses = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), labels, ignore_index=IGNORE, reduction="none")
    return (losses.sum(1) / (labels != IGNORE).sum(1)).mean()


# -- updates, models and optimizers


def clip_then_unscale(model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler, lab: Lab) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), lab.max_norm)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def step_past_the_scaler(model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler, lab: Lab) -> None:
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), lab.max_norm)
    optimizer.step()
    scaler.update()
    optimizer.zero_grad()


def unclipped(model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler, lab: Lab) -> None:
    scaler.step(optimizer)
    scaler.update()
    model.zero_grad()


class HandAdamW(torch.optim.Optimizer):
    """Adam written by hand, with decay in the weights or in the gradient."""

    def __init__(self, groups: Any, lr: float, *, decoupled: bool) -> None:
        self.decoupled = decoupled
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (beta1, beta2), rate, decay = group["betas"], group["lr"], group["weight_decay"]
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(parameter)}
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                if self.decoupled:
                    parameter.mul_(1 - rate * decay)
                else:
                    gradient = gradient + decay * parameter
                mean = state["exp_avg"].lerp_(gradient, 1 - beta1) / (1 - beta1 ** state["step"])
                square = state["exp_avg_sq"].lerp_(gradient.square(), 1 - beta2) / (1 - beta2 ** state["step"])
                parameter.sub_(rate * mean / (square.sqrt() + group["eps"]))


def by_hand(model: nn.Module, lab: Lab) -> torch.optim.Optimizer:
    return HandAdamW(loop.build_optimizer(model, lab).param_groups, lab.rate, decoupled=True)


def by_hand_l2(model: nn.Module, lab: Lab) -> torch.optim.Optimizer:
    return HandAdamW(loop.build_optimizer(model, lab).param_groups, lab.rate, decoupled=False)


def one_group(model: nn.Module, lab: Lab) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lab.rate, betas=(0.9, 0.95), weight_decay=lab.weight_decay)


class Copied(torch.optim.AdamW):
    """Float32 copies that the loop itself fills and writes back."""

    def __init__(self, weights: list[nn.Parameter], lr: float) -> None:
        self.weights = weights
        self.copies = [weight.detach().float().clone().requires_grad_() for weight in weights]
        super().__init__(self.copies, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)


def copied(model: nn.Module, lab: Lab) -> torch.optim.Optimizer:
    return Copied(list(model.parameters()), lab.rate)


def step_copies(model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler, lab: Lab) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), lab.max_norm)
    for weight, kept in zip(optimizer.weights, optimizer.copies, strict=True):
        kept.grad = weight.grad.float()
    optimizer.step()
    with torch.no_grad():
        for weight, kept in zip(optimizer.weights, optimizer.copies, strict=True):
            weight.copy_(kept)
    model.zero_grad()


def frozen_embedding(lab: Lab) -> nn.Module:
    model = GPT()
    model.embedding.requires_grad_(False)
    return model


def replaced(model: nn.Module, optimizer: torch.optim.Optimizer, lab: Lab) -> None:
    """Everything is made anew after the optimizer was made."""
    model.__dict__.update(copy.deepcopy(model).__dict__)


class GraphlessBlock(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad():
            x = x + self.attention(self.attention_norm(x), mask)
        return x + self.mlp(self.mlp_norm(x))


class CheckpointedBlock(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(super().forward, x, mask, use_reentrant=False)


# -- the two tables

_documents, _chat, _accumulated = (
    HONEST[name] for name in ("padded documents", "answers to prompts", "accumulation of padded documents")
)

#: Honest runs of odd kinds: none may raise an alarm.
ALSO_HONEST: dict[str, Lab] = {
    "labels shifted by the collator": replace(_documents, collate=shifted_labels, loss=mean_at_labels),
    "labels shifted by the collator, undeclared": replace(
        _documents, collate=shifted_labels, loss=mean_at_labels, declared=False
    ),
    "padded on the left": replace(_documents, collate=left_padded),
    "padded with the end of text": replace(_documents, collate=padded_with_eos, told={"tokenizer": {"pad_id": EOS}}),
    "fp16 without clipping": replace(HONEST["fp16 with a scaler"], update=unclipped),
    "fp16 resumed": Lab(precision="fp16", resume=10),
    "AdamW by hand": replace(_documents, build_optimizer=by_hand),
    "one group, decayed": replace(_documents, build_optimizer=one_group),
    "Adam with L2, undeclared": replace(_documents, build_optimizer=faults.l2_adam, declared=False),
    "float32 copies kept by the loop": Lab(precision="bf16-pure", build_optimizer=copied, update=step_copies),
    "bf16 weights at a high rate": Lab(precision="bf16-pure"),
    "a frozen embedding": replace(_documents, build_model=frozen_embedding),
    "checkpointing": replace(_documents, build_model=lambda lab: GPT(dropout=0.1, block=CheckpointedBlock)),
    "sequence means, undeclared": replace(_documents, loss=mean_of_sequences, declared=False),
    "means of micro-batches, undeclared": replace(_accumulated, loss=faults.mean_of_means, declared=False),
    "ten times over few documents": Lab(steps=4, epochs=10),
}


def _form(rule: str, lab: Lab, confidence: Any = "confirmed", step: int = 0, **changed: Any) -> Fault:
    return Fault(rule=rule, honest="", lab=replace(lab, **changed), step=step, confidence=confidence)


#: The faults of the matrix in other code.
OTHER_FORMS: dict[str, Fault] = {
    "two shifts, one in the collator": _form(
        "objective/labels-shifted-twice", _documents, collate=shifted_labels, loss=own_mean
    ),
    "labels of everything": _form("objective/pad-in-loss", _documents, collate=labels_of_everything, loss=own_mean),
    "prompt and padding scored": _form("objective/ignore-index-missing", _chat, loss=everything_scored),
    "divided by all positions": _form("objective/ignore-index-missing", _chat, loss=divided_by_all),
    "mean of sequence means": _form("objective/reduction", _documents, loss=mean_of_sequences),
    "sums accumulated": _form("objective/reduction", _accumulated, loss=faults.summed),
    "unequal means added": _form("objective/reduction", _accumulated, loss=faults.undivided),
    "clipped, then unscaled": _form("optimizer/order", HONEST["fp16 with a scaler"], update=clip_then_unscale),
    "stepped past the scaler": _form(
        "optimizer/overflow-step-applied", HONEST["fp16 that looks for its scale"], update=step_past_the_scaler
    ),
    "L2 by hand": _form("optimizer/step-mismatch", _documents, build_optimizer=by_hand_l2),
    "everything replaced": _form("optimizer/not-owned", _documents, after_build=replaced),
    "a branch without a graph": _form(
        "optimizer/gradient-chain-cut", _documents, "likely", build_model=lambda lab: GPT(block=GraphlessBlock)
    ),
    "no BOS": _form("data/bos-count", _chat, "likely", collate=without_bos),
    "half an epoch again": _form("data/duplicate-batch", _documents, step=10, epoch_of=first_half_again),
    "rate × 30 from the first step": _form("numerics/learning-rate", _documents, "likely", rate=0.3, schedule=False),
}
