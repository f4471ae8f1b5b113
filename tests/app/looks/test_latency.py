"""Latency by component and slice: quantiles of a named kind, and no verdict on a handful of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llmconsole.app.looks.latency import CONVENTION, latency, wilson
from llmconsole.app.ui.views.latency import waterfall
from llmconsole.capsules import CapsuleWriter


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    with CapsuleWriter(path / "s.capsule", title="s", phase="serving", manifest={}) as writer:
        writer.records("requests", rows)
    return str(path / "s.capsule")


def test_quantiles_lie_between_order_statistics_and_are_told_only_where_requests_lie_beyond(tmp_path: Path):
    # 0.01 … 1.00 s: type 7 puts p at 1 + 99 p in the ordered list, so p50 = 0.505, p95 = 0.9505, p99 = 0.9901.
    found = latency(write(tmp_path, [{"id": str(i), "ttft": i / 100} for i in range(1, 101)]))
    assert found is not None
    assert (found.total.p50, found.total.p95, found.total.p99) == pytest.approx((0.505, 0.9505, 0.9901))
    assert CONVENTION in found.note
    (tmp_path / "few").mkdir()
    few = latency(write(tmp_path / "few", [{"id": str(i), "ttft": float(i)} for i in range(19)]))
    assert few is not None
    assert (few.total.p50, few.total.p95, few.total.p99, few.slow) == (9.0, None, None, None)


def test_what_no_component_covers_has_a_row_of_its_own(tmp_path: Path):
    rows = [
        {"id": "a", "queue": 1.0, "prefill": {"value": 2.0, "clock": "server"}, "ttft": 4.0},
        {"id": "b", "queue": 3.0, "prefill": 2.0, "arrival": 100.0, "first_token": 105.0},
        {"id": "c", "ttft": 9.0},  # nothing was measured of it, so nothing is missing either
        {"id": "d", "queue": 50.0},  # no time to first token
    ]
    found = latency(write(tmp_path, rows))
    assert found is not None
    assert found.requests == 3
    assert {each.name: (each.requests, each.p50) for each in found.components} == {
        "queue": (2, 2.0),
        "prefill": (2, 2.0),
        "not covered": (2, 0.5),
    }


def test_the_whole_request_adds_decoding(tmp_path: Path):
    found = latency(write(tmp_path, [{"id": str(i), "queue": 1.0, "ttft": 2.0, "e2e": 7.0} for i in range(2)]), "e2e")
    assert found is not None
    assert {each.name: each.p50 for each in found.components} == {"queue": 1.0, "decode": 5.0, "not covered": 1.0}


def test_clocks_that_differ_are_told(tmp_path: Path):
    row = {"id": "a", "queue": {"value": 1.0, "clock": "client"}, "ttft": {"value": 2.0, "clock": "server"}}
    found = latency(write(tmp_path, [row]))
    assert found is not None
    assert "taken on several clocks (client, server)" in found.note


def test_a_slice_is_ranked_by_the_slow_requests_it_holds_beyond_its_size(tmp_path: Path):
    # 200 requests; the 10 slowest (above p95) are all of worker b, which has 50.
    rows = [{"id": str(i), "ttft": 1.0 + i / 1000, "worker": "a", "tenant": f"t{i % 2}"} for i in range(150)]
    rows += [
        {"id": f"b{i}", "ttft": 5.0 + i if i < 10 else 0.5, "worker": "b", "tenant": f"t{i % 2}"} for i in range(50)
    ]
    rows += [{"id": f"r{i}", "ttft": 0.1, "rack": "alone"} for i in range(5)]
    found = latency(write(tmp_path, rows))
    assert found is not None
    first = found.slices[0]
    # 205 requests: p95 is at place 193.8 of 0 … 204, between the 149 of a and b's slow ones: 10 … 11 lie above.
    slow = sum(row["ttft"] > found.slow for row in rows if found.slow is not None)
    assert (first.name, first.requests, first.slow, first.apart) == ("worker=b", 50, 10, True)
    assert first.held == 10 / slow
    assert not any(each.apart for each in found.slices if each.name.startswith("tenant"))
    assert "1 slices with fewer than 30 requests" in found.note


def test_wilsons_interval_is_the_one_in_the_books():
    # 10 of 100 at 95 %: 0.0552 to 0.1744 (Wilson 1927, as tabulated by Newcombe 1998's formula).
    assert wilson(10, 100) == pytest.approx((0.05523, 0.17437), abs=5e-5)
    z2 = 1.959963984540054**2
    assert wilson(0, 50) == pytest.approx((0.0, z2 / (50 + z2)))
    assert wilson(10, 100, 0.001)[0] < 0.0552 < wilson(10, 100, 0.5)[0]


def test_bars_begin_where_the_medians_before_them_end(tmp_path: Path):
    # Two requests alike: only p50 is told. 1 s + 3 s = 4 s on 80 − 52 = 27 cells or so: a quarter, then three.
    found = latency(write(tmp_path, [{"id": str(i), "queue": 1.0, "prefill": 3.0, "ttft": 4.0} for i in range(2)]))
    assert found is not None
    lines = waterfall(found, 92, 20).plain.split("\n")
    starts = {line.split()[0]: (line.find("█"), line.count("█")) for line in lines[3:7]}
    width = starts["ttft"][1]
    assert starts["prefill"][0] - starts["queue"][0] == round(width / 4) == starts["queue"][1]
    assert starts["prefill"][1] == width - round(width / 4)
