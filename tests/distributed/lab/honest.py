"""Honest jobs on several ranks, among them those that look like a fault: none may raise an alarm."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from .faults import average_gradients
from .job import BATCH, STEPS, Job, collate, mean_loss


def healthy(job: Job) -> None:
    """Everything that a careful job does: accumulation, evaluation and checkpoints by rank 0 alone."""
    job.told = {"training": {"accumulation_steps": 2}}
    model = DistributedDataParallel(job.model())
    optimizer = job.optimizer(model)
    _, held_out = collate(job.held_out(2 * STEPS))
    with job.recorder(model, optimizer) as recorder:
        for at, (ids, batch) in enumerate(job.batches(2 * STEPS)):
            last = at % 2 == 1
            with recorder.step(batch=batch, sample_ids=ids), nullcontext() if last else model.no_sync():
                loss = mean_loss(model(batch["input_ids"]), batch["labels"])
                (loss / 2).backward()
                if last:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            if at % 8 == 7:
                dist.barrier()
                if job.rank == 0:
                    model.eval()
                    with torch.no_grad(), recorder.evaluation("validation"):
                        mean_loss(model.module(held_out["input_ids"]), held_out["labels"])
                    model.train()
                    torch.save(model.module.state_dict(), job.folder / "checkpoint.pt")
                dist.barrier()


def joined(job: Job) -> None:
    """Rank 1 has fewer batches, and says so: Join answers for it."""
    model = DistributedDataParallel(job.model())
    optimizer = job.optimizer(model)
    batches = islice(job.batches(), STEPS - 2 * (job.rank == 1))
    with job.recorder(model, optimizer) as recorder, Join([model]):
        for ids, batch in batches:
            with recorder.step(batch=batch, sample_ids=ids):
                mean_loss(model(batch["input_ids"]), batch["labels"]).backward()
                optimizer.step()
                optimizer.zero_grad()


def lawful(job: Job) -> None:
    """Whatever may differ between ranks.

    Sizes in some calls, what only one rank gives or gets, neighbours of a pipeline, two groups of the same ranks in
    one order, a reduction that runs beside the next step and is waited for after it, and files of each rank's own.
    """
    world, rank = job.world, job.rank
    first, second = job.group(name="data"), job.group(name="expert")
    under_way: list[tuple[dist.Work, Tensor]] = []

    def after(step: int, loss: Tensor) -> None:
        for work, total in under_way:
            work.wait()
            total /= world
        total = loss.clone()
        under_way[:] = [(dist.all_reduce(total, async_op=True), total)]
        sent, received = [1 + rank] * world, [1 + other for other in range(world)]
        dist.all_to_all_single(torch.empty(sum(received)), torch.ones(sum(sent)), received, sent)
        dist.gather(loss, [torch.empty(()) for _ in range(world)] if rank == 0 else None, dst=0)
        share = torch.empty(2)
        dist.scatter(share, [torch.full((2,), float(each)) for each in range(world)] if rank == 1 else None, src=1)
        dist.reduce(share, dst=1)
        told = [{"step": step, "words": "x" * 10 * step}] if rank == 0 else [None]
        dist.broadcast_object_list(told, src=0)
        dist.all_gather_object([None] * world, "y" * (3 * rank))
        if rank > 0:
            dist.recv(share, rank - 1)
        if rank < world - 1:
            dist.send(share, rank + 1)
        for group in (first, second, first):
            dist.all_reduce(torch.ones(4), group=group)
        dist.barrier()
        if step % 4 == 3:
            torch.save({"random": torch.random.get_rng_state()}, job.folder / f"rank{rank}.pt")
        if step == STEPS - 1:
            under_way.pop()[0].wait()

    job.train(after)


def mesh(job: Job) -> None:
    """Two copies of a model cut in two: ranks of one copy see the same data, and hold different weights."""
    half = job.world // 2
    copies = [job.group(*range(at * half, (at + 1) * half), name="tensor") for at in range(2)]
    shards = [job.group(*range(at, job.world, half), name="data") for at in range(half)]
    copy, shard = job.rank // half, job.rank % half
    job.told = {"training": {"data_parallel": 2, "tensor_parallel": half}}
    model = job.model()
    with torch.no_grad():
        model.head.weight += 0.01 * shard
    optimizer = job.optimizer(model)
    samples = job.samples()[copy::2]
    with job.recorder(model, optimizer) as recorder:
        for at in range(STEPS):
            ids, batch = collate(samples[at * BATCH : (at + 1) * BATCH])
            with recorder.step(batch=batch, sample_ids=ids):
                logits = model(batch["input_ids"])
                mean_loss(logits, batch["labels"]).backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad, group=shards[shard])
                    parameter.grad /= 2
                optimizer.step()
                optimizer.zero_grad()
            dist.all_reduce(logits.detach().sum(), group=copies[copy])


def by_hand(job: Job) -> None:
    """Gradients are averaged without DistributedDataParallel, and the last batch is filled up with seen samples."""
    job.train(average=average_gradients)


def filled_up(job: Job) -> None:
    """The samples do not divide by the ranks, so that the sampler repeats the first of them."""
    samples = job.samples()[:-3]
    sampler = torch.utils.data.DistributedSampler(samples, job.world, job.rank, shuffle=True, seed=0)
    job.train(batches=iter(torch.utils.data.DataLoader(samples, BATCH, sampler=sampler, collate_fn=collate)))


def sharded(job: Job) -> None:
    """Weights, gradients and optimizer state in shards (FSDP2)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = job.model()
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (job.world,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (job.world,)))
    optimizer = job.optimizer(model)
    with job.recorder(model, optimizer) as recorder:
        for ids, batch in job.batches():
            with recorder.step(batch=batch, sample_ids=ids):
                mean_loss(model(batch["input_ids"]), batch["labels"]).backward()
                optimizer.step()
                optimizer.zero_grad()


HONEST: dict[str, Callable[[Job], None]] = {
    "healthy": healthy,
    "joined": joined,
    "what may differ": lawful,
    "copies and shards": mesh,
    "averaged by hand": by_hand,
    "sampler that fills up": filled_up,
    "sharded": sharded,
}
