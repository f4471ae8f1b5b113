"""The text of torch.cuda.memory_summary(), as torch itself formats it, whole, abbreviated, of several devices."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest
import torch

from .conftest import Imports, values

GIB, MIB = 2**30, 2**20


def summary(monkeypatch: pytest.MonkeyPatch, device: int = 0, *, abbreviated: bool = False, **numbers: int) -> str:
    """What torch prints where its allocator counts these numbers."""
    stats: dict[str, int] = {"num_ooms": numbers.get("ooms", 0), "num_alloc_retries": numbers.get("retries", 0)}
    for name in ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes", "inactive_split_bytes"):
        for pool in ("all", "large_pool", "small_pool"):
            current = numbers.get(name, 0) if pool != "small_pool" else 0
            peak = numbers.get(f"peak_{name}", current)
            for kind, value in (("current", current), ("peak", peak), ("allocated", 3 * peak), ("freed", 2 * peak)):
                stats[f"{name}.{pool}.{kind}"] = value
    for name in ("allocation", "active", "segment", "inactive_split", "oversize_allocations", "oversize_segments"):
        for pool in ("all", "large_pool", "small_pool"):
            for kind in ("current", "peak", "allocated", "freed"):
                stats[f"{name}.{pool}.{kind}"] = stats[f"{name}.{kind}"] = 7
    monkeypatch.setattr(torch.cuda.memory, "memory_stats", lambda device=None: stats)
    monkeypatch.setattr(torch.cuda.memory, "_get_device_index", lambda device, optional=False: device)
    text = io.StringIO()
    with redirect_stdout(text):
        print(torch.cuda.memory_summary(device, abbreviated=abbreviated))
    return text.getvalue()


@pytest.mark.parametrize("abbreviated", [False, True])
def test_current_and_peak_values_in_bytes(monkeypatch, imported: Imports, abbreviated: bool):
    text = summary(
        monkeypatch,
        abbreviated=abbreviated,
        allocated_bytes=6 * GIB,
        peak_allocated_bytes=9 * GIB,
        reserved_bytes=12 * GIB,
        active_bytes=7 * GIB,
        requested_bytes=5 * GIB,
        inactive_split_bytes=900 * MIB,
        ooms=1,
        retries=3,
    )
    (record,) = imported(text, name="memory.txt").records("memory")
    assert record == {
        "rank": 0,
        "device": 0,
        "allocated": 6 * GIB,
        "peak": 9 * GIB,
        "reserved": 12 * GIB,
        "peak_reserved": 12 * GIB,
        "active": 7 * GIB,
        "peak_active": 7 * GIB,
        "requested": 5 * GIB,
        "peak_requested": 5 * GIB,
        "fragmentation": 900 * MIB,
        "peak_fragmentation": 900 * MIB,
        "ooms": 1,
        "retries": 3,
    }


def test_several_devices_and_small_numbers(monkeypatch, imported: Imports):
    text = "".join(
        summary(monkeypatch, device, allocated_bytes=512 + device, reserved_bytes=2 * MIB) for device in (0, 1)
    )
    found = imported(text, name="memory.txt").records("memory")
    assert [(each["rank"], each["allocated"], each["reserved"]) for each in found] == [
        (0, 512, 2 * MIB),
        (1, 513, 2 * MIB),
    ]


def test_amid_a_log_it_belongs_to_the_step_and_the_rank_that_prints(monkeypatch, imported: Imports):
    table = summary(monkeypatch, 0, allocated_bytes=4 * GIB, reserved_bytes=5 * GIB, retries=2)
    lines = "".join(f"[rank3]: {line}\n" for line in table.splitlines())
    capsule = imported(f"[rank3]: step 7 loss 2.5\n{lines}[rank3]: step 8 loss 2.25\n")
    (record,) = capsule.records("memory")
    assert (record["rank"], record["step"], record["allocated"]) == (3, 7, 4 * GIB)
    assert values(capsule, "alloc_retries", rank=3) == [(7, 2.0)]
    assert len(values(capsule, "loss", rank=3)) == 2


def test_each_of_several_tables_belongs_to_the_step_before_it(monkeypatch, imported: Imports):
    tables = [summary(monkeypatch, 0, allocated_bytes=n * GIB, reserved_bytes=9 * GIB) for n in (4, 5)]
    text = "".join(f"iter {at}: loss 2.5, time 210.14ms, mfu 31.2%\n{tables[at // 2]}\n" * (at % 2) for at in (1, 3))
    capsule = imported(text + "iter 4: loss 2.4, time 210.14ms, mfu 31.2%\n")
    assert [(each["step"], each["allocated"]) for each in capsule.records("memory")] == [(1, 4 * GIB), (3, 5 * GIB)]


def test_the_layout_of_older_versions(imported: Imports):
    text = """\
|===========================================================================|
|                  PyTorch CUDA memory summary, device ID 5                 |
|---------------------------------------------------------------------------|
|            CUDA OOMs: 0            |        cudaMalloc retries: 0         |
|===========================================================================|
|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |
|---------------------------------------------------------------------------|
| Allocated memory      |    8192 MB |    9216 MB |   18432 MB |   10240 MB |
|       from large pool |    8000 MB |    9000 MB |   18000 MB |   10000 MB |
|---------------------------------------------------------------------------|
| GPU reserved memory   |   10240 MB |   10240 MB |   10240 MB |       0 B  |
|===========================================================================|
"""
    (record,) = imported(text, name="old.txt").records("memory")
    assert (record["rank"], record["allocated"], record["peak"], record["reserved"]) == (5, 8 * GIB, 9 * GIB, 10 * GIB)


def test_a_torn_table_is_read_as_far_as_it_goes(monkeypatch, imported: Imports):
    text = summary(monkeypatch, allocated_bytes=4 * GIB, reserved_bytes=5 * GIB)
    at = text.index("| Active memory")
    (record,) = imported(text[:at], name="torn.txt").records("memory")
    assert record["allocated"] == 4 * GIB
    assert "reserved" not in record
