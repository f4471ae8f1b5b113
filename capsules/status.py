"""Whether a capsule is still being written: derived from what its ranks last said, never from what they intended."""

from __future__ import annotations

from typing import Literal

from .manifest import Manifest, RankState
from .process import host, is_gone

DerivedStatus = Literal["recording", "sealed", "crashed", "stale"]

#: Seconds without a heartbeat after which a recording rank is not believed any more.
HEARTBEAT_TIMEOUT = 30.0


def rank_status(state: RankState, now: float) -> DerivedStatus:
    """Status of one rank at Unix time ``now``.

    A recording rank without a heartbeat for 30 s is crashed where its host is this one and its process is gone (or
    its pid belongs to another process now); elsewhere nobody can know, and it is stale.
    """
    if state.status != "recording":
        return state.status
    if state.heartbeat is not None and now - state.heartbeat < HEARTBEAT_TIMEOUT:
        return "recording"
    if state.host == host() and state.pid is not None and is_gone(state.pid, state.process_start):
        return "crashed"
    return "stale"


def capsule_status(manifest: Manifest, ranks: list[RankState], now: float) -> DerivedStatus:
    """Status of a capsule: as its creator sealed it, else the worst that any rank says."""
    if manifest.status != "recording":
        return manifest.status
    if not ranks:  # killed between the manifest and the first heartbeat, or somebody else's writer
        writer = manifest.writer
        creator = (
            RankState(host=writer.host, pid=writer.pid, process_start=writer.process_start) if writer else RankState()
        )
        return rank_status(creator, now)
    found = {rank_status(each, now) for each in ranks}
    for status in ("crashed", "recording", "stale"):
        if status in found:
            return status
    return "sealed"
