"""Batches that come again: within an epoch, or after a job was resumed; and batches that were left out."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..finding import Confidence, Evidence, Finding, Severity, Where
from ..registry import NotJudged, rule
from . import thresholds as T
from .rows import TRAIN, is_overfit, objective, rows_of

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Objectives that take several steps on one set of rollouts.
REUSING = frozenset({"grpo", "ppo", "rloo", "reinforce", "gspo", "dapo"})


@dataclass(frozen=True)
class Seen:
    """One micro-batch in the order in which the job took it; ``resumed``: how often a checkpoint was loaded before."""

    step: int
    micro: int
    digest: str | None
    epoch: float | None
    cursor: float | None
    resumed: int
    size: int | None


@rule(
    "data/duplicate-batch",
    stage="data",
    severity="warning",
    needs=("records.events.batch_sha256|records.events.data_cursor|records.samples.sha256|batches.input_ids",),
)
def duplicate_batch(capsule: Capsule) -> Iterator[Finding]:
    """A batch is trained on again within an epoch, or a resumed job replays or skips data.

    What it checks:
        The digest of each micro-batch in the order of training, a rank for itself, and where the loader stood.

    Why it matters:
        What comes twice weighs twice, and what is skipped is never seen. A loader that is made anew at each resume
        trains on its first batches again and again.

    How it decides:
        A digest comes again in the same epoch. Where epochs are not on record: three or more batches in a row come
        again at one distance, or one comes again, while batches that are new follow afterwards, so that the data was
        not used up. One and the same batch in every step is info and undetermined, where an epoch is not known to have
        more. After a checkpoint was loaded: batches of earlier steps begin to come again at once (replayed), or
        the loader's position jumps (skipped).

    Looks like it but is not:
        A further epoch; the steps after a checkpoint run once more with the same batches; a run that overfits one batch
        on purpose and says so; several optimisation passes over one set of rollouts; batches of one sample drawn with
        replacement; a step that raised, was caught, and is tried again with its batch; the same batch on other ranks
        (distributed/duplicate-data).

    What to try next:
        Log the loader's position and the ids of the samples; look how the iterator is made, and what is saved with a
        checkpoint.

    Fix:
        Make the iterator once an epoch; save and restore the loader's state; seed the sampler by epoch.
    """
    if is_overfit(capsule) or objective(capsule) in REUSING or _rewarded(capsule):
        return
    runs = _sequences(capsule)
    if not runs:
        raise NotJudged("no batch has a digest or a position of the loader")
    used_up = _epoch_batches(capsule)
    for rank, run in sorted(runs.items()):
        found = _repeat(run, used_up) or _jump(run)
        if found is not None:
            yield _placed(found, rank)
            return


def _rewarded(capsule: Capsule) -> bool:
    """Whether the loss goes below 0: no likelihood does, the surrogate losses of policy optimisation do."""
    return bool((capsule.scalars("loss").value < 0).any())


def _sequences(capsule: Capsule) -> dict[int, list[Seen]]:
    """The micro-batches of each rank in order: from the events, else the sample records, else the captured batches."""
    epochs: dict[int, float] = {}
    sizes: Counter[tuple[int, int]] = Counter()
    digests: dict[tuple[int, int], list[str]] = defaultdict(list)
    for record in capsule.records("samples"):
        step, rank = record.get("step"), int(record.get("rank") or 0)
        if step is None or record.get("split") not in TRAIN:
            continue
        sizes[rank, int(step)] += 1
        if isinstance(record.get("epoch"), int | float):
            epochs[int(step)] = float(record["epoch"])
        if record.get("sha256"):
            digests[rank, int(step)].append(str(record["sha256"]))
    found: dict[int, list[Seen]] = defaultdict(list)
    resumed: Counter[int] = Counter()
    untrained = _untrained(capsule)
    for event in capsule.records("events"):
        rank, step = int(event.get("rank") or 0), event.get("step")
        if (rank, step) in untrained:
            continue
        if event.get("kind") == "checkpoint_loaded":
            resumed[rank] += 1
        if event.get("kind") != "step_begin" or step is None:
            continue
        epoch = event.get("epoch")
        cursor = event.get("data_cursor")
        if epoch is None and isinstance(cursor, dict):
            epoch = cursor.get("epoch")
        epoch = epoch if isinstance(epoch, int | float) else epochs.get(int(step))
        digest = event.get("batch_sha256")
        place, micro = _place(cursor), int(event.get("micro") or 0)
        if digest is None and place is None:
            continue
        size = sizes.get((rank, int(step)))
        found[rank].append(Seen(int(step), micro, digest, _whole(epoch), place, resumed[rank], size))
    if any(each.digest for run in found.values() for each in run):
        return dict(found)
    if digests:
        for (rank, step), listed in digests.items():
            joined = hashlib.sha256("\n".join(listed).encode()).hexdigest()
            found[rank] = [each for each in found[rank] if each.step != step]
            found[rank].append(Seen(step, 0, joined, _whole(epochs.get(step)), None, 0, len(listed)))
        return dict(found)
    for rows in rows_of(capsule):
        batch = rows.batch
        joined = hashlib.sha256("\n".join(rows.digests()).encode()).hexdigest()
        seen = Seen(batch.step, batch.micro, joined, _whole(epochs.get(batch.step)), None, 0, len(rows.ids))
        found[batch.rank or 0].append(seen)
    return dict(found)


def _untrained(capsule: Capsule) -> set[tuple[int, int | None]]:
    """(rank, step) of steps that raised before the optimizer: their batches were not trained on, and may be retried."""
    places: dict[str, set[tuple[int, int | None]]] = defaultdict(set)
    for event in capsule.records("events"):
        places[str(event.get("kind"))].add((int(event.get("rank") or 0), event.get("step")))
    return (places["exception"] | places["oom"]) - places["optimizer_step"] - places["optimizer_step_skipped"]


def _whole(epoch: Any) -> float | None:
    """The number of the epoch; loaders that count fractions are in the epoch that has begun."""
    return float(epoch // 1) if isinstance(epoch, int | float) and epoch == epoch and abs(epoch) < 1e9 else None


def _place(cursor: Any) -> float | None:
    """The loader's position, where it is a single number beside words and epochs."""
    if not isinstance(cursor, dict):
        return None
    numbers = [v for k, v in cursor.items() if k != "epoch" and isinstance(v, int | float) and not isinstance(v, bool)]
    return float(numbers[0]) if len(numbers) == 1 and numbers[0] == numbers[0] else None


def _epoch_batches(capsule: Capsule) -> int | None:
    """Micro-batches a rank takes in one epoch, where the manifest tells."""
    training, run = capsule.manifest.training, capsule.manifest.run
    if training is None or not training.dataset_samples or not training.micro_batch:
        return None
    world = (run.world_size if run is not None else None) or 1
    return max(1, training.dataset_samples // (training.micro_batch * max(1, world)))


@dataclass(frozen=True)
class _Found:
    title: str
    summary: str
    step: int
    evidence: tuple[Evidence, ...]
    cause: str | None
    confidence: Confidence = "likely"
    severity: Severity | None = None


def _repeat(run: Sequence[Seen], used_up: int | None) -> _Found | None:
    """The first repetition that neither a new epoch nor a step run again explains."""
    known = [each for each in run if each.digest is not None]
    if len(known) < 2:
        return None
    last: dict[str, int] = {}
    first_step: dict[str, set[tuple[int, int]]] = defaultdict(set)
    again: list[tuple[int, int]] = []  # (index, index of the batch that it repeats)
    fresh_after = [0] * (len(known) + 1)
    seen: set[str] = set()
    fresh: list[bool] = []
    for at, each in enumerate(known):
        digest = each.digest or ""
        fresh.append(digest not in seen)
        if digest in last and (each.step, each.micro) not in first_step[digest]:
            again.append((at, last[digest]))
        seen.add(digest)
        first_step[digest].add((each.step, each.micro))
        last[digest] = at
    for at in range(len(known) - 1, -1, -1):
        fresh_after[at] = fresh_after[at + 1] + fresh[at]
    if not again:
        return None
    if len(seen) == 1:
        return _always_one(known, used_up)
    same_epoch = [(a, b) for a, b in again if known[a].epoch is not None and known[a].epoch == known[b].epoch]
    if same_epoch:
        return _told(known, same_epoch, same_epoch, "in the same epoch", "confirmed")
    again = [(a, b) for a, b in again if known[a].epoch is None or known[b].epoch is None]
    replayed = _replayed(known, again, used_up)
    if replayed is not None:
        return replayed
    if used_up is not None:
        again = [(a, b) for a, b in again if a // used_up == b // used_up]
    if len(known) < T.REPEAT_MIN_BATCHES:
        return None
    # Where the data was used up, what follows the first repetition holds nothing new.
    open_ended = [(a, b) for a, b in again if fresh_after[a] > T.NEW_AFTER_SHARE * len(known)]
    if used_up is not None:
        open_ended = again
    singles = any((known[a].size or 2) <= 1 for a, _ in open_ended)
    runs = _in_a_row(open_ended)
    longest = max(runs, key=len, default=[])
    if len(longest) >= T.REPEAT_RUN or (open_ended and not singles):
        shown = longest if len(longest) >= T.REPEAT_RUN else open_ended
        return _told(known, shown, again, "before the data was used up")
    return None


def _in_a_row(again: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Repetitions grouped where neighbours repeat neighbours, or each batch comes twice in turn."""
    runs: list[list[tuple[int, int]]] = []
    for a, b in again:
        if runs and a - b == runs[-1][-1][0] - runs[-1][-1][1] and a - runs[-1][-1][0] <= max(1, a - b + 1):
            runs[-1].append((a, b))
        else:
            runs.append([(a, b)])
    return runs


def _replayed(known: Sequence[Seen], again: Sequence[tuple[int, int]], used_up: int | None) -> _Found | None:
    """Batches from before a resume that come again right after it, under other step numbers."""
    for a, b in again:
        if known[a].resumed == known[b].resumed or (used_up is not None and a // used_up != b // used_up):
            continue
        start = next(at for at in range(len(known)) if known[at].resumed == known[a].resumed)
        if a - start > T.RESUME_BATCHES:
            continue
        after = [(x, y) for x, y in again if x >= a and known[x].resumed == known[a].resumed > known[y].resumed]
        found = known[a]
        return _Found(
            title="Data is replayed after the resume",
            summary=f"After the checkpoint was loaded step {found.step} takes the batch of step {known[b].step} again, "
            f"and so do {len(after)} batches in all.",
            step=found.step,
            evidence=(
                Evidence(name="batches replayed", value=len(after), expected=0, unit="batches"),
                Evidence(name="step of the batch", value=known[b].step, expected=found.step, note=_short(found.digest)),
            ),
            cause="the loader's position is not saved with the checkpoint, and it starts from its beginning",
        )
    return None


def _always_one(known: Sequence[Seen], used_up: int | None) -> _Found | None:
    """One and the same batch in every step."""
    if len(known) < T.REPEAT_MIN_BATCHES or used_up == 1:
        return None
    many = used_up is not None
    return _Found(
        severity=None if many else "info",
        confidence="likely" if many else "undetermined",
        title="Every step trains on the same batch",
        summary=f"All {len(known)} micro-batches from step {known[0].step} to {known[-1].step} are one and the same"
        + (f", where an epoch has {used_up}." if many else ": on purpose, or an iterator that is made anew each step."),
        step=known[1].step,
        evidence=(Evidence(name="distinct batches", value=1, expected=used_up or len(known), unit="batches"),),
        cause="the iterator is made anew for every step" if many else None,
    )


def _told(
    known: Sequence[Seen],
    pairs: Sequence[tuple[int, int]],
    everywhere: Sequence[tuple[int, int]],
    when: str,
    confidence: Confidence = "likely",
) -> _Found:
    a, b = pairs[0]
    distances = Counter(x - y for x, y in pairs)
    distance, often = distances.most_common(1)[0]
    regular = f", {often} of them {distance} later" if often > 1 else ""
    # Many, at all distances: the sampler draws with replacement, which may be meant.
    usual = Counter(x - y for x, y in everywhere).most_common(1)[0][1]
    drawn = len(everywhere) > T.REPEAT_RUN and 2 * usual < len(everywhere)
    return _Found(
        severity="info" if drawn else None,
        title="A batch is trained on again within an epoch",
        summary=f"Step {known[a].step} takes the batch of step {known[b].step} again {when}; {len(pairs)} of "
        f"{len(known)} batches are such repetitions{regular}.",
        step=known[a].step,
        evidence=(
            Evidence(name="repeated batches", value=len(pairs), expected=0, unit="batches", note=f"of {len(known)}"),
            Evidence(name="first repeated at step", value=known[a].step, note=f"of step {known[b].step}"),
            Evidence(name="distance", value=distance, unit="batches", note=_short(known[a].digest)),
        ),
        cause="the loader hands out the same batch twice: an iterator made anew, a sampler that repeats, or a retry",
        confidence="likely" if drawn else confidence,
    )


def _short(digest: str | None) -> str:
    return f"sha256 {str(digest)[:12]}"


def _jump(run: Sequence[Seen]) -> _Found | None:
    """A position of the loader that jumps where a checkpoint was loaded."""
    known = [each for each in run if each.cursor is not None]
    if len(known) < T.REPEAT_MIN_BATCHES:
        return None
    places = [each.cursor or 0.0 for each in known]
    moves = [b - a for a, b in pairwise(places)]
    usual, often = Counter(moves).most_common(1)[0]
    if usual <= 0 or often < 0.6 * len(moves):
        return None
    before: dict[tuple[int, int], float] = {}
    for at, each in enumerate(known):
        if at and each.resumed > known[at - 1].resumed:
            # A step run again must stand where it stood; the step after the last must be one move further.
            expected = before.get((each.step, each.micro), places[at - 1] + usual)
            if each.epoch is not None and each.epoch != known[at - 1].epoch:
                continue
            batches = (places[at] - expected) / usual
            if abs(batches) >= 1:
                return _cursor_finding(known[at], places[at], expected, batches)
        before[each.step, each.micro] = places[at]
    return None


def _cursor_finding(each: Seen, place: float, expected: float, batches: float) -> _Found:
    skipped = batches > 0
    count = abs(round(batches))
    return _Found(
        title="Data is skipped at the resume" if skipped else "The loader goes back at the resume",
        summary=f"After the checkpoint was loaded, step {each.step} begins at position {place:g} of the data where "
        f"{expected:g} is next: {count} batches are {'left out' if skipped else 'taken again'}.",
        step=each.step,
        evidence=(
            Evidence(name="position", value=place, expected=expected, note="data_cursor"),
            Evidence(
                name="batches skipped" if skipped else "batches replayed", value=count, expected=0, unit="batches"
            ),
        ),
        cause="the loader's position was not restored with the checkpoint",
    )


def _placed(found: _Found, rank: int) -> Finding:
    vague = found.confidence == "undetermined"
    return Finding(
        severity=found.severity,
        confidence=found.confidence,
        title=found.title,
        summary=found.summary,
        where=Where(step=found.step, rank=rank),
        evidence=found.evidence,
        cause=found.cause,
        next=(
            "log the loader's position and the sample ids",
            "look how the iterator is made and what a checkpoint holds",
            *(("declare run.overfit, or how many samples there are (training.dataset_samples)",) if vague else ()),
        ),
        fix=("make the iterator once an epoch", "save and restore the loader's state, and seed the sampler by epoch"),
    )
