"""Rules for sends and receives that never meet."""

from __future__ import annotations

from safelaunch.model import Collective
from safelaunch.stacks import frames as fr
from safelaunch.verdict.blame import blame_calls, blame_either_end, wait_claims, waiting_culprits
from safelaunch.verdict.c10d import op_name
from safelaunch.verdict.conflict import Call, Conflict
from safelaunch.verdict.doubts import Doubt, doubts_if
from safelaunch.verdict.findings import Finding, Ruling
from safelaunch.verdict.phrases import apart, capital, ranks_wait, wait_words, waits_words
from safelaunch.verdict.rules_history import skipped
from safelaunch.verdict.suggestions import PEERS_DIFFER, TAGS_DIFFER
from safelaunch.verdict.waits import Case, Waiters, ranks_in


def unmatched_transfers(case: Case) -> Ruling:
    """Sends and receives never meet: tags or peers differ, they wait for each other, or a peer is in a collective.

    A wrong tag or peer alone explains it, whatever else the ranks wait for. A majority shows nothing, as a send or
    receive involves only two ranks.
    """
    ranks = ranks_in(case.waits.transfers_of_cycle)
    peers = {rank: peer for rank in ranks if (peer := case.waiting[rank].peer) in case.waits.ranks_in_cycle}
    tags = next((pair for pair in peers.items() if _tags_differ(case, *pair)), None)
    if tags is not None:
        tag, other_tag = (case.waiting[rank].tag for rank in tags)
        text = f"{capital(apart(case, wait_words(case, tags)))}: the tags differ, {tag} and {other_tag}."
        return blame_either_end(case, tags, text, TAGS_DIFFER)
    finding = (_wrong_peer(case) if not case.unseen else None) or _in_a_cycle(case)
    elsewhere = [pair for pair in peers.items() if case.waiting[pair[1]].kind != "p2p" and not case.unseen]
    return finding or (_peer_is_elsewhere(case, *elsewhere[0]) if elsewhere else "")


def _tags_differ(case: Case, rank: int, peer: int) -> bool:
    wait, other = case.waiting[rank], case.waiting[peer]
    is_pair = wait.target is not None and other.kind == "p2p" and other.source == rank
    return is_pair and None not in (wait.tag, other.tag) and wait.tag != other.tag


def _wrong_peer(case: Case) -> Finding | None:
    """Returns the finding for a rank that sends to a wrong peer, or receives from one, if every batch is known."""
    transfers = (rank for rank, wait in case.waiting.items() if wait.kind == "p2p")
    batches = {rank: case.ranks[rank].evidence.gil.posted for rank in transfers}
    if not all(batches.values()):
        return None
    ends = {(transfer.sends, rank, transfer.peer) for rank, batch in batches.items() for transfer in batch}
    unmet = [(sends, rank, peer) for sends, rank, peer in ends if (not sends, peer, rank) not in ends]
    wrong_peers = [
        (sends, rank, peer, other)
        for sends, rank, peer in unmet
        for transfer, other, named in unmet
        if transfer is not sends and named == rank and other != peer and peer in batches
    ]
    if len({rank for _, rank, _, _ in wrong_peers}) != 1:
        return None
    sends, rank, peer, other = min(wrong_peers)
    does, wants = ("sends to", "receive from") if sends else ("receives from", "send to")
    text = f"{does} rank {peer}, which does not expect that, while rank {other} waits to {wants} rank {rank}"
    pairs = {end: Call(does=text) for end in (rank, peer, other)}
    conflict = Conflict(pairs, (rank,), "open", advice=frozenset({PEERS_DIFFER}))
    return blame_calls(case, conflict, f"Rank {rank} {text}.")


def _in_a_cycle(case: Case) -> Finding | None:
    """Returns the finding for sends and receives that wait for each other.

    gloo doesn't record peers, so the cycle is inferred: no other rank is left that could come. A rank in a collective
    might still have skipped its part of the exchange; without peers, nothing shows that.
    """
    ranks = ranks_in(_inner_cycle(case.waits.transfers_of_cycle))
    if not ranks:
        return None
    certain = all(_names_its_peer(case, waiters) for waiters in case.waits.cycle)
    text = f"{capital(waits_words(case, ranks))}: each waits for another."
    rest = waits_words(case, [rank for rank in case.waits.ranks_in_cycle if rank not in ranks])
    if rest and not certain:
        text += f" Or one of them waits for a peer that continued without it: {rest}."
    return Finding(
        "p2p-cycle",
        doubts_if({Doubt.PEERS_NOT_RECORDED: not certain}),
        text,
        waiting_culprits(case, ranks),
        wait_claims(case, ranks),
    )


def _peer_is_elsewhere(case: Case, rank: int, peer: int) -> Finding:
    """Returns the finding for a rank that waits for a peer which waits for it in turn, in a collective.

    The peer's habit might show that it skipped its part; otherwise the rank might have made an extra call.
    """
    words, peer_words = case.waiting[rank].words, case.waiting[peer].words
    text = f"{capital(ranks_wait(case, [rank]))} in {words}, and rank {peer} in {peer_words}"
    left_out = _left_out(case, peer)
    if left_out is not None:
        site = case.alignment.stack(peer, left_out).user_frame
        did = f"skipped {op_name(left_out)}{fr.at(site)}, which it had always called right before {peer_words}"
        return skipped(case, peer, site, did, wait_claims(case, (rank, peer)), text)
    text += f": rank {rank} has made one call too many, or rank {peer} left out the other end."
    return blame_either_end(case, (rank, peer), text)


def _left_out(case: Case, rank: int) -> Collective | None:
    now = case.call_of(rank)
    left = case.histories.left_habit(rank, now, -1) if now is not None else None
    is_shown = left is not None and left.kind == "missing" and left.sure
    return left.expected if left is not None and is_shown and left.expected.is_p2p else None


def _names_its_peer(case: Case, waiters: Waiters) -> bool:
    wait = waiters.wait
    if wait.kind != "p2p":
        return False
    missing = case.transfers.peers_missing(waiters.ranks[0], wait.group) if wait.group is not None else None
    return wait.peer is not None or missing is not None


def _inner_cycle(classes: tuple[Waiters, ...]) -> tuple[Waiters, ...]:
    while True:
        members = set(ranks_in(classes))
        bound = tuple(waiters for waiters in classes if waiters.blockers & (members - set(waiters.ranks)))
        if bound == classes:
            return classes if len(members) > 1 else ()
        classes = bound
