"""What a rule returns, and the words that are common to all verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from safelaunch.model import Claim, Culprit, Frame, NodeAtFault
from safelaunch.stacks.guards import Guard
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.rank_state import CaseFacts, user_stack_of
from safelaunch.verdict.suggestions import Advice


@dataclass(frozen=True)
class GuardedCall:
    """``ranks`` come to ``call``, which is past ``guard``. ``kept``: those that it is known to keep away from there;
    empty where it asks for more than the rank.
    """

    guard: Guard
    call: Frame
    ranks: tuple[int, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True)
class Finding:
    """A rule's answer."""

    cause: str
    doubts: tuple[Doubt, ...]
    summary: str
    culprits: tuple[Culprit, ...] = ()
    """may be empty: the cause is known, who is at fault is not"""
    claims: tuple[Claim, ...] = ()
    ruled_out: tuple[str, ...] = ()
    victims: tuple[int, ...] = ()
    """beside those that wait in a collective"""
    nodes: tuple[NodeAtFault, ...] = ()
    """those that are at fault as a whole"""
    calls: Mapping[int, tuple[Frame, ...]] = field(default_factory=dict)
    """rank → the user's frames, innermost first, of the call at which ways diverged, if the ranks are elsewhere now"""
    advice: frozenset[Advice] = frozenset()
    """on the sub-case that it is"""
    branches: tuple[GuardedCall, ...] = ()
    """the conditions on the rank that sent those at fault another way than their peers"""


@dataclass(frozen=True)
class Annotation:
    """What is added to a finding."""

    sentence: str = ""
    claims: tuple[Claim, ...] = ()
    """what supports the sentence"""
    doubts: tuple[Doubt, ...] = ()
    culprits: tuple[Culprit, ...] | None = None
    """who is at fault, where not those that the rule named"""
    advice: frozenset[Advice] = frozenset()
    cause: str = ""
    explains: bool = False
    """it says why the ranks are there: its sentence comes first, its doubts, culprits and advice replace all others"""
    supersedes: bool = False
    """and the rule's own summary follows from it, and is left out"""
    ruled_out: tuple[str, ...] = ()
    nodes: tuple[NodeAtFault, ...] = ()
    branches: tuple[GuardedCall, ...] = ()
    context: tuple[Claim, ...] = ()
    """claims about the ranks at fault that come last"""


def annotated(finding: Finding, annotations: Iterable[Annotation]) -> Finding:
    """The finding with its annotations; only the order of sentences and claims depends on theirs."""
    kept = list(annotations)
    why = next((annotation for annotation in kept if annotation.explains), None)
    if why is not None:
        kept = [
            annotation
            for annotation in kept
            if annotation is why or (annotation.culprits is None and not annotation.explains)
        ]
    decisive = [why] if why is not None else kept
    doubts = (*(() if why else finding.doubts), *(doubt for annotation in decisive for doubt in annotation.doubts))
    advice = frozenset[Advice]() if why else finding.advice
    summary = finding.summary if why is None or not why.supersedes else ""
    words = [
        why.sentence if why else "",
        summary,
        *(annotation.sentence for annotation in kept if annotation is not why),
    ]
    first = why.claims if why else ()
    behind = [claim for annotation in kept if annotation is not why for claim in annotation.claims]
    return replace(
        finding,
        cause=next((annotation.cause for annotation in decisive if annotation.cause), finding.cause),
        doubts=doubts,
        summary=" ".join(filter(None, words)),
        culprits=next(
            (annotation.culprits for annotation in decisive if annotation.culprits is not None), finding.culprits
        ),
        claims=(
            *first,
            *finding.claims[:1],
            *behind,
            *finding.claims[1:],
            *(c for annotation in kept for c in annotation.context),
        ),
        ruled_out=(*finding.ruled_out, *(text for annotation in kept for text in annotation.ruled_out)),
        nodes=(*finding.nodes, *(node for annotation in kept for node in annotation.nodes)),
        advice=advice.union(*(annotation.advice for annotation in decisive)),
        branches=(*finding.branches, *(branch for annotation in kept for branch in annotation.branches)),
    )


Ruling = Finding | str  # a finding, or why there is none ("" where that is not worth saying)


def stacks_of_waiters(facts: CaseFacts, finding: Finding) -> dict[int, tuple[Frame, ...]]:
    named = {culprit.rank for culprit in finding.culprits}
    waiting = (rank for rank, state in facts.ranks.items() if state.wait is not None or rank in named)
    return {rank: user_stack_of(facts.ranks[rank].evidence) for rank in waiting}
