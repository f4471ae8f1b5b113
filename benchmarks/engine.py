"""Rates of the counterfactual engine over random loss incidents, and what a verdict costs.

Each incident comes from a torch path written apart from the reference (``tests/analyzers/sweep``), goes through a
capsule on disk, and is judged. Faults that change nothing on their input are counted apart; a set of equivalent
faults that holds the truth counts as right.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llmconsole.analyzers.objective.loss_verdict import loss_verdict
from llmconsole.capsules import Capsule, CapsuleWriter

from tests.analyzers.sweep import incidents, rates


def table(seeds: int) -> None:
    """One line a mode: singles named and confirmed, healthy alarms, unknown causes named."""
    unknown = [f"unknown:{name}" for name in incidents.UNKNOWN]
    print(f"{seeds} × ({len(incidents.FAULTS)} faults, {len(unknown)} causes outside the catalogue, {HEALTHY} healthy)")
    print(f"{'':40}{'named':>8}{'confirmed':>11}{'misnamed':>10}{'alarms':>8}{'unknown named':>15}{'ms':>7}")
    for mode in rates.MODES:
        start = time.perf_counter()
        said = rates.run(mode, [*incidents.FAULTS, *unknown, *["healthy"] * HEALTHY], range(seeds))
        cost = (time.perf_counter() - start) / (seeds * (len(incidents.FAULTS) + len(unknown) + HEALTHY))
        faults, confirmed = said.count("fault:"), said.count("fault:confirmed")
        print(
            f"{mode.name:40}{percent(confirmed + said.count('fault:likely'), faults)}{percent(confirmed, faults, 11)}"
            f"{percent(said.count('fault:misnamed'), faults, 10)}"
            f"{percent(said.count('healthy:false-alarm'), said.count('healthy:'))}"
            f"{percent(said.count('unknown:named'), said.count('unknown:'), 15)}{cost * 1e3:7.0f}"
        )
        for line in said.wrong:
            if "missed" not in line:
                print("    ", line)
    said = rates.run(rates.FP32_TWO_STEPS, list(incidents.FAULTS), range(seeds), without_truth=True)
    total = said.count("unknown:")
    print(
        f"truth taken out of the catalogue, {rates.FP32_TWO_STEPS.name}: "
        f"confirmed {said.count('unknown:named-confirmed')}, likely {said.count('unknown:named-likely')} of {total}"
    )


def cost() -> None:
    """One verdict on logits of 64 MB (the largest a recorder keeps), and on the compact form of the same batch."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 32000, (1, 512), generator=generator)
    logits = torch.randn(1, 512, 32000, generator=generator)
    loss = float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))
    with tempfile.TemporaryDirectory() as folder:
        for name in ("logits [1, 512, 32000]", "log-sum-exp and target logits"):
            path = Path(folder) / f"{len(name)}.capsule"
            with CapsuleWriter(path, title=name, phase="training", manifest={}) as writer:
                scores = {"logits": logits} if name.startswith("logits") else compact(logits, ids)
                writer.batch(step=0, rank=0, input_ids=ids, labels=ids, reported_loss=loss, **scores)
            start = time.perf_counter()
            verdict = loss_verdict(Capsule.open(path))
            assert verdict is not None
            print(f"{name:32} {verdict[0].status:10} {(time.perf_counter() - start) * 1e3:6.0f} ms")


def compact(logits: torch.Tensor, ids: torch.Tensor) -> dict[str, np.ndarray]:
    """What is left of logits [1, T, V] where V is too large to keep."""
    length = ids.shape[1]
    picked = np.full((1, length, 3), np.nan, np.float32)
    for offset in range(3):
        at = torch.arange(length - offset)
        picked[0, : length - offset, offset] = logits[0, at, ids[0, offset:]].numpy()
    return {"logsumexp": logits.logsumexp(-1).numpy(), "target_logits": picked}


def percent(part: int, whole: int, width: int = 8) -> str:
    return f"{100 * part / whole if whole else float('nan'):{width - 2}.1f} %"


HEALTHY = 12


def main(seeds: int = 4) -> int:
    """Print the tables."""
    torch.set_num_threads(1)
    table(seeds)
    cost()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    raise SystemExit(main(parser.parse_args().seeds))
