"""Two ranks over Gloo: one capsule, a directory a rank, and no call that could make one rank wait for the other."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
from llmconsole.capsules import Capsule, Recorder
from llmconsole.capsules.recorder import rendezvous

SCRIPT = """
import os, sys
rank, port, kind = int({rank}), "{port}", "{kind}"
os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
import torch, torch.nn.functional as F
import torch.distributed as dist
from torch import nn
from llmconsole.capsules import Recorder
torch.manual_seed(0); torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 50))
if kind == "ddp":
    wrapped = nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[1], mesh=mesh); fully_shard(model, mesh=mesh)
    wrapped = model
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
# Rank 1 starts late, and only rank 0 records the last steps: neither may keep the other waiting.
if rank == 1:
    import time; time.sleep(0.5)
recorder = Recorder(sys.argv[1], model=wrapped, optimizer=optimizer, every=2)
for step in range(4):
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, 50, (4, 13), generator=generator)
    with recorder.step(batch=(ids[:, :-1], ids[:, 1:])) as micro:
        loss = F.cross_entropy(wrapped(ids[:, :-1]).view(-1, 50), ids[:, 1:].reshape(-1))
        loss.backward()
        norms = [p.grad for p in wrapped.parameters()]
        norms = [g.to_local() if hasattr(g, "to_local") else g for g in norms]
        micro.log(own_norm=torch.stack([g.norm() for g in norms]).norm())
        optimizer.step(); optimizer.zero_grad()
    if step == 1 and rank == 1:
        recorder.close()
recorder.close()
print("done", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def both(job: Any) -> Any:
    def both(kind: str) -> Capsule:
        port = free_port()
        # One folder for the capsules of both: the second script gets the first one's.
        jobs = [job(SCRIPT.format(rank=rank, port=port, kind=kind), f"rank{rank}", runs="runs") for rank in range(2)]
        for each in jobs:
            status, out, err = each.finish()
            assert (status, out) == (0, "done\n"), err
            assert "recording" not in err
        return jobs[0].capsule()

    return both


class TestDataParallel:
    def test_both_ranks_are_in_one_capsule_with_local_and_reduced_gradients(self, both: Any) -> None:
        capsule = both("ddp")
        assert (capsule.ranks, capsule.status) == ((0, 1), "sealed")
        assert capsule.manifest.run.world_size == 2
        assert capsule.manifest.run.backend == "gloo"
        first, second = (capsule.scalars("grad_norm_reduced", rank=rank).value for rank in (0, 1))
        assert first[:2] == pytest.approx(second[:2], rel=1e-6)
        assert first == pytest.approx(capsule.scalars("own_norm", rank=0).value, rel=1e-5)
        local = [capsule.scalars("grad_norm_local", rank=rank).value for rank in (0, 1)]
        assert local[0][:2] != pytest.approx(local[1][:2], rel=1e-3)
        assert capsule.scalars("loss", rank=0).value[0] != capsule.scalars("loss", rank=1).value[0]
        assert [len(capsule.scalars("loss", rank=rank)) for rank in (0, 1)] == [4, 2]

    def test_the_local_norm_is_that_of_the_rank_alone(self, both: Any) -> None:
        capsule = both("ddp")
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Embedding(50, 16), torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 50)
        )
        ids = torch.randint(0, 50, (4, 13), generator=torch.Generator().manual_seed(1))
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).view(-1, 50), ids[:, 1:].reshape(-1))
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
        assert capsule.scalars("grad_norm_local", rank=1).value[0] == pytest.approx(norm, rel=1e-5)
        assert capsule.scalars("loss", rank=1).value[0] == pytest.approx(loss.item(), rel=1e-6)


def test_shards_are_measured_as_shards_without_a_collective(both: Any) -> None:
    capsule = both("fsdp2")
    assert (capsule.ranks, capsule.status) == ((0, 1), "sealed")
    assert len(capsule.scalars("grad_norm", rank=0)) == 0  # whole only after a collective
    for rank in (0, 1):
        own = capsule.scalars("own_norm", rank=rank).value
        assert capsule.scalars("grad_norm_shard", rank=rank).value == pytest.approx(own, rel=1e-5)
    gradients = capsule.stats(rank=0, role="gradient", step=1)
    shapes = dict(zip(gradients.name, gradients.shape, strict=True))
    assert tuple(shapes["1.weight"]) == (32, 16)  # half of [64, 16]
    assert tuple(shapes["3.weight"]) == (25, 64)
    assert "1" in shapes  # gradients of outputs too
    assert len(capsule.scalars("update_norm", rank=0)) == 4


class TestNames:
    def test_a_process_alone_has_a_name_of_its_own_each_time(self, tmp_path: Any, monkeypatch: Any) -> None:
        monkeypatch.delenv("LLMCONSOLE_RUN", raising=False)
        assert rendezvous.capsule_path(tmp_path, 0, 1) != rendezvous.capsule_path(tmp_path, 0, 1)

    def test_ranks_of_plain_torchrun_meet_under_address_and_port(self, tmp_path: Any, monkeypatch: Any) -> None:
        monkeypatch.delenv("LLMCONSOLE_RUN", raising=False)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        monkeypatch.setenv("MASTER_ADDR", "node7")
        monkeypatch.setenv("MASTER_PORT", "29500")
        names = set()
        for rank in range(2):
            rendezvous._turns.clear()  # each rank is a process of its own
            names.add(rendezvous.capsule_path(tmp_path, rank, 2).name)
        assert names == {"run-node7-29500.capsule"}

    def test_a_restart_gets_a_capsule_of_its_own(self, tmp_path: Any, monkeypatch: Any) -> None:
        monkeypatch.setenv("LLMCONSOLE_RUN", "pretrain 7")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
        rendezvous._turns.clear()
        assert rendezvous.capsule_path(tmp_path, 0, 8).name == "pretrain-7-restart2.capsule"

    def test_a_name_used_by_an_earlier_run_is_not_written_into(self, tmp_path: Any, monkeypatch: Any) -> None:
        monkeypatch.setenv("LLMCONSOLE_RUN", "mine")
        earlier = tmp_path / "mine.capsule"
        (earlier / "ranks" / "rank00000").mkdir(parents=True)
        (earlier / "capsule.json").write_text("{}")
        rendezvous._turns.clear()
        assert rendezvous.capsule_path(tmp_path, 0, 1).name == "mine-r2.capsule"


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "soon", object()])
def test_a_patience_that_is_none_is_the_default_and_ends_no_recording(
    seconds: Any, tmp_path: Any, monkeypatch: Any, caplog: Any
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LLMCONSOLE_RUN": "odd"}.items():
        monkeypatch.setenv(name, value)
    rendezvous._turns.clear()
    recorder = Recorder(tmp_path, model=torch.nn.Linear(2, 2), hang_after=seconds)
    assert recorder.recording
    assert recorder._finisher.ranks._hang_after is None
    recorder.close()
    assert "is no number of seconds above 0" in caplog.text
