"""Network links whose error counters grow while all ranks wait."""

from __future__ import annotations

from collections.abc import Iterator

from safelaunch.model import Claim, NodeAtFault, format_ranks
from safelaunch.verdict.doubts import Doubt, doubts_if
from safelaunch.verdict.findings import Annotation, Finding
from safelaunch.verdict.majority import sides_of
from safelaunch.verdict.phrases import ranks_word
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.suggestions import LINK_ERRORS

_MOST = 4


def links_failing(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """Lists failing links, and names the node if they are all on one of several nodes."""
    failing = {link.host: link.grown for link in facts.evidence.links if link.grown}
    hosts = sides_of({rank: state.evidence.host for rank, state in facts.ranks.items()})
    if not failing or not facts.waiting or facts.gone:
        return
    words = {host: [f"{link}: {_counts(grown)}" for link, grown in links.items()] for host, links in failing.items()}
    claims = [
        Claim(f"since the job became quiet, {text}", f"node/{host}/resources.json")
        for host, texts in words.items()
        for text in texts[:_MOST]
    ]
    advice, (host, *others) = frozenset({LINK_ERRORS}), failing
    if others or len(hosts) < 2 or host not in hosts:
        yield Annotation(advice=advice, context=tuple(claims))
        return
    reason = f"the error counters of {' and '.join([*failing[host]][:_MOST])} grow while all ranks wait"
    unread = hosts.keys() - {link.host for link in facts.evidence.links}
    yield Annotation(
        f"Node {host} ({ranks_word(hosts[host])}) might be at fault: {reason}.",
        tuple(claims),
        doubts_if({Doubt.LINKS_UNREAD: bool(unread)}),
        advice=advice,
        nodes=(NodeAtFault(host, format_ranks(hosts[host]), reason),),
    )


def _counts(grown: dict[str, int]) -> str:
    return ", ".join(f"{count} {counter}" for counter, count in grown.items())
