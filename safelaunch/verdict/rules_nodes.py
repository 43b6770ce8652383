"""Rules for jobs on several nodes: a node is missing, gone, cut off, or without its launcher."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from msgspec import structs

from safelaunch.model import (
    Claim,
    NodeAtFault,
    NodeEvidence,
    Rendezvous,
    format_ranks,
)
from safelaunch.verdict.blame import condition_claims, conditions, wait_claims
from safelaunch.verdict.causes import FAILURES
from safelaunch.verdict.doubts import Doubt, doubts_if
from safelaunch.verdict.exceptions import is_timeout, nccl_failure, one_line
from safelaunch.verdict.exits import aborted_in
from safelaunch.verdict.findings import Finding, Ruling
from safelaunch.verdict.nccl_witness import nccl_states
from safelaunch.verdict.phrases import capital, clause_of, ranks_do, ranks_word, unseen_words, waits_words
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.rules_wait import mismatch_in
from safelaunch.verdict.versions import version_claims
from safelaunch.verdict.waits import Case

NODES_FILE, RENDEZVOUS_FILE = "nodes.json", "rendezvous.json"
SILENT_S = 15.0  # a shorter silence is a few missed beats


def rendezvous_incomplete(facts: CaseFacts) -> Ruling:
    """torchrun has started no rank: not all nodes have joined its rendezvous."""
    rendezvous = facts.evidence.rendezvous
    if rendezvous is None:
        return ""
    if not rendezvous.wanted:
        return _rendezvous_failed(rendezvous)
    text = f"{rendezvous.come} of {rendezvous.wanted} nodes joined torchrun's rendezvous within"
    text += f" {rendezvous.waited_s:.0f} s"
    text += f" ({', '.join(rendezvous.hosts[:8])}{', ...' * (rendezvous.come > len(rendezvous.hosts[:8]))})."
    if rendezvous.absent_ranks:
        text += f" Node {ranks_do(rendezvous.absent_ranks, 'is', 'are')} missing."
    if rendezvous.absent_hosts:
        text += f" No node joined from {', '.join(rendezvous.absent_hosts[:8])}."
    if rendezvous.store:
        text += f" The rendezvous store does not answer: {rendezvous.store}."
    claims = (
        Claim(f"{rendezvous.come} of {rendezvous.wanted} nodes joined", RENDEZVOUS_FILE),
        Claim(rendezvous.error, RENDEZVOUS_FILE),
    )
    absent = tuple(NodeAtFault(host, "", "it has not joined the rendezvous") for host in rendezvous.absent_hosts)
    return Finding("init-not-joined", (Doubt.UNCOUNTED_NODES,), text, claims=claims, nodes=absent)


def _rendezvous_failed(rendezvous: Rendezvous) -> Finding:
    why = f" ({rendezvous.error})" if rendezvous.error else ""
    text = f"The processes of the job did not meet: {rendezvous.store or 'not all of them joined'}{why}."
    return Finding("init-not-joined", (), text, claims=(Claim(rendezvous.error or rendezvous.store, RENDEZVOUS_FILE),))


def node_lost(case: Case) -> Ruling:
    """Every failure is a lost connection to a rank of a node that fell silent without reporting anything.

    Nodes that failed, were stopped or ended normally report that, unless the store ended before: it ends with the agent
    that hosts it. So its end blames no node while the host answers. If only the job's output is known, a single host
    that closed connections is that node.
    """
    raised = {rank: error for rank, state in case.ranks.items() if (error := state.evidence.exception) is not None}
    timed_out = {rank for rank, error in raised.items() if is_timeout(error)}
    nodes, own = case.evidence.nodes, conditions(case, *FAILURES)
    if case.evidence.printed is not None and len(nodes) == 1:
        lost = [rank for rank in raised if rank not in timed_out]
        return _host_lost(case, nodes[0], lost) if nodes[0].trouble or (lost and nodes[0].ranks and not own) else ""
    if any(c.cause != "rank-killed" or aborted_in(case.ranks[rank].evidence) is None for rank, c in own.items()):
        return ""
    lost = [rank for rank in case.ranks if rank in own or (rank in raised and rank in case.waiting)]
    gone = [node for node in _gone(case) if not node.ranks or case.unseen & set(node.ranks)]
    gone = [node for node in gone if node.silent_s or node.probe == "no answer"]
    if len(nodes) < 2 or not gone or not lost or not timed_out.isdisjoint(lost):
        return ""
    brief = max(node.silent_s for node in gone) < SILENT_S
    places = waits_words(case, lost)
    are, them = ("is", "it") if len(gone) == 1 else ("are", "them")
    text = f"{_names(gone)} {are} gone without reporting a failure, and {ranks_word(lost)}"
    text += f" lost their connections to {them}"
    text += f": {places}." if places else "."
    doubts = doubts_if({Doubt.BRIEFLY_SILENT: brief, Doubt.UNSEEN_RANKS: bool(case.unseen - _ranks_of(gone))})
    return _finding(case, "node-lost", doubts, text, gone, lost)


def _host_lost(case: Case, node: NodeEvidence, lost: list[int]) -> Finding:
    why = "" if node.trouble else " without reporting a failure"
    about = [node.trouble] if node.trouble else []
    about += [f"{ranks_word(lost)} lost the connection to it"] if lost else []
    about += [f"the output of {ranks_word(node.ranks)} ends there"] if node.ranks else []
    text = f"Node {node.host} is gone{why}: {', and '.join(about)}."
    reason = node.trouble or "connections to it were closed, and none of its ranks reports a failure"
    doubts = doubts_if({Doubt.UNSEEN_RANKS: not node.ranks})
    at_fault = (NodeAtFault(node.host, format_ranks(node.ranks), reason),)
    return Finding("node-lost", doubts, text, claims=wait_claims(case, lost), victims=tuple(lost), nodes=at_fault)


def ended_elsewhere(case: Case) -> Ruling:
    """The process that ended first was not seen: it hosted torchrun's store, or ranks lost their connections to it.

    Ranks here need not have failed, as an agent that lost its store ends them.
    """
    return _store_lost(case) or _unseen_peer_ended(case)


def _store_lost(case: Case) -> Finding | None:
    failed = [node for node in case.evidence.nodes if node.here and node.agent_error]
    hosts = [node for node in _gone(case) if node.store]
    if not failed or not hosts:
        return None
    answers = all(node.probe == "answers" for node in hosts)
    text = f"Torchrun on {_hosts(failed)} failed: its agents' store was on {_names(hosts)}, "
    text += "where torchrun has ended" if answers else "which is silent: it is down, or cut off"
    reason = Claim(f"node {failed[0].host}: torchrun failed: {one_line(failed[0].agent_error)}", NODES_FILE)
    unanswered = all(node.probe == "no answer" for node in hosts)
    doubts = {Doubt.NODE_MAY_LIVE: not unanswered, Doubt.UNSEEN_RANKS: bool(case.unseen - _ranks_of(hosts))}
    cause = "launcher-stopped" if answers else "node-unreachable"
    finding = _finding(case, cause, doubts_if(doubts), f"{text}.", hosts, case.waiting)
    return replace(finding, claims=(*finding.claims, reason))


def _unseen_peer_ended(facts: CaseFacts) -> Ruling:
    errors = {rank: facts.ranks[rank].evidence.exception for rank in facts.waiting}
    lost = [rank for rank, error in errors.items() if error is not None]
    unseen = facts.unseen or facts.evidence.world_guessed
    if not unseen or not lost or any(error is not None and is_timeout(error) for error in errors.values()):
        return ""
    subject = capital(f"{'' if len(facts.unseen) == 1 else 'one of '}{ranks_word(facts.unseen)}")
    named = [node.host for node in facts.evidence.nodes if not node.here and not node.ranks]
    if facts.evidence.world_guessed or (facts.evidence.printed is not None and named):
        subject = " or ".join(f"A process on {host}" for host in named) or "A peer"
    places = dict.fromkeys(facts.waiting[rank].words for rank in lost)
    printed = facts.evidence.printed is not None
    where = ", which doesn't appear in the log" if printed else ", on another node"
    ended = "ended first, or could not be reached" if facts.evidence.world_guessed else "ended first"
    text = f"{subject}{where}, {ended}: {ranks_word(lost)} lost the connection in "
    text += f"{' and '.join(list(places)[:2])}."
    if facts.evidence.stall_s:
        text += (
            f" There had been no step here for {facts.evidence.stall_s:.0f} s: that node might have ended a hung job."
        )
    place = "that rank's output" if printed else "that node's bundle or output"
    text += f" What went wrong is in {place}."
    failures = (nccl_failure(facts.ranks[rank].evidence) for rank in lost)
    cause = (
        "node-unreachable"
        if named and any(failure and failure.kind == "infiniband" for failure in failures)
        else "rank-exited"
    )
    return Finding(cause, (Doubt.UNSEEN_RANKS,), text, claims=wait_claims(facts, lost), victims=tuple(lost))


def unseen_peers(case: Case) -> Ruling:
    """Ranks wait for ranks that were not seen: their node is cut off or silent, or nothing more is known of them.

    A connection to a node shows what has gone silent there. A majority alone names no rank; a mismatch among the seen
    ranks is still reported, without a culprit.
    """
    finding = (_cut_off(case) or _silent(case)) if len(case.evidence.nodes) > 1 else None
    return finding or ("" if case.waits.blockers <= case.ranks.keys() else _of_unknown_state(case))


def _cut_off(case: Case) -> Finding | None:
    """Both sides are alive, but lost contact with each other; or this node has no address or route to the others.

    Both are known to be alive because the evidence includes a node that others lost contact with.
    """
    alive = [node for node in case.evidence.nodes if node.here]
    unreached = [node for node in case.evidence.nodes if node.is_gone and node.probe == "no route"]
    gone = _gone(case)
    if case.evidence.outcome == "crash":
        return None
    if unreached and len(alive) == 1 and not gone:
        own = [structs.replace(alive[0], probe="no route")]
        text = f"{_names(own)} is cut off from {_names(unreached)}: {_TRIED['no route']}."
        doubts = doubts_if({Doubt.UNSEEN_RANKS: bool(case.unseen)})
        return _finding(case, "node-unreachable", doubts, text, own, sorted(case.waiting))
    gone = gone or [structs.replace(node, probe="") for node in unreached]  # both sides alive: the link is down
    gone = [node for node in gone if any(_same(node, own_node) for own_node in alive)]
    if not gone:
        return None
    sides = [ranks_word(node.ranks) for node in alive if node.ranks]
    text = f"{_names(gone)} {'was' if len(gone) == 1 else 'were'} cut off: both sides are alive, but lost contact with"
    text += " each other"
    text += f" ({' and '.join(sides[:4])})." if sides else "."
    mutual = len({(node.host, node.ranks) for node in gone}) > 1 or any(node.probe == "no answer" for node in gone)
    doubts = doubts_if({Doubt.NODE_MAY_LIVE: not mutual, Doubt.UNSEEN_RANKS: bool(case.unseen)})
    return _finding(case, "node-unreachable", doubts, text, gone, sorted(case.waiting))


def _silent(case: Case) -> Finding | None:
    awaited = case.waits.blockers
    silent = [node for node in _gone(case) if awaited & set(node.ranks) & case.unseen]
    if not silent or awaited & case.unseen - _ranks_of(silent):
        return None
    # NCCL's report on its ranks overrides a guess about the node, and confirms what a connection to it shows.
    states = nccl_states(case.evidence)
    answers = {states.get(rank, "") for rank in _ranks_of(silent)}
    lives, gone = answers == {"answers"}, answers <= {"unresponsive", "dead"}
    launcher = lives or (not gone and all(node.store == "silent" or node.probe == "answers" for node in silent))
    unanswered = gone or all(node.store == "unreachable" or node.probe == "no answer" for node in silent)
    waiting = sorted(case.waiting)
    text = f"{capital(waits_words(case, waiting))} for {ranks_word(_ranks_of(silent))} on {_hosts(silent)}"
    if launcher:
        text += ", which answers, while its safelaunch or torchrun does not: it was stopped or has ended there."
    else:
        text += ", which is silent: it is down, or cut off."
    brief = not gone and all(0.0 < node.silent_s < SILENT_S and not node.store for node in silent)
    doubts = {Doubt.NODE_MAY_LIVE: not unanswered, Doubt.BRIEFLY_SILENT: brief}
    cause = "launcher-stopped" if launcher else "node-unreachable"
    return _finding(case, cause, doubts_if(doubts), text, silent, waiting)


def _of_unknown_state(case: Case) -> Finding:
    waiting = sorted(case.waiting)
    they = "they wait" if len(waiting) > 1 else "it waits"
    text = f"{capital(waits_words(case, waiting))}; {unseen_words(case)} and might be what {they} for."
    own = {rank: condition for rank, condition in conditions(case).items() if case.may_wait_elsewhere(rank)}
    if own:
        text += f" {capital(clause_of(own, case, []))}, perhaps waiting for one of them."
    cause = "missing-from-collective"
    if also := mismatch_in(case):
        cause = "collective-mismatch"
        text += f" Among those seen, ranks recorded {also}."
    claims = wait_claims(case, case.waiting) + condition_claims(own)
    return Finding(cause, (Doubt.UNSEEN_PEERS,), text, claims=claims)


def node_reports_why(case: Case) -> Ruling:
    """Ranks only wait, and a node reports why: its torchrun agent is stopped, or something failed there."""
    stopped = [node for node in case.evidence.nodes if node.agent == "stopped"]
    failed = [node for node in case.evidence.nodes if node.trouble and not node.here and case.unseen & set(node.ranks)]
    waiting = _only_waiting(case)
    if not waiting or not (stopped or failed):
        return ""
    waits = waits_words(case, waiting)
    if stopped:
        by_store = any(wait.kind == "init" for wait in case.waiting.values())
        doubts = {Doubt.BY_EXCLUSION: not by_store, Doubt.UNSEEN_RANKS: bool(case.unseen)}
        text = f"torchrun is stopped on {_names(stopped)}, while {waits}."
        return _finding(case, "launcher-stopped", doubts_if(doubts), text, stopped, waiting)
    text = f"{waits}; {'; '.join(node.trouble for node in failed[:4])}."
    claims = (Claim(f"node {node.host} reported: {node.trouble}", NODES_FILE) for node in failed)
    finding = _finding(case, "rank-exited", (Doubt.UNSEEN_RANKS,), text, (), waiting)
    return replace(finding, claims=(*claims, *finding.claims))


def versions_differ(case: Case) -> Ruling:
    """Ranks only wait, and the nodes run different versions of torch, safelaunch or the script."""
    claims, waiting = version_claims(case.evidence), _only_waiting(case)
    if not claims or not waiting:
        return ""
    text = f"{capital(waits_words(case, waiting))}, and {claims[0].claim}."
    doubts = {Doubt.BY_EXCLUSION: True, Doubt.UNSEEN_RANKS: bool(case.unseen)}
    return Finding(
        "versions-differ", doubts_if(doubts), text, claims=wait_claims(case, waiting), victims=tuple(waiting)
    )


def _only_waiting(case: Case) -> list[int]:
    return [] if conditions(case) else list(case.waiting)


def _gone(facts: CaseFacts) -> list[NodeEvidence]:
    # A supervisor that was stopped has missed reports, so only unreachable nodes count.
    nodes = facts.evidence.nodes
    missed = any(node.here and node.missed_s for node in nodes)
    gone = [node for node in nodes if node.is_gone and not node.here and node.probe != "no route"]
    return [node for node in gone if not missed or node.probe == "no answer" or node.store == "unreachable"]


def _same(node: NodeEvidence, other: NodeEvidence) -> bool:
    return node.host == other.host and (not node.ranks or not other.ranks or node.ranks == other.ranks)


def _ranks_of(nodes: Iterable[NodeEvidence]) -> frozenset[int]:
    return frozenset(rank for node in nodes for rank in node.ranks)


def _names(nodes: Iterable[NodeEvidence]) -> str:
    words = [f"node {node.host}" + (f" ({ranks_word(node.ranks)})" if node.ranks else "") for node in nodes]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _hosts(nodes: Iterable[NodeEvidence]) -> str:
    hosts = list(dict.fromkeys(node.host for node in nodes))
    return f"node{'s' * (len(hosts) > 1)} {' and '.join(hosts)}"


def _finding(
    case: Case,
    cause: str,
    doubts: tuple[Doubt, ...],
    text: str,
    nodes: Iterable[NodeEvidence],
    waiting: Iterable[int],
) -> Finding:
    waiting = tuple(waiting)
    named = {(node.host, node.ranks): _at_fault(node) for node in nodes}
    claims = tuple(Claim(f"node {node.host}: {node.reason}", NODES_FILE) for node in named.values())
    return Finding(
        cause,
        doubts,
        capital(text),
        claims=(*claims, *wait_claims(case, waiting)),
        victims=waiting,
        nodes=tuple(named.values()),
    )


def _at_fault(node: NodeEvidence) -> NodeAtFault:
    parts = []
    if node.agent == "stopped":
        parts.append("a signal has stopped its torchrun agent")
    if node.silent_s:
        parts.append(f"its safelaunch was silent for {node.silent_s:.0f} s")
    parts += [_LOST[node.store]] if node.store else []
    parts += [_TRIED[node.probe]] if node.probe else []
    return NodeAtFault(node.host, format_ranks(node.ranks), "; ".join(parts))


_LOST = {
    "closed": "the store of torchrun's agents, which it hosts, was closed",
    "silent": "its torchrun, which hosts the agents' store, accepts connections and does not answer",
    "unreachable": "no connection to the store of torchrun's agents, which it hosts, can be made",
}
_TRIED = {
    "answers": "the host itself answers",
    "no answer": "the host does not answer either",
    "no route": "its own network interface is down, or has no link, address or route",
}
