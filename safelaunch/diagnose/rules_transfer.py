"""Ranks that have met and do not fit: a send and its receive, two roots of one gather, or what goes into an all_to_all
and what comes out.
"""

from __future__ import annotations

from safelaunch.diagnose import frames as fr
from safelaunch.diagnose.collectives import number_of, op_name
from safelaunch.diagnose.facts import Facts, PeerWait
from safelaunch.diagnose.findings import Finding, Ruling, ranks_word, small, wait_claims, waiting_culprit
from safelaunch.diagnose.transfers import Transfer, is_root, several_roots, unequal, unequal_exchange
from safelaunch.diagnose.waits import Waits
from safelaunch.model import Claim, Collective


def unfit_transfers(facts: Facts, waits: Waits) -> Ruling:
    """All have come, and what one gives is not what another takes, in size or type, or not where it takes it.

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
            roots = several_roots(facts.alignment, wait.group, wait.seq)
            if roots:
                return _roots(facts, wait.group, wait.seq, roots)
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


def _roots(facts: Facts, group: str, seq: int, roots: tuple[int, ...]) -> Finding:
    """Who was not the root the last time is wrong now; where that does not tell, all roots are named."""
    entries = {rank: facts.alignment.entry(rank, group, seq) for rank in roots}
    new = tuple(rank for rank, entry in entries.items() if entry is not None and _was_root(facts, rank, entry) is False)
    named = new if 0 < len(new) < len(roots) else roots
    frames = {rank: entry.frames if entry is not None else () for rank, entry in entries.items()}
    sites = {rank: fr.user_frame(frames[rank], facts.roots.get(rank, ())) for rank in roots}
    op = next(op_name(entry) for entry in entries.values() if entry is not None)
    text = f"{ranks_word(roots)} each take themselves for the root of {op} number {seq} of group {group!r}"
    text += f" at {fr.place(sites[named[0]])}"
    if named != roots:
        text += f"; {small(ranks_word(named))} {'was' if len(named) == 1 else 'were'} not the root there before"
    did = f"takes itself for the root of {op} at"
    return Finding(
        "collective-mismatch",
        "medium",
        f"{text}.",
        tuple(waiting_culprit(facts.ranks[r], f"Rank {r} {did} {fr.place(sites[r])}.", sites[r]) for r in named),
        tuple(
            Claim(
                f"rank {rank}: {op} number {seq} of group {group!r} has tensors that only the root's has",
                f"ranks/{rank}/flight_recorder.json",
            )
            for rank in roots[:4]
        )
        + wait_claims(facts, sorted(facts.ranks)),
    )


def _was_root(facts: Facts, rank: int, now: Collective) -> bool | None:
    """Whether it was the root in its call before ``now`` from the same place; None where there is none."""
    window = facts.alignment.window(rank, now.group)
    site = fr.user_frame(now.frames, facts.roots.get(rank, ()))
    for number in reversed(window.numbers if window is not None else ()):
        entry = facts.alignment.entry(rank, now.group, number) if number < now.seq else None
        if entry is None or op_name(entry) != op_name(now):
            continue
        if fr.user_frame(entry.frames, facts.roots.get(rank, ())) == site:
            return is_root(entry)
    return None


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
