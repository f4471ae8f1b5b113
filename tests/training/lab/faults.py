"""Honest runs in their many forms, and the faults: each an honest run with one thing changed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from . import data, loop
from .data import BOS, EOS, IGNORE, VOCABULARY, Batch, Sample
from .loop import Lab, Window
from .model import GPT, Block, LoraLinear, add_adapters

# -- the loss


def unshifted(logits: Tensor, batch: Batch, window: Window) -> Tensor:
    scores = logits.float().flatten(0, 1)
    return F.cross_entropy(scores, batch["labels"].flatten(), ignore_index=IGNORE)


def shifted_twice(logits: Tensor, batch: Batch, window: Window) -> Tensor:
    """The collator's labels already name the next token, and the loss shifts them again."""
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)
    scores = logits[:, :-1].float()
    return F.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)


def pads_counted(logits: Tensor, batch: Batch, window: Window) -> Tensor:
    scores, targets = logits[:, :-1].float(), batch["input_ids"][:, 1:]
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def prompt_counted(logits: Tensor, batch: Batch, window: Window) -> Tensor:
    targets = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORE)
    return loop.loss_sum(logits, targets) / loop.supervised(targets)


def summed(logits: Tensor, batch: Batch, window: Window) -> Tensor:
    return loop.loss_sum(logits, batch["labels"])


def mean_of_means(logits: Tensor, batch: Batch, window: Window) -> Tensor:
    return loop.loss_sum(logits, batch["labels"]) / loop.supervised(batch["labels"]) / window.micros


def undivided(logits: Tensor, batch: Batch, window: Window) -> Tensor:
    return loop.loss_sum(logits, batch["labels"]) / loop.supervised(batch["labels"])


def divided_by_configured(logits: Tensor, batch: Batch, window: Window) -> Tensor:
    return loop.loss_sum(logits, batch["labels"]) / loop.supervised(batch["labels"]) / window.configured


# -- the update


def clip_before_unscale(model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler, lab: Lab) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), lab.max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def step_in_any_case(model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler, lab: Lab) -> None:
    """Whatever overflowed is set to zero, and the step is taken."""
    scaler.unscale_(optimizer)
    for parameter in model.parameters():
        if parameter.grad is not None:
            torch.nan_to_num_(parameter.grad, nan=0.0, posinf=0.0, neginf=0.0)
    nn.utils.clip_grad_norm_(model.parameters(), lab.max_norm)
    optimizer.step()
    scaler.update()
    optimizer.zero_grad()


def keep_gradients(model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler, lab: Lab) -> None:
    """As it should be, but gradients are cleared to zeros instead of being taken away."""
    nn.utils.clip_grad_norm_(model.parameters(), lab.max_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


# -- model and optimizer


def l2_adam(model: nn.Module, lab: Lab) -> torch.optim.Optimizer:
    groups = loop.build_optimizer(model, lab).param_groups
    return torch.optim.Adam(
        [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups],
        lr=lab.rate, betas=(0.9, 0.95),
    )  # fmt: skip


def decay_by_name(model: nn.Module, lab: Lab) -> torch.optim.Optimizer:
    """Spares what is called as in another model, where the norms have other names."""
    spared = ("bias", "LayerNorm.weight")
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for name, p in named if not name.endswith(spared)],
            "weight_decay": lab.weight_decay,
        },
        {"params": [p for name, p in named if name.endswith(spared)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lab.rate, betas=(0.9, 0.95))


def freeze_embedding(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Freezes too late: the optimizer holds the embedding and its moments, and goes on moving it."""
    if step == 10:
        model.embedding.requires_grad_(False)


class MergedLoraLinear(LoraLinear):
    """Merges its update into the weights for speed, and adds it once more."""

    def forward(self, x: Tensor) -> Tensor:
        merged = self.base_layer.weight + self.scaling * self.lora_B.weight @ self.lora_A.weight
        return F.linear(x, merged, self.base_layer.bias) + self.scaling * self.lora_B(self.lora_A(x))


def twice_merged(lab: Lab) -> nn.Module:
    model = GPT()
    model.load_state_dict(loop.base_weights(lab))
    return add_adapters(model, MergedLoraLinear)


def resize_embedding(model: nn.Module, optimizer: torch.optim.Optimizer, lab: Lab) -> None:
    """The table gets room for another token after the optimizer was made."""
    model.embedding.weight = nn.Parameter(model.embedding.weight.detach().clone())


class DetachedBlock(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask).detach()
        return x + self.mlp(self.mlp_norm(x))


def detached(lab: Lab) -> nn.Module:
    return GPT(block=DetachedBlock)


# -- data


def role_misspelt(samples: Sequence[Sample], lab: Lab) -> Batch:
    """Learns from the turns of "assistant" where the data say "model": nothing is left."""
    batch = data.padded(samples)
    batch["labels"].fill_(IGNORE)
    return batch


def pad_is_eos(samples: Sequence[Sample], lab: Lab) -> Batch:
    batch = data.padded(samples)
    batch["input_ids"].masked_fill_(batch["attention_mask"] == 0, EOS)
    batch["labels"].masked_fill_(batch["input_ids"] == EOS, IGNORE)
    return batch


def double_bos(samples: Sequence[Sample], lab: Lab) -> Batch:
    """The template writes the sign of the beginning, and the tokenizer adds it again."""
    return data.padded([replace(sample, tokens=(BOS, *sample.tokens), prompt=sample.prompt + 1) for sample in samples])


def without_boundaries(samples: Sequence[Sample], lab: Lab) -> Batch:
    """Each token sees all before it in its row, whichever document they are of."""
    batch = data.packed_behind_mask(samples)
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"]).tril()
    return batch


class Everything(IterableDataset[Sample]):
    """Yields its samples without asking which worker it is in: each worker yields all of them."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)


def every_worker_everything(samples: Sequence[Sample], epoch: int, lab: Lab) -> Iterator[tuple[list[Sample], Batch]]:
    loader = DataLoader(Everything(samples), lab.batch, num_workers=2, collate_fn=loop.Collator(lab))
    return iter(loader)


def one_of_noise(lab: Lab) -> list[Sample]:
    """A sample of step 15 is random tokens."""
    samples = loop.make_samples(lab)
    draw = random.Random(lab.seed)
    samples[15 * lab.batch + 3] = Sample("noise", tuple(draw.randrange(80, VOCABULARY) for _ in range(30)))
    return samples


# -- resuming and evaluating


def weights_only(saved: dict[str, Any], model: nn.Module, optimizer: Any, schedule: Any, scaler: Any) -> None:
    model.load_state_dict(saved["model"])
    schedule.load_state_dict(saved["schedule"])
    scaler.load_state_dict(saved["scaler"])
    torch.random.set_rng_state(saved["random"])


@torch.no_grad()
def evaluate_while_training(model: nn.Module, batches: Sequence[Batch], lab: Lab) -> float:
    with loop.precision(lab):
        total = sum(float(loop.loss_sum(model(**loop.inputs_of(batch)), batch["labels"])) for batch in batches)
    return total / sum(loop.supervised(batch["labels"]) for batch in batches)


# -- the two tables

#: Honest runs: none may raise an alarm.
HONEST: dict[str, Lab] = {
    "padded documents": Lab(),
    "rows of one length": Lab(kind="text"),
    "answers to prompts": Lab(kind="chat"),
    "packed documents": Lab(kind="packed"),
    "packed documents behind a mask": Lab(kind="packed-mask"),
    "bf16 autocast": Lab(precision="bf16"),
    "fp16 with a scaler": Lab(precision="fp16"),
    "fp16 that looks for its scale": Lab(precision="fp16", init_scale=2.0**26),
    "accumulation of padded documents": Lab(steps=12, accumulation=2, batch=4),
    "accumulation of rows of one length": Lab(kind="text", steps=12, accumulation=2, batch=4, loss=mean_of_means),
    "a last window shorter than the others": Lab(
        kind="text", steps=8, accumulation=4, batch=2, remainder=1, loss=mean_of_means
    ),
    "evaluation between steps": Lab(dropout=0.1, evaluate_every=5),
    "resumed": Lab(resume=10),
    "several epochs": Lab(steps=7, epochs=3),
    "several epochs in one order": Lab(steps=7, epochs=3, shuffled=False),
    "two workers": Lab(steps=12, workers=2),
    "a constant rate": Lab(schedule=False, rate=1e-3),
    "tied embeddings": Lab(tied=True),
    "continued on more documents": Lab(pretrained=True, rate=1e-3, shuffled=False),
    "fine-tuning with float32 masters": Lab(kind="chat", pretrained=True, precision="bf16-master", rate=1e-5),
    "adapters": Lab(kind="chat", pretrained=True, adapters=True),
    "gradients cleared to zeros": Lab(update=keep_gradients),
    "nothing declared": Lab(declared=False),
    "nothing declared, prompts and accumulation": Lab(declared=False, kind="chat", steps=12, accumulation=2, batch=4),
    "nothing declared, packed": Lab(declared=False, kind="packed", precision="bf16"),
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong with a run, and what a report on it must say.

    Attributes:
        rule: of the first divergence.
        honest: name of the same run without the fault.
        lab: the faulty run.
        step: where the divergence begins.
        confidence: of the finding.
    """

    rule: str
    honest: str
    lab: Lab
    step: int
    confidence: Literal["confirmed", "likely"]


def _fault(rule: str, honest: str, confidence: Any = "confirmed", step: int = 0, **changed: Any) -> Fault:
    return Fault(rule=rule, honest=honest, lab=replace(HONEST[honest], **changed), step=step, confidence=confidence)


#: One thing changed in an honest run, and what the report must say first.
FAULTS: dict[str, Fault] = {
    "labels unshifted": _fault("objective/labels-not-shifted", "padded documents", loss=unshifted),
    "labels shifted twice": _fault("objective/labels-shifted-twice", "padded documents", loss=shifted_twice),
    "pads counted": _fault("objective/pad-in-loss", "padded documents", loss=pads_counted),
    "prompt counted": _fault("objective/prompt-in-loss", "answers to prompts", loss=prompt_counted),
    "sum for mean": _fault("objective/reduction", "padded documents", loss=summed),
    "mean of micro-batch means": _fault("objective/reduction", "accumulation of padded documents", loss=mean_of_means),
    "missing 1/accumulation": _fault("objective/reduction", "accumulation of rows of one length", loss=undivided),
    "short last window": _fault(
        "objective/reduction", "a last window shorter than the others", loss=divided_by_configured
    ),
    "clip before unscale": _fault("optimizer/order", "fp16 with a scaler", update=clip_before_unscale),
    "stepped on overflow": _fault(
        "optimizer/overflow-step-applied", "fp16 that looks for its scale", update=step_in_any_case
    ),
    "L2 for decoupled": _fault("optimizer/step-mismatch", "padded documents", build_optimizer=l2_adam),
    "decay on norms": _fault("optimizer/decay-on-norm-or-bias", "padded documents", build_optimizer=decay_by_name),
    "bf16 without master weights": _fault(
        "optimizer/no-master-weights", "fine-tuning with float32 masters", precision="bf16-pure"
    ),
    "frozen layer trained": _fault(
        "optimizer/frozen-not-frozen", "gradients cleared to zeros", step=10, before_step=freeze_embedding
    ),
    "adapter merged twice": _fault("optimizer/adapter-merged-twice", "adapters", step=10, build_model=twice_merged),
    "optimizer on stale parameters": _fault("optimizer/not-owned", "padded documents", after_build=resize_embedding),
    "a detached branch": _fault("optimizer/gradient-chain-cut", "padded documents", "likely", build_model=detached),
    "optimizer state lost at a resume": _fault(
        "optimizer/state-not-restored", "resumed", step=10, restore=weights_only
    ),
    "dropout in evaluation": _fault(
        "numerics/eval-mode", "evaluation between steps", "likely", step=4, evaluate=evaluate_while_training
    ),
    "all labels masked": _fault("objective/all-masked", "answers to prompts", collate=role_misspelt),
    "pad = eos": _fault("data/pad-is-eos", "padded documents", collate=pad_is_eos, told={"tokenizer": {"pad_id": EOS}}),
    "double BOS": _fault("data/bos-count", "answers to prompts", collate=double_bos),
    "packed without boundaries": _fault(
        "data/packing-contamination", "packed documents behind a mask", collate=without_boundaries
    ),
    "duplicated batches": _fault("data/duplicate-batch", "two workers", step=1, epoch_of=every_worker_everything),
    "poison sample": _fault(
        "data/poison-sample", "continued on more documents", "likely", step=15, make_samples=one_of_noise
    ),
    "learning rate × 30": _fault("numerics/learning-rate", "padded documents", "likely", rate=0.3),
}
