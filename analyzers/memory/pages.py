"""The page pool of a server, replayed from its key-value events: who holds which blocks, and who kept them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from .records import number, positive, whole
from .thresholds import MOST_EVENTS

if TYPE_CHECKING:
    from ...capsules import Capsule

Block = int | str


@dataclass
class Holder:
    """One request: blocks it holds, those of them that it shares, and how and when (event) it ended."""

    held: set[Block] = field(default_factory=set[Block])
    shared: set[Block] = field(default_factory=set[Block])
    ended: str | None = None
    at: int = -1
    t: float | None = None


@dataclass
class Pool:
    """What the events tell of one engine's pool of pages."""

    holders: dict[str, Holder] = field(default_factory=dict[str, Holder])
    block_size: int | None = None
    total: int | None = None
    in_use: int | None = None  # referenced pages of the last snapshot
    frees: int = 0
    rejects: list[float | None] = field(default_factory=list[float | None])
    admitted: dict[int, int] = field(default_factory=dict[int, int])  # tokens by engine step
    at: dict[int, float] = field(default_factory=dict[int, float])  # Unix seconds of an engine step
    references: dict[Block, int] = field(default_factory=dict[Block, int])

    def leaked(self, ended: str) -> dict[str, Holder]:
        """Requests that ended so and still hold blocks, while one that ended later has given back.

        Of a finished request only what it shares counts, and one that gave back its own blocks shows that the way was
        walked; of a cancelled one all of it.
        """
        returned = max(
            (each.at for each in self.holders.values() if each.ended and not _of_interest(each, ended, own=True)),
            default=-1,
        )
        return {
            name: each
            for name, each in self.holders.items()
            if each.ended == ended and each.at < returned and _of_interest(each, ended)
        }

    def ended(self, how: str) -> int:
        """How many requests ended so."""
        return sum(each.ended == how for each in self.holders.values())


def _of_interest(holder: Holder, ended: str, own: bool = False) -> set[Block]:
    if ended == "cancel":
        return holder.held
    return holder.held - holder.shared if own else holder.held & holder.shared


_POOLS: WeakKeyDictionary[Capsule, tuple[Pool, ...]] = WeakKeyDictionary()


def pools(capsule: Capsule) -> tuple[Pool, ...]:
    """One pool a rank, after the last event."""
    if capsule not in _POOLS:
        found: dict[int, Pool] = {}
        for at, event in zip(range(MOST_EVENTS), capsule.records("kv_events"), strict=False):
            pool = found.setdefault(whole(event.get("rank")) or 0, Pool())
            _take(pool, at, event)
        serving = capsule.manifest.serving
        for pool in found.values():
            if pool.block_size is None and serving is not None:
                pool.block_size = positive(serving.block_size)
        _POOLS[capsule] = tuple(found.values())
    return _POOLS[capsule]


def _take(pool: Pool, at: int, event: Mapping[str, Any]) -> None:
    kind, blocks = str(event.get("kind") or ""), _blocks(event.get("blocks"))
    pool.block_size = positive(event.get("block_size")) or pool.block_size
    pool.total = positive(event.get("total_blocks")) or pool.total
    _refer(pool, blocks, event.get("refcount"))
    t, step = number(event.get("t")), whole(event.get("engine_step"))
    if step is not None and t is not None:
        pool.at[step] = t
    if kind == "snapshot":
        parts = [whole(event.get(name)) for name in ("free", "referenced", "cached")]
        if parts[1] is not None:
            pool.in_use = parts[1]
        if pool.total is None and None not in parts:
            pool.total = sum(each or 0 for each in parts)
        return
    if kind == "reject":
        pool.rejects.append(t)
        return
    name = event.get("request")
    if name is None:
        if kind == "free":
            pool.frees += 1
            _free_of_anyone(pool, blocks)
        return
    holder = pool.holders.setdefault(str(name), Holder())
    if kind in ("allocate", "copy"):
        holder.held |= set(blocks)
    elif kind in ("share", "hit"):
        holder.held |= set(blocks)
        holder.shared |= set(blocks)
    elif kind == "free":
        pool.frees += 1
        holder.held = holder.held - set(blocks) if blocks else set()
    elif kind in ("finish", "cancel"):
        holder.ended, holder.at, holder.t = kind, at, t
    elif kind == "admit" and step is not None:
        tokens = event.get("tokens")
        count = len(tokens) if isinstance(tokens, list) else whole(tokens)
        pool.admitted[step] = pool.admitted.get(step, 0) + (count or 0)


def _free_of_anyone(pool: Pool, blocks: Iterable[Block]) -> None:
    """A block is freed and nobody says by whom: one that has ended is the likelier holder."""
    for block in blocks:
        holders = sorted(
            (each for each in pool.holders.values() if block in each.held), key=lambda each: each.ended is None
        )
        if holders:
            holders[0].held.discard(block)


def _refer(pool: Pool, blocks: list[Block], refcount: Any) -> None:
    if isinstance(refcount, int) and not isinstance(refcount, bool):
        pool.references |= dict.fromkeys(blocks, refcount)
    elif isinstance(refcount, list):
        counts: list[Any] = refcount  # pyright: ignore[reportUnknownVariableType]
        pool.references |= {block: each for block, each in zip(blocks, counts, strict=False) if isinstance(each, int)}
    elif isinstance(refcount, dict):
        named: dict[Any, Any] = refcount  # pyright: ignore[reportUnknownVariableType]
        known = {str(key): each for key, each in named.items() if isinstance(each, int)}
        pool.references |= {block: known[str(block)] for block in blocks if str(block) in known}


def _blocks(value: Any) -> list[Block]:
    return [each for each in value if isinstance(each, int | str)] if isinstance(value, list | tuple) else []
