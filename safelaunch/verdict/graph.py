"""Graph of waits, with two readings: the most likely end of each wait, and all its possible ends.

Diagnosis follows likely waits (:class:`Edge`) until a node waits for nothing. :mod:`.processes` finds them between the
threads and children of one rank, :mod:`.waits` between ranks. The proof needs every possible end (:class:`Need`), which
:mod:`.possible_waits` finds. The nodes are the same in both, and a likely end is always a possible one.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal

from safelaunch.model import Claim

Node = Hashable


@dataclass(frozen=True)
class Actor:
    """A thread, or all native threads of a process about which nothing is known."""

    rank: int
    pid: int
    tid: int | str  # name of a thread whose TID is unknown; UNKNOWN_THREADS for the unknown native threads


UNKNOWN_THREADS = -1
# What a node waits for: a call of a group; a lock on a file; another thread's work, signal or lock; a child's exit or
# message; the other end of a pipe; a DataLoader's workers; something that is polled for, such as a file; a store key.
NodeKind = Literal["call", "file", "work", "signal", "lock", "child", "message", "pipe", "workers", "poll", "key"]


@dataclass(frozen=True)
class Edge:
    """A likely wait of ``of`` for each of ``on``."""

    of: Node
    on: tuple[Node, ...]  # the likeliest first
    kind: NodeKind
    claims: tuple[Claim, ...] = ()  # evidence of the wait
    may_end: bool = False  # a time limit might end it, or it might wait for something else


@dataclass(frozen=True)
class Need:
    """Something that must happen before a node can continue. Any of ``givers`` can do it; without any, nothing can."""

    givers: frozenset[Node]
    why: str = ""  # what must happen
    claim: Claim | None = None  # evidence of the wait


def stuck(needs: Mapping[Node, Collection[Need]]) -> dict[Node, Need]:
    """Returns the nodes that can never continue, each with an unmet need: the greatest closed set of waits.

    A node that isn't in ``needs`` can continue at any time. All others start as stuck, and nodes whose needs can be met
    are removed.
    """
    left = {node: tuple(all_of) for node, all_of in needs.items()}
    waiting_for: dict[Node, list[Node]] = {}
    for node, all_of in left.items():
        for giver in frozenset().union(*(need.givers for need in all_of)):
            waiting_for.setdefault(giver, []).append(node)
    queue = list(left)
    while queue:
        node = queue.pop()
        if node in left and all(any(giver not in left for giver in need.givers) for need in left[node]):
            del left[node]
            queue += waiting_for.get(node, ())
    return {node: next(need for need in all_of if left.keys() >= need.givers) for node, all_of in left.items()}


class Graph:
    def __init__(self, edges: Iterable[Edge]) -> None:
        by_node: dict[Node, tuple[Edge, ...]] = {}
        for edge in edges:
            by_node[edge.of] = (*by_node.get(edge.of, ()), edge)
        self.edges: Mapping[Node, tuple[Edge, ...]] = by_node

    def path(self, start: Node) -> tuple[Edge, ...]:
        """Follows the first edges from ``start`` until a node waits for nothing or a cycle closes."""
        path: list[Edge] = []
        visited = {start}
        node = start
        while self.edges.get(node):
            path.append(self.edges[node][0])
            node = path[-1].on[0]
            if node in visited:
                break
            visited.add(node)
        return tuple(path)

    def leads_to(self, start: Node, nodes: Collection[Node]) -> bool:
        return start in nodes or any(other in nodes for edge in self.path(start) for other in edge.on)

    @cached_property
    def sinks(self) -> tuple[tuple[Node, ...], ...]:
        """Strongly connected sets of nodes that wait for nothing outside their set."""
        sets = ((component, frozenset(component)) for component in self._components())
        edges = self.edges
        return tuple(
            component
            for component, nodes in sets
            if all(nodes.issuperset(e.on) for n in component for e in edges.get(n, ()))
        )

    def _components(self) -> list[tuple[Node, ...]]:
        """Returns the strongly connected components (Tarjan, iterative: there can be as many nodes as ranks)."""
        index: dict[Node, int] = {}
        low: dict[Node, int] = {}
        stack: list[Node] = []
        on_stack: set[Node] = set()
        components: list[tuple[Node, ...]] = []

        def enter(node: Node) -> None:
            index[node] = low[node] = len(index)
            stack.append(node)
            on_stack.add(node)
            work.append((node, chain.from_iterable(edge.on for edge in self.edges.get(node, ()))))

        for start in self.edges:
            if start in index:
                continue
            work: list[tuple[Node, Iterator[Node]]] = []
            enter(start)
            while work:
                node, rest = work[-1]
                other = next(rest, None)
                if other is None:
                    work.pop()
                    if work:
                        low[work[-1][0]] = min(low[work[-1][0]], low[node])
                    if low[node] == index[node]:
                        members = [stack.pop()]
                        while members[-1] != node:
                            members.append(stack.pop())
                        on_stack.difference_update(members)
                        components.append(tuple(members))
                elif other not in index:
                    enter(other)
                elif other in on_stack:
                    low[node] = min(low[node], index[other])
        return components
