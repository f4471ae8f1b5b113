"""What each rank counted: optimizer windows, micro-batches, samples left out, and how it ended."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..attempts import current_events

if TYPE_CHECKING:
    from ...capsules import Capsule

#: A line that says that data was left out; a step that a loss scaler skips is no data.
_SKIP = re.compile(
    r"\b(?:skip(?:s|ped|ping)?|drop(?:s|ped|ping)?|discard(?:s|ed|ing)?|filter(?:ed|ing)(?: out)?)\b"
    r".{0,60}?\b(?:sample|example|batch|micro[- ]?batch|document|row|sequence|record|prompt|image)(?:s|es)?\b"
    r"|\b(?:sample|example|batch|micro[- ]?batch|document|row|sequence|record|prompt|image)(?:s|es)?\b"
    r".{0,40}?\b(?:skipped|dropped|discarded|filtered out)\b",
    re.IGNORECASE,
)
_NO_SKIP = re.compile(
    r"overflow|loss scale|\b(?:skipped|dropped|discarded|filtered)\b\D{0,24}\b0\b"
    r"|\b0 (?:\w+ ){0,2}(?:were )?(?:skipped|dropped)"
    r"|skip_?(?:first|batches|eval|save)|drop_last|resum|fast[- ]?forward|already (?:seen|trained)",
    re.IGNORECASE,
)
#: Errors by which a rank says that another one did not come.
_WAITED = re.compile(
    r"time[d ]?[- ]?out|connection (?:closed|reset|refused)|watchdog|collective|nccl|gloo|socket|broken pipe|peer",
    re.IGNORECASE,
)
DIED = ("exception", "oom", "signal")


@dataclass
class Account:
    """One rank's books.

    ``steps`` is the number of windows it says it made, ``first`` and ``last`` the numbers of the windows that left
    evidence, ``inside`` that of the last call it made; ``micro`` the micro-batches of each window; ``skips`` what it
    says of data left out, with the step where it does.
    """

    rank: int
    steps: int | None = None
    first: int | None = None
    last: int | None = None
    inside: int | None = None
    seen: int | None = None
    skipped: int | None = None
    reason: str | None = None
    ended: str | None = None
    message: str = ""
    ended_at: float = math.inf
    pending: bool = False
    reached: dict[str, int] = field(default_factory=dict[str, int])
    micro: Counter[int] = field(default_factory=Counter[int])
    skips: list[tuple[int | None, str]] = field(default_factory=list[tuple[int | None, str]])

    @property
    def waited(self) -> bool:
        """Whether it ended, or stood at the end, waiting for others."""
        return self.ended == "hang" or (self.ended in DIED and bool(_WAITED.search(self.message)))

    @property
    def begun(self) -> int | None:
        """Windows that it made or began: one that hangs is in no count of finished ones."""
        known = [each for each in (self.last, self.inside) if each is not None]
        if self.first is None or not known:
            return self.steps
        return max(self.steps or 0, max(known) - self.first + 1)

    @property
    def left_out(self) -> int:
        """Samples that it says it left out."""
        return max(self.skipped or 0, len(self.skips))


def accounts(capsule: Capsule) -> dict[int, Account]:
    """The books of every rank that left any, by rank."""
    found: dict[int, Account] = {}

    def of(rank: int) -> Account:
        return found.setdefault(rank, Account(rank))

    for record in capsule.records("ranks"):
        _summary(of(record["rank"]), record)
    micros: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for record in (*capsule.records("microbatches"), *capsule.records("events")):
        begins = record.get("kind") == "step_begin" or "kind" not in record
        step = record.get("step")
        if begins and isinstance(step, int):
            micros[record["rank"]].add((step, record.get("micro") or 0))
    for rank, each in micros.items():
        of(rank).micro = Counter(step for step, _ in each)
    for rank, steps in _steps_of(capsule, micros).items():
        of(rank).first, of(rank).last = min(steps), max(steps)
    for event in current_events(capsule):
        if event.get("kind") == "log" and event.get("told") is not False:
            message = event.get("message")
            if message and len(message) < 2000 and _SKIP.search(message) and not _NO_SKIP.search(message):
                of(event["rank"]).skips.append((event.get("step"), message))
    _calls(capsule, found)
    return dict(sorted(found.items()))


def _summary(account: Account, record: dict[str, Any]) -> None:
    """Later records of a rank complete and replace earlier ones."""
    for name, key in (("steps", "steps"), ("seen", "samples_seen"), ("skipped", "samples_skipped")):
        if record.get(key) is not None:
            setattr(account, name, record[key])
    account.reason = record.get("skip_reason") or account.reason
    account.reached.update(
        {group: seq for group, seq in (record.get("last_seq") or {}).items() if isinstance(seq, int)}
    )
    ended = record.get("exit")
    if isinstance(ended, dict):
        account.ended = ended.get("kind") or account.ended
        account.message = str(ended.get("message") or "")
        at = ended.get("t")
        account.ended_at = float(at) if isinstance(at, int | float) and math.isfinite(at) else math.inf


def _steps_of(capsule: Capsule, micros: dict[int, set[tuple[int, int]]]) -> dict[int, set[int]]:
    """Windows that left evidence, of one kind for all ranks: micro-batches, else samples, else one scalar."""
    counted: dict[int, set[int]] = {rank: {step for step, _ in each} for rank, each in micros.items()}
    if len(counted) > 1:
        return counted
    by_samples: dict[int, set[int]] = defaultdict(set)
    for record in capsule.records("samples"):
        if isinstance(record.get("step"), int) and record.get("split") in (None, "train"):
            by_samples[record["rank"]].add(record["step"])
    if len(by_samples) > 1:
        return dict(by_samples)
    for name in ("loss", "step_time", "tokens", "grad_norm"):
        ranks = {key.rank for key in capsule.scalar_keys() if key.name == name and key.side is None}
        series = {rank: set(capsule.scalars(name, rank=rank).step.tolist()) for rank in ranks}
        # A rank that logs every tenth step ends up to ten steps before one that logs each.
        paces = {round((max(steps) - min(steps)) / max(1, len(steps) - 1)) for steps in series.values() if steps}
        if len(series) > 1 and len(paces) == 1:
            return series
    return counted


def _calls(capsule: Capsule, found: dict[int, Account]) -> None:
    """How far each rank came in each group, and whether it stood in a call at the end."""
    columns = capsule.columns("collectives")
    rank, seq, step = (columns.integers(each) for each in ("rank", "seq", "step"))
    told, places = columns.combinations("rank", "group", "p2p")
    furthest = np.full((2, len(told)), -1)
    np.maximum.at(furthest[0], places, seq)
    np.maximum.at(furthest[1], places, step)
    for (own, group, direct), reached, inside in zip(told, *furthest.tolist(), strict=True):
        account = found.setdefault(own, Account(own))
        if reached >= 0 and not direct:
            name = str(group or "0")
            account.reached[name] = max(reached, account.reached.get(name, 0))
        if inside >= 0:
            account.inside = max(inside, account.inside or 0)
    order = columns.integers("order")
    place = np.where(order >= 0, order, np.arange(len(order)))
    rows = np.lexsort((np.arange(len(place)), place, rank))
    states, places = columns.combinations("state")
    for row in rows[np.flatnonzero(np.diff(rank[rows], append=-1))].tolist():
        found[int(rank[row])].pending = states[places[row]][0] in ("scheduled", "started")


def in_step_until(capsule: Capsule) -> int | None:
    """The first step from which on equal numbers may not mean equal steps on all ranks; None where they always do.

    A window that raised has a number and no optimizer step; where the loop catches the error and goes on, all later
    windows of that rank alone count one more.
    """
    raised: dict[int, set[int]] = defaultdict(set)
    for event in capsule.records("events"):
        if event.get("kind") in ("exception", "oom") and isinstance(event.get("step"), int):
            raised[event["rank"]].add(event["step"])
    everywhere = set.intersection(*raised.values()) if len(raised) >= len(capsule.ranks) > 0 else set[int]()
    return min((step for each in raised.values() for step in each - everywhere), default=None)


def joined(capsule: Capsule) -> bool:
    """Whether the job tolerates ranks that run out of data earlier: DDP's join, or a setting that means it."""
    for (frames,) in capsule.columns("collectives").combinations("frames")[0]:
        for frame in frames or ():
            if (frame.get("file") or "").replace("\\", "/").endswith("algorithms/join.py"):
                return True
            if frame.get("name") in ("notify_join_context", "join_hook", "join_uneven_inputs"):
                return True
    return _says_join(capsule.manifest.raw.get("config")) or _says_join(capsule.manifest.raw.get("training"))


def _says_join(given: Any) -> bool:
    pending: list[Any] = [given]
    for _ in range(4096):
        if not pending:
            return False
        value = pending.pop()
        if isinstance(value, dict):
            for key, inner in value.items():
                if isinstance(key, str) and re.fullmatch(r"(?:ddp_)?(?:join|join_uneven_inputs|uneven_inputs)", key):
                    if inner not in (False, None, 0, "false", "none", "error"):
                        return True
                elif isinstance(inner, dict):
                    pending.append(inner)
    return False


def most_common(values: Iterable[int]) -> int:
    """The value that most have; of several, the largest."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value))
