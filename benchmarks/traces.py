"""What reading a Kineto trace costs, beside ``json.loads`` of the same file: processor seconds and peak memory.

Each reader runs in a process of its own, in turn. Ours streams: its peak does not grow with the file.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EVENTS, MOST_SECONDS, MOST_MB = 100_000, 1.0, 300.0
KERNEL = "void at::native::vectorized_elementwise_kernel<4, at::native::F{}>(int, std::array<char*, 2ul>)"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"


def write(path: Path, events: int) -> None:
    """A trace as torch writes it: for each kernel the operation, the call that launches it and their flow."""
    header = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "H100", "totalGlobalMem": 85_000_000_000}],
        "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
        "baseTimeNanoseconds": 1_790_857_026_000_000_000,
    }
    shapes = {"Concrete Inputs": ["", ""], "Input type": ["float", "float"], "Input Dims": [[8, 128, 64], [64, 64]]}
    work = {"queued": 0, "device": 0, "context": 1, "stream": 7, "grid": [1, 1, 1], "block": [128, 1, 1]}
    with path.open("w") as file:
        file.write(json.dumps(header)[:-1] + ',\n  "traceEvents": [\n')
        for at in range(events // 4):
            start, step = 1e9 + 20.0 * at, {}
            call = {"External id": at, "correlation": at + 1}
            if at % 5000 == 0:
                step = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{at // 5000}", "dur": 100_000}
            each = [
                {**step, "pid": 1, "tid": 1, "ts": start} if step else None,
                {"ph": "X", "cat": "cpu_op", "name": f"aten::op{at % 50}", "pid": 1, "tid": 1, "ts": start, "dur": 9.5,
                 "args": {"External id": at, **shapes}},
                {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": start + 1,
                 "dur": 4, "args": {**call, "cbid": 211}},
                {"ph": "s", "id": at + 1, "pid": 1, "tid": 1, "ts": start + 1, "cat": "ac2g", "name": "ac2g"},
                {"ph": "X", "cat": "kernel", "name": KERNEL.format(at % 80) if at % 20 else NCCL, "pid": 0, "tid": 7,
                 "ts": start + 8, "dur": 11, "args": {**call, **work}},
            ]  # fmt: skip
            separator = ",\n" if at else ""
            file.write(separator + ",\n".join(f"  {json.dumps(one)}" for one in each if one))
        file.write('\n  ],\n  "traceName": "benchmark"\n}\n')


def run(reader: str, path: Path) -> tuple[float, float]:
    """Processor seconds of reading alone, and the peak of the process in MB."""
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.traces", "--run", reader, str(path)],
        check=True,
        capture_output=True,
        text=True,
    )
    seconds, peak = told.stdout.split()
    return float(seconds), float(peak)


def read(reader: str, path: Path) -> None:
    """In the child: read the file one way."""
    if reader == "json.loads":
        begin = time.process_time()
        json.loads(path.read_bytes())
    else:
        from llmconsole.capsules.importers import import_files

        with tempfile.TemporaryDirectory() as place:
            begin = time.process_time()
            import_files([path], place, attach=False)
    print(time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main(events: int = EVENTS, rounds: int = 3) -> None:
    with tempfile.TemporaryDirectory() as place:
        path, large = Path(place) / "trace.json", Path(place) / "large.json"
        write(path, events)
        print(f"{'trace of':28} {'size':>9} {'reader':>12} {'CPU s':>8} {'peak':>9}")
        best: dict[str, tuple[float, float]] = {}
        for _ in range(rounds):
            for reader in ("llmconsole", "json.loads"):
                best[reader] = min(best.get(reader, (9e9, 9e9)), run(reader, path))
        for reader, (seconds, peak) in best.items():
            size = path.stat().st_size / 1e6
            print(f"{f'{events:,} events':28} {size:6.0f} MB {reader:>12} {seconds:8.2f} {peak:6.0f} MB")
        write(large, 10 * events)
        seconds, peak = run("llmconsole", large)
        size = large.stat().st_size / 1e6
        print(f"{f'{10 * events:,} events':28} {size:6.0f} MB {'llmconsole':>12} {seconds:8.2f} {peak:6.0f} MB")
        met = best["llmconsole"][0] <= MOST_SECONDS and peak <= MOST_MB
        print(f"target: ≤ {MOST_SECONDS:g} s of the processor, ≤ {MOST_MB:g} MB: {'met' if met else 'MISSED'}")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--run", nargs=2, metavar=("READER", "FILE"))
    given = arguments.parse_args().run
    if given:
        read(given[0], Path(given[1]))
    else:
        main()
