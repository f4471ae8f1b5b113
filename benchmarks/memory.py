"""A verdict on a CUDA memory snapshot beside torch's own reader of the same file: seconds and peak memory.

The file is what a training job leaves on a model of the caching allocator (``caching_allocator.py``): weights, Adam's
state, activations and gradients of 24 layers, and one small block a step that is never given back. No command of
``torch.cuda._memory_viz`` gives a verdict; of those that it documents the fastest one that needs no download is timed.
Both run as processes of their own, in turn; Linux tells the seconds of the processor and the peak of each with its
children. On a machine that others use the seconds of the clock say little.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pickle
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .caching_allocator import GIB, KIB, MIB, CachingAllocator, stack
from .training_memory import ENOUGH, numbered

EVENTS, MOST_SECONDS, MOST_MB = 400_000, 2.0, 300.0
#: Commands of torch.cuda._memory_viz that print or write without asking the network for a script.
THEIRS = (("stats",), ("trace",), ("trace_plot", "-o", os.devnull), ("segment_plot", "-o", os.devnull))
LOOP = ("train /home/me/train.py:120", "<module> /home/me/train.py:150")


def write_snapshot(path: Path, events: int, own_stacks: bool = False) -> None:
    """The snapshot of a job that keeps a logged loss."""
    a = CachingAllocator(80 * GIB, own_stacks=own_stacks)
    chosen = random.Random(0)
    call = ("_call_impl /site-packages/torch/nn/modules/module.py:1779", *LOOP)
    code = [
        stack(f"op /site-packages/torch/nn/functional.py:{n}", f"forward /home/me/model.py:{n}", *call)
        for n in range(12)
    ]
    adam = stack(
        "_multi_tensor_adam /site-packages/torch/optim/adam.py:700", "step /site-packages/torch/optim/adam.py:9", *LOOP
    )
    logged = stack("training_step /home/me/train.py:88", *LOOP)
    for _ in range(24):
        a.malloc(50 * MIB, stack("__init__ /site-packages/torch/nn/modules/linear.py:110", LOOP[1]))
    while len(a.events) < events:
        held: list[int] = []
        for _ in range(24):
            for frames in code:
                address = a.malloc(chosen.choice((300, 40 * KIB, 3 * MIB, 20 * MIB)), frames)
                held.append(address) if chosen.random() < 0.5 else a.free(address)
        a.malloc(40 * KIB, logged)
        for address in reversed(held):
            a.free(a.malloc(MIB))
            a.free(address)
        a.free(a.malloc(50 * MIB, adam))
        a.tick(200_000)
    with path.open("wb") as file:
        pickle.dump(a.snapshot(), file)


@dataclass(frozen=True)
class Ran:
    """One run of a command: seconds of the clock and of the processor, peak MB of its largest process, what it said."""

    seconds: float
    busy: float
    peak: float
    status: int
    printed: str


#: A small process in between, whose children are the command's processes only.
_WEIGH = (
    "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:], capture_output=True, text=True); "
    "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
    "print(used.ru_maxrss, used.ru_utime + used.ru_stime, done.returncode); print(done.stdout)"
)


def run(command: Sequence[str], folder: Path) -> Ran:
    """Run a command and weigh it."""
    before = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-S", "-c", _WEIGH, *command], capture_output=True, text=True, check=True, cwd=folder
    )
    seconds = time.perf_counter() - before
    head, _, printed = done.stdout.partition("\n")
    peak, busy, status = head.split()
    return Ran(seconds, float(busy), int(peak) / 1024, int(status), printed)


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--events", type=int, default=EVENTS)
    parser.add_argument("--runs", type=int, default=3, help="runs of each command, in turn; the median counts")
    parser.add_argument("--jobs", type=int, default=240, help="jobs of which some leak")
    options = parser.parse_args(arguments or [])
    print(f"$ python -m benchmarks.memory --events {options.events} --runs {options.runs} --jobs {options.jobs}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, own in (("each line of code one list of frames", False), ("each event a list of its own", True)):
            path = folder / "snapshot.pickle"
            write_snapshot(path, options.events, own_stacks=own)
            print(f"\nsnapshot of {options.events:,} events, {path.stat().st_size / 1e6:.0f} MB, {label}")
            _compare(path, folder, options.runs)
            path.unlink()
        _jobs(folder, options.jobs)


def _jobs(folder: Path, count: int) -> None:
    """How often rules are right on jobs by number: leaks that are named by their line, honest ones that are not."""
    from llmconsole.analyzers.registry import all_rules
    from llmconsole.analyzers.runner import analyze
    from llmconsole.capsules import Capsule
    from llmconsole.capsules.importers import import_files

    rules = [
        each for each in all_rules() if each.id in ("memory/leak", "memory/logged-tensors", "memory/fragmentation")
    ]
    leaks = found = wrong = honest = alarms = 0
    path = folder / "snapshot.pickle"
    for number in range(count):
        kind, device, leaked = numbered(number)
        if kind == "leak" and leaked < ENOUGH:
            continue  # too few steps to tell: not counted
        with path.open("wb") as file:
            pickle.dump(device.snapshot(), file)
        report = analyze(Capsule.open(import_files([path], folder / "capsules", attach=False)), rules)
        first = report.first_divergence
        if kind == "leak":
            leaks += 1
            # Half a kilobyte a step fills no device: it is named in a remark.
            found += any("train.py:88" in each.summary for each in report.findings)
            wrong += first is not None and "train.py:88" not in first.summary
        else:
            honest += 1
            alarms += first is not None
    print(f"\n{leaks + honest} jobs on the model of the allocator; {leaks} leak a block in {ENOUGH} steps or more")
    print(f"leaks named by their line: {found} of {leaks}, by another: {wrong}; alarms on others: {alarms} of {honest}")


def _compare(path: Path, folder: Path, runs: int) -> None:
    ours = [sys.executable, "-m", "llmconsole.app.cli", "analyze", str(path), "--json"]
    # As its documentation starts it: the file itself, so that torch is not imported.
    torch = importlib.util.find_spec("torch")
    script = Path(str(torch and torch.origin)).parent / "cuda" / "_memory_viz.py"
    theirs = {words[0]: [sys.executable, str(script), words[0], str(path), *words[1:]] for words in THEIRS}
    once = {name: run(command, folder) for name, command in theirs.items()}
    fastest = min((name for name, each in once.items() if not each.status), key=lambda name: once[name].busy)
    measured: dict[str, list[Ran]] = {"theirs": [], "ours": []}
    for _ in range(runs):
        for label, command in (("theirs", theirs[fastest]), ("ours", ours)):
            measured[label].append(run(command, folder))
    print(f"{'':40} {'seconds':>8} {'target':>7} {'of processor':>13} {'peak MB':>8} {'target':>7}")
    for label, command, target, most in (
        ("theirs", f"python _memory_viz.py {fastest}", "", ""),
        ("ours", "llmconsole analyze", f"≤ {MOST_SECONDS:g}", f"≤ {MOST_MB:g}"),
    ):
        seconds, busy = (
            statistics.median(getattr(each, name) for each in measured[label]) for name in ("seconds", "busy")
        )
        peak = max(each.peak for each in measured[label])
        print(f"{command:40} {seconds:8.2f} {target:>7} {busy:13.2f} {peak:8.0f} {most:>7}")
    others = ", ".join(
        f"{name} {each.busy:.1f} s" for name, each in once.items() if name != fastest and not each.status
    )
    print(f"other commands of theirs, once, seconds of processor: {others or 'none that ends well'}")
    print(f"verdict: {_verdict(measured['ours'][-1])}")


def _verdict(ran: Ran) -> str:
    if ran.status != 1:
        return f"none (exit status {ran.status})"
    first = json.loads(ran.printed)["reports"][0]["first_divergence"]
    return f"{first['rule']}: {first['summary']}"


if __name__ == "__main__":
    main(sys.argv[1:])
