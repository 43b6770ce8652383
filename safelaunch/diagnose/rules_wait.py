"""Rules over the wait-for graph: follow every wait to its end, or to the cycle in which it ends."""

from __future__ import annotations

from safelaunch.diagnose.collectives import mismatch_at
from safelaunch.diagnose.conditions import Condition
from safelaunch.diagnose.facts import Facts
from safelaunch.diagnose.findings import (
    Finding,
    Ruling,
    condition_claims,
    culprit,
    least,
    lower,
    ranks_word,
    small,
    summary_of,
    wait_claims,
    waiting_culprit,
    waits_words,
)
from safelaunch.diagnose.history import called_alike, may_have_parted_before
from safelaunch.diagnose.rules_groups import broken_habits, calls_in_turns, left_out_between_groups
from safelaunch.diagnose.rules_mismatch import departed, mismatch, parted_in
from safelaunch.diagnose.rules_state import small_ranks
from safelaunch.diagnose.waits import Key, Waits, members_of
from safelaunch.model import Claim

_SURENESS = {"high": 0, "medium": 1, "low": 2}


def held_up(facts: Facts, waits: Waits) -> Ruling:
    """Peers wait in a collective that a rank has not entered, and that rank waits for no peer: its own state is the
    cause.

    Waits are followed to their end, so a rank that waits for a rank that waits is nobody's culprit. Ranks that hold
    up others in different ways are all named, under the cause that is surest.
    """
    blocking = frozenset(b for found in waits.blockers.values() for b in found) - waits.waiting
    roots = sorted(blocking & frozenset(facts.ranks))
    if not roots:
        return "" if blocking else "every rank that peers wait for waits for its peers too"
    named = {r: facts.ranks[r].condition or _unexplained() for r in roots}
    named = dict(sorted(named.items(), key=lambda item: (_SURENESS[item[1].confidence], item[0])))
    cause = next(iter(named.values())).cause
    mixed = len({c.cause for c in named.values()}) > 1
    waiters = sorted(waits.waiting)
    confidence = least(c.confidence for c in named.values() if c.cause == cause)
    ruled = []
    if mixed or (blocking - frozenset(facts.ranks)):
        confidence = lower(confidence)
    if _by_stack_alone(waits) and len(roots) > 1:
        confidence = lower(confidence)
    if (also := _mismatch_in(facts, waits)) is not None:
        ruled.append(f"{also}; the runner-up, as a rank that has not arrived explains the wait")
        confidence = lower(confidence)
    return Finding(
        cause,
        confidence,
        summary_of(named, facts, waiters),
        tuple(culprit(facts.ranks[r], c) for r, c in named.items()),
        condition_claims(named) + _not_entered(waits, roots) + wait_claims(facts, waiters),
        tuple(ruled),
    )


def _not_entered(waits: Waits, roots: list[int], limit: int = 4) -> tuple[Claim, ...]:
    """What the ranks have not come to: one claim for each call in which others wait for them, the most first."""
    claims = []
    for rank in roots[:limit]:
        held = [key for key, found in waits.blockers.items() if rank in found and waits.example[key].seq is not None]
        for key in sorted(held, key=lambda key: (-len(waits.ranks[key]), waits.ranks[key]))[:limit]:
            wait, who = waits.example[key], waits.ranks[key]
            text = f"{wait.op} number {wait.seq} of group {wait.group!r}"
            text += f", in which {small(ranks_word(who))} {'waits' if len(who) == 1 else 'wait'}"
            claims.append(Claim(f"rank {rank} has not come to {text}", f"ranks/{who[0]}/flight_recorder.json"))
    return tuple(claims)


def _unexplained() -> Condition:
    text = "did not enter it, and was ended before anything was seen of it"
    return Condition("missing-from-collective", text, None, confidence="low")


def _by_stack_alone(waits: Waits) -> bool:
    return any(w.kind == "collective" and w.seq is None for w in waits.example.values())


def _mismatch_in(facts: Facts, waits: Waits) -> str | None:
    for wait in waits.example.values():
        if wait.group is not None and wait.seq is not None and wait.kind == "collective":
            found = mismatch_at(facts.alignment, wait.group, wait.seq)
            if found is not None:
                return f"ranks also recorded different operations as number {found.seq} of group {found.group!r}"
    return None


def unseen_peers(facts: Facts, waits: Waits) -> Ruling:
    """Members of the stuck group were not seen: nobody is named by majority alone.

    A mismatch among those that were seen is a fact all the same, and is told without a culprit.
    """
    unseen = frozenset(b for found in waits.blockers.values() for b in found) - frozenset(facts.ranks)
    if not unseen:
        return ""
    words = waits_words(facts, sorted(waits.waiting))
    text = f"{words[:1].upper()}{words[1:]}; {small_ranks(facts)} not seen and may be what they wait for."
    cause = "missing-from-collective"
    if (also := _mismatch_in(facts, waits)) is not None:
        cause = "collective-mismatch"
        text += f" Among those seen, {also.replace('ranks also', 'ranks')}."
    claims = wait_claims(facts, sorted(waits.waiting))
    return Finding(cause, "low", text, claims=claims)


def cycles(facts: Facts, waits: Waits) -> Ruling:
    """No wait ends at a rank of its own doing, so somewhere ranks wait for each other in a circle.

    Which circle it is follows from what its members wait in: two groups entered in different orders; sends and
    receives; or one group in which they do not meet in the same operation.
    """
    circles = [c for c in waits.sinks if any(waits.blockers[key] for key in c)]
    if not circles:
        return ""
    circle = max(circles, key=lambda c: sum(len(waits.ranks[k]) for k in c))
    groups = _groups_of(waits, circle)
    p2p = [key for key in circle if waits.example[key].kind == "p2p"]
    if (len(groups) > 1 or p2p) and (earlier := parted_in(facts, groups)) is not None:
        return earlier
    inner = _inner_circle(waits, p2p)
    if inner:
        return _p2p_cycle(facts, waits, circle, members_of(waits, inner))
    if p2p and (one := departed(facts, members_of(waits, circle))) is not None:
        return one
    if len(groups) > 1:
        return left_out_between_groups(facts, waits, circle) or _group_order(facts, waits, circle)
    return mismatch(facts, waits, circle)


def _inner_circle(waits: Waits, keys: list[Key]) -> list[Key]:
    """Those of ``keys`` that wait for each other, without help from others."""
    left = list(keys)
    while True:
        there = {rank for key in left for rank in waits.ranks[key]}
        bound = [key for key in left if waits.blockers[key] & (there - set(waits.ranks[key]))]
        if bound == left:
            return left if len(there) > 1 else []
        left = bound


def _groups_of(waits: Waits, circle: tuple[Key, ...]) -> set[str]:
    return {group for key in circle if (group := waits.example[key].group) is not None}


def _p2p_cycle(facts: Facts, waits: Waits, circle: tuple[Key, ...], ranks: list[int]) -> Finding:
    """gloo records no peer of a send or receive, so the circle is then inferred: nobody else is left to come.

    Unless somebody who waits in a collective has left out his part of the exchange: without peers, nothing tells.
    """
    known = all("->" in waits.example[k].op or "<-" in waits.example[k].op for k in circle)
    text = waits_words(facts, ranks)
    text = f"{text[:1].upper()}{text[1:]}: each waits for another, and nobody is left to answer."
    others = waits_words(facts, [rank for rank in members_of(waits, circle) if rank not in ranks])
    if others and not known:
        text += f" Or one of them waits for a peer that has gone on without it: {others}."
    return Finding(
        "p2p-cycle",
        "high" if known else "medium",
        text,
        tuple(waiting_culprit(facts.ranks[r], _waits_reason(facts, r)) for r in ranks),
        wait_claims(facts, ranks),
    )


def _group_order(facts: Facts, waits: Waits, circle: tuple[Key, ...]) -> Finding:
    ranks = members_of(waits, circle)
    words = []
    for key in circle:
        example = waits.example[key]
        members = waits.ranks[key]
        verb = "waits" if len(members) == 1 else "wait"
        group, known = facts.alignment.members(str(example.group))
        of = f" of {small(ranks_word(group))}" if known else ""
        words.append(f"{small(ranks_word(members))} {verb} in group {example.group!r}{of} ({example.words})")
    more = f", and so in {len(words) - 3} more" if len(words) > 3 else ""
    text = " while ".join(words[:3]) + more
    known = all(facts.alignment.members(str(waits.example[k].group))[1] for k in circle)
    groups = _groups_of(waits, circle)
    early = may_have_parted_before(facts.alignment, groups, facts.roots)
    sure = known and not early and called_alike(facts.alignment, groups, facts.roots)
    if known:  # who is in one of the groups only had no order to choose
        of_several = [r for r in ranks if sum(r in facts.alignment.members(g)[0] for g in groups) > 1]
        ranks = of_several or ranks
    in_turns = calls_in_turns(facts, waits, circle) and not broken_habits(facts, waits, circle)
    return Finding(
        "group-order",
        "high" if sure and in_turns else "medium",
        f"{text[:1].upper()}{text[1:]}: they entered the groups in different orders.",
        tuple(waiting_culprit(facts.ranks[r], _waits_reason(facts, r)) for r in ranks),
        wait_claims(facts, ranks, limit=10),
    )


def _waits_reason(facts: Facts, rank: int) -> str:
    wait = facts.ranks[rank].wait
    return f"Rank {rank} waits in {wait.words}." if wait else f"Rank {rank} did not meet its peers."
