"""What the scripts of the laboratory share: the ranks' meeting, a small model, text, and an ordinary loop."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from llmconsole.capsules import Recorder
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.training.lab import data
from tests.training.lab.loop import loss_sum, supervised
from tests.training.lab.model import GPT

#: Seconds that ranks wait for one another where nothing is to hang: they share two busy cores with much else.
PATIENT = 100.0
#: Seconds after which a collective gives up, and after which the recorder calls it a hang, where one is to hang.
TIMEOUT, HANG_AFTER = 5.0, 2.0

LENGTH, BATCH, STEPS, RATE = 16, 4, 8, 1e-2

Batch = tuple[list[str], dict[str, Tensor]]


def place(folder: Path, name: str) -> Path:
    """Where a job keeps its capsule, its files and what it says."""
    return folder / re.sub(r"\W+", "-", name)


def collate(samples: list[data.Sample]) -> Batch:
    """The samples' names beside the batch."""
    return [each.id for each in samples], data.whole(samples)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy per supervised token; logits [B, T, V], labels [B, T]."""
    return loss_sum(logits, labels) / supervised(labels)


def nothing(step: int, loss: Tensor) -> None:
    """What an ordinary job does after a step."""


@dataclass(kw_only=True)
class Job:
    """One rank of one job.

    Attributes:
        odd: the rank that does otherwise, where the job has a fault.
        hangs: the job is to hang, so that the recorder shall say so soon.
        patient: its collectives do not give up soon, whether it hangs or not.
        told: parts of the manifest beside those that every job tells.
    """

    rank: int
    world: int
    store: dist.Store
    folder: Path
    odd: int = 0
    hangs: bool = False
    patient: bool = True
    told: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def timeout(self) -> timedelta:
        """Of this job's collectives."""
        return timedelta(seconds=PATIENT if self.patient else TIMEOUT)

    def begin(self) -> None:
        """Make the default group, once every rank is here: a short time-out is for the job, not for its start."""
        torch.set_num_threads(1)
        if self.store.add("here", 1) == self.world:
            self.store.set("all here", "")
        self.store.wait(["all here"], timedelta(seconds=PATIENT))
        dist.init_process_group("gloo", store=self.store, rank=self.rank, world_size=self.world, timeout=self.timeout)

    def group(self, *ranks: int, name: str | None = None) -> Any:
        """A group of those ranks (of all without any), which every rank asks for."""
        return dist.new_group(list(ranks) or None, timeout=self.timeout, group_desc=name)

    def model(self) -> GPT:
        """The same weights on each rank."""
        torch.manual_seed(0)
        return GPT(hidden=16, layers=1)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Adam with no decay: what the laboratory is about lies elsewhere."""
        return torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)

    def samples(self, steps: int = STEPS) -> list[data.Sample]:
        """Rows of one length, just enough for so many steps of all ranks."""
        return data.stream(self.world * BATCH * steps, seed=0, length=LENGTH)

    def held_out(self, steps: int = STEPS) -> list[data.Sample]:
        """Some rows of the same text that no such training sees."""
        return data.stream(self.world * BATCH * steps + 8, seed=0, length=LENGTH)[-8:]

    def batches(self, steps: int = STEPS, *, shared: bool = True) -> Iterator[Batch]:
        """This rank's share of the samples, or without a sampler the first of all of them."""
        samples = self.samples(steps)
        if shared:
            sampler = DistributedSampler(samples, self.world, self.rank, shuffle=True, seed=0)
            return iter(DataLoader(samples, BATCH, sampler=sampler, collate_fn=collate))
        shuffled = torch.Generator().manual_seed(0)
        loader = DataLoader(samples, BATCH, shuffle=True, generator=shuffled, collate_fn=collate)
        return (batch for _, batch in zip(range(steps), loader, strict=False))

    def recorder(self, model: nn.Module, optimizer: Any, **options: Any) -> Recorder:
        """The recorder with what such a job tells it."""
        manifest: dict[str, Any] = {
            "training": {
                "objective": "causal-lm", "reduction": "token-mean", "accumulation_steps": 1, "micro_batch": BATCH,
                "precision": "fp32", "data_parallel": self.world,
                "optimizer": {
                    "name": "AdamW", "lr": RATE, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0,
                    "decoupled": True,
                },
            },
            "tokenizer": {"vocab_size": data.VOCABULARY},
            "model": {"vocab_size": data.VOCABULARY, "initialised": "random"},
        }  # fmt: skip
        for part, fields in self.told.items():
            manifest[part] = manifest.get(part, {}) | fields
        options = {"every": 4} | ({"hang_after": HANG_AFTER} if self.hangs else {}) | options
        return Recorder(self.folder, model=model, optimizer=optimizer, manifest=manifest, **options)

    def train(
        self,
        after: Callable[[int, Tensor], None] = nothing,
        *,
        before: Callable[[int, nn.Module], None] = lambda step, model: None,
        batches: Iterator[Batch] | None = None,
        average: Callable[[nn.Module], None] | None = None,
    ) -> None:
        """An ordinary loop: DistributedDataParallel, or ``average`` on the gradients of a plain model."""
        model: nn.Module = self.model()
        if average is None:
            model = DistributedDataParallel(model)
        optimizer = self.optimizer(model)
        with self.recorder(model, optimizer) as recorder:
            for step, (ids, batch) in enumerate(self.batches() if batches is None else batches):
                before(step, model)
                with recorder.step(batch=batch, sample_ids=ids):
                    loss = mean_loss(model(batch["input_ids"]), batch["labels"])
                    loss.backward()
                    if average is not None:
                        average(model)
                    optimizer.step()
                    optimizer.zero_grad()
                after(step, loss.detach())
