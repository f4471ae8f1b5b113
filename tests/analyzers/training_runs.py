"""Scalars and statistics of made-up training runs, for tests that change one thing in a healthy one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from llmconsole.capsules import CapsuleWriter

STEPS = 160


def falling_loss(steps: int = STEPS, seed: int = 0, noise: float = 0.05) -> np.ndarray:
    """5.5 nats falling to 2.5 with Gaussian noise: the shape of a healthy start."""
    return 2.5 + 3.0 * np.exp(-np.arange(steps) / 15) + np.random.default_rng(seed).normal(0, noise, steps)


def falling_norm(steps: int = STEPS, seed: int = 1) -> np.ndarray:
    """A gradient norm of 6 falling to 1 with multiplicative noise."""
    noise = np.exp(np.random.default_rng(seed).normal(0, 0.15, steps))
    return (1.0 + 5.0 * np.exp(-np.arange(steps) / 10)) * noise


def write_scalars(writer: CapsuleWriter, **series: Iterable[float]) -> None:
    """Write each series from step 0 on."""
    for name, values in series.items():
        kept = list(values)
        writer.scalars(name, step=list(range(len(kept))), value=kept)


def row(step: int, order: int, name: str, absmax: float, **fields: Any) -> dict[str, Any]:
    """A full row of a float16 activation of 4,096 elements, symmetric around zero, with nothing non-finite."""
    return {
        "step": step, "order": order, "name": name, "role": "activation", "dtype": "float16", "shape": [64, 64],
        "numel": 4096, "nan": 0, "posinf": 0, "neginf": 0, "min": -absmax, "max": absmax, "absmax": absmax,
        "rms": absmax / 4, "mean": 0.0, "std": absmax / 4, **fields,
    }  # fmt: skip


def sample_records(losses: dict[int, list[float]], length: int = 64, **fields: Any) -> list[dict[str, Any]]:
    """One record a sample a step; ids are ``s<step>.<row>``."""
    return [
        {"step": step, "id": f"s{step}.{index}", "length": length, "loss": loss, "split": "train", **fields}
        for step, rows in losses.items()
        for index, loss in enumerate(rows)
    ]


def sample_losses(steps: int, batch: int = 8, seed: int = 2, spread: float = 0.4) -> dict[int, list[float]]:
    """Sample losses around a falling mean, normally spread."""
    generator = np.random.default_rng(seed)
    mean = falling_loss(steps, noise=0.0)
    return {step: (mean[step] + generator.normal(0, spread, batch)).tolist() for step in range(steps)}
