"""A case log of 5,000 cards: reading it, making it ready once, and what a keystroke of a search then costs."""

from __future__ import annotations

import time
from statistics import median

from llmconsole.app import paths
from llmconsole.app.casebook import cards
from llmconsole.app.casebook.search import Index

#: Cards of the log, made from those that ship with the product, each with an incident of its own.
CARDS = 5_000

#: Milliseconds that a search may take.
LIMIT = 30.0

QUERIES = ("溢出", "复读机", "loss 不降", "NaN", "grad norm", "n", "class:serving p99", '"learning rate" 溢出', "zebra")


def log() -> str:
    """The text of a case log with that many cards."""
    seeds = cards.parse(paths.seed_cases())
    parts = [cards.HEADER]
    for number in range(CARDS):
        seed = seeds[number % len(seeds)]
        values = {field.name: field.value for field in seed.fields}
        values["Occurrences"] = f"2026-{number % 12 + 1:02}-{number % 28 + 1:02} run job-{number}, located in 11 min"
        parts.append(cards.format_card(f"{seed.id[:60]}-{number}", f"{seed.title} ({number})", values))
    return "\n".join(parts)


def main() -> None:
    text = log()
    before = time.perf_counter()
    known = cards.parse(text)
    parsed = time.perf_counter()
    index = Index(known)
    ready = time.perf_counter()
    assert len(known) == CARDS
    print(f"{CARDS:,} cards, {len(text) / 1e6:.1f} million characters")
    print(f"read {parsed - before:.2f} s, made ready {ready - parsed:.2f} s, once until the file changes")
    print(f"{'query':<24}{'found':>7}{'median ms':>11}{'worst ms':>10}")
    slow: list[str] = []
    for query in QUERIES:
        times: list[float] = []
        found = index.search(query)
        for _ in range(15):
            before = time.perf_counter()
            found = index.search(query)
            times.append((time.perf_counter() - before) * 1e3)
        print(f"{query:<24}{len(found):>7,}{median(times):>11.2f}{max(times):>10.2f}")
        if median(times) > LIMIT:
            slow.append(query)
    print(f"limit {LIMIT:g} ms a search: " + (f"exceeded by {', '.join(slow)}" if slow else "kept"))


if __name__ == "__main__":
    main()
