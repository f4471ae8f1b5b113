"""Servers that run out of memory, by cause: each rule has a signature of its own, and leaks come before load."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..finding import Evidence, Finding, Where
from ..registry import NotJudged, rule
from .load import Requests, prefilled, pressure, running
from .pages import Block, Holder, Pool, pools
from .records import whole
from .thresholds import (
    ADMITTED_TIMES,
    LEAKED_REQUESTS,
    LEAKED_SHARE,
    OUTPUT_SHARE,
    OUTPUT_TIMES,
    POOL_OVER,
    PREEMPTED,
    REFERENCES,
    SERVED,
)

if TYPE_CHECKING:
    from ...capsules import Capsule

_CASES = ("kv-pages-never-return",)


@rule("memory/serving-cancelled", stage="runtime", severity="warning", needs=("records.kv_events",), cases=_CASES)
def cancelled(capsule: Capsule) -> Iterator[Finding]:
    """Cancelled requests do not give their pages back.

    What it checks:
        The key-value events replayed: which requests were cancelled, and which blocks they still hold at the end.
    Why it matters:
        A client that hangs up takes pages with it. The pool shrinks by a little every minute, and after hours requests
        are preempted or refused although the load is what it was.
    How it decides:
        Cancelled requests hold blocks while a request that ended later has given all of its back, so the way that frees
        was walked since. Likely; info below 3 such requests and 5 % of the pool.
    Looks like it but is not:
        Blocks that are freed a few steps after the cancellation, when the device is done; a full prefix cache, which
        has no owner; a log that holds no frees at all (not judged).
    What to try next:
        Cancel one request in ten in a load test; when idle, free and cached pages must be all of them.
    Fix:
        Release in one place on every way out of a request, cancellation and exceptions included.
    """
    yield from _leaks(capsule, "cancel", "Cancelled requests keep their pages", "the cancelled ones hold")


@rule(
    "memory/serving-prefix-references", stage="runtime", severity="warning", needs=("records.kv_events",), cases=_CASES
)
def prefix_references(capsule: Capsule) -> Iterator[Finding]:
    """References to a shared prefix rise and never fall.

    What it checks:
        The key-value events replayed: blocks that requests shared and still hold after they finished.
    Why it matters:
        A block with a reference cannot be evicted. A popular prefix pins more pages with every request, until nothing
        is left for new ones.
    How it decides:
        Finished requests hold shared blocks while a request that ended later has given all of its back. Likely; info
        below 3 such requests and 5 % of the pool.
    Looks like it but is not:
        A full prefix cache: its blocks have no owner and are evicted when pages are needed. A reference that the cache
        itself holds. Prefixes of requests that are still there.
    What to try next:
        Print the reference counts when no request runs: all must be what the cache itself holds.
    Fix:
        Take references by a guard that gives them back on every way out.
    """
    yield from _leaks(capsule, "finish", "References to shared prefixes never fall", "shared blocks are held by")


@rule(
    "memory/serving-admission",
    stage="runtime",
    severity="warning",
    needs=("records.requests|records.kv_events", "records.events|records.memory"),
)
def admission(capsule: Capsule) -> Iterator[Finding]:
    """Too many prompt tokens are admitted to prefill at once.

    What it checks:
        The tokens that were in prefill when the device ran out of memory, beside those of other moments.
    Why it matters:
        Activations of prefill grow with the tokens of a step. A burst of long prompts needs gigabytes for a moment,
        beside a cache that has been given all the rest.
    How it decides:
        The failure is in prefill, and at least twice the median of prompt tokens were at work, more than at any other
        time (the tokens admitted in one engine step, or the requests between arrival and first token). Likely.
    Looks like it but is not:
        Pages that are all held (the pool), outputs without an end, leaks; a failure in decode.
    What to try next:
        Replay the burst with a smaller limit of prefill tokens a step.
    Fix:
        Chunked prefill and a limit of prefill tokens a step; leave room for activations beside the cache.
    """
    sign = pressure(capsule)
    if sign is None or not (sign.phase or "").startswith("prefill") or _leaking(capsule):
        return
    tokens, usual = prefilled(capsule, sign.t)
    if tokens is None or tokens < ADMITTED_TIMES * usual:
        return
    serving = capsule.manifest.serving
    chunk = serving.chunk_size if serving is not None else None
    yield Finding(
        confidence="likely",
        title="Too many prompt tokens are in prefill at once",
        summary=(
            f"{sign.words} in prefill with {tokens:,} prompt tokens at work; the median is {usual:,.0f}"
            f"{f', the chunk is {chunk:,}' if chunk else ''}."
        ),
        evidence=(
            Evidence(name="prompt tokens in prefill", value=tokens, expected=f"≤ {ADMITTED_TIMES * usual:,.0f}"),
            Evidence(name="chunk_size", value=chunk, note="none: whole prompts" if not chunk else ""),
        ),
        cause="a burst of prompts is admitted to prefill in one step",
        next=("replay the burst with a smaller limit of prefill tokens a step",),
        fix=("chunked prefill, and a limit of prefill tokens a step",),
    )


@rule("memory/serving-output-limit", stage="runtime", severity="warning", needs=("records.requests.output_tokens",))
def output_limit(capsule: Capsule) -> Iterator[Finding]:
    """Outputs without a limit fill the page pool.

    What it checks:
        The requests that were running when the server ran out: how long their outputs were, and whether they had
        max_tokens.
    Why it matters:
        One request that loops holds more pages than a hundred others, and all others are preempted for it.
    How it decides:
        Running requests without max_tokens (while others have it), each with an output of 4 times the median or more,
        hold at least half of the tokens. Likely; undetermined where no request names a limit.
    Looks like it but is not:
        Long outputs with a limit that was asked for; long prompts; a healthy few percent of preemptions.
    What to try next:
        List the longest running requests with their limit and their last tokens (a repetition loop?).
    Fix:
        A default for max_tokens, and a largest one; stop on repetition.
    """
    sign = pressure(capsule)
    there = running(capsule, sign.t) if sign is not None else None
    if sign is None or there is None or _leaking(capsule) or (sign.phase or "").startswith("prefill"):
        return
    long = _long_outputs(capsule, there)
    if long is None:
        return
    at, share, usual, known = long
    longest = int(there.output[at].max())
    yield Finding(
        confidence="likely" if known else "undetermined",
        title="Outputs without a limit fill the page pool",
        summary=(
            f"{sign.words} while {len(at)} of {len(there)} running requests hold {share:.0%} of the "
            f"tokens by outputs of up to {longest:,}; the median output is {usual:,.0f}"
            f"{', and they have no max_tokens' if known else '; no request names a limit'}."
        ),
        where=Where(request=there.names[int(at[there.output[at].argmax()])]),
        evidence=(
            Evidence(name="share of tokens", value=round(share, 4), expected=f"< {OUTPUT_SHARE}"),
            Evidence(
                name="longest output", value=int(there.output[at].max()), expected=f"≤ {OUTPUT_TIMES * usual:,.0f}"
            ),
        ),
        cause="a few outputs go on without an end",
        next=("look at the last tokens of the longest requests",),
        fix=("a default and a largest max_tokens",),
    )


@rule("memory/serving-pages", stage="runtime", severity="warning", needs=("records.requests|records.kv_events",))
def page_pool(capsule: Capsule) -> Iterator[Finding]:
    """The page pool is too small for the mix of requests.

    What it checks:
        The pages that the running requests need by their tokens, beside the pages there are, where requests were
        preempted, refused, or the device ran out in decode.
    Why it matters:
        Each preemption computes a prompt again. A pool that is a little too small costs more than a smaller batch.
    How it decides:
        More than 10 % of the requests were preempted, or some were refused; nothing leaks and no output runs away; and
        the running requests need more pages than there are. Likely.
    Looks like it but is not:
        A healthy few percent of preemptions, once each; leaks; outputs without a limit; a full prefix cache, whose
        pages are evicted when they are needed.
    What to try next:
        Count pages by tokens of the running requests over time, and compare with the pool.
    Fix:
        Fewer requests at once, a larger share of memory for the cache, a narrower dtype for it, or shorter contexts.
    """
    sign = pressure(capsule)
    there = running(capsule, sign.t) if sign is not None else None
    if sign is None or there is None or _leaking(capsule) or (sign.phase or "").startswith("prefill"):
        return
    known = [pool for pool in pools(capsule) if pool.total and pool.block_size]
    if not known:
        raise NotJudged("the number of pages and their size: kv_events.total_blocks and block_size")
    total = sum(pool.total or 0 for pool in known)
    size = known[0].block_size or 1
    needed = int(np.ceil((there.prompt + there.output) / size).sum())
    if needed < POOL_OVER * total or _long_outputs(capsule, there) is not None:
        return
    yield Finding(
        confidence="likely",
        title="The page pool is too small for the mix of requests",
        summary=(
            f"{sign.words}: the {len(there)} running requests need {needed:,} pages of {size} tokens, and "
            f"there are {total:,}."
        ),
        evidence=(
            Evidence(name="pages needed", value=needed, expected=f"≤ {total:,}"),
            Evidence(name="requests preempted", value=round(sign.preempted, 4), expected=f"≤ {PREEMPTED}"),
        ),
        cause="the running requests need more pages than the pool has",
        next=("count the pages of the running requests over time",),
        fix=("fewer requests at once, or more memory for the cache",),
    )


def _leaks(capsule: Capsule, how: str, title: str, words: str) -> Iterator[Finding]:
    for pool in pools(capsule):
        if not pool.frees:
            raise NotJudged("events of kind free: nothing says when blocks are given back")
        found = pool.leaked(how)
        if not found:
            continue
        references = sum(len(_kept(each, how)) for each in found.values())
        blocks: set[Block] = set[Block]().union(*(_kept(each, how) for each in found.values()))
        small = len(found) < LEAKED_REQUESTS and references < LEAKED_SHARE * (pool.total or math.inf)
        sure = how == "cancel" or _references_stay(pool, blocks, len(found))
        first = min(found, key=lambda name: found[name].at)
        total = f" of {pool.total:,}" if pool.total else ""
        yield Finding(
            severity="info" if small else None,
            confidence="likely" if sure else "undetermined",
            title=title,
            summary=(
                f"{len(found)} of {pool.ended(how)} requests that ended by {how} never gave back {references:,} "
                f"references to {len(blocks):,} blocks{total}, while later ones did: {words} {first!r} and others."
            ),
            where=Where(request=first),
            evidence=(
                Evidence(name="requests", value=len(found), expected=0, note=f"of {pool.ended(how)} ended by {how}"),
                Evidence(name="references not given back", value=references, expected=0),
                Evidence(name="blocks", value=len(blocks), expected=0, note=f"of {pool.total}" if pool.total else ""),
            ),
            cause=f"the way out by {how} does not release what the request holds",
            next=("when idle, free and cached pages must be all of them: look at those that are not",),
            fix=("release in one place on every way out",),
        )


def _references_stay(pool: Pool, blocks: set[Block], requests: int) -> bool:
    """Whether more than the events of frees says so: a count that stayed up, pages in use, or others that gave back.

    A log may hold the frees of a request's own blocks only, and then every shared one would look leaked.
    """
    gave_back = any(each.ended and each.shared and not each.held & each.shared for each in pool.holders.values())
    counted = requests > 1 and any(pool.references.get(block, 0) >= REFERENCES * requests for block in blocks)
    return gave_back or counted or (pool.in_use is not None and pool.in_use >= len(blocks) > 0)


def _kept(holder: Holder, how: str) -> set[Block]:
    """Blocks that count: all of a cancelled request, the shared ones of a finished one."""
    return holder.held if how == "cancel" else holder.held & holder.shared


def _leaking(capsule: Capsule) -> bool:
    return any(pool.leaked(how) for pool in pools(capsule) if pool.frees for how in ("cancel", "finish"))


def _long_outputs(capsule: Capsule, there: Requests) -> tuple[np.ndarray[Any, Any], float, float, bool] | None:
    """(which, their share of the tokens, the usual output, whether limits are on record) of outputs without an end."""
    rows = capsule.records("requests")
    known = any(whole(each.get("max_tokens")) is not None for each in rows)
    outputs = [size for each in rows if (size := whole(each.get("output_tokens")))]
    if len(outputs) < SERVED:
        return None
    usual = float(np.median(outputs))
    at = np.flatnonzero((there.output >= OUTPUT_TIMES * usual) & ~there.limited)
    total = int((there.prompt + there.output).sum())
    share = float(there.output[at].sum()) / total if total else 0.0
    return (at, share, usual, known) if len(at) and share >= OUTPUT_SHARE else None
