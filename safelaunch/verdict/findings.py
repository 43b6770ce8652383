"""Findings, which rules return, and the annotations that explanations add to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from safelaunch.model import Claim, Culprit, Frame, NodeAtFault
from safelaunch.stacks.guards import Guard
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.suggestions import Advice


@dataclass(frozen=True)
class GuardedCall:
    """A call that some ranks make under a condition on the rank."""

    guard: Guard
    call: Frame
    ranks: tuple[int, ...]  # ranks that make the call
    kept: tuple[int, ...]
    """Ranks that the guard is known to exclude; empty if it depends on more than the rank."""


@dataclass(frozen=True)
class Finding:
    """Answer of a rule."""

    cause: str
    doubts: tuple[Doubt, ...]
    summary: str
    culprits: tuple[Culprit, ...] = ()
    """Ranks at fault; empty if only the cause is known."""
    claims: tuple[Claim, ...] = ()
    ruled_out: tuple[str, ...] = ()
    victims: tuple[int, ...] = ()
    """Victims in addition to the ranks that wait in a collective."""
    nodes: tuple[NodeAtFault, ...] = ()
    """Nodes at fault as a whole."""
    calls: Mapping[int, tuple[Frame, ...]] = field(default_factory=dict)
    """rank → user frames, innermost first, of the call at which ranks diverged, if they have moved on since."""
    advice: frozenset[Advice] = frozenset()
    """Advice on the sub-case."""
    branches: tuple[GuardedCall, ...] = ()
    """Conditions on the rank that sent the ranks at fault a different way than their peers."""


@dataclass(frozen=True)
class Annotation:
    """Addition to a finding."""

    sentence: str = ""
    claims: tuple[Claim, ...] = ()
    """Evidence for the sentence."""
    doubts: tuple[Doubt, ...] = ()
    culprits: tuple[Culprit, ...] | None = None
    """Ranks at fault, if not the ones that the rule named."""
    advice: frozenset[Advice] = frozenset()
    cause: str = ""
    explains: bool = False
    """Says why the ranks are there: the sentence comes first; doubts, culprits and advice replace all others."""
    supersedes: bool = False
    """Omits the rule's summary, which follows from the sentence."""
    ruled_out: tuple[str, ...] = ()
    nodes: tuple[NodeAtFault, ...] = ()
    branches: tuple[GuardedCall, ...] = ()
    context: tuple[Claim, ...] = ()
    """Claims about the ranks at fault, listed last."""


def annotated(finding: Finding, annotations: Iterable[Annotation]) -> Finding:
    """Returns the finding with its annotations; their order affects only the order of sentences and claims."""
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
    other_claims = [claim for annotation in kept if annotation is not why for claim in annotation.claims]
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
            *other_claims,
            *finding.claims[1:],
            *(c for annotation in kept for c in annotation.context),
        ),
        ruled_out=(*finding.ruled_out, *(text for annotation in kept for text in annotation.ruled_out)),
        nodes=(*finding.nodes, *(node for annotation in kept for node in annotation.nodes)),
        advice=advice.union(*(annotation.advice for annotation in decisive)),
        branches=(*finding.branches, *(branch for annotation in kept for branch in annotation.branches)),
    )


Ruling = Finding | str  # a finding, or why the rule has no finding ("" if not worth reporting)


def stacks_of_waiters(facts: CaseFacts, finding: Finding) -> dict[int, tuple[Frame, ...]]:
    named = {culprit.rank for culprit in finding.culprits}
    waiting = (rank for rank, state in facts.ranks.items() if state.wait is not None or rank in named)
    return {rank: facts.ranks[rank].user_stack for rank in waiting}
