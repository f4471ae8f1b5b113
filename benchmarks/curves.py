"""Healthy losses of ten kinds, as logs have them, over all rules about numbers: how many raise an alarm.

Power laws, fine-tuning, preference tuning, diffusion, epochs, batches of one, policy gradients, continued pre-training,
a mixture that changes, a context that grows; logged every 1 to 100 steps with 1 to 6 decimals, noise from white to
heavy-tailed, with and without gradient norms, learning rates and evaluations.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from llmconsole.analyzers.registry import all_rules
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, CapsuleWriter
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Random = np.random.Generator

#: Curves of each kind.
CURVES = 40


def correlated(random: Random, count: int) -> Floats:
    """Unit noise: white, correlated from step to step, or with heavy tails."""
    drawn = random.normal(0, 1, count)
    match random.integers(3):
        case 0:
            return random.standard_t(4, count) / np.sqrt(2)
        case 1:
            for index in range(1, count):
                drawn[index] = 0.3 * drawn[index - 1] + np.sqrt(0.91) * drawn[index]
    return drawn


def pretraining(r: Random, t: Floats, z: Floats) -> Floats:
    end = r.uniform(1.5, 3.5)
    return (end + (10.9 - end) * (1 + t * len(t) / r.uniform(3, 50)) ** -r.uniform(0.3, 0.9)) * (1 + 0.03 * z)


def fine_tuning(r: Random, t: Floats, z: Floats) -> Floats:
    level = r.uniform(0.6, 1.4) + r.uniform(0.1, 1) * np.exp(-t * len(t) / r.uniform(3, 40)) - r.uniform(0, 0.2) * t
    return level * (1 + r.uniform(0.02, 0.2) * z)


def preference(r: Random, t: Floats, z: Floats) -> Floats:
    return (0.693 - r.uniform(0, 0.4) * (1 - np.exp(-5 * t))) * (1 + 0.2 * z)


def diffusion(r: Random, t: Floats, z: Floats) -> Floats:
    return 0.08 * np.exp(r.uniform(0, 0.5) * np.exp(-20 * t) + 0.4 * z)


def epochs(r: Random, t: Floats, z: Floats) -> Floats:
    return 0.05 + 1.2 * np.exp(-0.5 * np.floor(t * r.integers(2, 6))) * (1 + 0.1 * z)


def batch_of_one(r: Random, t: Floats, z: Floats) -> Floats:
    return 2 * np.exp(-0.3 * t + 0.4 * z)


def policy(r: Random, t: Floats, z: Floats) -> Floats:
    return 0.01 * z


def continued(r: Random, t: Floats, z: Floats) -> Floats:
    return 1.9 - 0.02 * t + 0.05 * z


def mixture(r: Random, t: Floats, z: Floats) -> Floats:
    change = r.uniform(0.3, 0.9)
    harder = np.where(t >= change, r.uniform(0.1, 0.4) * np.exp(-np.maximum(t - change, 0) / 0.2), 0.0)
    return (2 + 8 * (1 + t * len(t) / 10) ** -0.6 + harder) * (1 + 0.02 * z)


def growing_context(r: Random, t: Floats, z: Floats) -> Floats:
    return 2 + 9 * np.exp(-3 * t) + 0.1 * z


KINDS: dict[str, Callable[[Random, Floats, Floats], Floats]] = {
    each.__name__: each
    for each in (
        *(pretraining, fine_tuning, preference, diffusion, epochs),
        *(batch_of_one, policy, continued, mixture, growing_context),
    )
}


def write(random: Random, kind: str, path: Path) -> None:
    """A capsule of one healthy run."""
    count = int(random.choice([50, 80, 150, 300, 800, 3000]))
    t = np.arange(count) / count
    loss = KINDS[kind](random, t, correlated(random, count))
    loss = loss if kind == "policy" else np.maximum(np.round(loss, int(random.choice([2, 3, 4, 6]))), 0.01)
    step = np.arange(count) * int(random.choice([1, 1, 5, 10, 100]))
    warm = np.minimum(1.0, (np.arange(count) + 1) / (0.03 * count + 1))
    rates = (np.ones(count), warm * 0.5 * (1 + np.cos(np.pi * t)), 1 - t)
    with CapsuleWriter(path, title=kind, phase="training", manifest={}) as writer:
        writer.scalars("loss", step=step, value=loss)
        if random.random() < 0.7:
            norm = np.exp(0.3 * random.normal(0, 1, count)) * (1 + 5 * np.exp(-np.arange(count) / 10))
            writer.scalars("grad_norm", step=step, value=norm)
        if random.random() < 0.7:
            writer.scalars("learning_rate", step=step, value=1e-4 * rates[int(random.integers(3))])
        if random.random() < 0.5:
            at = np.arange(9, count, max(10, count // 8))
            value = np.median(loss[max(0, at[0] - 9) :]) * (1 + 0.3 * np.exp(-5 * t[at])) + 0.01 * random.normal(
                size=len(at)
            )
            writer.scalars("eval_loss", step=step[at], value=value)


def main() -> None:
    """Print alarms (warning or above) a kind and rule."""
    rules = [each for each in all_rules() if each.id.startswith("numerics/")]
    alarms: Counter[tuple[str, str]] = Counter()
    for number, kind in enumerate(KINDS):
        for seed in range(CURVES):
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "run.capsule"
                write(np.random.default_rng([number, seed]), kind, path)
                report = analyze(Capsule.open(path), rules)
            assert not report.errors, report.errors
            alarms.update((kind, each.rule) for each in report.findings if each.severity != "info")
    print(f"{len(rules)} rules about numbers on {CURVES * len(KINDS)} healthy curves of {len(KINDS)} kinds")
    for (kind, rule), count in sorted(alarms.items()):
        print(f"{kind:16} {rule:32} {count} of {CURVES}")
    print(f"{'all':16} {'':32} {sum(alarms.values())} of {CURVES * len(KINDS)}")
