"""Rules over the wait-for graph: follow every wait to its end, or to the cycle in which it ends."""

from __future__ import annotations

from safelaunch.diagnose.collectives import mismatch_at
from safelaunch.diagnose.conditions import Condition
from safelaunch.diagnose.doubts import Doubt, levels_of, those
from safelaunch.diagnose.findings import (
    Finding,
    Ruling,
    blame,
    capital,
    condition_claims,
    conditions,
    most_doubtful,
    ranks_do,
    record_claim,
    summary_of,
    unseen_words,
    wait_claims,
    waiting_culprits,
    waits_words,
)
from safelaunch.diagnose.transfers import peers_missing
from safelaunch.diagnose.waits import Case, Key, Waits, members_of
from safelaunch.model import Claim

_UNEXPLAINED = Condition(
    "missing-from-collective",
    "did not enter it, and was ended before anything was seen of it",
    None,
    doubts=(Doubt.STATE_UNKNOWN,),
)


def held_up(case: Case) -> Ruling:
    """Peers wait for a rank that waits for nobody: its own state is the cause.

    Waits are followed to their end, so a rank that waits for a rank that waits is nobody's culprit. Ranks that hold
    up others in different ways are all named, under the cause that is surest.
    """
    blocking = frozenset(b for found in case.waits.blockers.values() for b in found) - case.waits.waiting
    roots = sorted(blocking & frozenset(case.ranks))
    if case.unseen:
        surely = _needed(case)
        roots = [r for r in roots if case.of_dump(r) or (r in surely and not case.may_wait_elsewhere(r))]
    if not roots:
        return "" if blocking else "every rank that peers wait for waits for its peers too"
    named = {r: case.ranks[r].condition or _UNEXPLAINED for r in roots}
    named = dict(sorted(named.items(), key=lambda item: (levels_of(item[1].doubts), item[0])))
    cause = next(iter(named.values())).cause
    also, waiting = _mismatch_in(case), case.waits.example.values()
    doubts = {
        Doubt.SEVERAL_CAUSES: len({c.cause for c in named.values()}) > 1,
        Doubt.UNSEEN_RANKS: bool(blocking - frozenset(case.ranks)),
        Doubt.STACKS_ALONE: len(roots) > 1 and any(w.kind == "collective" and w.seq is None for w in waiting),
        Doubt.MISMATCH_TOO: bool(also),
    }
    sure = (*most_doubtful(c for c in named.values() if c.cause == cause), *those(doubts))
    text = f"ranks also recorded {also}; the runner-up, as a rank that has not arrived explains the wait"
    claims, ruled = _not_entered(case.waits, roots), [text] if also else []
    return blame(case, cause, sure, named, sorted(case.waits.waiting), claims=claims, ruled_out=ruled)


def stuck_for_good(case: Case) -> dict[int, int]:
    """The ranks that will never come to where a peer waits for them, whatever ranks that were not seen may do.

    Each with the process at fault. Whether somebody waits for a rank has to be on record: an evaluator beside the
    trainers, or a rank that has done its part, may sleep as long as it likes.
    """
    needed = _needed(case)
    own = {rank: condition for rank, condition in conditions(case).items() if rank in needed and condition.for_good}
    return {rank: condition.pid or case.ranks[rank].evidence.pid for rank, condition in own.items()}


def _needed(case: Case) -> frozenset[int]:
    """The ranks that peers wait for in a collective of a group whose members are known."""
    known = [
        key
        for key, wait in case.waits.example.items()
        if wait.group is not None and case.alignment.members(wait.group)[1]
    ]
    return frozenset(rank for key in known for rank in case.waits.blockers[key])


def _not_entered(waits: Waits, roots: list[int], limit: int = 4) -> tuple[Claim, ...]:
    """What the ranks have not come to: one claim for each call in which others wait for them, the most first."""
    claims = []
    for rank in roots[:limit]:
        held = [key for key, found in waits.blockers.items() if rank in found and waits.example[key].seq is not None]
        for key in sorted(held, key=lambda key: (-len(waits.ranks[key]), waits.ranks[key]))[:limit]:
            wait, who = waits.example[key], waits.ranks[key]
            text = f"{wait.op} number {wait.seq} of group {wait.group!r}, in which {ranks_do(who, 'waits', 'wait')}"
            claims.append(record_claim(who[0], f"rank {rank} has not come to {text}"))
    return tuple(claims)


def _mismatch_in(case: Case) -> str:
    """``different operations as number 7 of group '0'``; empty where there is no mismatch in what ranks wait in."""
    for wait in case.waits.example.values():
        if wait.group is not None and wait.seq is not None and wait.kind == "collective":
            found = mismatch_at(case.alignment, wait.group, wait.seq)
            if found is not None:
                return f"different operations as number {found.seq} of group {found.group!r}"
    return ""


def unseen_peers(case: Case) -> Ruling:
    """Ranks wait for peers that were not seen: majority alone names nobody.

    A mismatch among those that were seen is a fact all the same, and is told without a culprit.
    """
    unseen = frozenset(b for found in case.waits.blockers.values() for b in found) - frozenset(case.ranks)
    if not unseen:
        return ""
    text = (
        f"{capital(waits_words(case, sorted(case.waits.waiting)))}; {unseen_words(case)} and may be what they wait for."
    )
    own = {rank: condition for rank, condition in conditions(case).items() if case.may_wait_elsewhere(rank)}
    if own:
        text += f" {summary_of(own, case, [])[:-1]}, perhaps waiting for one of them."
    cause = "missing-from-collective"
    if also := _mismatch_in(case):
        cause = "collective-mismatch"
        text += f" Among those seen, ranks recorded {also}."
    claims = wait_claims(case, sorted(case.waits.waiting)) + condition_claims(own)
    return Finding(cause, (Doubt.UNSEEN_PEERS,), text, claims=claims)


def sends_and_receives(case: Case) -> Ruling:
    """Sends and receives wait for each other, and no other rank is left to answer.

    gloo records no peer of a send or receive, so the circle is then inferred: nobody else is left to come. Unless
    somebody who waits in a collective has left out his part of the exchange: without peers, nothing tells.
    """
    ranks = members_of(case.waits, _inner_circle(case.waits, list(case.waits.transfers_of_circle)))
    if not ranks:
        return ""
    known = all(_names_its_peer(case, key) for key in case.waits.circle)
    text = f"{capital(waits_words(case, ranks))}: each waits for another, and nobody is left to answer."
    others = waits_words(case, [rank for rank in case.waits.in_circle if rank not in ranks])
    if others and not known:
        text += f" Or one of them waits for a peer that has gone on without it: {others}."
    return Finding(
        "p2p-cycle",
        those({Doubt.PEERS_NOT_RECORDED: not known}),
        text,
        waiting_culprits(case, ranks),
        wait_claims(case, ranks),
    )


def _names_its_peer(case: Case, key: Key) -> bool:
    wait = case.waits.example[key]
    if wait.kind != "p2p" or wait.group is None:
        return False
    return peers_missing(case.alignment, case.waits.ranks[key][0], wait.group) is not None


def _inner_circle(waits: Waits, keys: list[Key]) -> list[Key]:
    """Those of ``keys`` that wait for each other, without help from others."""
    left = list(keys)
    while True:
        there = {rank for key in left for rank in waits.ranks[key]}
        bound = [key for key in left if waits.blockers[key] & (there - set(waits.ranks[key]))]
        if bound == left:
            return left if len(there) > 1 else []
        left = bound
