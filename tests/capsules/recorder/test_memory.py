"""The recorder's memory ledger: exact bytes on a CPU, and the decisions that a device needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from llmconsole.capsules import Capsule, Recorder
from llmconsole.capsules.recorder.memory import HighWater, MemoryLedger, size_of
from torch import nn
from torch.nn import functional as F

from tests.capsules.recorder.conftest import GPT, Run, cross_entropy, shifted


def rows(path: Path | None) -> dict[tuple[int, str], dict]:
    assert path is not None
    return {(row["step"], row["phase"]): row for row in Capsule.open(path).records("memory")}


def test_weights_gradients_and_states_are_counted_exactly(tmp_path: Path):
    run = Run(tmp_path, every=3)
    elements = sum(each.numel() for each in run.model.parameters())
    tensors = len(list(run.model.parameters()))
    run.train(7)
    run.recorder.close()
    found = rows(run.recorder.path)
    assert set(found) == {(step, phase) for step in (0, 3, 6) for phase in ("forward", "backward", "optimizer")}
    states = 8 * elements + 4 * tensors  # two moments, and a step in float32 for each tensor
    for step in (0, 3, 6):
        assert {found[step, phase]["weights"] for phase in ("forward", "backward", "optimizer")} == {4 * elements}
        assert [found[step, phase]["gradients"] for phase in ("forward", "backward")] == [0, 4 * elements]
        assert found[step, "optimizer"]["optimizer"] == states
    assert found[0, "forward"]["optimizer"] == 0  # made by the first step
    assert found[3, "forward"]["optimizer"] == states
    assert "allocated" not in found[3, "optimizer"]  # a CPU has no allocator to ask


def test_tied_weights_count_once_and_gradients_stay_over_micro_batches(tmp_path: Path):
    model = GPT(width=16)
    model.head = nn.Linear(16, 50, bias=False)
    model.head.weight = model.tokens.weight
    elements = sum(each.numel() for each in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path, model=model, optimizer=optimizer, every=1) as recorder:
        for micro in range(2):
            inputs, targets = shifted(micro)
            with recorder.step(batch=(inputs, targets)):
                cross_entropy(model(inputs), targets).backward()
                if micro == 1:
                    optimizer.step()
    found = rows(recorder.path)
    assert found[0, "forward"] | {"rank": 0} == found[0, "forward"] | {"weights": 4 * elements, "rank": 0}
    assert found[0, "forward"]["gradients"] == 4 * elements  # of the first micro-batch, when the second went forward
    assert found[0, "optimizer"]["optimizer"] == 0


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A process group that stands for four ranks and sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
def test_of_a_sharded_model_the_part_of_this_rank_counts():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    ledger = MemoryLedger(model, lambda: ())
    assert size_of(model.parameters(), ledger.device) == 2 * 64 * 64 * 4 // 4


def test_the_high_water_mark_rises_falls_with_a_reset_and_rises_from_there():
    high = HighWater()
    high.rose(100)
    assert [high.rose(each) for each in (100, 110, 110, 40, 50)] == pytest.approx([0, 0.1, 0, 0, 0.25])


def test_an_optimizer_of_odd_state_and_a_model_without_parameters_cost_nothing_else(tmp_path: Path):
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter] = {"history": [torch.zeros(8), torch.zeros(8)], "name": "odd", "none": None}

    model = GPT()
    optimizer = Odd(model.parameters(), lr=0.1)
    with Recorder(tmp_path, model=model, optimizer=optimizer) as recorder:
        inputs, targets = shifted(0)
        with recorder.step(batch=(inputs, targets)):
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    found = rows(recorder.path)
    assert found[0, "optimizer"]["optimizer"] == 2 * 32 * len(list(model.parameters()))

    with Recorder(tmp_path / "none") as recorder, recorder.step():
        F.mse_loss(torch.ones(3, requires_grad=True), torch.zeros(3)).backward()
    assert {row["weights"] for row in rows(recorder.path).values()} <= {0}


def test_a_host_without_memory_and_a_device_without_are_told_apart(tmp_path: Path):
    message = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is "
        "free. Of the allocated memory 77.00 GiB is allocated by PyTorch, and 0.50 GiB is reserved by PyTorch but "
        "unallocated."
    )
    found = {}
    for error in (torch.OutOfMemoryError(message), MemoryError()):
        model = GPT()
        recorder = Recorder(tmp_path, model=model)
        with contextlib.suppress(type(error)), recorder.step(batch=shifted(0)):
            cross_entropy(model(shifted(0)[0]), shifted(0)[1]).backward()
            raise error
        recorder.close()
        assert recorder.path is not None
        events = Capsule.open(recorder.path).records("events")
        (found[type(error)],) = (each for each in events if each["kind"] == "oom")
    event = found[torch.OutOfMemoryError]
    assert (event["requested"], event["free"], event["phase"]) == (2 << 30, 1 << 30, "optimizer")
    assert found[MemoryError]["where"] == "host"
    assert "requested" not in found[MemoryError]


def test_the_manifest_says_what_a_layer_is_made_of(tmp_path: Path):
    class RMSNorm(nn.Module):
        pass

    model = nn.Sequential(nn.Embedding(8, 4), RMSNorm(), nn.Dropout(0.1), nn.Linear(4, 8))
    with Recorder(tmp_path, model=model) as recorder:
        assert recorder.path is not None
    facts = Capsule.open(recorder.path).manifest.model
    assert facts is not None
    assert (facts.norm, facts.dropout, facts.attention) == ("rms", 0.1, None)
