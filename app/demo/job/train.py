"""Train a byte-level GPT on a directory of text, with the failure recorder attached."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from data import batches, load_corpus
from llmconsole.capsules import Recorder
from model import GPT, ModelConfig, language_model_loss


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides the run beside the model's shape."""

    steps: int = 200
    batch_size: int = 8
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    seed: int = 0


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up to ``config.learning_rate``, then half a cosine down to a tenth of it."""
    warmup = min(1.0, (step + 1) / config.warmup_steps)
    progress = max(0, step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.learning_rate * warmup * (0.55 + 0.45 * math.cos(math.pi * min(1.0, progress)))


def build_optimizer(model: GPT, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the gains of the norms alone."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    gains = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate(0, config), betas=(0.9, 0.95), eps=1e-8)


def train(config: TrainConfig, model_config: ModelConfig, corpus: Path, runs: Path) -> float:
    """Train for ``config.steps`` optimizer steps and return the last loss; stops where the loss is not finite."""
    torch.manual_seed(config.seed)
    model = GPT(model_config)
    optimizer = build_optimizer(model, config)
    scaler = torch.amp.GradScaler("cpu", enabled=model_config.half, init_scale=2.0**12)
    samples = load_corpus(corpus, model_config.max_positions)
    value = math.nan

    recorder = Recorder(
        runs,
        model=model,
        optimizer=optimizer,
        scaler=scaler if model_config.half else None,
        config=dataclasses.asdict(config) | {"model": dataclasses.asdict(model_config)},
        manifest={
            "phase": "training",
            "run": {"name": "byte-gpt", "seed": config.seed},
            "model": dataclasses.asdict(model_config) | {"initialised": "random", "tied_embeddings": False},
            "training": {
                "objective": "causal-lm",
                "reduction": "token-mean",
                "precision": "fp16-mixed" if model_config.half else "fp32",
            },
        },
    )
    with recorder:
        for step, batch in zip(range(config.steps), batches(samples, config.batch_size, config.seed), strict=False):
            input_ids = torch.stack([sample.input_ids for sample in batch])  # [B, T]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            with recorder.step(
                batch={"input_ids": input_ids, "labels": input_ids}, sample_ids=[sample.id for sample in batch]
            ):
                loss = language_model_loss(model(input_ids), input_ids)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
                scaler.step(optimizer)
                scaler.update()
            value = loss.item()
            print(f"step {step} loss {value:.4f} lr {optimizer.param_groups[0]['lr']:.2e}", flush=True)
            if not math.isfinite(value):
                break
    return value


def main() -> int:
    """Exit status 0 where the loss stayed finite, 1 where it did not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=TrainConfig.steps)
    parser.add_argument("--precision", choices=("fp32", "fp16"), default="fp32")
    parser.add_argument("--seed", type=int, default=TrainConfig.seed)
    parser.add_argument("--corpus", type=Path, default=Path("corpus"))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    args = parser.parse_args()
    config = TrainConfig(steps=args.steps, seed=args.seed)
    model_config = ModelConfig(half=args.precision == "fp16")
    return 0 if math.isfinite(train(config, model_config, args.corpus, args.runs)) else 1


if __name__ == "__main__":
    sys.exit(main())
