"""The findings that rules return, and the annotations that explanations add to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Literal, TypeVar

from safelaunch.model import Claim, Culprit, Frame, NodeAtFault
from safelaunch.stacks.guards import Guard, SourceLoop
from safelaunch.verdict.doubts import Doubt, doubts_if
from safelaunch.verdict.phrases import ranks_do
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.suggestions import DRAWN, GROUPS_MADE, SIZES_DIFFER, UNUSUAL_GROUP, Advice

# What ranks at fault do differently, if more is known than that they make other calls.
Deviation = Literal[
    "",
    "sizes",  # they pass other sizes or types at the same line
    "groups made",  # they have made another number of process groups
    "usual call",  # they didn't make the call that they had always made there
    "usual group",  # they call in another group than they had always done
    "own choice",  # they decided by a random number or by their own data
]
_ADVICE: Mapping[object, frozenset[Advice]] = {
    "sizes": frozenset({SIZES_DIFFER}),
    "groups made": frozenset({GROUPS_MADE}),
    "usual group": frozenset({UNUSUAL_GROUP}),
    "own choice": DRAWN,
}

# How sure it is which of the sides that don't meet is at fault: the minority, none, or perhaps the other one.
SideVote = Literal["", "tie", "open", "two to one"]
_DOUBTS_OF_VOTE: Mapping[SideVote, tuple[Doubt, ...]] = {
    "": (),
    "tie": (Doubt.NO_MAJORITY,),
    "open": (Doubt.EITHER_SIDE,),
    "two to one": (Doubt.TWO_TO_ONE,),
}


class Reason(IntEnum):
    """Evidence of why ranks diverged, the surest first."""

    WARNED = 1  # torch warned of a call on a group that the rank isn't in
    HABIT = 2  # a rank's earlier calls
    CAUGHT = 3  # an exception that the script caught
    PRINTED = 4  # a line of output that no peer printed
    NODE = 5  # exactly the ranks of one node are at fault


@dataclass(frozen=True)
class GuardedCall:
    """A call that some ranks make under a condition on the rank."""

    guard: Guard
    call: Frame
    ranks: tuple[int, ...]  # ranks that make the call
    kept: tuple[int, ...]
    """Ranks that the guard is known to exclude; empty if it depends on more than the rank."""


@dataclass(frozen=True)
class LeftLoop:
    """A loop that ``ahead`` have left and ``behind`` are still in."""

    ahead: tuple[int, ...]
    behind: tuple[int, ...]
    loop: SourceLoop
    round: Literal["whole", "short", ""]  # see :meth:`.Aligned.round_before`
    of_a_step: bool = False  # runs several times in each step, so it isn't the loop over batches
    skips: str = ""  # how an iteration can skip these calls, in words
    more_steps: int = 0  # steps that ``ahead`` made more, with as many calls

    @property
    def cause(self) -> str:
        return "collective-mismatch" if self.of_a_step else "uneven-batches"

    @property
    def sure(self) -> bool:
        """True if no round of an outer loop explains it as well."""
        return self.round == "short" or not self.loop.enclosed

    @property
    def by_habit(self) -> bool:
        """True if ``behind`` skipped the call that ended each earlier round."""
        return not self.sure and self.round == "whole" and len(self.behind) <= len(self.ahead)

    @property
    def round_unknown(self) -> bool:
        return not self.sure and not self.by_habit

    @property
    def cut_short(self) -> bool:
        """True if some calls of one step were skipped."""
        return self.of_a_step and self.round == "short"

    @property
    def doubts(self) -> tuple[Doubt, ...]:
        of_round = {Doubt.HABIT_ALONE: self.by_habit, Doubt.ROUND_UNKNOWN: self.round_unknown}
        return doubts_if({Doubt.MAY_SKIP_CALLS: bool(self.skips), **of_round})

    @property
    def says(self) -> str:
        ahead, loop = ranks_do(self.ahead, "has", "have"), f"the loop at {self.loop.place}"
        breaks = " or ".join(self.loop.breaks[:3])
        skips = f" ({breaks} can end it early)" if breaks else ""
        skips += f", with fewer batches or after a round without these calls ({self.skips})" if self.skips else ""
        if self.cut_short:
            return f"{ahead} left {loop} after fewer calls than in each earlier round"
        if self.sure:
            return f"{ahead} left {loop}{skips}"
        if self.round == "whole":
            return f"each earlier round of {loop} had as many calls and ended there"
        return f"{ahead} left {loop}, in this iteration or the previous one{skips}"


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
    """Advice on the sub-case, in addition to that on the deviation."""
    branches: tuple[GuardedCall, ...] = ()
    """Conditions on the rank that sent the ranks at fault a different way than their peers."""
    of: Deviation | LeftLoop = ""
    vote: SideVote = ""

    @property
    def all_doubts(self) -> tuple[Doubt, ...]:
        return (*self.doubts, *_DOUBTS_OF_VOTE[self.vote])

    @property
    def all_advice(self) -> frozenset[Advice]:
        return self.advice | _ADVICE.get(self.of, frozenset())


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
    of: Deviation = ""
    explains: Reason | None = None
    """Evidence of why the ranks are there: the sentence comes first; doubts, culprits and advice replace all others."""
    supersedes: bool = False
    """Omits the rule's summary, which follows from the sentence."""
    ruled_out: tuple[str, ...] = ()
    nodes: tuple[NodeAtFault, ...] = ()
    branches: tuple[GuardedCall, ...] = ()
    context: tuple[Claim, ...] = ()
    """Claims about the ranks at fault, listed last."""


def annotated(finding: Finding, annotations: Iterable[Annotation]) -> Finding:
    """Returns the finding with its annotations; their order affects only the order of sentences, claims and doubts.

    The surest reason replaces all others. Without one, at most one annotation decides a cause, culprits or a deviation.
    """
    kept = list(annotations)
    why = min((note for note in kept if note.explains is not None), key=lambda note: note.explains or 0, default=None)
    if why is not None:
        kept = [note for note in kept if note is why or (note.culprits is None and note.explains is None)]
    decisive = [why] if why is not None else kept
    rest = [note for note in kept if note is not why]
    summary = finding.summary if why is None or not why.supersedes else ""
    words = [why.sentence if why else "", summary, *(note.sentence for note in rest)]
    other_claims = [claim for note in rest for claim in note.claims]
    return replace(
        finding,
        cause=_only((note.cause for note in decisive if note.cause), finding.cause),
        doubts=(*(() if why else finding.all_doubts), *(doubt for note in decisive for doubt in note.doubts)),
        summary=" ".join(filter(None, words)),
        culprits=_only((note.culprits for note in decisive if note.culprits is not None), finding.culprits),
        claims=(
            *(why.claims if why else ()),
            *finding.claims[:1],
            *other_claims,
            *finding.claims[1:],
            *(claim for note in kept for claim in note.context),
        ),
        ruled_out=(*finding.ruled_out, *(text for note in kept for text in note.ruled_out)),
        nodes=(*finding.nodes, *(node for note in kept for node in note.nodes)),
        advice=frozenset(() if why else finding.advice).union(*(note.advice for note in decisive)),
        branches=(*finding.branches, *(branch for note in kept for branch in note.branches)),
        of=_only((note.of for note in decisive if note.of), finding.of),
        vote="",  # its doubts are among the others now
    )


T = TypeVar("T")


def _only(decisions: Iterable[T], default: T) -> T:
    [decision, *others] = [*decisions] or [default]
    assert not others, "annotations that decide the same must have an order that is not their position"
    return decision


Ruling = Finding | str  # a finding, or why the rule has no finding ("" if not worth reporting)


def stacks_of_waiters(facts: CaseFacts, finding: Finding) -> dict[int, tuple[Frame, ...]]:
    named = {culprit.rank for culprit in finding.culprits}
    waiting = (rank for rank, state in facts.ranks.items() if state.wait is not None or rank in named)
    return {rank: facts.ranks[rank].user_stack for rank in waiting}
