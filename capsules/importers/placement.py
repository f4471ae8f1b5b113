"""Devices that files name: where a rank computes, and how much memory its device has."""

from __future__ import annotations

from typing import Any

from .run import Run


def placed(out: Run, rank: int, *, device: str = "", name: str = "", memory: int | None = None) -> None:
    """State the device of a rank in the manifest's placement; of a rank that is placed already what is missing.

    Args:
        out: the run that is imported.
        rank: of the job; where files speak of devices only, the device's number.
        device: torch's name of it, ``cuda:0``.
        name: what its maker calls it.
        memory: its capacity in bytes.
    """
    known: dict[str, Any] = {"rank": rank, "device": device, "name": name, "memory": memory}
    stated: dict[str, Any] | None = getattr(out, "stated", None)
    if stated is None:  # only a glance at the file's steps
        return
    placement = stated.setdefault("placement", {})
    ranks = placement.setdefault("ranks", []) if isinstance(placement, dict) else []
    if not isinstance(ranks, list) or len(ranks) >= 4096:
        return
    found = next((each for each in ranks if isinstance(each, dict) and each.get("rank") == rank), None)
    if found is None:
        ranks.append(found := {})
    for field, value in known.items():
        if value not in ("", None):
            found.setdefault(field, value)
