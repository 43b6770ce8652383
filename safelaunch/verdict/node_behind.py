"""A node whose ranks are all at fault, and no others."""

from __future__ import annotations

from collections.abc import Iterator

from safelaunch.model import (
    Evidence,
    NodeAtFault,
    format_ranks,
)
from safelaunch.verdict.causes import CAUSES
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.findings import Annotation, Finding, Reason
from safelaunch.verdict.majority import sides_of
from safelaunch.verdict.phrases import ranks_word
from safelaunch.verdict.waits import Case


def node_behind(case: Case, finding: Finding) -> Iterator[Annotation]:
    """Blames the node if the ranks at fault are exactly the ranks of one node."""
    named = frozenset(culprit.rank for culprit in finding.culprits)
    node = next((node for node in _nodes(case.evidence) if len(named) > 1 and named == set(node[1])), None)
    if node is None or case.unseen:
        return
    host, ranks = node
    does = dict.fromkeys(culprit.does.rstrip(".") for culprit in finding.culprits)
    first, *others = does
    reason = f"each of its ranks {first}"
    if others:
        reason = f"all of its ranks are behind: rank {next(iter(ranks))} {first}, and others likewise"
    at_fault = (NodeAtFault(host, format_ranks(ranks), reason),)
    of_node = CAUSES[finding.cause].of_node
    if not of_node or case.evidence.outcome not in ("hang", "suspect"):
        yield Annotation(nodes=at_fault)
        return
    yield Annotation(
        f"Node {host} is behind as a whole: {ranks_word(ranks)}, and no others.",
        doubts=finding.doubts if of_node == "surely" else (*finding.doubts, Doubt.NOT_OF_THE_NODE),
        culprits=(),
        cause="node-behind",
        explains=Reason.NODE,
        ruled_out=(f"{finding.cause} of {ranks_word(ranks)} alone: they are all ranks of the node",),
        nodes=at_fault,
    )


def _nodes(evidence: Evidence) -> list[tuple[str, tuple[int, ...]]]:
    hosts = {node.ranks: node.host for node in evidence.nodes if node.ranks}
    if not hosts:
        by_host = sides_of({rank.rank: rank.host for rank in evidence.ranks})
        hosts = {tuple(sorted(ranks)): host for host, ranks in by_host.items()}
    return [(host, ranks) for ranks, host in hosts.items()] if len(hosts) > 1 else []
