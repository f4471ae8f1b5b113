"""The memory model against the bytes that torch allocates on a CPU, over the whole grid of small GPTs."""

from __future__ import annotations

import time

import torch
from llmconsole.analyzers.reference.memory_model import estimate

from tests.analyzers.sweep.memory_models import grid, measure


def main() -> None:
    """Print how far the computed peak is from the measured one: median, 90 %, worst, and the worst cases."""
    torch.set_num_threads(1)
    rows: list[tuple[float, str]] = []
    spent = 0.0
    for shape, job, dropout, foreach in grid():
        job = job.changed(device="cpu", foreach=foreach)
        measured = measure(shape, job, dropout, foreach)
        began = time.perf_counter()
        estimated = estimate(shape, job)
        spent += time.perf_counter() - began
        rows.append((estimated.peak / measured.peak - 1, f"{shape} {job}"))
    off = sorted(abs(each) for each, _ in rows)
    print(f"{len(rows)} models and jobs; the computed peak beside the allocated one:")
    print(f"  off by {off[len(off) // 2]:.1%} (median), {off[len(off) * 9 // 10]:.1%} (90 %), {off[-1]:.1%} (worst)")
    print(f"  within 10 %: {sum(each <= 0.1 for each in off)} of {len(off)}; {spent / len(rows) * 1e3:.2f} ms each")
    for each, words in sorted(rows, key=lambda row: -abs(row[0]))[:3]:
        print(f"  {each:+.1%}  {words}")
