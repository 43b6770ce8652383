"""Rules about the making of process groups, which all ranks have to take part in, members or not."""

from __future__ import annotations

from safelaunch.model import Claim
from safelaunch.verdict.collectives import vote
from safelaunch.verdict.doubts import Doubt, those
from safelaunch.verdict.findings import Finding, Ruling, capital, ranks_do, wait_claims, waiting_culprit
from safelaunch.verdict.waits import Case


def groups_made_apart(case: Case) -> Ruling:
    """Ranks wait in ``new_group``, and some have made more groups than others: not all ranks took part before.

    torch names groups by a count of its own on each rank, so ranks that are not in step wait for different ones.
    """
    inside = [rank for rank, one in case.ranks.items() if one.wait is not None and one.wait.op == "new_group"]
    made = {rank: one.evidence.gil.groups_made for rank, one in case.ranks.items()}
    if not inside or None in made.values():
        return ""
    least = min(made[rank] or 0 for rank in inside)  # the one under way counts
    counts: dict[int, list[int]] = {}
    for rank, count in made.items():
        if rank in inside or (count or 0) >= least:  # who has made fewer, and waits elsewhere, has not come there yet
            counts.setdefault(count or 0, []).append(rank)
    if len(counts) < 2:
        return ""
    odd, majority = vote(counts)
    odd = odd if majority else tuple(counts[min(counts)])  # they have left out a call that every rank has to make
    parts = [f"{ranks_do(ranks, 'has', 'have')} made {count}" for count, ranks in sorted(counts.items(), reverse=True)]
    text = f"{capital(ranks_do(inside, 'waits', 'wait'))} in new_group, and not all ranks have made the same groups: "
    text += f"{', '.join(parts)}. Every rank has to call new_group(), also for a group of others."
    reason = "has made another number of groups than its peers"
    return Finding(
        "collective-mismatch",
        those({Doubt.NO_MAJORITY: not majority}),
        text,
        tuple(waiting_culprit(case.ranks[rank], f"Rank {rank} {reason}.") for rank in odd),
        tuple(Claim(f"rank {rank} has made {made[rank]} process groups", f"ranks/{rank}/rank.json") for rank in made)[
            :8
        ]
        + wait_claims(case, sorted(case.waits.waiting)),
        signs=frozenset({"groups-made"}),
    )
