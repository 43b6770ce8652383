"""Ranks that have met and do not fit: a send and its receive, or what goes into an all_to_all and what comes out."""

from __future__ import annotations

from safelaunch.diagnose import frames as fr
from safelaunch.diagnose.collectives import number_of, op_name
from safelaunch.diagnose.facts import Facts, PeerWait
from safelaunch.diagnose.findings import Finding, Ruling, ranks_word, wait_claims, waiting_culprit
from safelaunch.diagnose.transfers import Transfer, unequal, unequal_exchange
from safelaunch.diagnose.waits import Waits
from safelaunch.model import Claim


def unfit_transfers(facts: Facts, waits: Waits) -> Ruling:
    """All have come, and what one gives is not what another takes, in size or type.

    Of a send and its receive, either may be the wrong one: both are named. Of an all_to_all only the sums are known.
    """
    for key, members in sorted(waits.ranks.items(), key=lambda item: item[1]):
        wait = waits.example[key]
        if wait.group is None or wait.seq is None:
            continue
        if wait.kind == "p2p":
            pair = unequal(facts.alignment, members[0], wait.group)
            if pair is not None:
                return _pair(facts, pair)
        elif wait.kind == "collective":
            sums = unequal_exchange(facts.alignment, wait.group, wait.seq)
            if sums is not None:
                return _exchange(facts, wait, members, sums)
    return ""


def _pair(facts: Facts, pair: tuple[Transfer, Transfer]) -> Finding:
    sites = {one.rank: fr.user_frame(one.entry.frames, facts.roots.get(one.rank, ())) for one in pair}
    says = {one.rank: one.says() + (f" at {fr.place(sites[one.rank])}" if sites[one.rank] else "") for one in pair}
    text = " while rank ".join(f"{rank} {words}" for rank, words in says.items())
    return Finding(
        "collective-mismatch",
        "medium",
        f"Rank {text}: they do not fit.",
        tuple(waiting_culprit(facts.ranks[rank], f"Rank {rank} {says[rank]}.", sites[rank]) for rank in says),
        tuple(
            Claim(
                f"rank {one.rank} {one.says()}: {op_name(one.entry)} number {number_of(one.entry)} of group "
                f"{one.entry.group!r}",
                f"ranks/{one.rank}/flight_recorder.json",
            )
            for one in pair
        ),
    )


def _exchange(facts: Facts, wait: PeerWait, members: tuple[int, ...], sums: tuple[int, int]) -> Finding:
    where = f"number {wait.seq} of group {wait.group!r}"
    text = f"together the ranks send {sums[0]} elements and expect {sums[1]}"
    claim = Claim(f"{where}: {text}", f"ranks/{members[0]}/flight_recorder.json")
    return Finding(
        "collective-mismatch",
        "medium",
        f"{ranks_word(members)} {'waits' if len(members) == 1 else 'wait'} in {wait.words}, {where}: {text}.",
        claims=(claim, *wait_claims(facts, members)),
    )
