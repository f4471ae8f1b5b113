"""Ranks that did not make the same number of steps, or of micro-batches, by their data or a decision of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..attempts import current_events
from ..finding import Confidence, Evidence, Finding, Where
from ..registry import NotCaptured, rule
from . import thresholds as T
from .accounts import DIED, Account, accounts, joined, most_common
from .diagnosis import diagnosis
from .words import named_ranks

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "distributed/uneven-steps",
    stage="distributed",
    needs=(
        "records.ranks.steps|records.ranks.samples_seen|records.ranks.samples_skipped|records.microbatches"
        "|records.events|records.samples|scalars.loss|scalars.step_time|scalars.tokens",
    ),
    cases=("hang-in-collective", "several-gpus-odd-loss"),
)
def uneven_steps(capsule: Capsule) -> Iterator[Finding]:
    """Ranks made different numbers of steps or micro-batches.

    What it checks:
        The steps and micro-batches of every rank, the samples each left out, and how each rank ended.

    Why it matters:
        Each step is a fixed series of collectives. A rank that has one batch less leaves the loop, or goes one
        micro-batch ahead, and the others wait for it until the time-out. Whoever looks at the rank that timed out looks
        at a victim.

    How it decides:
        Confirmed: a rank ended well, or went on, with fewer steps or micro-batches than others that then waited.
        Likely: counts that are two or more steps apart, or a rank that left out more samples than the others and is
        behind in its collectives. Undetermined: samples left out by one rank beside a hang, without counts that say
        whether it got behind, or by one that the log does not name; different counts although nobody waited. The odd
        ranks are those off the most common
        count; of two ranks, the one with less.

    Looks like it but is not:
        Ranks one step apart because the job was cut within a step; a rank that died; ranks that log less often, or not
        at all, as stages of a pipeline do; DDP's join, which allows it; numbers of micro-batches that differ at most
        steps because batches are filled by tokens; samples left out on every rank alike.

    What to try next:
        Print len(loader) on every rank before the first step, and count what each yields over an epoch without the
        model.

    Fix:
        A distributed sampler with drop_last=True, or padding to the same number; decide to skip, or to stop, on all
        ranks together (all_reduce the flag), or replace the sample instead of skipping it; DDP's join where uneven
        inputs are meant.
    """
    books = accounts(capsule)
    counted = {rank: each for rank, each in books.items() if _count(each) is not None or each.left_out or each.micro}
    untold = any(each.get("samples_skipped") for each in capsule.records("events"))
    if len(counted) < 2 and not untold and not any(each.left_out for each in counted.values()):
        raise NotCaptured("steps, micro-batches or skipped samples of at least two ranks")
    if joined(capsule):
        return
    waited = _waited(capsule, books)
    imported = capsule.manifest.trigger is not None and capsule.manifest.trigger.kind == "imported"
    missing = frozenset(rank for each in diagnosis(capsule).missing for rank in each.ranks)
    found = _by_micro_batches(books, waited) or _by_steps(books, waited, imported) or _by_skips(books, waited, missing)
    found = found or _by_somebody(capsule, waited)
    if found is not None:
        yield found


def _by_somebody(capsule: Capsule, waited: frozenset[int]) -> Finding | None:
    """Samples that a rank left out whose log does not say which it is, beside ranks that wait."""
    skips = [each for each in current_events(capsule) if each.get("told") is False and each.get("samples_skipped")]
    if not skips or not waited:
        return None
    words = " ".join(str(skips[0].get("message") or "").split())[:120]
    return Finding(
        severity="warning",
        confidence="undetermined",
        title="A rank left out samples, and the log does not say which",
        summary=f"Samples were left out (“{words}”) by a rank that the log does not name, and "
        f"{named_ranks(sorted(waited))} waited: a rank that leaves out a batch makes fewer calls than the others.",
        where=Where(step=skips[0].get("step")),
        evidence=(Evidence(name="samples left out", value=len(skips), expected=0, note=words),),
        next=("print the rank before each line (torchrun does with --tee 3), and count the batches of each rank",),
        fix=_FIX,
    )


def _waited(capsule: Capsule, books: Mapping[int, Account]) -> frozenset[int]:
    """Ranks that were left waiting for others."""
    found = {rank for rank, each in books.items() if each.waited or (each.pending and each.ended != "ok")}
    found |= {each["rank"] for each in diagnosis(capsule).calls.timeouts}
    trigger = capsule.trigger
    if not found and trigger is not None and trigger.kind == "hang":
        found = {rank for rank, each in books.items() if each.ended is None}
    return frozenset(found)


def _count(account: Account) -> int | None:
    return account.steps if account.steps is not None else account.last


def _died(account: Account, books: Mapping[int, Account]) -> bool:
    """Whether a rank's end explains by itself why it has less: it broke off, and nobody had before."""
    if account.ended is None:  # others said how they ended, this one no longer could
        return any(each.ended is not None for each in books.values())
    if account.ended not in DIED or account.waited:
        return False
    others = min((each.ended_at for each in books.values() if each.ended in (*DIED, "hang")), default=math.inf)
    return not math.isfinite(account.ended_at) or account.ended_at <= others


def _by_steps(books: Mapping[int, Account], waited: frozenset[int], imported: bool) -> Finding | None:
    """Different numbers of steps."""
    stated = {rank: each.begun for rank, each in books.items() if each.steps}
    if stated and waited:  # a rank that left before its first step is one of them, one that never trains is not
        left = min((books[rank].ended_at for rank in waited), default=math.inf)
        stated |= {r: 0 for r, each in books.items() if each.steps == 0 and each.ended == "ok" and each.ended_at < left}
    if len(stated) < 2:
        # Where only evidence of windows counts, ranks that began elsewhere, or log every tenth step, are no measure.
        shown = {rank: each for rank, each in books.items() if each.first is not None}
        first = most_common(each.first or 0 for each in shown.values()) if shown else 0
        stated = {rank: each.begun for rank, each in shown.items() if each.first == first}
    counts = {rank: count for rank, count in stated.items() if count is not None and not _died(books[rank], books)}
    if len(counts) < 2 or len(set(counts.values())) == 1:
        return None
    usual = most_common(counts.values()) if len(counts) > 2 else max(counts.values())
    odd = sorted(rank for rank, count in counts.items() if count != usual)
    most, least = max(counts.values()), min(counts.values())
    # A rank that stands in a call made fewer steps for that reason: only those that were free to go on count.
    short = sorted(rank for rank, count in counts.items() if count < most and rank not in waited)
    if not short:
        return None
    apart = most - min(counts[rank] for rank in short)
    ended_well = [rank for rank in short if books[rank].ended == "ok"]
    longer = [rank for rank, count in counts.items() if rank in waited and count > min(counts[each] for each in short)]
    skipping = [rank for rank in short if _skipped_more(books[rank], books)]
    whole_lives = all(books[rank].ended == "ok" for rank in counts)
    confidence: Confidence
    told_apart = apart >= T.STEPS_APART and not imported
    if ended_well and longer:
        confidence = "confirmed"
    elif (skipping and waited) or (told_apart and (longer or skipping or _all_samples_differ(books, counts))):
        confidence = "likely"
    elif apart >= T.STEPS_APART and whole_lives:
        confidence = "undetermined"
    else:
        return None
    named = ended_well if confidence == "confirmed" else [rank for rank in short if rank in odd] or short
    said = _said(books, named)
    words = _counts_in_words(counts)
    tail = (
        f" {named_ranks(sorted(waited)).capitalize()} waited." if waited else " No rank is known to have waited for it."
    )
    return Finding(
        severity="critical" if confidence != "undetermined" and (waited or skipping) else "warning",
        confidence=confidence,
        title="Ranks made different numbers of steps",
        summary=f"{words}{said}.{tail}",
        where=Where(step=_first_missing(books, short, least), rank=named[0] if named else short[0]),
        evidence=(
            *(
                Evidence(name=f"steps of rank {rank}", value=count, expected=usual, unit="steps")
                for rank, count in _odd_first(counts, usual)
            ),
            *_skips(books),
            *_ends(books, [*named, *sorted(waited)]),
        ),
        cause=_cause(books, named),
        next=(
            "print len(loader) on every rank, and count what each yields over one epoch without the model",
            "look for what may leave the loop on one rank alone: early stopping, a time limit, a caught error",
        ),
        fix=_FIX,
    )


def _by_micro_batches(books: Mapping[int, Account], waited: frozenset[int]) -> Finding | None:
    """Different numbers of micro-batches in a step that is over for the rank with fewer."""
    ranks = {rank: each.micro for rank, each in books.items() if each.micro and not _died(each, books)}
    if len(ranks) < 2:
        return None
    closed = min(max(each) for each in ranks.values())
    begun = max(min(each) for each in ranks.values())
    steps = (
        [step for step in range(begun, closed) if all(step in each for each in ranks.values())]
        if (closed - begun < T.MOST_STEPS)
        else []
    )
    uneven = [step for step in steps if len({each[step] for each in ranks.values()}) > 1]
    if len(uneven) > max(1, T.DYNAMIC_SHARE * len(steps)):
        return None  # batches are filled by tokens: the numbers differ by design
    ahead = [rank for rank, each in ranks.items() if max(each) > closed]
    open_now = {rank: each[closed] for rank, each in ranks.items()}
    behind = [rank for rank in ranks if rank not in ahead]
    # The last common step is over for those that went on; whoever made more micro-batches of it stands in one.
    if ahead and behind and min(open_now[rank] for rank in behind) > max(open_now[rank] for rank in ahead):
        step, counts, named = closed, open_now, ahead
        confidence: Confidence = "confirmed" if set(behind) & waited else "likely"
    elif uneven and len(steps) >= T.STEPS_TO_COMPARE:
        step = uneven[0]
        counts = {rank: each[step] for rank, each in ranks.items()}
        usual = most_common(counts.values()) if len(counts) > 2 else max(counts.values())
        named = sorted(rank for rank, count in counts.items() if count != usual)
        confidence = "likely"
    else:
        return None
    usual = most_common(counts.values()) if len(counts) > 2 else max(counts.values())
    tail = f" {named_ranks(sorted(waited)).capitalize()} waited." if waited else ""
    return Finding(
        severity="critical" if waited else "warning",
        confidence=confidence,
        title="Ranks made different numbers of micro-batches in a step",
        summary=f"Step {step}: {_counts_in_words(counts, 'micro-batches')}{_said(books, named)}.{tail}",
        where=Where(step=step, rank=named[0]),
        evidence=(
            *(
                Evidence(name=f"micro-batches of rank {rank}", value=count, expected=usual)
                for rank, count in _odd_first(counts, usual)
            ),
            Evidence(name="steps with uneven micro-batches", value=max(1, len(uneven)), expected=0),
            *_skips(books),
            *_ends(books, [*named, *sorted(waited)]),
        ),
        cause=_cause(books, named),
        next=("count the micro-batches that each rank's loader yields for this step, without the model",),
        fix=_FIX,
    )


def _by_skips(books: Mapping[int, Account], waited: frozenset[int], missing: frozenset[int]) -> Finding | None:
    """Samples that one rank left out, where something waits; ``missing`` ranks are those that others wait for."""
    skipping = [rank for rank, each in books.items() if each.left_out and _skipped_more(each, books)]
    lagging = [rank for rank in skipping if rank in missing or _behind(books[rank], books)]
    # Loaders leave samples out all the time: it is the reason only where whoever left out most is the one behind.
    others = [each.left_out for rank, each in books.items() if rank not in lagging]
    if lagging and min(books[rank].left_out for rank in lagging) <= max(others, default=0):
        return None
    if not lagging and (missing or any(_behind(each, books) for each in books.values())):
        return None
    if not skipping or (not lagging and not waited):
        return None
    named = lagging or skipping
    account = books[named[0]]
    behind = _behind(account, books)
    samples = f"{account.left_out} sample{'s' * (account.left_out != 1)}"
    words = f"{named_ranks(named).capitalize()} left out {samples}{_said(books, named)}"
    if behind is None and lagging:
        words += ", and others wait for it in a call that it did not make"
    if behind is not None:
        words += f" and came to call {behind[1]} of group {behind[0]}, others to {behind[2]}"
    return Finding(
        severity="critical" if lagging else "warning",
        confidence="likely" if lagging else "undetermined",
        title="A rank left out samples that the others did not",
        summary=words + ".",
        where=Where(step=next((step for step, _ in account.skips if step is not None), None), rank=named[0]),
        evidence=(
            *_skips(books),
            *(
                [Evidence(name=f"last call of rank {named[0]}", value=behind[1], expected=behind[2], note=behind[0])]
                if behind
                else []
            ),
            *_ends(books, [*named, *sorted(waited)]),
        ),
        cause=_cause(books, named),
        next=("count the micro-batches of each rank up to the hang", "let all ranks skip together and see it pass"),
        fix=_FIX,
    )


_FIX = (
    "give every rank the same number of batches: a distributed sampler with drop_last, or padding",
    "decide on all ranks together whether to skip or to stop (all_reduce the flag), or replace the sample",
)


def _first_missing(books: Mapping[int, Account], short: Sequence[int], least: int) -> int:
    """The first step that not every rank made."""
    last = [each for rank in short if (each := books[rank].last) is not None]
    return min(last) + 1 if last else least


def _all_samples_differ(books: Mapping[int, Account], counts: Mapping[int, int]) -> bool:
    """Whether fewer samples were seen wherever fewer steps were made."""
    seen = {rank: books[rank].seen for rank in counts}
    if any(each is None for each in seen.values()):
        return False
    ordered = sorted(counts, key=lambda rank: counts[rank])
    return (seen[ordered[0]] or 0) < (seen[ordered[-1]] or 0)


def _skipped_more(account: Account, books: Mapping[int, Account]) -> bool:
    """Whether a rank left out more than the one that left out least."""
    return account.left_out > min(each.left_out for each in books.values()) if len(books) > 1 else account.left_out > 0


def _behind(account: Account, books: Mapping[int, Account]) -> tuple[str, int, int] | None:
    """(group, own last call, furthest of the others) where a rank is behind in a group."""
    for group, own in sorted(account.reached.items()):
        furthest = max((each.reached.get(group, -1) for each in books.values()), default=-1)
        if own < furthest:
            return group, own, furthest
    return None


def _cause(books: Mapping[int, Account], named: Sequence[int]) -> str:
    if any(books[rank].left_out for rank in named):
        return "a condition on the data skipped samples on one rank alone, which therefore made fewer calls"
    return "the loaders hold different numbers of batches, or a condition (a break) ended the loop on some ranks alone"


def _said(books: Mapping[int, Account], named: Sequence[int]) -> str:
    """What the ranks say of why they left data out."""
    for rank in named:
        words = books[rank].reason or next((message for _, message in books[rank].skips), None)
        if words:
            words = " ".join(words.split())
            return f" (rank {rank}: “{words if len(words) <= 120 else words[:119] + '…'}”)"
    return ""


def _skips(books: Mapping[int, Account]) -> list[Evidence]:
    if not any(each.left_out for each in books.values()):
        return []
    least = min(each.left_out for each in books.values())
    ranks = sorted(books, key=lambda rank: (-books[rank].left_out, rank))[: T.RANKS_SHOWN]
    return [
        Evidence(
            name=f"samples left out by rank {rank}",
            value=books[rank].left_out,
            expected=least,
            note=(books[rank].reason or next((message for _, message in books[rank].skips), ""))[:200],
        )
        for rank in ranks
    ]


def _ends(books: Mapping[int, Account], ranks: Sequence[int]) -> list[Evidence]:
    chosen = [rank for rank in dict.fromkeys(ranks) if rank in books and books[rank].ended][: T.RANKS_SHOWN]
    return [
        Evidence(name=f"end of rank {rank}", value=books[rank].ended, note=books[rank].message[:200]) for rank in chosen
    ]


def _odd_first(counts: Mapping[int, int], usual: int) -> list[tuple[int, int]]:
    return sorted(counts.items(), key=lambda each: (each[1] == usual, each[0]))[: T.RANKS_SHOWN]


def _counts_in_words(counts: Mapping[int, int], unit: str = "steps") -> str:
    """As in: Rank 1 made 97 steps, ranks 0, 2 and 3 made 98."""
    by_count: dict[int, list[int]] = {}
    for rank, count in sorted(counts.items()):
        by_count.setdefault(count, []).append(rank)
    parts = [
        f"{named_ranks(ranks)} made {count:,}" + (f" {unit}" if at == 0 else "")
        for at, (count, ranks) in enumerate(sorted(by_count.items(), key=lambda each: (len(each[1]), each[0])))
    ]
    shown = parts[: T.RANKS_SHOWN]
    text = ", ".join(shown)
    return text[:1].upper() + text[1:]
