"""Ranks that created different numbers of process groups."""

from __future__ import annotations

from safelaunch.model import Claim
from safelaunch.verdict.blame import blame_calls
from safelaunch.verdict.conflict import Call, Conflict, outvoted
from safelaunch.verdict.findings import Ruling
from safelaunch.verdict.majority import sides_of
from safelaunch.verdict.phrases import capital, ranks_do, ranks_wait, waits_words
from safelaunch.verdict.suggestions import GROUPS_MADE
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
    odd, tie = outvoted(counts)
    odd = odd if tie is None else tuple(counts[min(counts)])  # ranks that skipped a call which every rank must make
    parts = [f"{ranks_do(ranks, 'has', 'have')} made {count}" for count, ranks in sorted(counts.items(), reverse=True)]
    waits = [f"{ranks_wait(case, within)} in new_group"] if within else []
    waits += (
        [f"{waits_words(case, in_foreign_group)}, in a group that peers have without it"] if in_foreign_group else []
    )
    text = f"{capital(' and '.join(waits))}, and not all ranks have made the same groups: "
    text += f"{', '.join(parts)}. Every rank has to call new_group(), also for a group of others."
    claims = [Claim(f"rank {r} has made {count} process groups", f"ranks/{r}/rank.json") for r, count in made.items()]
    call = Call(does="has made a different number of groups than its peers")
    return blame_calls(
        case,
        Conflict(dict.fromkeys(made, call), odd, tie, claims=tuple(claims[:8]), advice=frozenset({GROUPS_MADE})),
        text,
    )


def _in_another_group(case: Case) -> list[int]:
    """Returns ranks that wait in a group which a peer lists by the same name without them."""
    lists = {each for rank in case.ranks for each in case.alignment.groups_of(rank).items() if each[1]}
    waiting = {rank: wait.group for rank, wait in case.waiting.items() if wait.group and wait.kind == "collective"}
    return [rank for rank, name in waiting.items() if any(name == group and rank not in m for group, m in lists)]
