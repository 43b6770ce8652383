"""Who waits for whom: edges, the walk along them to where the waiting ends, and the circles in which it ends nowhere.

The nodes are whatever waits or is waited for. :mod:`.processes` gives the edges between the threads and children of one
rank, :mod:`.waits` those between ranks: by the calls in which they meet, and by the files that they lock.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal

from safelaunch.model import Claim

Node = Hashable
# An operation of a group of ranks; a lock on a file; of threads: another's end, what another feeds, a lock that another
# holds; of processes: a child's end, a child's message, who has the other end of a pipe, a DataLoader's workers.
# Between ranks, too: what one is to send over a connection, or to make, a file, say, that others look for, or a key of
# the store.
NodeKind = Literal["call", "file", "work", "signal", "lock", "child", "message", "pipe", "workers", "poll", "key"]


@dataclass(frozen=True)
class Edge:
    """``of`` waits for each of ``on``, the most telling first. ``claims``: where that was seen.

    ``may_end``: it may end by itself, by a time limit or because whoever it waits for is somebody else.
    """

    of: Node
    on: tuple[Node, ...]
    kind: NodeKind
    claims: tuple[Claim, ...] = ()
    may_end: bool = False


@dataclass(frozen=True)
class Need:
    """Something that has to happen before a node goes on: any one of ``givers`` can do it. No givers: nothing can.

    ``why``: what has to happen, in words; ``claim``: where the wait was seen.
    """

    givers: frozenset[Node]
    why: str = ""
    claim: Claim | None = None


def stuck(needs: Mapping[Node, Collection[Need]]) -> dict[Node, Need]:
    """The nodes that never go on, each with a need that nobody meets: the greatest closed set of waits.

    A node goes on once each of its needs is met; whoever isn't in ``needs`` may go on at any time, and meet any. So
    everybody is taken for stuck at first, and whoever can be released is, until nobody more can.
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
    return {node: next(one for one in all_of if left.keys() >= one.givers) for node, all_of in left.items()}


class Graph:
    """``edges``: node → the waits that it is in, of which it has one as a rule."""

    def __init__(self, edges: Iterable[Edge]) -> None:
        found: dict[Node, tuple[Edge, ...]] = {}
        for edge in edges:
            found[edge.of] = (*found.get(edge.of, ()), edge)
        self.edges: Mapping[Node, tuple[Edge, ...]] = found

    def path(self, start: Node) -> tuple[Edge, ...]:
        """The walk from ``start`` along the first edges, to who waits for nobody or where a circle closes."""
        path: list[Edge] = []
        seen = {start}
        node = start
        while self.edges.get(node):
            path.append(self.edges[node][0])
            node = path[-1].on[0]
            if node in seen:
                break
            seen.add(node)
        return tuple(path)

    def leads_to(self, start: Node, nodes: Collection[Node]) -> bool:
        """Whether the walk from ``start`` comes to one of ``nodes``."""
        return start in nodes or any(other in nodes for edge in self.path(start) for other in edge.on)

    @cached_property
    def sinks(self) -> tuple[tuple[Node, ...], ...]:
        """The strongly connected sets of nodes that wait for nobody outside their set."""
        sets = ((component, frozenset(component)) for component in self._components())
        edges = self.edges
        return tuple(one for one, nodes in sets if all(nodes.issuperset(e.on) for n in one for e in edges.get(n, ())))

    def _components(self) -> list[tuple[Node, ...]]:
        """Strongly connected components (Tarjan, iterative: classes can be as many as ranks)."""
        index: dict[Node, int] = {}
        low: dict[Node, int] = {}
        stack: list[Node] = []
        on_stack: set[Node] = set()
        found: list[tuple[Node, ...]] = []

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
                        found.append(tuple(members))
                elif other not in index:
                    enter(other)
                elif other in on_stack:
                    low[node] = min(low[node], index[other])
        return found
