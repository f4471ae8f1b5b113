"""The same samples on several ranks that should each train on a share of their own."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..finding import Confidence, Evidence, Finding, Where
from ..registry import NotCaptured, NotJudged, rule
from . import thresholds as T
from .accounts import in_step_until
from .layout import Layout, layout, shards
from .words import named_ranks

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Objectives for which one prompt goes to several ranks by design: only whole rows count, not names of samples.
_SAMPLED_AGAIN = ("grpo", "ppo", "rloo", "reinforce", "dapo", "gspo", "rlhf", "rl")

Key = Literal["sha256", "id", "batch"]
#: share of the data → step → what it trained on there, in order
Rows = Mapping[int, Mapping[int, Sequence[str]]]


@rule(
    "distributed/duplicate-data",
    stage="distributed",
    needs=("records.samples.sha256|records.samples.id|records.events.batch_sha256|batches.input_ids",),
    cases=("several-gpus-odd-loss",),
)
def duplicate_data(capsule: Capsule) -> Iterator[Finding]:
    """Several data-parallel ranks train on the same samples.

    What it checks:
        The samples (digest, else name, else the digest of the batch) that each rank trained on, step by step.

    Why it matters:
        Without a distributed sampler every rank works through the same data: the averaged gradient is that of one
        batch, all other ranks are wasted, and the run makes as many epochs as there are ranks for each one it counts.

    How it decides:
        Rows that a rank shares with another one at the same step, place by place: at least half of its rows, and by
        draws from as many samples as were seen they would agree with a probability below 1e-3. Confirmed where the
        job is known to be data-parallel and whole digests agree; by names alone, or where plain data parallelism is
        only assumed, likely. A second sign: ranks that never repeat a sample of their own and yet draw those of others
        (each shuffles the whole set with a seed of its own); likely. Undetermined where the ranks may be parts of one
        model, and where names agree while contents differ.

    Looks like it but is not:
        Tensor-, context- and pipeline-parallel ranks, which share a batch by design; one batch repeated on purpose
        (run.overfit, or the same rows at every step); a data set of a few samples, or draws with replacement; the
        padding at the end of an epoch; validation, which every rank may run alike; prompts sampled several times.

    What to try next:
        Print the first ten sample ids of every rank. Train one step on one rank: if the gradient is that of all ranks,
        they hold the same data.

    Fix:
        DistributedSampler(dataset, num_replicas=world size, rank=global rank) with set_epoch, or
        split_dataset_by_node for streams; shuffle with one seed on all ranks and take every n-th sample.
    """
    run, training = capsule.manifest.run, capsule.manifest.training
    if run is not None and run.overfit:
        return
    where = layout(capsule)
    if where is None:
        raise NotJudged("sizes of the parallel axes that divide the number of ranks")
    if len(set(where.batch.values())) < 2:
        return  # all ranks are one model: one batch is right
    if not where.known and shards(capsule).parameters and not _sharded_by_data(capsule):
        raise NotJudged("how the ranks are divided: parts of one model share a batch by design")
    by_name = not (training is not None and (training.objective or "").lower() in _SAMPLED_AGAIN)
    samples = (training.dataset_samples if training is not None else None) or 0
    read = {key: _rows(capsule, where, key) for key in ("sha256", "id", "batch") if key != "id" or by_name}
    if not any(_shared_steps(rows) for rows in read.values()):
        raise NotCaptured("samples or batch digests of two data-parallel ranks at one step")
    for key, rows in read.items():
        overlap = _at_one_step(rows, samples) if key != "batch" or not _shared_steps(read["sha256"]) else None
        if overlap is not None:
            contents = read["sha256"] if key == "id" else None
            yield _finding(capsule, where, key, overlap, bool(contents and _shared_steps(contents)))
            return
    for key in ("sha256", "id"):
        spread = _over_steps(read.get(key, {})) if key in read else None
        if spread is not None:
            yield _spread_finding(where, key, spread)
            return


def _sharded_by_data(capsule: Capsule) -> bool:
    """Whether parameters are sharded over data-parallel ranks (FSDP, ZeRO), each of which has a batch of its own."""
    training = capsule.manifest.training
    kind = training.sharding.kind if training is not None and training.sharding is not None else None
    return bool(kind) and any(word in (kind or "").lower() for word in ("fsdp", "zero", "deepspeed", "fullyshard"))


def _rows(capsule: Capsule, where: Layout, key: str) -> dict[int, dict[int, list[str]]]:
    """Keys of the rows by share of the data and step, those of the lowest rank where several hold the share."""
    found: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    speaker: dict[int, int] = {}
    for rank in sorted(where.batch):
        speaker.setdefault(where.batch[rank], rank)

    until = in_step_until(capsule)

    def add(rank: int, step: object, value: object) -> None:
        if until is not None and isinstance(step, int) and step >= until:
            return
        if isinstance(step, int) and isinstance(value, str) and value and rank in where.batch:
            share = where.batch[rank]
            if speaker.get(share) == rank:
                found[share][step].append(value)

    if key == "batch":
        for event in capsule.records("events"):
            if event.get("kind") == "step_begin":
                add(event["rank"], event.get("step"), event.get("batch_sha256"))
        return found
    order: Counter[int] = Counter()  # where no step is known, the n-th sample of each rank
    for record in capsule.records("samples"):
        if record.get("split") in (None, "train"):
            step = record.get("step")
            add(record["rank"], order[record["rank"]] if step is None else step, record.get(key))
            order[record["rank"]] += 1
    if key == "sha256" and not found:
        for batch in capsule.batches()[: T.BATCHES_READ]:
            ids = batch.input_ids if batch.split in (None, "train") else None
            if ids is not None and ids.ndim == 2:
                for row in ids[: T.ROWS_READ]:
                    add(batch.rank, batch.step, hashlib.sha256(row.tobytes()).hexdigest())
    return found


def _shared_steps(rows: Rows) -> list[int]:
    """Steps for which at least two shares have rows."""
    counts = Counter(step for each in rows.values() for step in each)
    return sorted(step for step, count in counts.items() if count > 1)


@dataclass
class _Overlap:
    """What shares of the data have in common: groups of shares, rows in common, and the chance of so many."""

    groups: list[list[int]]
    first: int
    steps: int
    common: int
    rows: int
    distinct: int
    chance: float
    example: str = ""
    shares: dict[int, float] = field(default_factory=dict[int, float])


def _at_one_step(rows: Rows, samples: int) -> _Overlap | None:
    """Shares that hold the same rows at the same place of the same step, of a data set of at least ``samples``."""
    steps = _shared_steps(rows)
    if not steps:
        return None
    # place (step, position) → row → shares that have it there
    compared: Counter[int] = Counter()
    matched: Counter[tuple[int, int]] = Counter()
    first: dict[tuple[int, int], tuple[int, str]] = {}
    for step in steps:
        present = {share: each[step] for share, each in rows.items() if step in each}
        for share, listed in present.items():
            compared[share] += len(listed)
        for position in range(max(map(len, present.values()))):
            held: dict[str, int] = {}
            for share in sorted(present):
                if position < len(present[share]):
                    row = present[share][position]
                    if row in held:
                        pair = (held[row], share)
                        matched[pair] += 1
                        first.setdefault(pair, (step, row))
                    else:
                        held[row] = share
    seen = {row for each in rows.values() for step in steps for row in each.get(step, ())}
    alike = {
        pair: count
        for pair, count in matched.items()
        if count >= T.DUPLICATE_SHARE * min(compared[pair[0]], compared[pair[1]]) and count >= T.FEWEST_ROWS
    }
    alike = {pair: count for pair, count in alike.items() if all(_goes_on(rows[share]) for share in pair)}
    if not alike or len(seen) < 2:
        return None
    common = sum(alike.values())
    groups = _joined(alike)
    # Each place where a second share has the row of the first is one draw among the samples there are.
    draws = max(sum(count for pair, count in alike.items() if set(pair) <= set(group)) for group in groups)
    chance = 10 ** max(-300.0, 2 * math.log10(len(rows)) - draws * math.log10(max(len(seen), samples)))
    if chance > T.AT_ONE_PLACE:
        return None
    step, example = min(first[pair] for pair in alike)
    shares = {share: matched[pair] / max(1, compared[share]) for pair in alike for share in pair}
    return _Overlap(groups, step, len(steps), common, sum(compared.values()), len(seen), chance, example, shares)


def _goes_on(steps: Mapping[int, Sequence[str]]) -> bool:
    """Whether a share brings new rows: one batch again and again, or a handful of samples, says nothing."""
    listed = [row for each in steps.values() for row in each]
    moves = len(steps) == 1 or len({tuple(each) for each in steps.values()}) > 1
    return len(set(listed)) >= T.NEW_ROWS * len(listed) and moves


def _joined(pairs: Mapping[tuple[int, int], int]) -> list[list[int]]:
    """Groups of shares that hold the same."""
    root: dict[int, int] = {}

    def find(share: int) -> int:
        while root.setdefault(share, share) != share:
            share = root[share]
        return share

    for one, other in pairs:
        root[max(find(one), find(other))] = min(find(one), find(other))
    groups: dict[int, list[int]] = defaultdict(list)
    for share in sorted(root):
        groups[find(share)].append(share)
    return sorted(groups.values())


@dataclass
class _Spread:
    """Samples of one share that another one had at any step, before any share repeats one of its own."""

    rows: int
    repeated: int
    pairs: int
    shares: int
    last: int
    first: int


def _over_steps(rows: Rows) -> _Spread | None:
    """Shares that draw each other's samples and none of their own twice: each shuffles the whole data set."""
    if len(rows) < 2:
        return None
    own: dict[int, set[str]] = {share: set() for share in rows}
    holders: dict[str, set[int]] = defaultdict(set)
    first = last = None
    for step in _shared_steps(rows):
        present = {share: each[step] for share, each in rows.items() if step in each}
        if any(len(set(listed)) < len(listed) or own[share] & set(listed) for share, listed in present.items()):
            break
        for share, listed in present.items():
            own[share].update(listed)
            for row in listed:
                if holders[row] and first is None:
                    first = step
                holders[row].add(share)
        last = step
    total = sum(map(len, own.values()))
    repeated = sum(len(each) for each in holders.values() if len(each) > 1)
    pairs = sum(len(each) * (len(each) - 1) // 2 for each in holders.values())
    # Draws with replacement repeat a rank's own samples once for every (ranks − 1) of the others'.
    if (
        first is None
        or last is None
        or repeated < T.SPREAD_SHARE * total
        or pairs / (len(rows) - 1) < -math.log(T.BY_CHANCE)
    ):
        return None
    return _Spread(total, repeated, pairs, len(rows), last, first)


def _finding(capsule: Capsule, where: Layout, key: str, overlap: _Overlap, contents_differ: bool) -> Finding:
    groups = [[rank for share in group for rank in _ranks_of(where, share)] for group in overlap.groups]
    named = groups[0]
    odd = any(set(named) <= group for group in where.odd)
    single = overlap.steps == 1
    unsure = single or contents_differ or odd
    known = where.known or _sharded_by_data(capsule)
    confidence: Confidence = "undetermined" if unsure else "confirmed" if known and key != "id" else "likely"
    everyone = len(groups) == 1 and len(named) == len(where.batch)
    what = {"sha256": "rows", "id": "samples (by name)", "batch": "batches"}[key]
    whom = "All ranks" if everyone else named_ranks(named).capitalize()
    share = max(overlap.shares.values())
    doubt = ""
    if contents_differ:
        doubt = " Their contents differ: the names may be numbers within each rank's own part, or rows augmented anew."
    elif single:
        doubt = " One step alone does not tell it from a batch that is repeated on purpose."
    elif unsure:
        doubt = " They may be parts of one model, which share a batch by design: nothing says how the job is divided."
    return Finding(
        severity="critical" if confidence == "confirmed" else "warning",
        confidence=confidence,
        title="Ranks train on the same samples",
        summary=(
            f"{whom} have the same {what} at the same place of the same steps: {share:.0%} of "
            f"{overlap.rows // max(1, len(overlap.shares))} compared, from step {overlap.first} on"
            + (f"; {len(groups)} such groups" if len(groups) > 1 else "")
            + f".{doubt}"
        ),
        where=Where(step=overlap.first, sample=overlap.example[:80] if key == "id" else None),
        evidence=(
            Evidence(name="share of rows in common", value=share, expected=0.0, note=f"over {overlap.steps} steps"),
            Evidence(
                name="ranks with the same data", value=[each[: T.RANKS_SHOWN] for each in groups[:8]], expected=[]
            ),
            Evidence(name=f"first {what} in common", value=overlap.example[:80], note=f"step {overlap.first}"),
            Evidence(name="different samples seen", value=overlap.distinct),
            Evidence(
                name="chance", value=overlap.chance, expected=f"> {T.AT_ONE_PLACE:g}", note="of independent draws"
            ),
        ),
        cause=(
            "no distributed sampler, or one that is given the same rank on every process"
            if everyone
            else "the sampler is given the same rank on several processes (the rank within the node, for example)"
        ),
        next=("print the first ten sample ids of every rank", *(("say how the ranks are divided",) if unsure else ())),
        fix=("a distributed sampler with the global rank and world size, and set_epoch",),
    )


def _spread_finding(where: Layout, key: str, spread: _Spread) -> Finding:
    return Finding(
        severity="warning",
        confidence="likely",
        title="Ranks draw each other's samples",
        summary=(
            f"{spread.repeated} of {spread.rows} samples up to step {spread.last} were seen by several ranks, while no "
            f"rank has repeated one of its own: each goes through the data in an order of its own."
        ),
        where=Where(step=spread.first),
        evidence=(
            Evidence(name="samples seen by several ranks", value=spread.repeated, expected=0, note=f"by {key}"),
            Evidence(name="samples of a rank's own seen twice", value=0, expected=spread.pairs / (spread.shares - 1)),
        ),
        cause="each rank shuffles with a seed of its own, without a distributed sampler or with it",
        next=("compare the number of batches in an epoch with samples / (batch × ranks): more without a sampler",),
        fix=("a distributed sampler with the global rank and world size, one seed on all ranks, and set_epoch",),
    )


def _ranks_of(where: Layout, share: int) -> list[int]:
    return sorted(rank for rank, each in where.batch.items() if each == share)
