"""The ranks of a job agree on one capsule name without talking to each other more than a store or a launcher does.

No collective and nothing that waits: a rank that never records must not hold up the others.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from ..rank_writer import rank_directory
from .environment import restart_count

# Several recorders in one process (two models, say) are told apart by their turn, which is the same on every rank.
_turns: dict[str, int] = {}
# A capsule of the same launcher name is an earlier run's when it is older than this at the time we start.
JOIN_SECONDS = 600.0


def rank_and_world() -> tuple[int, int]:
    """Rank and number of ranks from the default process group, else from the launcher's variables, else (0, 1)."""
    import torch.distributed as distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    for rank, world in (
        ("RANK", "WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
    ):
        found = os.environ.get(rank, ""), os.environ.get(world, "")
        if all(value.isdecimal() for value in found):
            return int(found[0]), int(found[1])
    return 0, 1


def capsule_path(directory: Path, rank: int, world_size: int) -> Path:
    """The directory of this run's capsule, the same on every rank.

    The first that has an answer decides: the default process group's store, ``LLMCONSOLE_RUN``, the launcher's
    variables; a process alone takes the time and a random part.
    """
    turn = _turns.get(str(directory), 0)
    _turns[str(directory)] = turn + 1
    fresh = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
    name = _from_store(directory, fresh, turn)
    if name is not None:
        return directory / f"{name}.capsule"
    name = _from_environment(os.environ, world_size)
    if name is None:
        return directory / f"{fresh}.capsule"
    restarts = restart_count()
    name += (f"-restart{restarts}" if restarts else "") + (f"-{turn + 1}" if turn else "")
    return _free(directory, name, rank, world_size)


def _from_store(directory: Path, fresh: str, turn: int) -> str | None:
    """Whoever comes first puts its name into the store, and everyone reads what is there then."""
    import torch.distributed as distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    try:
        from .internals import default_store

        # A restarted job may meet the store of its predecessor.
        key = f"llmconsole/capsule/{restart_count() or 0}/{turn}"
        wanted = fresh
        if os.environ.get("LLMCONSOLE_RUN"):
            wanted = _free(directory, _safe(os.environ["LLMCONSOLE_RUN"]), 0, 1).name.removesuffix(".capsule")
        return _safe(default_store().compare_set(key, "", wanted).decode())
    except Exception:  # a store of another kind, or one whose server is gone
        return None


def _from_environment(variables: Mapping[str, str], world_size: int) -> str | None:
    if variables.get("LLMCONSOLE_RUN"):
        return _safe(variables["LLMCONSOLE_RUN"])
    if world_size <= 1:
        return None
    elastic = variables.get("TORCHELASTIC_RUN_ID", "none")
    if elastic != "none":
        return _safe(f"run-{elastic}")
    if variables.get("SLURM_JOB_ID"):
        return _safe(f"slurm-{variables['SLURM_JOB_ID']}-{variables.get('SLURM_STEP_ID', '0')}")
    if variables.get("MASTER_ADDR") and variables.get("MASTER_PORT"):
        return _safe(f"run-{variables['MASTER_ADDR']}-{variables['MASTER_PORT']}")
    return None


def _free(directory: Path, name: str, rank: int, world_size: int) -> Path:
    """The first of NAME, NAME-r2, NAME-r3 … that this rank has not written and that belongs to the run now starting."""
    for number in range(1, 10_000):
        path = directory / (f"{name}.capsule" if number == 1 else f"{name}-r{number}.capsule")
        try:
            age = time.time() - (path / "capsule.json").stat().st_mtime
        except OSError:
            return path
        if world_size > 1 and age < JOIN_SECONDS and not (path / rank_directory(rank)).exists():
            return path
    return directory / f"{name}-{socket.gethostname()}-{secrets.token_hex(3)}.capsule"


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.\-]", "-", name).lstrip(".-")[:100] or "run"
