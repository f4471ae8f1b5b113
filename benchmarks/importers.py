"""What reading raw files costs: event files beside TensorBoard's own reader, and long logs in bounded memory.

Both readers of an event file keep every point. TensorBoard's is asked as its documentation says to keep all of them
(``size_guidance={"scalars": 0}``); ours checks both checksums of every record, writes a capsule and reads it back. Logs
are imported by a process of its own, whose peak memory the operating system tells.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

TAGS = ("train/loss", "train/grad_norm", "train/learning_rate", "train/epoch")
LINE = (
    " [2026-08-22 15:22:22.123456] iteration {step:8d}/ 9000000 | consumed samples: {samples:12d} | "
    "elapsed time per iteration (ms): 7624.3 | learning rate: 6.676000E-06 | global batch size:    64 | "
    "lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 0.741 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 |\n"
)
FASTER, MOST_MB = 10.0, 300.0


def write_events(path: Path, points: int) -> None:
    """An event file as TensorBoard's record writer makes it."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    with path.open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=1.7e9, file_version="brain.Event:2").SerializeToString())
        for point in range(points):
            step, tag = divmod(point, len(TAGS))
            value = Summary.Value(tag=TAGS[tag], simple_value=2.5 + 8.0 / (1.0 + step * 1e-3))
            event = Event(wall_time=1.7e9 + step * 0.25, step=step, summary=Summary(value=[value]))
            writer.write(event.SerializeToString())


def with_tensorboard(path: Path) -> tuple[float, int]:
    """Seconds, and points kept."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    began = time.perf_counter()
    accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0})
    accumulator.Reload()
    points = sum(len(accumulator.Scalars(tag)) for tag in accumulator.Tags()["scalars"])
    return time.perf_counter() - began, points


def with_llmconsole(path: Path, target: Path) -> tuple[float, int]:
    """Seconds to the series read back from the capsule, and points in them."""
    from llmconsole.capsules import Capsule
    from llmconsole.capsules.importers import import_files

    began = time.perf_counter()
    capsule = Capsule.open(import_files([path], target, attach=False))
    points = sum(len(capsule.scalars(key.name, key.rank, key.side)) for key in capsule.scalar_keys())
    return time.perf_counter() - began, points


def write_log(path: Path, steps: int) -> None:
    """A log as Megatron-LM prints it."""
    with path.open("w") as file:
        for step in range(1, steps + 1):
            file.write(LINE.format(step=step, samples=64 * step, loss=2.5 + 8.0 / (1.0 + step * 1e-3)))


def in_a_process(path: Path) -> tuple[float, float, int]:
    """Import a file in a process of its own: seconds, peak MB of memory, and steps of the loss in the capsule."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.importers", "--import", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, peak, steps = done.stdout.split()
    return float(seconds), float(peak), int(steps)


def _import_here(path: Path) -> None:
    """What the process does: the import, and nothing that would hold the series in memory."""
    from llmconsole.capsules.importers import import_files

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        capsule = import_files([path], folder, attach=False)
        seconds = time.perf_counter() - began
        peak = _peak()
        from llmconsole.capsules import Capsule

        print(seconds, peak, len(np.unique(Capsule.open(capsule).scalars("loss").step)))


def _peak() -> float:
    """Peak MB of this process; the resource usage of a child begins with its parent's peak, so Linux is asked."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.importers", description=__doc__)
    parser.add_argument("--points", type=int, default=1_000_000, help="points of the event file")
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps of the log")
    parser.add_argument("--gigabytes", type=float, default=0.1, help="size of the log whose import is weighed")
    parser.add_argument("--import", dest="path", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments or [])
    if options.path is not None:
        _import_here(options.path)
        return
    command = f"--points {options.points} --steps {options.steps} --gigabytes {options.gigabytes:g}"
    print(f"$ python -m benchmarks.importers {command}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _events(folder, options.points)
        _logs(folder, options.steps, options.gigabytes)


def _events(folder: Path, points: int) -> None:
    path = folder / "events.out.tfevents.1700000000.host.1.0"
    write_events(path, points)
    print(f"event file of {points:,} points, {len(TAGS)} tags, {path.stat().st_size / 1e6:.0f} MB")
    theirs, theirs_kept = with_tensorboard(path)
    ours, ours_kept = with_llmconsole(path, folder / "capsules")
    path.unlink()
    print(f"{'':34} {'seconds':>9} {'points kept':>12} {'× faster':>9} {'target':>7}")
    print(f"{'TensorBoard EventAccumulator':34} {theirs:9.2f} {theirs_kept:12,}")
    label, target = "llmconsole, to a capsule and back", f"≥ {FASTER:g}"
    print(f"{label:34} {ours:9.2f} {ours_kept:12,} {theirs / ours:9.1f} {target:>7}")


def _logs(folder: Path, steps: int, gigabytes: float) -> None:
    lines = max(1, int(gigabytes * 1e9 / len(LINE.format(step=1, samples=64, loss=2.5))))
    print(f"{'Megatron-LM log':34} {'seconds':>9} {'steps kept':>12} {'peak MB':>9} {'target':>7}")
    for count in dict.fromkeys((steps, lines)):
        path = folder / "train.log"
        write_log(path, count)
        label = f"{count:,} steps, {path.stat().st_size / 1e9:.2f} GB"
        seconds, peak, kept = in_a_process(path)
        os.unlink(path)
        print(f"{label:34} {seconds:9.1f} {kept:12,} {peak:9.0f} {f'≤ {MOST_MB:g}':>7}")


if __name__ == "__main__":
    main(sys.argv[1:])
