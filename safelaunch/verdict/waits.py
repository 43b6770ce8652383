"""Who waits for whom among the ranks: the graph of waits, whose nodes are classes of ranks, ranks and processes.

All ranks that wait in the same operation under the same number wait for the same peers, so the nodes are those
classes and not the ranks; a job of thousands of ranks has a handful. A rank that is in no such operation is a node of
its own. It may wait for a file that a process has locked, for what the process at the other end of a connection is to
send, or, in a loop that polls, for what a rank was to do that is kept from there. A child of a rank is a node where it
has locked that file, or has that other end.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property

from safelaunch.model import Frame
from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.stacks.guards import Guard, guards_of, way_to
from safelaunch.verdict.c10d import fits, signature
from safelaunch.verdict.conditions import Condition
from safelaunch.verdict.graph import Edge, Graph, Node, NodeKind
from safelaunch.verdict.guarding import whereabouts
from safelaunch.verdict.majority import sides_of
from safelaunch.verdict.peers import PeerWait
from safelaunch.verdict.processes import ProcessView
from safelaunch.verdict.rank_state import CaseFacts, child_views, user_stack_of, view_of

WaitKey = tuple[Hashable, ...]


@dataclass(frozen=True)
class AwaitedHolder:
    """Whom a rank waits for: another one, or a ``child`` process (a pid) of its. ``condition``: what that does by its
    own doing, if anything; None where it waits for peers in turn. ``kind``: it has a file locked, the other end of a
    connection, alone does not poll for what the others look for, or alone sets the key, or makes the file, that they
    wait for, at ``site``. ``words`` say why, of the last two.
    """

    rank: int
    condition: Condition | None
    kind: NodeKind = "file"
    words: str = ""
    site: Frame | None = None
    child: int | None = None


@dataclass(frozen=True)
class Waiters:
    """A class of ``ranks`` that wait for the same peers, ``blockers``. ``wait``: what the first of them waits in."""

    ranks: tuple[int, ...]
    wait: PeerWait
    blockers: frozenset[int]


@dataclass(frozen=True)
class Waits:
    """``nodes``: in the graph, of the ranks that wait for peers; ``classes``: by these. ``held_by``: rank → whom it
    waits for outside of calls, where that is not the rank itself.
    """

    nodes: Mapping[int, WaitKey]
    classes: Mapping[WaitKey, Waiters]
    held_by: Mapping[int, AwaitedHolder]

    @cached_property
    def graph(self) -> Graph:
        return Graph(self._edges())

    def _edges(self) -> Iterator[Edge]:
        nodes = self.nodes
        for key, one in self.classes.items():
            # In the order of the ranks: the same evidence has the same verdict, to the word.
            others = dict.fromkeys(nodes.get(b, b) for b in sorted(one.blockers) if nodes.get(b) != key)
            yield Edge(key, tuple(others), "call")
        for rank, holder in self.held_by.items():
            yield Edge(rank, (self.node_of(holder),), holder.kind)

    def node_of(self, holder: AwaitedHolder) -> Node:
        return self.nodes.get(holder.rank, holder.rank) if holder.child is None else (holder.rank, holder.child)

    @cached_property
    def blocking(self) -> frozenset[int]:
        """The ranks that somebody waits for."""
        return frozenset().union(*(one.blockers for one in self.classes.values()))

    @cached_property
    def circle(self) -> tuple[Waiters, ...]:
        """The largest set of classes that wait for each other and for nobody else; empty where every wait ends at a
        rank of its own doing.
        """
        circles = [self._classes(sink) for sink in self.graph.sinks]
        return max(circles, key=lambda circle: sum(len(one.ranks) for one in circle), default=())

    def _classes(self, sink: tuple[Node, ...]) -> tuple[Waiters, ...]:
        """The classes in a circle of calls alone."""
        found = tuple(self.classes[node] for node in sink if isinstance(node, tuple) and node in self.classes)
        return found if len(found) == len(sink) and any(one.blockers for one in found) else ()

    @cached_property
    def groups_of_circle(self) -> frozenset[str]:
        return frozenset(group for one in self.circle if (group := one.wait.group) is not None)

    @cached_property
    def transfers_of_circle(self) -> tuple[Waiters, ...]:
        """The sends and receives in it."""
        return tuple(one for one in self.circle if one.wait.kind == "p2p")

    @property
    def in_circle(self) -> list[int]:
        return ranks_in(self.circle)


class Case(CaseFacts):
    """What the rules decide on: the ranks, and the graph of their waits, which is built when it is first asked for."""

    @cached_property
    def waits(self) -> Waits:
        nodes = {rank: _key(rank, wait) for rank, wait in self.waiting.items()}
        classes = {key: _class_of(self, tuple(ranks)) for key, ranks in sides_of(nodes).items()}
        return Waits(nodes, classes, dict(_holders(self)))


def ranks_in(classes: Iterable[Waiters]) -> list[int]:
    return sorted(rank for one in classes for rank in one.ranks)


def _class_of(facts: CaseFacts, ranks: tuple[int, ...]) -> Waiters:
    wait = facts.waiting[ranks[0]]
    return Waiters(ranks, wait, _blockers(facts, wait, ranks))


def _holders(facts: CaseFacts) -> Iterator[tuple[int, AwaitedHolder]]:
    """Of the ranks that wait for a file lock or at a connection: the process that the kernel names, where it is another
    rank's. Of those that poll: the one rank that the source keeps from there.
    """
    places: dict[fr.Spot, set[int]] = {}
    for rank, one in facts.ranks.items():
        if one.condition is not None and one.condition.frame is not None:
            places.setdefault(fr.spot(one.condition.frame), set()).add(rank)
    for rank, one in facts.ranks.items():
        own = one.condition
        if own is None:
            continue
        pid = own.locked_by if own.locked_by is not None else own.awaits_message_from
        host = own.locked_on or one.evidence.host
        owner, _ = facts.processes.get((host, pid), (rank, ())) if pid is not None else (rank, ())
        if pid is not None and owner != rank:
            yield rank, _holder(facts, owner, pid, "file" if own.locked_by == pid else "message")
        elif own.process == "main":
            found = _sets(facts, rank, own) or _kept_from(facts, rank, own)
            found = found or _answers(facts, rank) or _not_there(facts, own, places)
            yield from [(rank, found)] if found is not None else []


def _kept_from(facts: CaseFacts, rank: int, own: Condition) -> AwaitedHolder | None:
    """Of a rank that polls: the one rank that a condition on the rank keeps from its line; None for several."""
    if not _polls(own):
        return None
    for guard in guards_of(user_stack_of(facts.ranks[rank].evidence), facts.read_source):
        admitted = {other: guard.admits(whereabouts(facts, other)) for other in facts.world}
        kept = [other for other, comes in admitted.items() if comes is False]
        if admitted[rank] is True and len(kept) == 1 and kept[0] in facts.ranks:
            other = kept[0]
            return _the_rank(facts, other, "poll", f"`{guard.words}` keeps rank {other} from there")
    return None


def _polls(own: Condition) -> bool:
    return own.poll is not None and own.poll.of in ("file", "key", "")


def _not_there(facts: CaseFacts, own: Condition, places: Mapping[fr.Spot, Set[int]]) -> AwaitedHolder | None:
    """Of a rank that waits for a key of the store, or polls: the one rank that does not, while all others do so at one
    line; where it waits for its peers, it has passed by there, or comes there never.
    """
    if own.frame is None or not (own.key is not None or _polls(own)):
        return None
    there = places[fr.spot(own.frame)]
    if len(there) < 2 or len(there) != len(facts.world) - 1 or facts.unseen:
        return None
    (other,) = facts.world - there
    if other not in facts.waiting:
        return None
    return _the_rank(facts, other, "poll", f"rank {other} alone does not wait there")


def _answers(facts: CaseFacts, rank: int) -> AwaitedHolder | None:
    """Of a rank that waits for the answer to a remote call: the one other rank that is at one; None for several."""
    view = view_of(facts.ranks[rank].evidence)
    if view is None or not calls.RPC.on(view.stack.called):
        return None
    views = {other: view_of(one.evidence) for other, one in facts.ranks.items() if other != rank}
    at_work = [r for r, v in views.items() if v is not None and any(calls.ANSWERS_RPC.on(t.frames) for t in v.beside())]
    if len(at_work) != 1:
        return None
    return _the_rank(facts, at_work[0], "message")


def _sets(facts: CaseFacts, rank: int, own: Condition) -> AwaitedHolder | None:
    """Of a rank that waits for a key of the store, or polls for a file: the one other rank that comes to the line that
    sets or makes it.
    """
    lines = own.key.set_at if own.key is not None else own.poll.made_at if own.poll is not None else ()
    for line in lines:
        guards = guards_of((line,), facts.read_source)
        kept = {other for other in facts.world if any(_is_kept(facts, other, guard) for guard in guards)}
        may = facts.world - kept
        if len(may) == 1 and rank in kept and (other := next(iter(may))) in facts.ranks:
            behind = [f"`{step.words}`" for step in way_to(line, facts.read_source) if not step.loop]
            does = f"sets it, at {fr.place(line)}"
            if own.key is None:
                does = f"comes to {fr.place(line)}, which names that file"
            words = f"rank {other} alone {does}, behind {' and '.join(behind)}"
            return _the_rank(facts, other, "key" if own.key is not None else "poll", words, line)
    return None


def _is_kept(facts: CaseFacts, rank: int, guard: Guard) -> bool:
    """By its number, or as it is where the same condition sends those that it does not admit."""
    if guard.admits(whereabouts(facts, rank)) is False:
        return True
    stack = user_stack_of(facts.ranks[rank].evidence) if rank in facts.ranks else ()
    return any(
        (here.file, here.line) == (guard.file, guard.line) and here.taken is not guard.taken
        for here in guards_of(stack, facts.read_source)
    )


def _the_rank(facts: CaseFacts, rank: int, kind: NodeKind, words: str = "", site: Frame | None = None) -> AwaitedHolder:
    return AwaitedHolder(rank, facts.ranks[rank].condition, kind, words, site)


def _holder(facts: CaseFacts, rank: int, pid: int, kind: NodeKind) -> AwaitedHolder:
    one = facts.ranks[rank]
    child = next((view for view in child_views(one.evidence) if view.process.pid == pid), None)
    if child is None or (one.condition is not None and one.condition.pid == pid):
        return _the_rank(facts, rank, kind)
    if child.awaited.processes == "message" or child.user_frame is None:  # it waits for what its rank sends
        return _the_rank(facts, rank, kind)
    condition = replace(ProcessView(child).condition(), process=f"{child.process.role} (pid {pid})")
    return AwaitedHolder(rank, condition, kind, child=pid)


def _key(rank: int, wait: PeerWait) -> WaitKey:
    """Each send and receive is a class of its own: two ranks in the same ``recv`` line wait for different peers."""
    if wait.kind == "p2p":
        return (*wait.key, rank)
    return wait.key if wait.seq is not None or wait.kind == "init" else (*wait.key, _line(wait))


def _blockers(facts: CaseFacts, wait: PeerWait, ranks: tuple[int, ...]) -> frozenset[int]:
    inside = frozenset(ranks)
    if wait.kind == "init":
        return frozenset(r for r in facts.world - inside if not facts.alignment.joined(r))
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
    """``rank`` has entered the same collective; one that recorded something else under the number has not,
    nor one whose device has not begun what its CPU has queued.

    A rank without a record is taken to have entered when its stack waits in the same function.
    """
    if rank not in facts.alignment.records:
        return _same_call(facts, rank, wait)
    entry = facts.alignment.entry(rank, group, seq)
    if entry is not None:
        fitting = entry.started is not False and fits(signature(entry), wait.signature)
        return fitting and not facts.alignment.is_behind(rank, entry)
    return facts.alignment.last(rank, group) >= seq


def _same_call(facts: CaseFacts, rank: int, wait: PeerWait) -> bool:
    """``rank`` waits in the same function. Where stacks are all there is for both, in the same line, too: only a
    Flight Recorder could tell that different lines meet.
    """
    other = facts.waiting.get(rank)
    if other is None or other.kind != wait.kind or not same_op(other.op, wait.op):
        return False
    return other.seq is not None or wait.seq is not None or _line(other) == _line(wait)


def _line(wait: PeerWait) -> tuple[str, int] | None:
    return (wait.frame.file, wait.frame.line) if wait.frame else None


def same_op(one: str, other: str) -> bool:
    """The Flight Recorder says ``_all_gather_base``, the stack ``all_gather_into_tensor`` or ``all_gather_object``."""
    a, b = (name.strip("_").replace("_", "") for name in (one, other))
    return "acollective" in (a.replace(" ", ""), b.replace(" ", "")) or a in b or b in a
