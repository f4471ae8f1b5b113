"""Every fault of the training laboratory over seeds and precisions: is it the first divergence, and is honesty quiet?

Each line is a real training run with the recorder attached and one thing wrong, from ``tests/training/lab``. *named*
counts the runs whose first divergence is the fault, *sure* those of them with the confidence that is demanded. An
honest run counts as an alarm where any rule says anything at warning or above.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llmconsole.analyzers.report import ALARMS, CapsuleReport
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule

from tests.training.lab.faults import FAULTS, HONEST, Fault
from tests.training.lab.loop import Lab, record
from tests.training.lab.variants import ALSO_HONEST, OTHER_FORMS

PRECISIONS = ("fp32", "bf16")


def report_on(lab: Lab) -> CapsuleReport:
    with tempfile.TemporaryDirectory() as folder:
        return analyze(Capsule.open(record(Path(folder), lab)))


def variants(lab: Lab, seeds: int) -> dict[str, list[Lab]]:
    """The run under each seed in both precisions; one whose precision is its point stays as it is."""
    names = PRECISIONS if lab.precision == "fp32" else (lab.precision,)
    return {name: [replace(lab, seed=seed, precision=name) for seed in range(seeds)] for name in names}


def verdict(fault: Fault, report: CapsuleReport) -> str:
    """``sure``, ``named``, or what was said instead."""
    first = report.first_divergence
    if first is None:
        return "nothing"
    if (first.rule, first.where.step) != (fault.rule, fault.step):
        return f"{first.rule} at step {first.where.step}"
    finding = next(each for each in report.findings if each.rule == first.rule)
    return "sure" if fault.confidence in ("likely", finding.confidence) else "named"


def main(seeds: int = 5) -> int:
    """Print both tables."""
    torch.set_num_threads(1)
    start, runs = time.perf_counter(), 0
    forms, honest_forms = FAULTS | OTHER_FORMS, HONEST | ALSO_HONEST
    print(f"{len(FAULTS)} faults and {len(OTHER_FORMS)} other forms, {len(honest_forms)} honest runs, {seeds} seeds")
    print(f"{'fault':36}{'rule':34}{'precision':12}{'named':>7}{'sure':>7}")
    for name, fault in forms.items():
        for precision, labs in variants(fault.lab, seeds).items():
            said = Counter(verdict(fault, report_on(lab)) for lab in labs)
            runs += len(labs)
            named = said["named"] + said["sure"]
            other = ", ".join(f"{words} × {count}" for words, count in said.items() if words not in ("named", "sure"))
            print(
                f"{name:36}{fault.rule:34}{precision:12}{named:5}/{seeds}{said['sure']:5}/{seeds}  {other}", flush=True
            )
    print(f"\n{'honest run':48}{'precision':12}{'alarms':>8}")
    for name, honest in honest_forms.items():
        for precision, labs in variants(honest, seeds).items():
            found = [{each.rule for each in report_on(lab).findings if each.severity in ALARMS} for lab in labs]
            runs += len(labs)
            rules = ", ".join(sorted(set().union(*found)))
            print(f"{name:48}{precision:12}{sum(map(bool, found)):6}/{seeds}  {rules}", flush=True)
    print(f"{runs} runs, {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    raise SystemExit(main(parser.parse_args().seeds))
