"""Every rule about numbers on evidence that is odd, torn or made to hurt: no error row, whatever it says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from llmconsole.analyzers.registry import all_rules
from llmconsole.analyzers.runner import analyze

RULES = [each for each in all_rules() if each.id.startswith("numerics/")]
NAMES = (
    "loss",
    "grad_norm",
    "learning_rate",
    "loss_scale",
    "overflow",
    "update_norm",
    "param_norm",
    "eval_loss",
    "odd",
)
ODD = (0.0, -0.0, -1.0, 1e-320, 1e308, -1e308, math.nan, math.inf, -math.inf, 1.0, 2.5, 65504.0)


def series(generator: np.random.Generator) -> tuple[list[int], list[float]]:
    """Steps that repeat, fall, jump or stand still, and values of any kind."""
    count = int(generator.choice([1, 2, 3, 7, 40, 150, 300]))
    steps = {
        0: np.arange(count),
        1: np.sort(generator.integers(0, max(1, count // 2), count)),
        2: generator.integers(0, 50, count),
        3: np.concatenate([np.arange(count - count // 3), np.arange(count // 3)]),
        4: np.zeros(count, int),
        5: np.cumsum(generator.choice([1, 1, 1, 10**6], count)),
    }[int(generator.integers(6))]
    values = {
        0: generator.choice(ODD, count),
        1: np.full(count, generator.choice(ODD)),
        2: np.where(generator.random(count) < 0.1, np.nan, 5 * np.exp(-np.arange(count) / 30)),
        3: np.round(3 + generator.normal(0, 0.5, count), 1),
        4: np.cumprod(generator.choice([0.5, 1.0, 2.0], count)) * 65536,
    }[int(generator.integers(5))]
    return steps.tolist(), values.tolist()


def row(generator: np.random.Generator) -> dict[str, object]:
    """One row of statistics, full or norm-only, of any role and type."""
    made: dict[str, object] = {
        "step": int(generator.integers(0, 12)), "order": int(generator.integers(0, 9)),
        "name": str(generator.choice(["a", "a.weight", "b", "norm", "head"])),
        "role": str(generator.choice(["activation", "gradient", "logits", "loss", "parameter", "update"])),
        "dtype": str(generator.choice(["float16", "bfloat16", "float32", "float8_e5m2", ""])),
        "rms": float(generator.choice(ODD)),
    }  # fmt: skip
    if generator.random() < 0.6:
        counts = {name: int(generator.integers(0, 5)) for name in ("nan", "posinf", "neginf", "zeros", "subnormals")}
        made |= counts | {"numel": int(generator.integers(0, 6)), "shape": [2, 2]}
        made |= {name: float(generator.choice(ODD)) for name in ("min", "max", "absmax", "absmean", "mean", "std")}
    return made


@pytest.mark.parametrize("seed", range(12))
def test_no_rule_about_numbers_raises(build, seed):
    generator = np.random.default_rng(seed)

    def fill(writer):
        for name in NAMES:
            if generator.random() < 0.7:
                steps, values = series(generator)
                writer.scalars(name, step=steps, value=values, rank=0)
        writer.stats([row(generator) for _ in range(int(generator.integers(1, 60)))])
        writer.batch(step=0, input_ids=np.zeros((2, 3), int), token_loss=np.full((2, 3), np.nan), loss_dtype="bfloat16")
        for kind in ("scaler_update", "grad_norm", "clip", "checkpoint_loaded", "optimizer_step_skipped"):
            writer.record("events", {"kind": kind, "step": int(generator.integers(0, 9)), "scale_after": math.nan})
            writer.record("events", {"kind": kind})
        writer.record("samples", {"step": 1, "loss": math.nan})
        writer.record("param_groups", {"name": None, "has_grad": True})
        writer.record("kernel_checks", {"kernel": None, "dtypes": {"accumulator": "bfloat16"}})
        writer.tensor("norm/input", np.full((9, 0), 1.0, np.float32), step=0, dtype="float32")
        writer.tensor("norm/output", np.zeros((9, 2), np.float16), step=0, dtype="float16", eps=1e-6)

    assert not analyze(build(fill), RULES).errors


def test_several_ranks_and_few_decimals_are_read_as_one_run(build):
    """Eight ranks, one decimal, a log every ten steps with two holes: a healthy run is quiet."""
    generator = np.random.default_rng(1)
    steps = [step for step in range(0, 2000, 10) if step not in (300, 310)]

    def fill(writer):
        for rank in range(8):
            loss = 2.5 + 8 * np.exp(-np.array(steps) / 150) + generator.normal(0, 0.05, len(steps))
            writer.scalars("loss", step=steps, value=np.round(loss, 1).tolist(), rank=rank)
            writer.scalars(
                "grad_norm", step=steps, value=np.round(1 + generator.random(len(steps)), 1).tolist(), rank=rank
            )

    report = analyze(build(fill), RULES)
    assert not report.errors
    assert not [each for each in report.findings if each.severity != "info"]
