"""What torchrun starts on each rank: every job in a process of its own, forked after torch was imported once.

``python -m tests.distributed.lab.main FOLDER NAME…`` plays the jobs of those names, a few at a time since those that
hang only wait; with ``--plain`` before the folder the one named is played in this process itself, as torchrun sees it.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer would import it, for a second or more
import torch.distributed as dist
import torch.distributed.algorithms.join
import torch.distributed.fsdp  # noqa: F401

from .faults import FAULTS, FOREVER, Fault
from .honest import HONEST
from .job import PATIENT, Job, place

#: Jobs under way on a rank at any time.
AT_ONCE = 4

#: Seconds after which a process ends by itself, should the one that started all be gone.
LIFE = 600


def play(folder: Path, name: str) -> None:
    """Take this rank's part in a job, as a script of its own would: what it raises ends the process."""
    signal.alarm(LIFE)
    os.environ["LLMCONSOLE_RUN"] = "job"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=PATIENT))
    fault = (FAULTS | FOREVER).get(name) or Fault(HONEST[name], rule="")
    odd = -1 if fault.odd is None else min(fault.odd, world - 1)
    job = Job(
        rank=rank, world=world, store=dist.PrefixStore(name, store), folder=place(folder, name), odd=odd,
        hangs=fault.hangs, patient=fault.patient or not fault.hangs,
    )  # fmt: skip
    job.begin()
    fault.run(job)
    dist.destroy_process_group()


def play_apart(folder: Path, name: str) -> int:
    """Play a job in a forked process, and return its number.

    The process ends as the interpreter would end it, without taking all of torch apart, which costs more than the job.
    """
    pid = os.fork()
    if pid:
        return pid
    path = place(folder, name) / f"said-{os.environ['RANK']}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    said = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    status = 0
    try:
        play(folder, name)
    except BaseException:
        status = 1
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    """Play all jobs, and write how each ended."""
    arguments = [each for each in sys.argv[1:] if each != "--plain"]
    folder, names = Path(arguments[0]), arguments[1:]
    if "--plain" in sys.argv:
        place(folder, names[0]).mkdir(parents=True, exist_ok=True)
        return play(folder, names[0])
    signal.alarm(LIFE)
    gc.collect()
    gc.freeze()  # what is here already need not be copied into each process
    under_way: dict[int, str] = {}
    while names or under_way:
        if names and len(under_way) < AT_ONCE:
            name = names.pop(0)
            under_way[play_apart(folder, name)] = name
        else:
            pid, status = os.wait()
            ended = place(folder, under_way.pop(pid)) / f"ended-{os.environ['RANK']}.txt"
            ended.write_text(str(os.waitstatus_to_exitcode(status)))
    return None


if __name__ == "__main__":
    main()
