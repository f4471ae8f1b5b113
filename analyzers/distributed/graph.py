"""The graph of who waits for whom: which ranks all waiting leads to, and where it goes in a circle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set

Edges = Mapping[int, Set[int]]

#: Edges that are looked at for circles.
_MOST_EDGES = 2_000_000


def backwards(edges: Edges) -> dict[int, set[int]]:
    """The same edges from their ends."""
    found: dict[int, set[int]] = defaultdict(set)
    for rank, others in edges.items():
        for other in others:
            found[other].add(rank)
    return found


def reached(edges: Edges, starts: Iterable[int]) -> set[int]:
    """All nodes to which edges lead from the starts, these included."""
    found = set(starts)
    pending = list(found)
    while pending:
        for other in edges.get(pending.pop(), frozenset[int]()) - found:
            found.add(other)
            pending.append(other)
    return found


def ends(edges: Edges, candidates: Iterable[int]) -> list[int]:
    """Those candidates from which everything that is reached leads back to them: nothing further explains them."""
    ahead = {each: reached(edges, (each,)) for each in candidates}
    if all(len(each) == 1 for each in ahead.values()):
        return list(ahead)  # they lead nowhere, as those do that everybody waits for
    turned = backwards(edges)
    return [each for each, nodes in ahead.items() if len(nodes) == 1 or nodes <= reached(turned, (each,))]


def circles(edges: Edges, explained: Iterable[int]) -> list[tuple[int, ...]]:
    """Ranks that wait for each other and for nobody outside, where none of ``explained`` is what they wait for."""
    if sum(map(len, edges.values())) > _MOST_EDGES:
        return []
    known = reached(backwards(edges), explained)
    left = {rank: others - known for rank, others in edges.items() if rank not in known and others}
    return [each for each in _components(left) if all(left.get(rank, frozenset()) <= set(each) for rank in each)]


def _components(edges: Edges) -> list[tuple[int, ...]]:
    """Strongly connected components of more than one rank (Tarjan 1972, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[tuple[int, ...]] = []
    for start in sorted(edges):
        if start in index:
            continue
        work = [(start, iter(sorted(edges[start])))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while work:
            node, rest = work[-1]
            following = next(rest, None)
            if following is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component: list[int] = []
                    while not component or component[-1] != node:
                        component.append(stack.pop())
                        on_stack.discard(component[-1])
                    if len(component) > 1:
                        found.append(tuple(sorted(component)))
            elif following not in index:
                index[following] = low[following] = len(index)
                stack.append(following)
                on_stack.add(following)
                work.append((following, iter(sorted(edges.get(following, ())))))
            elif following in on_stack:
                low[node] = min(low[node], index[following])
    return found
