"""Proof that a job is dead: a closed set of waits that no thread, process or rank can end.

It is the greatest fixpoint (:func:`.graph.stuck`) over all possible waits. The job is dead if the main thread of every
living rank is stuck.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from safelaunch.model import Claim, ProofEdge, rank_words
from safelaunch.stacks import frames as fr
from safelaunch.verdict.graph import UNKNOWN_THREADS, Actor, Need, Node, stuck
from safelaunch.verdict.possible_waits import USER_LIMIT_S, OpenCall, PossibleWaits
from safelaunch.verdict.proof_threads import is_steady
from safelaunch.verdict.waits import Case

MOST_EDGES = 24


@dataclass(frozen=True)
class ProofResult:
    """A proof, or what is missing for one."""

    proof: tuple[ProofEdge, ...] = ()  # closed set of waits that holds every rank; empty without a proof
    free: Claim | None = None  # what could still release the ranks, or why a main thread's wait can end


def examine(case: Case) -> ProofResult:
    if case.unseen or case.evidence.outcome == "crash" or not case.ranks:
        return ProofResult()
    ended = {rank: facts.evidence.exit for rank, facts in case.ranks.items() if facts.evidence.exit is not None}
    living = [rank for rank in case.ranks if rank not in ended]
    if not living or any(exit_.returncode for exit_ in ended.values()):
        return ProofResult()  # a failed rank makes the launcher end or restart the others
    mains = [rank.evidence.main for rank in case.ranks.values() if rank.evidence.main is not None]
    if any(state.leads for main in mains for state in main.states):
        return ProofResult()  # the first thread belongs to a framework, which might end any wait
    waits = PossibleWaits(case, living)
    if not waits.has_every_rank:
        return ProofResult()
    stuck_nodes = stuck({node: needs for node, needs in waits.needs.items() if needs})
    if stuck_nodes.keys() >= set(waits.mains):
        return ProofResult(_edges(waits, stuck_nodes))
    return ProofResult((), _what_is_free(waits, stuck_nodes))


def _what_is_free(waits: PossibleWaits, stuck_nodes: Mapping[Node, Need]) -> Claim | None:
    """Follows the waits from a main thread that isn't stuck to a node that acts by itself."""
    for node in sorted(waits.mains.keys() - stuck_nodes.keys(), key=repr):
        visited = {node}
        while waits.needs.get(node):
            givers = (giver for need in waits.needs[node] for giver in sorted(need.givers, key=repr))
            following = next((giver for giver in givers if giver not in stuck_nodes and giver not in visited), None)
            if following is None:
                break
            node = following
            visited.add(node)
        if isinstance(node, Actor) and not waits.needs.get(node):
            free = _why_it_ends(waits, node) if node in waits.mains else _place_of(waits, node)
            if free:
                could = "" if node in waits.mains else " could still release the ranks"
                return Claim(f"{free}{could}", f"ranks/{node.rank}/stack.txt")
    return None


def _why_it_ends(waits: PossibleWaits, main: Actor) -> str:
    """Returns why the wait of a main thread can end by itself, unless that is evident."""
    process = waits.rank_processes[main.rank]
    view = process.views[main]
    may_end = view.wait.kind in ("lock", "child", "io", "poll")
    if not may_end or not is_steady(view, spins=False):
        return ""
    where = f"the wait of rank {main.rank} at {view.place}"
    if view.wait.left_s is not None and view.wait.left_s < USER_LIMIT_S:
        return f"{where} has a time limit"
    if waits.may_be_interrupted(view, process):
        return f"a signal can end {where}: the script handles one"
    if view.wait.kind == "child":
        return f"the child process for which rank {main.rank} waits at {view.place} can end"
    return f"{where} can end from outside the job" if view.wait.kind in ("io", "poll") else ""


def _place_of(waits: PossibleWaits, node: Actor) -> str:
    host = waits.case.ranks[node.rank].evidence.host
    process = waits.processes[host, node.pid]
    whose = f"rank {node.rank}" if waits.is_rank(process) else f"process {node.pid} of rank {node.rank}"
    if node.tid == UNKNOWN_THREADS:
        files = {path.rpartition("/")[2] for thread in process.unknown_threads for path in thread.libraries} - {"?"}
        return f"a native thread of {whose}" + (f" ({', '.join(sorted(files)[:3])})" if files else "")
    view = process.views[node]
    which = f"thread {view.name} of {whose}" if view.other is not None else whose
    return f"{which} ({fr.place(view.user_frame)})" if view.user_frame is not None else which


def _edges(waits: PossibleWaits, stuck_nodes: Mapping[Node, Need]) -> tuple[ProofEdge, ...]:
    """Follows the needs from the main threads, and merges ranks that need the same."""
    together: dict[tuple[str, tuple[str, ...], str], list[Node]] = {}
    queue: list[Node] = sorted(waits.mains, key=repr)
    visited = set(queue)
    for node in queue:  # grows during the loop
        need = stuck_nodes[node]
        file = need.claim.file if need.claim is not None else ""
        key = (need.why, _names(waits, need.givers), file.partition("/")[2].partition("/")[2])
        together.setdefault(key, []).append(node)
        for giver in sorted(need.givers - visited, key=repr):
            visited.add(giver)
            queue.append(giver)
    edges = []
    for (why, names, _), nodes in list(together.items())[:MOST_EDGES]:
        claim = stuck_nodes[nodes[0]].claim
        edges.append(ProofEdge(", ".join(_names(waits, nodes)), names, why, claim.file if claim is not None else ""))
    return tuple(edges)


def _names(waits: PossibleWaits, nodes: Iterable[Node]) -> tuple[str, ...]:
    nodes = set(nodes)
    mains = [rank for main, rank in waits.mains.items() if main in nodes]
    ranks = rank_words(mains) if mains else ""
    rest = {_name(node) for node in nodes - waits.mains.keys()}
    return tuple(filter(None, (ranks, *sorted(rest))))


def _name(node: Node) -> str:
    if isinstance(node, OpenCall):
        return node.words
    assert isinstance(node, Actor)
    what = "a native thread of " if node.tid == UNKNOWN_THREADS else f"thread {node.tid} of "
    return f"{what if node.tid != node.pid else ''}process {node.pid} of rank {node.rank}"
