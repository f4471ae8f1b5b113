"""Rates of the optimizer's counterfactuals over random steps of AdamW, right and wrong, and what a verdict costs.

Each step is taken by torch in the job's own types (``tests/analyzers/sweep/optimizer_steps.py``), goes through a
capsule on disk, and is judged as the rule does. Faults that change nothing are counted apart; a set of equivalent
faults that holds the truth counts as right.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llmconsole.analyzers.optimizer.step_case import cases_by_window, taken_steps
from llmconsole.analyzers.optimizer.step_faults import CATALOGUE
from llmconsole.analyzers.optimizer.step_verdict import judge
from llmconsole.capsules import Capsule, CapsuleWriter

from tests.analyzers.sweep.optimizer_steps import FAULTS, UNKNOWN, Job


def outcome(job: Job, without_truth: bool = False) -> str:
    """What the verdict is worth: right, wrong, undetermined, missed or inert, quiet or alarm for a healthy step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.capsule"
        with CapsuleWriter(path, title="step", phase="training", manifest={}) as writer:
            job.write(writer)
        capsule = Capsule.open(path)
        ((step, rank), cases), *_ = cases_by_window(capsule, taken_steps(capsule)).items()
        catalogue = [each for each in CATALOGUE if not (without_truth and each.fault.name == job.fault)]
        verdict = judge(step, rank, cases, catalogue).verdict
    named = {member for members in verdict.classes for member in members}
    if job.fault is None:
        return "quiet" if verdict.status == "healthy" else f"alarm:{verdict.status}"
    if job.fault in UNKNOWN or without_truth:
        return {"healthy": "missed", "undetermined": "undetermined"}.get(verdict.status, f"named-{verdict.status}")
    if job.fault in verdict.inert:
        return "inert"
    if verdict.status == "healthy":
        return "within rounding"  # the declared step fits what the dtype kept
    if verdict.status == "undetermined":
        return "undetermined" if (job.fault,) not in named else "among several"
    return f"right-{verdict.status}" if (job.fault,) in named else f"wrong-{verdict.status}"


def table(seeds: int) -> None:
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        faults = [fault for fault in FAULTS if dtype is torch.float32 or fault != "rounded-to-bfloat16"]
        print(f"{str(dtype).removeprefix('torch.')}: {seeds} × {len(faults)} faults, healthy × {20 * seeds}")
        start, total = time.perf_counter(), Counter[str]()
        for fault in faults:
            said = Counter(outcome(Job(seed, fault, dtype)) for seed in range(seeds))
            total += said
            print(f"  {fault:26}" + ", ".join(f"{name} {count}" for name, count in said.most_common()))
        judged = sum(count for name, count in total.items() if name not in ("inert", "within rounding"))
        right = sum(count for name, count in total.items() if name.startswith("right"))
        cost = 1e3 * (time.perf_counter() - start) / (seeds * len(faults))
        print(f"  named {100 * right / judged:.1f} % of {judged} that are neither inert nor within rounding")
        print(f"  {cost:.0f} ms each, capsule included")
        healthy = Counter(outcome(Job(seed, None, dtype, fused=bool(seed % 2))) for seed in range(20 * seeds))
        print(f"  healthy: {dict(healthy)}")
        unknown = Counter(outcome(Job(seed, fault, dtype)) for fault in UNKNOWN for seed in range(seeds))
        print(f"  causes outside the catalogue: {dict(unknown)}")
        removed = Counter(
            outcome(Job(seed, fault, dtype), True) for fault in faults for seed in range(max(1, seeds // 2))
        )
        print(f"  truth taken out of the catalogue: {dict(removed)}")


def main(seeds: int = 4) -> int:
    """Print the tables."""
    table(seeds)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=40)
    sys.exit(main(parser.parse_args().seeds))
