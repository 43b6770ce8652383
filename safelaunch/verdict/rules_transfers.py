"""Ranks that meet with calls that don't fit: a send and its receive, two roots, the sums of an all_to_all."""

from __future__ import annotations

from collections.abc import Mapping

from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.verdict.asymmetric import roots, unequal_exchange
from safelaunch.verdict.blame import wait_claims, waiting_culprit
from safelaunch.verdict.c10d import number_of, op_name
from safelaunch.verdict.conditions import record_claim
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.findings import DOUBTS_OF_VOTE, Finding, Ruling, Vote
from safelaunch.verdict.majority import sides_of, vote
from safelaunch.verdict.peers import PeerWait
from safelaunch.verdict.phrases import capital, ranks_wait, ranks_word
from safelaunch.verdict.rank_state import CaseFacts, RankFacts
from safelaunch.verdict.suggestions import ROOTS_DIFFER
from safelaunch.verdict.transfers import RecordedTransfer
from safelaunch.verdict.waits import Case


def unequal_transfers(case: Case) -> Ruling:
    """All ranks have arrived, but what one rank sends is not what another expects: size, type or root differ.

    Both ends of a send and its receive are named, as either might be wrong. For an all_to_all, only the sums are known.
    """
    for waiters in sorted(case.waits.classes.values(), key=lambda waiters: waiters.ranks):
        wait, members = waiters.wait, waiters.ranks
        numbered = wait.group is not None and wait.seq is not None
        if numbered and case.waits.cycle:
            continue
        sources = _roots(case, wait) if wait.kind == "collective" else {}
        if len({*sources.values()}) > 1:
            return _different_roots(case, wait, sources)
        if wait.group is None or wait.seq is None:
            continue
        if wait.kind == "p2p":
            pair = case.transfers.unequal(members[0], wait.group)
            if pair is not None:
                return _unequal_pair(case, pair)
        elif wait.kind == "collective":
            sums = unequal_exchange(case.alignment, wait.group, wait.seq)
            if sums is not None:
                return _unequal_sums(case, wait, members, sums)
    return ""


def _unequal_pair(facts: CaseFacts, pair: tuple[RecordedTransfer, RecordedTransfer]) -> Finding:
    sites = {side.rank: facts.alignment.stack(side.rank, side.entry).user_frame for side in pair}
    says = {side.rank: side.words() + fr.at(sites[side.rank]) for side in pair}
    text = " while rank ".join(f"{rank} {words}" for rank, words in says.items())
    return Finding(
        "collective-mismatch",
        DOUBTS_OF_VOTE["open"],
        f"Rank {text}: they do not match.",
        tuple(waiting_culprit(facts.ranks[rank], f"Rank {rank} {says[rank]}.", sites[rank]) for rank in says),
        tuple(
            record_claim(
                side.rank,
                f"rank {side.rank} {side.words()}: {op_name(side.entry)} #{number_of(side.entry)} of group "
                f"{side.entry.group!r}",
            )
            for side in pair
        ),
        vote="open",
    )


def _roots(facts: CaseFacts, wait: PeerWait) -> dict[int, int]:
    same_call = {rank: state for rank in facts.waiting if _waits_in(state := facts.ranks[rank], wait)}
    named = {rank: root for rank, state in same_call.items() if (root := _root_of(state)) is not None}
    return named or {rank: rank for rank in roots(facts.alignment, wait.group or "", wait.seq or 0)}


def _waits_in(facts: RankFacts, wait: PeerWait) -> bool:
    """Returns whether the rank waits in the same call; a list of objects takes two, the first for the sizes."""
    own_wait = facts.wait
    if own_wait is None or own_wait.key == wait.key:
        return own_wait is not None and (wait.seq is not None or own_wait.frame == wait.frame)
    same = (own_wait.group, own_wait.seq, own_wait.op, own_wait.frame) == (
        wait.group,
        (wait.seq or 0) + 1,
        wait.op,
        wait.frame,
    )
    return same and facts.view is not None and calls.passes_objects(facts.view.stack)


def _root_of(facts: RankFacts) -> int | None:
    wait, view = facts.wait, facts.view
    if wait is not None and wait.seq is not None:
        return wait.target if wait.target is not None else wait.source
    call = view.thread.call if view is not None and view.thread is not None else None
    return (call.group_src if call.group_src is not None else call.group_dst) if call is not None else None


def _different_roots(facts: CaseFacts, wait: PeerWait, sources: Mapping[int, int]) -> Finding:
    by_root = sides_of(sources)
    odd, majority = vote(by_root)
    numbered = wait.seq is not None
    silent = len(facts.alignment.members(str(wait.group))[0]) - len(sources) if numbered else 0
    vote_of_all: Vote = "" if majority and 2 * (len(sources) - len(odd)) > len(sources) + silent else "tie"
    whose = "rank" if numbered else "group rank"
    parts = [f"{whose} {root} on {ranks_word(ranks)}" for root, ranks in by_root.items()]
    number = f", #{wait.seq} of group {wait.group!r}," if numbered else ""
    text = f"The root of {wait.words}{number} is {' and '.join(parts)}."
    return Finding(
        "collective-mismatch",
        (*DOUBTS_OF_VOTE[vote_of_all], *(() if numbered else (Doubt.LINES_ALONE,))),
        text,
        tuple(waiting_culprit(facts.ranks[r], f"Rank {r} names {whose} {sources[r]} as the root.") for r in odd),
        tuple(facts.ranks[r].line_claim(f"rank {r} names {whose} {root} as the root") for r, root in sources.items())[
            :8
        ]
        + wait_claims(facts, sorted(sources)),
        advice=frozenset({ROOTS_DIFFER}),
        vote=vote_of_all,
    )


def _unequal_sums(facts: CaseFacts, wait: PeerWait, members: tuple[int, ...], sums: tuple[int, int]) -> Finding:
    where = f"#{wait.seq} of group {wait.group!r}"
    text = f"together the ranks send {sums[0]} elements and expect {sums[1]}"
    claim = record_claim(members[0], f"{where}: {text}")
    return Finding(
        "collective-mismatch",
        (Doubt.SUMS_ALONE,),
        f"{capital(ranks_wait(facts, members))} in {wait.words}, {where}: {text}.",
        claims=(claim, *wait_claims(facts, members)),
    )
