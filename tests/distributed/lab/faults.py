"""The faults of jobs on several ranks. The line that a report shall name ends in ``# here``."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .job import STEPS, Job, mean_loss

ODD_STEP = 4


def average_gradients(model: nn.Module) -> None:
    """What DistributedDataParallel does, by hand."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


# -- one rank calls otherwise


def missing_call(job: Job) -> None:
    """One rank leaves out the reduction of the loss once, and goes on with what comes next."""

    def after(step: int, loss: Tensor) -> None:
        if job.rank == job.odd and step == ODD_STEP:
            return
        dist.all_reduce(loss)  # here
        dist.all_reduce(torch.tensor([float(step), 1.0]))

    job.train(after)


def never_comes(job: Job) -> None:
    """One rank is stuck in its own code (a lock, a file system) before a call that all others made."""

    def after(step: int, loss: Tensor) -> None:
        if job.rank == job.odd and step == ODD_STEP:
            time.sleep(2 * job.timeout.total_seconds())
        dist.all_reduce(loss)  # here

    job.train(after)


def extra_call(job: Job) -> None:
    """One rank synchronises once more than the others."""

    def after(step: int, loss: Tensor) -> None:
        if job.rank == job.odd and step == ODD_STEP:
            dist.all_reduce(torch.ones(3))  # here
        dist.all_reduce(loss)

    job.train(after)


def different_shape(job: Job) -> None:
    """One rank counts one class more."""

    def after(step: int, loss: Tensor) -> None:
        counts = torch.ones(8 if (job.rank, step) == (job.odd, ODD_STEP) else 4)
        dist.all_reduce(counts)  # here

    job.train(after)


def different_dtype(job: Job) -> None:
    """One rank sends float16 where the others send bfloat16: as many bytes, so that nothing fails."""

    def after(step: int, loss: Tensor) -> None:
        odd = (job.rank, step) == (job.odd, ODD_STEP)
        dist.all_reduce(torch.ones(4, dtype=torch.float16 if odd else torch.bfloat16))  # here

    job.train(after)


def different_op(job: Job) -> None:
    """One rank broadcasts what the others reduce."""

    def after(step: int, loss: Tensor) -> None:
        counts = torch.ones(4)
        if (job.rank, step) == (job.odd, ODD_STEP):
            dist.broadcast(counts, 0)  # here
        else:
            dist.all_reduce(counts)

    job.train(after)


def group_order(job: Job) -> None:
    """One rank enters two groups in the other order."""
    first, second = job.group(name="data"), job.group(name="expert")

    def after(step: int, loss: Tensor) -> None:
        turned = (job.rank, step) == (job.odd, ODD_STEP)
        for group in (second, first) if turned else (first, second):
            dist.all_reduce(torch.ones(4), group=group)  # here

    job.train(after)


def rank_zero_only(job: Job) -> None:
    """Rank 0 evaluates, and waits there for everyone."""

    def after(step: int, loss: Tensor) -> None:
        if job.rank == 0 and step == ODD_STEP:
            dist.barrier()  # here
        dist.all_reduce(loss)

    job.train(after)


def uneven_steps(job: Job) -> None:
    """One rank leaves out a batch with too little to learn from, and ends a step before the others."""
    batches = job.batches()
    if job.rank == job.odd:
        batches = (batch for step, batch in enumerate(batches) if step != ODD_STEP)
    job.train(batches=batches)


# -- one rank ends


def killed(job: Job) -> None:
    """The kernel's out-of-memory killer takes one rank."""

    def before(step: int, model: nn.Module) -> None:
        if (job.rank, step) == (job.odd, ODD_STEP):
            os.kill(os.getpid(), signal.SIGKILL)

    job.train(before=before)


def memory_error(job: Job) -> None:
    """One rank asks for more memory than there is."""

    def before(step: int, model: nn.Module) -> None:
        if (job.rank, step) == (job.odd, ODD_STEP):
            raise MemoryError("Unable to allocate 1.00 PiB for an array")  # here

    job.train(before=before)


def raised(job: Job) -> None:
    """One rank reads a sample that it cannot parse."""

    def before(step: int, model: nn.Module) -> None:
        if (job.rank, step) == (job.odd, ODD_STEP):
            raise ValueError("sample 17: not a JSON object")  # here

    job.train(before=before)


# -- data, replicas and gradients


def no_sampler(job: Job) -> None:
    """Each rank shuffles all data with one seed."""
    job.train(batches=job.batches(shared=False))


def perturbed(job: Job) -> None:
    """One rank's weights are changed by themselves."""

    def before(step: int, model: nn.Module) -> None:
        if (job.rank, step) == (job.odd, ODD_STEP):
            with torch.no_grad():
                model.module.head.weight[3, 5] += 0.25

    job.train(before=before)


def not_averaged(job: Job) -> None:
    """The reduction of the gradients was forgotten."""
    job.train(average=lambda model: None)


def summed(job: Job) -> None:
    """Gradients are added and not divided."""

    def add(model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    job.train(average=add)


# -- time and buffers


def slow_rank(job: Job) -> None:
    """One rank takes three times as long over each batch, however busy the machine is."""
    went_on = time.perf_counter()

    def before(step: int, model: nn.Module) -> None:
        nonlocal went_on
        if job.rank == job.odd:
            time.sleep(max(0.15, 2 * (time.perf_counter() - went_on)))
        went_on = time.perf_counter()

    job.train(before=before, batches=job.batches(2 * STEPS))


def reused_buffer(job: Job) -> None:
    """A buffer is filled anew while its reduction is under way."""
    counts = torch.zeros(4)

    def after(step: int, loss: Tensor) -> None:
        work = dist.all_reduce(counts, async_op=True)  # here
        counts.fill_(float(loss))
        work.wait()

    job.train(after)


# -- files


def one_path(job: Job) -> None:
    """Each rank writes the checkpoint."""
    path = job.folder / "checkpoint.pt"
    model = DistributedDataParallel(job.model())
    optimizer = job.optimizer(model)
    with job.recorder(model, optimizer) as recorder:
        for step, (ids, batch) in enumerate(job.batches()):
            with recorder.step(batch=batch, sample_ids=ids):
                mean_loss(model(batch["input_ids"]), batch["labels"]).backward()
                optimizer.step()
                optimizer.zero_grad()
            if step % 4 == 3:
                torch.save(model.state_dict(), path)
                dist.barrier()


@dataclass(frozen=True)
class Fault:
    """A job with one fault.

    Attributes:
        rule: what names it.
        odd: the rank that does otherwise; None where all do.
        hangs: ranks wait for one another in vain.
        patient: and would do so for longer than anybody waits.
    """

    run: Callable[[Job], None]
    rule: str
    odd: int | None = None
    hangs: bool = False
    patient: bool = False


FAULTS: dict[str, Fault] = {
    "missing call": Fault(missing_call, "distributed/collective-mismatch", 2, hangs=True),
    "a rank that never comes": Fault(never_comes, "distributed/missing-rank", 1, hangs=True),
    "extra call": Fault(extra_call, "distributed/collective-mismatch", 1, hangs=True),
    "different shape": Fault(different_shape, "distributed/collective-mismatch", 3, hangs=True),
    "different dtype": Fault(different_dtype, "distributed/collective-mismatch", 1),
    "different op": Fault(different_op, "distributed/collective-mismatch", 2, hangs=True),
    "groups in different order": Fault(group_order, "distributed/group-order", 3, hangs=True),
    "rank 0 only": Fault(rank_zero_only, "distributed/rank-conditional", 0, hangs=True),
    "uneven steps": Fault(uneven_steps, "distributed/uneven-steps", 1, hangs=True),
    "out-of-memory kill": Fault(killed, "distributed/rank-died-first", 2, hangs=True),
    "MemoryError": Fault(memory_error, "distributed/rank-died-first", 1, hangs=True),
    "exception": Fault(raised, "distributed/rank-died-first", 3, hangs=True),
    "no sampler": Fault(no_sampler, "distributed/duplicate-data"),
    "perturbed parameters": Fault(perturbed, "distributed/replicas-diverged", 3),
    "gradients not averaged": Fault(not_averaged, "distributed/gradient-scale"),
    "gradients summed": Fault(summed, "distributed/gradient-scale"),
    "slow rank": Fault(slow_rank, "distributed/straggler", 2),
    "reused buffer": Fault(reused_buffer, "distributed/unwaited-buffer"),
    "one path": Fault(one_path, "distributed/rank-zero-work-everywhere"),
}

#: A fault that nothing in the job ends.
FOREVER: dict[str, Fault] = {
    "a rank that is stuck": Fault(never_comes, "distributed/missing-rank", 1, hangs=True, patient=True),
}
