"""Graph of the ranks' waits. Its nodes are classes of ranks, single ranks, and processes.

All ranks that wait in one operation with the same number are one node, so a job of thousands of ranks has a handful.
Other ranks can wait for a file lock or the other end of a connection, which a child process might hold, or poll for
something that another rank should do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property

from safelaunch.model import Frame
from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.stacks.guards import Guard, guards_of, way_to
from safelaunch.verdict.c10d import fits, same_op, signature
from safelaunch.verdict.conditions import Condition
from safelaunch.verdict.graph import Edge, Graph, Need, Node, NodeKind, stuck
from safelaunch.verdict.majority import sides_of
from safelaunch.verdict.peers import PeerWait
from safelaunch.verdict.processes import ProcessView
from safelaunch.verdict.rank_state import CaseFacts, RankFacts

WaitKey = tuple[Hashable, ...]


@dataclass(frozen=True)
class AwaitedHolder:
    """The rank, or its child process, that a rank waits for outside calls."""

    rank: int
    condition: Condition | None  # what it does; None if it waits for peers itself
    kind: NodeKind = "file"
    words: str = ""  # why it is the one, if only the source or the stacks show it
    site: Frame | None = None  # line that would set the key or create the file
    child: int | None = None  # PID of the child process


@dataclass(frozen=True)
class Waiters:
    """A class of ranks that wait for the same peers. ``wait`` is the wait of the first rank."""

    ranks: tuple[int, ...]
    wait: PeerWait
    blockers: frozenset[int]


@dataclass(frozen=True)
class Waits:
    nodes: Mapping[int, WaitKey]  # class of each rank that waits for peers
    classes: Mapping[WaitKey, Waiters]
    holders: Mapping[int, AwaitedHolder]  # what other ranks wait for

    @cached_property
    def graph(self) -> Graph:
        return Graph(self._edges())

    def _edges(self) -> Iterator[Edge]:
        nodes = self.nodes
        for key, waiters in self.classes.items():
            # In rank order, so that the same evidence has exactly the same verdict.
            awaited_nodes = dict.fromkeys(nodes.get(b, b) for b in sorted(waiters.blockers) if nodes.get(b) != key)
            yield Edge(key, tuple(awaited_nodes), "call")
        for rank, holder in self.holders.items():
            yield Edge(rank, (self.node_of(holder),), holder.kind)

    def node_of(self, holder: AwaitedHolder) -> Node:
        return self.nodes.get(holder.rank, holder.rank) if holder.child is None else (holder.rank, holder.child)

    @cached_property
    def blockers(self) -> frozenset[int]:
        return frozenset().union(*(waiters.blockers for waiters in self.classes.values()))

    @cached_property
    def cycle(self) -> tuple[Waiters, ...]:
        """The largest set of classes that wait only for each other."""
        cycles = [self._cycle_classes(sink) for sink in self.graph.sinks]
        return max(cycles, key=lambda cycle: sum(len(waiters.ranks) for waiters in cycle), default=())

    def _cycle_classes(self, sink: tuple[Node, ...]) -> tuple[Waiters, ...]:
        classes = tuple(self.classes[node] for node in sink if isinstance(node, tuple) and node in self.classes)
        return classes if len(classes) == len(sink) and any(waiters.blockers for waiters in classes) else ()

    @cached_property
    def groups_of_cycle(self) -> frozenset[str]:
        return frozenset(group for waiters in self.cycle if (group := waiters.wait.group) is not None)

    @cached_property
    def transfers_of_cycle(self) -> tuple[Waiters, ...]:
        return tuple(waiters for waiters in self.cycle if waiters.wait.kind == "p2p")

    @property
    def ranks_in_cycle(self) -> list[int]:
        return ranks_in(self.cycle)

    @cached_property
    def released_by(self) -> int | None:
        """The only rank of the cycle that could end all waits by entering what others wait for."""
        awaited = (rank for rank in self.ranks_in_cycle if rank in self.blockers)
        releasing = [rank for rank in awaited if self._releases(rank)]
        return releasing[0] if len(releasing) == 1 else None

    def _releases(self, rank: int) -> bool:
        stuck_nodes = stuck({node: needs for node, needs in self._needs.items() if node != rank})
        return not any(other in stuck_nodes for other in self.nodes if other != rank)

    @cached_property
    def _needs(self) -> Mapping[Node, tuple[Need, ...]]:
        """The likely waits of all ranks as needs. A rank that waits for no rank needs something that never happens."""
        needs: dict[Node, tuple[Need, ...]] = dict.fromkeys(self.blockers, (Need(frozenset()),))
        for key, waiters in self.classes.items():
            needs[key] = tuple(Need(frozenset({rank})) for rank in waiters.blockers)
            needs |= dict.fromkeys(waiters.ranks, (Need(frozenset({key})),))
        for rank, holder in self.holders.items():
            if holder.child is None:
                needs[rank] = (Need(frozenset({holder.rank})),)
        return needs


class Case(CaseFacts):
    """The input of the rules."""

    @cached_property
    def waits(self) -> Waits:
        nodes = {rank: _key(rank, wait) for rank, wait in self.waiting.items()}
        classes = {key: _class_of(self, tuple(ranks)) for key, ranks in sides_of(nodes).items()}
        return Waits(nodes, classes, dict(_holders(self)))


def ranks_in(classes: Iterable[Waiters]) -> list[int]:
    return sorted(rank for waiters in classes for rank in waiters.ranks)


def _class_of(facts: CaseFacts, ranks: tuple[int, ...]) -> Waiters:
    wait = facts.waiting[ranks[0]]
    return Waiters(ranks, wait, _blockers(facts, wait, ranks))


def _holders(facts: CaseFacts) -> Iterator[tuple[int, AwaitedHolder]]:
    """Yields what ranks wait for outside collective calls, according to the kernel or the source code."""
    places: dict[fr.Spot, set[int]] = {}
    for rank, rank_facts in facts.ranks.items():
        if rank_facts.condition is not None:
            for spot in _spots(rank_facts, rank_facts.condition):
                places.setdefault(spot, set()).add(rank)
    for rank, rank_facts in facts.ranks.items():
        own = rank_facts.condition
        if own is None:
            continue
        pid = own.locked_by if own.locked_by is not None else own.awaits_message_from
        host = own.locked_on or rank_facts.evidence.host
        owner, _ = facts.processes.get((host, pid), (rank, ())) if pid is not None else (rank, ())
        if pid is not None and owner != rank:
            yield rank, _holder(facts, owner, pid, "file" if own.locked_by == pid else "message")
        elif own.process == "main":
            holder = _setting_rank(facts, rank, own) or _excluded_rank(facts, rank, own)
            holder = holder or _answering_rank(facts, rank) or _missing_rank(facts, rank, own, places)
            yield from [(rank, holder)] if holder is not None else []


def _excluded_rank(facts: CaseFacts, rank: int, own: Condition) -> AwaitedHolder | None:
    """Returns the only rank that a condition keeps from the line of a polling rank."""
    if not _polls(own):
        return None
    for guard in guards_of(facts.ranks[rank].user_stack, facts.read_source):
        admitted = {other: guard.admits(facts.whereabouts(other)) for other in facts.world}
        kept = [other for other, comes in admitted.items() if comes is False]
        if admitted[rank] is True and len(kept) == 1 and kept[0] in facts.ranks:
            other = kept[0]
            return _rank_holder(facts, other, "poll", f"`{guard.words}` keeps rank {other} from that line")
    return None


def _polls(own: Condition) -> bool:
    return own.poll is not None and own.poll.of in ("file", "key", "") and not own.poll.removal


def _missing_rank(
    facts: CaseFacts, rank: int, own: Condition, places: Mapping[fr.Spot, Set[int]]
) -> AwaitedHolder | None:
    """Returns the one rank that waits for its peers while all others wait or poll in this line, or in a call from it.

    It has passed the line, or will never reach it.
    """
    if facts.unseen or not (own.key is not None or _polls(own)):
        return None
    for spot in _spots(facts.ranks[rank], own):
        others = facts.world - places[spot]
        if len(places[spot]) < 2 or len(others) != 1 or not others <= facts.waiting.keys():
            continue
        (other,) = others
        if spot not in map(fr.spot, facts.ranks[other].user_stack):
            return _rank_holder(facts, other, "poll", f"only rank {other} does not wait there")
    return None


def _spots(subject: RankFacts, own: Condition) -> Iterator[fr.Spot]:
    # The line where it waits, then the lines from which it got there.
    frames = dict.fromkeys((*([own.frame] if own.frame is not None else []), *subject.user_stack))
    return map(fr.spot, frames)


def _answering_rank(facts: CaseFacts, rank: int) -> AwaitedHolder | None:
    """Returns the only other rank in the remote call."""
    view = facts.ranks[rank].view
    if view is None or not calls.RPC.on(view.stack.called):
        return None
    views = {other: other_facts.view for other, other_facts in facts.ranks.items() if other != rank}
    at_work = [r for r, v in views.items() if v is not None and any(calls.ANSWERS_RPC.on(t.frames) for t in v.beside())]
    if len(at_work) != 1:
        return None
    return _rank_holder(facts, at_work[0], "message")


def _setting_rank(facts: CaseFacts, rank: int, own: Condition) -> AwaitedHolder | None:
    """Returns the only other rank that reaches the line that sets the key or creates the file."""
    lines = own.key.set_at if own.key is not None else own.poll.made_at if own.poll is not None else ()
    for line in lines:
        guards = guards_of((line,), facts.read_source)
        kept = {other for other in facts.world if any(_is_excluded(facts, other, guard) for guard in guards)}
        may = facts.world - kept
        if len(may) == 1 and rank in kept and (other := next(iter(may))) in facts.ranks:
            behind = [f"`{step.words}`" for step in way_to(line, facts.read_source) if not step.loop]
            does = f"sets it, at {fr.place(line)}"
            if own.poll is not None and own.key is None:
                does = f"reaches {fr.place(line)}, which {'removes' if own.poll.removal else 'names'} that file"
            words = f"only rank {other} {does}, under {' and '.join(behind)}"
            return _rank_holder(facts, other, "key" if own.key is not None else "poll", words, line)
    return None


def _is_excluded(facts: CaseFacts, rank: int, guard: Guard) -> bool:
    """Returns whether the condition excludes the rank, by its number or because it is where excluded ranks go."""
    if guard.admits(facts.whereabouts(rank)) is False:
        return True
    stack = facts.ranks[rank].user_stack if rank in facts.ranks else ()
    return any(
        (here.file, here.line) == (guard.file, guard.line) and here.taken is not guard.taken
        for here in guards_of(stack, facts.read_source)
    )


def _rank_holder(
    facts: CaseFacts, rank: int, kind: NodeKind, words: str = "", site: Frame | None = None
) -> AwaitedHolder:
    return AwaitedHolder(rank, facts.ranks[rank].condition, kind, words, site)


def _holder(facts: CaseFacts, rank: int, pid: int, kind: NodeKind) -> AwaitedHolder:
    owner = facts.ranks[rank]
    child = next((view for view in owner.children if view.process.pid == pid), None)
    if child is None or (owner.condition is not None and owner.condition.pid == pid):
        return _rank_holder(facts, rank, kind)
    if child.awaited.processes == "message" or child.user_frame is None:  # it waits for its rank
        return _rank_holder(facts, rank, kind)
    condition = replace(ProcessView(child).condition(), process=f"{child.process.role} (pid {pid})")
    return AwaitedHolder(rank, condition, kind, child=pid)


def _key(rank: int, wait: PeerWait) -> WaitKey:
    if wait.kind == "p2p":
        return (*wait.key, rank)
    return wait.key if wait.seq is not None or wait.kind == "init" else (*wait.key, _line(wait))


def _blockers(facts: CaseFacts, wait: PeerWait, ranks: tuple[int, ...]) -> frozenset[int]:
    inside = frozenset(ranks)
    if wait.kind == "init":
        return frozenset(r for r in facts.world - inside if not facts.alignment.has_joined(r))
    if wait.kind == "p2p":
        named = facts.transfers.peers_missing(ranks[0], wait.group) if wait.group is not None else None
        if named is None and wait.peer is not None and wait.peer in facts.world:
            named = frozenset({wait.peer})
        return facts.world - inside if named is None else named
    if wait.group is None or wait.seq is None:
        return frozenset(r for r in facts.world - inside if not _same_call(facts, r, wait))
    members, _ = facts.alignment.members(wait.group)
    return frozenset(r for r in members - inside if not _has_entered(facts, r, wait, wait.group, wait.seq))


def _has_entered(facts: CaseFacts, rank: int, wait: PeerWait, group: str, seq: int) -> bool:
    """Returns whether ``rank`` has entered the same collective, and its device has begun it.

    A rank without a record counts if its stack waits in the same function.
    """
    if rank not in facts.alignment.records:
        return _same_call(facts, rank, wait)
    entry = facts.alignment.entry(rank, group, seq)
    if entry is not None:
        fitting = entry.started is not False and fits(signature(entry), wait.signature)
        return fitting and not facts.alignment.is_behind(rank, entry)
    return facts.alignment.last(rank, group) >= seq


def _same_call(facts: CaseFacts, rank: int, wait: PeerWait) -> bool:
    other = facts.waiting.get(rank)
    if other is None or other.kind != wait.kind or not same_op(other.op, wait.op):
        return False
    return other.seq is not None or wait.seq is not None or _line(other) == _line(wait)


def _line(wait: PeerWait) -> tuple[str, int] | None:
    return (wait.frame.file, wait.frame.line) if wait.frame else None
