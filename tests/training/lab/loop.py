"""The training loop of the laboratory, and the settings that decide a run.

``Lab()`` is an honest run. Every part of the loop that a fault can sit in is a function among the settings, so a
faulty run is an honest one with one of them replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from llmconsole.capsules import Recorder
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from . import data
from .data import ASSISTANT, BOS, EOS, IGNORE, PAD, VOCABULARY, Batch, Sample
from .model import GPT, add_adapters


@dataclass(frozen=True)
class Window:
    """What a loss may want to know of the optimizer step it belongs to: supervised tokens and micro-batches."""

    tokens: int
    micros: int
    configured: int


def build_model(lab: Lab) -> nn.Module:
    """A model with random weights, or a pretrained one, with adapters or as a whole."""
    model = GPT(dropout=lab.dropout, tied=lab.tied)
    if lab.pretrained:
        model.load_state_dict(base_weights(lab))
    if lab.adapters:
        model = add_adapters(model)
    return model.bfloat16() if lab.precision in ("bf16-pure", "bf16-master") else model


_bases: dict[tuple[Any, ...], dict[str, Tensor]] = {}


def base_weights(lab: Lab) -> dict[str, Tensor]:
    """Weights after some steps on documents of the same language."""
    key = (lab.seed, lab.dropout, lab.tied)
    if key not in _bases:
        generator = torch.random.get_rng_state()
        torch.manual_seed(lab.seed)
        model = GPT(dropout=lab.dropout, tied=lab.tied)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _, samples in islice(data.batches(data.documents(160, lab.seed), 8, lab.seed), 40):
            batch = data.padded(samples)
            loss_sum(model(**inputs_of(batch)), batch["labels"]).div(supervised(batch["labels"])).backward()
            optimizer.step()
            optimizer.zero_grad()
        _bases[key] = model.state_dict()
        torch.random.set_rng_state(generator)
    return _bases[key]


def build_optimizer(model: nn.Module, lab: Lab) -> torch.optim.Optimizer:
    """AdamW that decays matrices and leaves biases and norms alone."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": lab.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    kind = MasterAdamW if lab.precision == "bf16-master" else torch.optim.AdamW
    return kind([group for group in groups if group["params"]], lr=lab.rate, betas=(0.9, 0.95))


class MasterAdamW(torch.optim.AdamW):
    """Steps float32 copies of low-precision weights, and writes the weights from them."""

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        self.weights = [weight for group in groups for weight in group["params"]]
        copies = [group | {"params": [p.detach().float() for p in group["params"]]} for group in groups]
        super().__init__(copies, **settings)
        self.masters = [master for group in self.param_groups for master in group["params"]]

    def step(self, closure: Any = None) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        super().step(closure)
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in self.weights:
            weight.grad = None


def warmup_cosine(lab: Lab) -> Callable[[int], float]:
    """Share of the peak rate at a step: up in a straight line, then down half a cosine to a tenth."""

    def share(step: int) -> float:
        progress = min(1.0, max(0, step - lab.warmup) / max(1, lab.total_steps - lab.warmup))
        return min(1.0, (step + 1) / (lab.warmup + 1)) * (0.55 + 0.45 * math.cos(math.pi * progress))

    return share if lab.schedule else lambda step: 1.0


def supervised(labels: Tensor) -> int:
    """Positions whose next token has a label."""
    return int((labels[:, 1:] != IGNORE).sum())


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Σ −log p of the next tokens that have a label; logits [B, T, V], labels [B, T]."""
    scores = logits[:, :-1].float()
    return F.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum")


def token_mean(logits: Tensor, batch: Batch, window: Window) -> Tensor:
    """This micro-batch's share of the mean over all supervised tokens of the window."""
    return loss_sum(logits, batch["labels"]) / window.tokens


def clip_and_step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, lab: Lab) -> None:
    """Unscale, clip, step unless a gradient overflowed, and clear the gradients."""
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), lab.max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[Batch], lab: Lab) -> float:
    """Mean loss of held-out text in evaluation mode."""
    model.eval()
    with precision(lab):
        total = sum(float(loss_sum(model(**inputs_of(batch)), batch["labels"])) for batch in batches)
    model.train()
    return total / sum(supervised(batch["labels"]) for batch in batches)


def restore(
    saved: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    scaler: torch.amp.GradScaler,
) -> None:
    """Put back everything that a checkpoint holds."""
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    scaler.load_state_dict(saved["scaler"])
    torch.random.set_rng_state(saved["random"])


def make_samples(lab: Lab) -> list[Sample]:
    """The training set, just long enough for the steps of an epoch."""
    count = lab.batch * (lab.accumulation * lab.steps + lab.remainder)
    if lab.kind == "text":
        return data.stream(count, lab.seed, lab.length)
    if lab.kind == "chat":
        return data.conversations(count, lab.seed)
    return data.documents(count, lab.seed)


def collate(samples: Sequence[Sample], lab: Lab) -> Batch:
    """A batch in the form that the kind of data asks for."""
    makers = {"text": data.whole, "packed": data.packed, "packed-mask": data.packed_behind_mask}
    return makers.get(lab.kind, data.padded)(samples)


def epoch_of(samples: Sequence[Sample], epoch: int, lab: Lab) -> Iterator[tuple[list[Sample], Batch]]:
    """The micro-batches of an epoch in an order of its own."""
    generator = torch.Generator().manual_seed(1000 * lab.seed + epoch)
    loader = DataLoader(
        samples, lab.batch, shuffle=lab.shuffled, drop_last=True, generator=generator, num_workers=lab.workers,
        collate_fn=Collator(lab),
    )  # fmt: skip
    return iter(loader)


@dataclass(frozen=True)
class Collator:
    """What a loader's workers call."""

    lab: Lab

    def __call__(self, samples: list[Sample]) -> tuple[list[Sample], Batch]:
        return samples, self.lab.collate(samples, self.lab)


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Everything that decides a run. The defaults are an honest run in float32 on padded documents.

    Attributes:
        kind: documents (padded), text (rows of one length), chat (prompt and answer), packed and packed-mask
            (documents kept apart by their numbers, or by a mask).
        precision: fp32, bf16 and fp16 (autocast), bf16-pure (bfloat16 weights), bf16-master (with float32 masters).
        steps: optimizer steps an epoch; ``remainder`` more micro-batches make a short last window.
        resume: step at which the run starts, from a checkpoint made by the steps before; 0 for a fresh run.
        declared: what the recorder cannot see is told to it.
    """

    seed: int = 0
    kind: str = "documents"
    precision: str = "fp32"
    steps: int = 20
    epochs: int = 1
    batch: int = 8
    length: int = 32
    accumulation: int = 1
    remainder: int = 0
    shuffled: bool = True
    workers: int = 0
    rate: float = 1e-2
    weight_decay: float = 0.1
    warmup: int = 5
    schedule: bool = True
    max_norm: float = 1.0
    init_scale: float = 2.0**12
    dropout: float = 0.0
    tied: bool = False
    pretrained: bool = False
    adapters: bool = False
    evaluate_every: int = 0
    resume: int = 0
    declared: bool = True
    every: int = 10
    told: dict[str, Any] = field(default_factory=dict[str, Any])  # further parts of the manifest

    build_model: Callable[[Lab], nn.Module] = build_model
    build_optimizer: Callable[[nn.Module, Lab], torch.optim.Optimizer] = build_optimizer
    after_build: Callable[[nn.Module, torch.optim.Optimizer, Lab], None] = lambda model, optimizer, lab: None
    make_samples: Callable[[Lab], list[Sample]] = make_samples
    collate: Callable[[Sequence[Sample], Lab], Batch] = collate
    epoch_of: Callable[[Sequence[Sample], int, Lab], Iterator[tuple[list[Sample], Batch]]] = epoch_of
    loss: Callable[[Tensor, Batch, Window], Tensor] = token_mean
    update: Callable[[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, Lab], None] = clip_and_step
    before_step: Callable[[int, nn.Module, torch.optim.Optimizer], None] = lambda step, model, optimizer: None
    evaluate: Callable[[nn.Module, Sequence[Batch], Lab], float] = evaluate
    restore: Callable[..., None] = restore

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return (self.steps + bool(self.remainder)) * self.epochs

    def manifest(self) -> dict[str, Any]:
        """What such a job says of itself."""
        if not self.declared:
            return self.told
        training: dict[str, Any] = {
            "objective": "sft" if self.kind == "chat" else "causal-lm", "reduction": "token-mean",
            "accumulation_steps": self.accumulation, "micro_batch": self.batch, "epochs": self.epochs,
            "dataset_samples": self.batch * (self.accumulation * self.steps + self.remainder),
            "precision": {"bf16": "bf16-mixed", "fp16": "fp16-mixed", "fp32": "fp32"}.get(self.precision, "bf16-pure"),
            "optimizer": {
                "name": "AdamW", "lr": self.rate, "betas": [0.9, 0.95], "eps": 1e-8,
                "weight_decay": self.weight_decay, "decoupled": True,
            },
            "max_grad_norm": self.max_norm, "packing": self.kind.startswith("packed"),
            "loss_masking": "response" if self.kind == "chat" else "all",
        }  # fmt: skip
        if self.schedule:
            training["schedule"] = {"name": "cosine", "warmup_steps": self.warmup, "total_steps": self.total_steps}
        tokenizer: dict[str, Any] = {
            "vocab_size": VOCABULARY, "bos_id": BOS, "eos_id": EOS, "pad_id": PAD, "adds_bos": self.kind != "text",
        }  # fmt: skip
        if self.kind == "chat":
            tokenizer["response_template_ids"] = [ASSISTANT]
        if self.kind == "text":
            tokenizer = {"vocab_size": VOCABULARY}
        told: dict[str, Any] = {
            "run": {"name": "lab", "seed": self.seed}, "training": training, "tokenizer": tokenizer,
            "model": {"vocab_size": VOCABULARY, "initialised": "pretrained" if self.pretrained else "random"},
        }  # fmt: skip
        for part, fields in self.told.items():
            told[part] = told.get(part, {}) | fields
        return told


def precision(lab: Lab) -> Any:
    """Mixed precision, where the run has it."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(lab.precision)
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def inputs_of(batch: Batch) -> Batch:
    """What the model's forward takes."""
    return {name: value for name, value in batch.items() if name != "labels"}


def record(directory: Path, lab: Lab) -> Path:
    """Train as ``lab`` says with the recorder attached, and return the capsule's path under ``directory``."""
    checkpoint = None
    if lab.resume:
        checkpoint = directory / "checkpoint.pt"
        first = Run(lab)
        first.train(until=lab.resume)
        torch.save(first.state(lab.resume), checkpoint)
    return Run(lab).record(directory, checkpoint)


class Run:
    """One process of training: model, optimizer and schedule, and the loop over the data."""

    def __init__(self, lab: Lab) -> None:
        torch.manual_seed(lab.seed)
        self.lab = lab
        self.samples = lab.make_samples(lab)
        self.model = lab.build_model(lab)
        self.optimizer = lab.build_optimizer(self.model, lab)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warmup_cosine(lab))
        self.scaler = torch.amp.GradScaler("cpu", enabled=lab.precision == "fp16", init_scale=lab.init_scale)
        lab.after_build(self.model, self.optimizer, lab)
        self.held_out = [data.padded(data.documents(16, lab.seed + 1000))] if lab.evaluate_every else []

    def record(self, directory: Path, checkpoint: Path | None) -> Path:
        """Train to the end."""
        lab, start = self.lab, 0
        recorder = Recorder(
            directory, model=self.model, optimizer=self.optimizer, manifest=lab.manifest(), every=lab.every,
            scaler=self.scaler if self.scaler.is_enabled() else None,
        )  # fmt: skip
        with recorder:
            if checkpoint is not None:
                saved = torch.load(checkpoint, weights_only=True)
                lab.restore(saved, self.model, self.optimizer, self.schedule, self.scaler)
                start = saved["step"]
            self.train(recorder, start)
        assert recorder.path is not None
        return recorder.path

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint holds."""
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "scaler": self.scaler}
        states = {name: part.state_dict() for name, part in parts.items()}
        return states | {"random": torch.random.get_rng_state(), "step": step}

    def windows(self) -> Iterator[tuple[int, list[tuple[list[Sample], Batch]]]]:
        """(epoch, micro-batches) of each optimizer step."""
        for epoch in range(self.lab.epochs):
            micros = self.lab.epoch_of(self.samples, epoch, self.lab)
            while window := list(islice(micros, self.lab.accumulation)):
                yield epoch, window

    def train(self, recorder: Recorder | None = None, start: int = 0, until: int | None = None) -> None:
        """Run the steps from ``start`` to before ``until``."""
        lab = self.lab
        for step, (epoch, micros) in islice(enumerate(self.windows()), start, until):
            window = Window(
                tokens=sum(supervised(batch["labels"]) for _, batch in micros),
                micros=len(micros), configured=lab.accumulation,
            )  # fmt: skip
            lab.before_step(step, self.model, self.optimizer)
            scale = self.scaler.get_scale()
            for index, (samples, batch) in enumerate(micros):
                handle = nullcontext()
                if recorder is not None:
                    ids = [sample.id for sample in samples] if len(samples) == len(batch["input_ids"]) else None
                    handle = recorder.step(batch=batch, sample_ids=ids, step=step, cursor={"epoch": epoch})
                with handle:
                    with precision(lab):
                        logits = self.model(**inputs_of(batch))
                    self.scaler.scale(lab.loss(logits, batch, window)).backward()
                    if index == len(micros) - 1:
                        lab.update(self.model, self.optimizer, self.scaler, lab)
            if self.scaler.get_scale() >= scale:  # a step that the scaler left out moves no schedule
                self.schedule.step()
            if lab.evaluate_every and (step + 1) % lab.evaluate_every == 0:
                lab.evaluate(self.model, self.held_out, lab)
