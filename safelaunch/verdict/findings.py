"""What a rule returns, and the words that are common to all verdicts."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from safelaunch.model import Claim, Culprit, Frame, NodeAtFault, rank_words
from safelaunch.stacks.guards import Guard
from safelaunch.verdict.causes import Advice
from safelaunch.verdict.collectives import sides_of
from safelaunch.verdict.conditions import Condition
from safelaunch.verdict.doubts import Doubt, levels_of
from safelaunch.verdict.rank_state import CaseFacts, RankFacts


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
    found = list(annotations)
    why = next((one for one in found if one.explains), None)
    if why is not None:
        found = [one for one in found if one is why or (one.culprits is None and not one.explains)]
    decisive = [why] if why is not None else found
    doubts = (*(() if why else finding.doubts), *(doubt for one in decisive for doubt in one.doubts))
    advice = frozenset[Advice]() if why else finding.advice
    summary = finding.summary if why is None or not why.supersedes else ""
    words = [why.sentence if why else "", summary, *(one.sentence for one in found if one is not why)]
    first = why.claims if why else ()
    behind = [claim for one in found if one is not why for claim in one.claims]
    return replace(
        finding,
        cause=next((one.cause for one in decisive if one.cause), finding.cause),
        doubts=doubts,
        summary=" ".join(filter(None, words)),
        culprits=next((one.culprits for one in decisive if one.culprits is not None), finding.culprits),
        claims=(*first, *finding.claims[:1], *behind, *finding.claims[1:], *(c for one in found for c in one.context)),
        ruled_out=(*finding.ruled_out, *(text for one in found for text in one.ruled_out)),
        nodes=(*finding.nodes, *(node for one in found for node in one.nodes)),
        advice=advice.union(*(one.advice for one in decisive)),
        branches=(*finding.branches, *(branch for one in found for branch in one.branches)),
    )


Ruling = Finding | str  # a finding, or why there is none ("" where that is not worth saying)


def most_doubtful(conditions: Iterable[Condition]) -> tuple[Doubt, ...]:
    """The doubts about the least sure of them."""
    return max((condition.doubts for condition in conditions), key=levels_of)


def ranks_word(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-2,5``."""
    return rank_words(ranks)


def each_of(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``each of ranks 0-2,5``: what takes a clause that is said of one."""
    return f"{'' if len(set(ranks)) == 1 else 'each of '}{ranks_word(ranks)}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def ranks_do(ranks: Collection[int], one: str, many: str) -> str:
    """``rank 3 waits``, ``ranks 0-2 wait``: for the middle of a sentence."""
    return f"{ranks_word(ranks)} {one if len(ranks) == 1 else many}"


def ranks_wait(facts: CaseFacts, ranks: Collection[int]) -> str:
    """``rank 3 waits``, ``ranks 0-2 wait``; ``ranks 0-2 waited``, once they have all ended."""
    return ranks_do(ranks, "waited", "waited") if facts.gone.issuperset(ranks) else ranks_do(ranks, "waits", "wait")


def unseen_words(facts: CaseFacts) -> str:
    """``ranks 4-7 were not seen``."""
    return f"{ranks_do(facts.unseen, 'was', 'were')} not seen"


def culprit(facts: RankFacts, condition: Condition) -> Culprit:
    return Culprit(
        rank=facts.rank,
        host=facts.evidence.host,
        pid=condition.pid or facts.evidence.pid,
        process=condition.process,
        frame=condition.frame or (facts.frame if condition.process == "main" else None),
        step=facts.step,
        reason=f"Rank {facts.rank} {condition.reason}.",
    )


def waiting_culprit(facts: RankFacts, reason: str, site: Frame | None = None) -> Culprit:
    """A culprit that waits for peers itself; ``site`` is the line to show where that is not the line of its wait."""
    frame = site or (facts.wait.frame if facts.wait else facts.frame)
    return Culprit(facts.rank, facts.evidence.host, facts.evidence.pid, "main", frame, facts.step, reason)


def waiting_culprits(facts: CaseFacts, ranks: Iterable[int]) -> tuple[Culprit, ...]:
    """Ranks of which nothing more is to be said than what they wait in."""
    waits = {
        rank: f"{ranks_wait(facts, [rank])} in {facts.waiting[rank].words}"
        if rank in facts.waiting
        else f"rank {rank} met no peer"
        for rank in ranks
    }
    return tuple(waiting_culprit(facts.ranks[rank], f"{capital(does)}.") for rank, does in waits.items())


def wait_words(facts: CaseFacts, ranks: Iterable[int]) -> dict[int, str]:
    """rank → what it waits in, of those that do. Where only some of those at one line tell which call it is, or of what
    class the function is, all of them are said to wait in that one.
    """
    words = {rank: facts.waiting[rank].words for rank in ranks if rank in facts.waiting}
    told: dict[str, dict[str, str]] = {}
    for text in sorted(words.values(), key=len):
        call, line = _call_and_line(text)
        told.setdefault(line, {})[call] = text
    return {rank: _told_best(text, told[_call_and_line(text)[1]]) for rank, text in words.items()}


_UNTOLD = "a collective"


def _call_and_line(text: str) -> tuple[str, str]:
    """``all_reduce at train.py:9 (fit)`` → the call and ``train.py:9``."""
    call, _, place = text.partition(" at ")
    return call, place.partition(" ")[0]


def _told_best(text: str, at_that_line: Mapping[str, str]) -> str:
    call, _ = _call_and_line(text)
    known = [other for its, other in at_that_line.items() if its != _UNTOLD]
    return known[0] if call == _UNTOLD and len(known) == 1 else at_that_line[call]


P = TypeVar("P", bound=Hashable)


def by_place(words: Mapping[int, P]) -> list[tuple[P, list[int]]]:
    """``words``: rank → where it is, in words or as a key. The places in the order of their first ranks, with the ranks
    in each.
    """
    return list(sides_of(words).items())


def apart(facts: CaseFacts, words: Mapping[int, str], limit: int = 3) -> str:
    """``rank 0 waits in all_gather at train.py:41 while ranks 1-3 wait in all_reduce at train.py:9``; three or more
    places as a list.
    """
    places = by_place(words)
    parts = [f"{ranks_wait(facts, ranks)} in {place}" for place, ranks in places[:2]]
    if len(places) < 3:
        return " while ".join(parts)
    parts = [parts[0], *(f"{ranks_word(ranks)} in {place}" for place, ranks in places[1:limit])]
    if len(places) > limit:
        parts.append(f"others in {len(places) - limit} more {'place' if len(places) == limit + 1 else 'places'}")
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def waits_words(facts: CaseFacts, ranks: Iterable[int], limit: int = 3) -> str:
    """``ranks 1-3 wait in all_reduce at train.py:9 and rank 4 in barrier at train.py:30``."""
    places = sorted(by_place(wait_words(facts, ranks)), key=lambda item: (-len(item[1]), item[1]))
    parts = [f"{ranks_word(members)} in {place}" for place, members in places[:limit]]
    if places:
        parts[0] = f"{ranks_wait(facts, places[0][1])} in {places[0][0]}"
    if len(places) > limit:
        parts.append(f"others in {len(places) - limit} more places")
    return " and ".join(parts)


def summary_of(named: Mapping[int, Condition], facts: CaseFacts, waiters: Iterable[int]) -> str:
    """Returns ``Rank 1 is asleep in train.py:7, while ranks 0,2-3 wait in all_reduce at train.py:9.`` and the like."""
    groups = by_place({rank: condition.reason for rank, condition in named.items()})
    parts = [f"{each_of(ranks)} {reason}" for reason, ranks in groups[:2]]
    text = capital("; ".join(parts))
    if len(groups) > 2:
        text += f"; {ranks_word(r for _, ranks in groups[2:] for r in ranks)} likewise"
    waits = waits_words(facts, waiters)
    return f"{text}, while {waits}." if waits else f"{text}."


def wait_claims(facts: CaseFacts, ranks: Iterable[int], limit: int = 4) -> tuple[Claim, ...]:
    """One claim for each place in which peers wait, with its first rank as the example."""
    first = {facts.waiting[rank].words: rank for rank in sorted(ranks, reverse=True) if rank in facts.waiting}
    return tuple(
        Claim(f"rank {rank}: {claim.claim}", claim.file)
        for rank in sorted(first.values())[:limit]
        for claim in facts.waiting[rank].claims[:2]
    )


def condition_claims(named: Mapping[int, Condition]) -> tuple[Claim, ...]:
    return tuple(
        Claim(f"rank {rank}: {claim.claim}", claim.file)
        for rank, condition in list(named.items())[:8]
        for claim in condition.claims[:6]
    )


def conditions(facts: CaseFacts, *causes: str) -> dict[int, Condition]:
    """The ranks that do something of their own: all, or those of these causes."""
    own = {rank: one.condition for rank, one in facts.ranks.items()}
    return {rank: c for rank, c in own.items() if c is not None and (not causes or c.cause in causes)}


def blame(
    facts: CaseFacts,
    cause: str,
    doubts: tuple[Doubt, ...],
    named: Mapping[int, Condition],
    waiters: Iterable[int] | None = None,
    *,
    summary: str = "",
    claims: tuple[Claim, ...] = (),
    ruled_out: Sequence[str] = (),
) -> Finding:
    """The finding that names ranks for what they do themselves, while ``waiters`` wait, or all others that do."""
    waiters = sorted(facts.waiting.keys() - named.keys() if waiters is None else waiters)
    return Finding(
        cause,
        doubts,
        summary or summary_of(named, facts, waiters),
        tuple(culprit(facts.ranks[rank], condition) for rank, condition in named.items()),
        condition_claims(named) + claims + wait_claims(facts, waiters),
        tuple(ruled_out),
    )
