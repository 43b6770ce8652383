"""Who waits for whom: the wait-for graph over ranks, in classes.

All ranks that wait in the same operation under the same number wait for the same peers, so the nodes are those
classes and not the ranks; a job of thousands of ranks has a handful.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from safelaunch.diagnose.collectives import fits, signature
from safelaunch.diagnose.facts import Facts, PeerWait
from safelaunch.diagnose.transfers import peers_missing

Key = tuple[Hashable, ...]


@dataclass(frozen=True)
class Waits:
    """``ranks``: the members of each class. ``blockers``: the ranks a class waits for. ``sinks``: classes, in strongly
    connected sets, that wait for nobody outside their set."""

    ranks: Mapping[Key, tuple[int, ...]]
    blockers: Mapping[Key, frozenset[int]]
    example: Mapping[Key, PeerWait]
    sinks: tuple[tuple[Key, ...], ...]

    @property
    def waiting(self) -> frozenset[int]:
        return frozenset(r for ranks in self.ranks.values() for r in ranks)


def members_of(waits: Waits, keys: Iterable[Key]) -> list[int]:
    return sorted(rank for key in keys for rank in waits.ranks[key])


def waits_of(facts: Facts) -> Waits:
    ranks: dict[Key, list[int]] = {}
    example: dict[Key, PeerWait] = {}
    for rank, one in facts.ranks.items():
        if one.wait is None:
            continue
        key = _key(rank, one.wait)
        ranks.setdefault(key, []).append(rank)
        example.setdefault(key, one.wait)
    blockers = {key: _blockers(facts, example[key], tuple(members)) for key, members in ranks.items()}
    of_rank = {r: key for key, members in ranks.items() for r in members}
    edges = {key: {of_rank[b] for b in found if b in of_rank} - {key} for key, found in blockers.items()}
    free = {key for key, found in blockers.items() if any(b not in of_rank for b in found)}
    sinks = tuple(
        component
        for component in _components(edges)
        if not free.intersection(component) and all(edges[k] <= set(component) for k in component)
    )
    return Waits({k: tuple(v) for k, v in ranks.items()}, blockers, example, sinks)


def _key(rank: int, wait: PeerWait) -> Key:
    """Each send and receive is a class of its own: two ranks in the same ``recv`` line wait for different peers."""
    if wait.kind == "p2p":
        return (*wait.key, rank)
    return wait.key if wait.seq is not None or wait.kind == "init" else (*wait.key, _line(wait))


def _blockers(facts: Facts, wait: PeerWait, ranks: tuple[int, ...]) -> frozenset[int]:
    inside = frozenset(ranks)
    if wait.kind == "init":
        return frozenset(r for r in facts.world - inside if not facts.alignment.joined(r))
    if wait.kind == "p2p":
        named = peers_missing(facts.alignment, ranks[0], wait.group) if wait.group is not None else None
        return facts.world - inside if named is None else named
    if wait.group is None or wait.seq is None:
        return frozenset(r for r in facts.world - inside if not _same_call(facts, r, wait))
    members, _ = facts.alignment.members(wait.group)
    return frozenset(r for r in members - inside if not _has_entered(facts, r, wait, wait.group, wait.seq))


def _has_entered(facts: Facts, rank: int, wait: PeerWait, group: str, seq: int) -> bool:
    """``rank`` has entered the same collective; one that recorded something else under the number has not,
    nor one whose device has not begun what its CPU has queued.

    A rank without a record is taken to have entered when its stack waits in the same function.
    """
    if rank not in facts.alignment.records:
        return _same_call(facts, rank, wait)
    entry = facts.alignment.entry(rank, group, seq)
    if entry is not None:
        return entry.started is not False and fits(signature(entry), wait.signature)
    return facts.alignment.last(rank, group) >= seq


def _same_call(facts: Facts, rank: int, wait: PeerWait) -> bool:
    """``rank`` waits in the same function. Where stacks are all there is for both, in the same line, too: only a
    Flight Recorder could tell that different lines meet."""
    other = facts.ranks[rank].wait if rank in facts.ranks else None
    if other is None or other.kind != wait.kind or not same_op(other.op, wait.op):
        return False
    return other.seq is not None or wait.seq is not None or _line(other) == _line(wait)


def _line(wait: PeerWait) -> tuple[str, int] | None:
    return (wait.frame.file, wait.frame.line) if wait.frame else None


def same_op(one: str, other: str) -> bool:
    """The Flight Recorder says ``_all_gather_base``, the stack ``all_gather_into_tensor`` or ``all_gather_object``."""
    a, b = (name.strip("_").replace("_", "") for name in (one, other))
    return "acollective" in (a.replace(" ", ""), b.replace(" ", "")) or a in b or b in a


def _components(edges: Mapping[Key, Iterable[Key]]) -> list[tuple[Key, ...]]:
    """Strongly connected components (Tarjan, iterative: classes can be as many as ranks)."""
    index: dict[Key, int] = {}
    low: dict[Key, int] = {}
    stack: list[Key] = []
    on_stack: set[Key] = set()
    found: list[tuple[Key, ...]] = []
    for start in edges:
        if start in index:
            continue
        work = [(start, iter(edges[start]))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while work:
            node, rest = work[-1]
            child = next(rest, None)
            if child is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    found.append(_pop_until(node, stack, on_stack))
            elif child not in index:
                index[child] = low[child] = len(index)
                stack.append(child)
                on_stack.add(child)
                work.append((child, iter(edges[child])))
            elif child in on_stack:
                low[node] = min(low[node], index[child])
    return found


def _pop_until(node: Key, stack: list[Key], on_stack: set[Key]) -> tuple[Key, ...]:
    members: list[Key] = []
    while True:
        top = stack.pop()
        on_stack.discard(top)
        members.append(top)
        if top == node:
            return tuple(members)
