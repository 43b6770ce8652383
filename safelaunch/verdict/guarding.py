"""Conditions on the rank that sent ranks different ways, read from the source.

``if rank == 0: dist.all_gather(...)`` is the most common collective that peers never call, and ``if rank != 0:
continue`` the most common one that a rank skips. The finding is true without this; this names the line that decides. It
never makes a finding more certain. If nothing distinguishes the sides, ``chance`` makes it less certain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from safelaunch.model import Claim, Frame
from safelaunch.stacks import frames as fr
from safelaunch.stacks.guards import Guard, guards_of
from safelaunch.verdict import suggestions
from safelaunch.verdict.c10d import signature
from safelaunch.verdict.chance import is_in_transfer, unless_random
from safelaunch.verdict.findings import Annotation, Finding, GuardedCall, LeftLoop, stacks_of_waiters
from safelaunch.verdict.phrases import by_place, capital, ranks_do
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.suggestions import Advice

MOST_NAMED = 2


def guards(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """Yields the conditions on the rank that sent the ranks at fault a different way than their peers.

    If there is none, checks whether each rank might have decided on its own.
    """
    stacks = finding.calls or stacks_of_waiters(facts, finding)
    named = frozenset(culprit.rank for culprit in finding.culprits)
    guarded = branches(facts, stacks, named)
    # The other end of a send or receive isn't expected at the same line.
    guarded = [
        branch for branch in guarded if not all(is_in_transfer(facts, rank, branch.call) for rank in branch.ranks)
    ]
    telling = [branch for branch in guarded if branch.kept]
    cause = ""
    if (
        isinstance(finding.of, LeftLoop)
        and finding.of.round_unknown
        and any(named.issuperset(b.ranks) for b in telling)
    ):
        cause = "collective-mismatch"  # the condition explains the place, not the end of a loop
    yield Annotation(
        " ".join(f"{_clause(branch)}." for branch in telling[:MOST_NAMED]),
        tuple(claim_of(facts, branch) for branch in guarded),
        advice=_advice(facts, finding, guarded),
        cause=cause,
        branches=tuple(guarded),
    )
    if not telling and finding.cause == "collective-mismatch" and finding.of != "groups made":
        yield unless_random(facts, finding, guarded)


def _advice(facts: CaseFacts, finding: Finding, guarded: Sequence[GuardedCall]) -> frozenset[Advice]:
    # An `if` with an `else` excludes each side from the other's call: the odd call decides.
    named = frozenset(culprit.rank for culprit in finding.culprits)
    if finding.cause == "group-order":
        guarded = [branch for branch in guarded if branch.kept]
        if named <= {rank for branch in guarded for rank in branch.kept}:
            return frozenset()
    advice = frozenset[Advice]().union(*(_advice_for_branch(facts, branch, named) for branch in guarded))
    return frozenset({suggestions.GUARDED}) if suggestions.GUARDED in advice else advice


def _advice_for_branch(facts: CaseFacts, branch: GuardedCall, named: frozenset[int]) -> frozenset[Advice]:
    came, kept = named & set(branch.ranks), named - set(branch.ranks)
    if not branch.kept and _admitted_before(facts, branch):
        return frozenset()
    if came and kept:
        admitted = [branch.guard.admits(facts.whereabouts(rank)) for rank in facts.world]
        return frozenset({suggestions.LEFT_OUT if 2 * admitted.count(True) > len(admitted) else suggestions.GUARDED})
    return frozenset({suggestions.GUARDED if came else suggestions.LEFT_OUT})


def _admitted_before(facts: CaseFacts, branch: GuardedCall) -> bool:
    """Returns whether excluded peers made such a call before, so that the condition depends on more than the rank."""
    wait = facts.ranks[branch.ranks[0]].wait
    if wait is None or wait.group is None or wait.seq is None:
        return False
    for rank in [rank for rank in facts.ranks if rank not in branch.ranks][:MOST_NAMED]:
        window = facts.alignment.window(rank, wait.group)
        entries = (window.at(number) for number in window.numbers if number < wait.seq) if window is not None else ()
        if any(entry is not None and signature(entry) == wait.signature for entry in entries):
            return True
    return False


def by_stack(stacks: Mapping[int, Sequence[Frame]]) -> dict[tuple[Frame, ...], list[int]]:
    """Groups ranks by stack, ignoring class names, which stacks of exceptions lack."""
    places = by_place({rank: tuple(map(fr.spot, stack)) for rank, stack in sorted(stacks.items())})
    return {tuple(stacks[ranks[0]]): ranks for _, ranks in places}


def branches(facts: CaseFacts, stacks: Mapping[int, Sequence[Frame]], named: frozenset[int]) -> list[GuardedCall]:
    """Returns the guards that only one side's call has, the most telling first.

    A guard counts if it excludes ranks of the other side, or if it depends on the rank and more, and the other side
    isn't past it.

    Args:
        stacks: rank → user's frames of its call, innermost first; empty for a rank without a call.
        named: Ranks at fault.
    """
    places = by_stack({rank: stack for rank, stack in stacks.items() if stack})
    guards = {place: guards_of(place, facts.read_source) for place in places}
    guarded = []
    for place, ranks in places.items():
        peers = [rank for other, members in places.items() if other != place for rank in members]
        peers += [rank for rank in {*named, *stacks} if not stacks.get(rank)]
        shared = {guard for other in places if other != place for guard in guards[other]}
        for guard in guards[place]:
            if guard not in shared and (named & set(ranks) or named & set(peers)):
                branch = _guarded_call(facts, guard, place[0], ranks, peers)
                guarded += [branch] if branch is not None and _excludes_culprit(branch, named, peers) else []
    return sorted(guarded, key=lambda branch: (not branch.kept, branch.ranks))


def _excludes_culprit(branch: GuardedCall, named: Set[int], peers: Sequence[int]) -> bool:
    both = bool(named & set(branch.ranks)) and bool(named & set(peers))
    return not both or not branch.kept or bool(named & set(branch.kept))


def _guarded_call(
    facts: CaseFacts, guard: Guard, call: Frame, ranks: Sequence[int], peers: Sequence[int]
) -> GuardedCall | None:
    here = {guard.admits(facts.whereabouts(rank)) for rank in ranks}
    admitted = {rank: guard.admits(facts.whereabouts(rank)) for rank in peers}
    if False in here or (admitted and all(admitted.values())):
        return None  # the guard was misread, or excludes no rank
    return GuardedCall(
        guard, call, tuple(sorted(ranks)), tuple(sorted(rank for rank, comes in admitted.items() if comes is False))
    )


def _clause(branch: GuardedCall) -> str:
    if branch.kept:
        kept = capital(ranks_do(branch.kept, "never reaches", "never reach"))
        return f"{kept} {fr.place(branch.call)} because of `{branch.guard.words}`"
    return f"{capital(ranks_do(branch.ranks, 'comes', 'come'))} to {fr.place(branch.call)} under `{branch.guard.words}`"


def claim_of(facts: CaseFacts, branch: GuardedCall) -> Claim:
    return facts.ranks[branch.ranks[0]].line_claim(_clause(branch))


def guard_of(facts: CaseFacts, rank: int, peers: Iterable[int]) -> Guard | None:
    """Returns the innermost condition on the rank around the place of ``rank`` that might exclude ``peers``."""
    for guard in guards_of(facts.ranks[rank].user_stack, facts.read_source):
        if any(guard.admits(facts.whereabouts(other)) is not True for other in peers):
            return guard
    return None
