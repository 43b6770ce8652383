"""Ranks that created different numbers of process groups."""

from __future__ import annotations

from safelaunch.model import Claim
from safelaunch.verdict.blame import wait_claims, waiting_culprit
from safelaunch.verdict.findings import DOUBTS_OF_VOTE, Finding, Ruling, Vote
from safelaunch.verdict.majority import sides_of, vote
from safelaunch.verdict.phrases import capital, ranks_do, ranks_wait, waits_words
from safelaunch.verdict.waits import Case


def unequal_new_groups(case: Case) -> Ruling:
    """Ranks wait in ``new_group``, or in a group that peers created without them: they created different groups.

    torch names groups by a counter on each rank, so ranks that are out of step wait for different groups.
    """
    counts_by_rank = {rank: state.evidence.gil.groups_made for rank, state in case.ranks.items()}
    made = {rank: count for rank, count in counts_by_rank.items() if count is not None}
    if len(made) < len(counts_by_rank) or len(set(made.values())) < 2:
        return ""
    in_foreign_group = _in_another_group(case)
    within = [rank for rank, wait in case.waiting.items() if wait.op == "new_group"]
    inside = sorted({*within, *in_foreign_group})
    if not inside:
        return ""
    least = min(made[rank] for rank in inside)  # including the group being created
    # A rank with fewer groups that waits elsewhere has not come there yet.
    counts = sides_of({rank: count for rank, count in made.items() if rank in inside or count >= least})
    if len(counts) < 2:
        return ""
    odd, majority = vote(counts)
    odd = odd if majority else tuple(counts[min(counts)])  # ranks that skipped a call which every rank must make
    parts = [f"{ranks_do(ranks, 'has', 'have')} made {count}" for count, ranks in sorted(counts.items(), reverse=True)]
    waits = [f"{ranks_wait(case, within)} in new_group"] if within else []
    waits += (
        [f"{waits_words(case, in_foreign_group)}, in a group that peers have without it"] if in_foreign_group else []
    )
    text = f"{capital(' and '.join(waits))}, and not all ranks have made the same groups: "
    text += f"{', '.join(parts)}. Every rank has to call new_group(), also for a group of others."
    reason = "has made a different number of groups than its peers"
    decided: Vote = "" if majority else "tie"
    return Finding(
        "collective-mismatch",
        DOUBTS_OF_VOTE[decided],
        text,
        tuple(waiting_culprit(case.ranks[rank], f"Rank {rank} {reason}.") for rank in odd),
        tuple(Claim(f"rank {rank} has made {made[rank]} process groups", f"ranks/{rank}/rank.json") for rank in made)[
            :8
        ]
        + wait_claims(case, case.waiting),
        of="groups made",
        vote=decided,
    )


def _in_another_group(case: Case) -> list[int]:
    """Returns ranks that wait in a group which a peer lists by the same name without them."""
    waiting = {rank: wait.group for rank, wait in case.waiting.items() if wait.group and wait.kind == "collective"}
    lists: dict[str, set[tuple[int, ...]]] = {group: set() for group in waiting.values()}
    for rank in case.ranks:
        listed = case.alignment.groups_of(rank)
        for group in lists.keys() & listed.keys():
            lists[group].add(listed[group])
    return [
        rank
        for rank, group in waiting.items()
        if any(
            members and rank not in members for members in lists[group] - {case.alignment.groups_of(rank).get(group)}
        )
    ]
