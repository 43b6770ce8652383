"""Rules for ranks whose calls differ in a value: a tag, a peer, a size, a root, or the number of groups."""

from __future__ import annotations

from dataclasses import replace

from safelaunch.model import Claim
from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.verdict.blame import blame_calls
from safelaunch.verdict.c10d import elements, is_root, number_of, op_name
from safelaunch.verdict.conditions import record_claim
from safelaunch.verdict.conflict import Call, Conflict, outvoted
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.findings import Finding, Ruling
from safelaunch.verdict.majority import sides_of
from safelaunch.verdict.peers import PeerWait
from safelaunch.verdict.phrases import capital, ranks_do, ranks_wait, ranks_word, waits_words
from safelaunch.verdict.rank_state import CaseFacts, RankFacts
from safelaunch.verdict.suggestions import ROOTS_DIFFER
from safelaunch.verdict.waits import Case, Waiters


def unequal_calls(case: Case) -> Finding | None:
    """Returns the finding for a call that all ranks have reached, if size, type or root differ.

    Both ends of a send and its receive are named, as either might be wrong. For an all_to_all, only the sums are known.
    """
    for waiters in sorted(case.waits.classes.values(), key=lambda waiters: waiters.ranks):
        wait = waiters.wait
        numbered = wait.group is not None and wait.seq is not None
        if numbered and case.waits.cycle:
            continue
        finding = _different_roots(case, wait) if wait.kind == "collective" else None
        if finding is None and wait.group is not None and wait.seq is not None:
            finding = _unequal_pair(case, waiters) if wait.kind == "p2p" else _unequal_sums(case, waiters)
        if finding is not None:
            return finding
    return None


def _unequal_pair(facts: CaseFacts, waiters: Waiters) -> Finding | None:
    pair = facts.transfers.unequal(waiters.ranks[0], str(waiters.wait.group))
    if pair is None:
        return None
    sites = {side.rank: facts.alignment.stack(side.rank, side.entry).user_frame for side in pair}
    ends = {side.rank: Call(does=side.words() + fr.at(sites[side.rank]), site=sites[side.rank]) for side in pair}
    calls_made = {s.rank: f"{op_name(s.entry)} #{number_of(s.entry)} of {facts.group(s.entry.group)}" for s in pair}
    claims = (record_claim(s.rank, f"rank {s.rank} {s.words()}: {calls_made[s.rank]}") for s in pair)
    text = " while ".join(f"rank {rank} {call.does}" for rank, call in ends.items())
    conflict = Conflict(ends, (*ends,), "open")
    return replace(blame_calls(facts, conflict, f"{capital(text)}: they do not match."), claims=tuple(claims))


def _roots(facts: CaseFacts, wait: PeerWait) -> dict[int, int]:
    # Records show only the root of a gather or scatter.
    same_call = {rank: state for rank in facts.waiting if _waits_in(state := facts.ranks[rank], wait)}
    named = {rank: root for rank, state in same_call.items() if (root := _root_of(state)) is not None}
    group, members = wait.group or "", sorted(facts.alignment.members(wait.group or "")[0])
    recorded = ((rank, facts.alignment.entry(rank, group, wait.seq or 0)) for rank in members)
    return named or {rank: rank for rank, entry in recorded if entry is not None and is_root(entry)}


def _waits_in(facts: RankFacts, wait: PeerWait) -> bool:
    """Returns whether the rank waits in the same call; a list of objects takes two, the first for the sizes."""
    own_wait = facts.wait
    if own_wait is None or own_wait.key == wait.key:
        return own_wait is not None and (wait.seq is not None or own_wait.frame == wait.frame)
    place = (own_wait.group, own_wait.seq, own_wait.op, own_wait.frame)
    same = place == (wait.group, (wait.seq or 0) + 1, wait.op, wait.frame)
    return same and facts.view is not None and calls.passes_objects(facts.view.stack)


def _root_of(facts: RankFacts) -> int | None:
    wait, view = facts.wait, facts.view
    if wait is not None and wait.seq is not None:
        return wait.target if wait.target is not None else wait.source
    call = view.thread.call if view is not None and view.thread is not None else None
    return (call.group_src if call.group_src is not None else call.group_dst) if call is not None else None


def _different_roots(facts: CaseFacts, wait: PeerWait) -> Finding | None:
    sources = _roots(facts, wait)
    by_root, numbered = sides_of(sources), wait.seq is not None
    if len(by_root) < 2:
        return None
    odd, decided = outvoted(by_root)
    silent = len(facts.alignment.members(str(wait.group))[0]) - len(sources) if numbered else 0
    if 2 * (len(sources) - len(odd)) <= len(sources) + silent:
        decided = "tie"
    whose = "rank" if numbered else "group rank"
    parts = [f"{whose} {root} on {ranks_word(ranks)}" for root, ranks in by_root.items()]
    number = f", #{wait.seq} of {facts.group(wait.group)}," if numbered else ""
    names = {rank: Call(does=f"names {whose} {root} as the root") for rank, root in sources.items()}
    claims = [facts.ranks[rank].line_claim(f"rank {rank} {call.does}") for rank, call in names.items()]
    doubts = () if numbered else (Doubt.LINES_ALONE,)
    conflict = Conflict(names, odd, decided, doubts, tuple(claims[:8]), advice=frozenset({ROOTS_DIFFER}))
    return blame_calls(facts, conflict, f"The root of {wait.words}{number} is {' and '.join(parts)}.")


def _unequal_sums(facts: CaseFacts, waiters: Waiters) -> Finding | None:
    """Returns the finding for an all_to_all of all members in which they don't send as many elements as they expect.

    Sizes differ between ranks by design, and the record doesn't show what goes where, so no rank can be blamed.
    """
    wait, ranks = waiters.wait, waiters.ranks
    members, are_known = facts.alignment.members(str(wait.group))
    entries = [facts.alignment.entry(rank, str(wait.group), wait.seq or 0) for rank in members]
    exchanges = [entry for entry in entries if entry is not None and op_name(entry).startswith("all_to_all")]
    if not are_known or len(exchanges) < len(entries) or not all(e.input_sizes and e.output_sizes for e in exchanges):
        return None
    sent = elements(tuple(size for entry in exchanges for size in entry.input_sizes))
    expected = elements(tuple(size for entry in exchanges for size in entry.output_sizes))
    if sent is None or expected is None or sent == expected:
        return None
    where = f"#{wait.seq} of {facts.group(wait.group)}"
    text = f"together the ranks send {sent} elements and expect {expected}"
    claims = (record_claim(ranks[0], f"{where}: {text}"),)
    conflict = Conflict(dict.fromkeys(ranks, Call()), (), doubts=(Doubt.SUMS_ALONE,), claims=claims)
    return blame_calls(facts, conflict, f"{capital(ranks_wait(facts, ranks))} in {wait.words}, {where}: {text}.")


# --- groups -----------------------------------------------------------------------------------------------------------


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
    odd, decided = outvoted(counts)
    odd = odd if not decided else tuple(counts[min(counts)])  # ranks that skipped a call which every rank must make
    parts = [f"{ranks_do(ranks, 'has', 'have')} made {count}" for count, ranks in sorted(counts.items(), reverse=True)]
    waits = [f"{ranks_wait(case, within)} in new_group"] if within else []
    waits += (
        [f"{waits_words(case, in_foreign_group)}, in a group that peers have without it"] if in_foreign_group else []
    )
    text = f"{capital(' and '.join(waits))}, and not all ranks have made the same groups: "
    text += f"{', '.join(parts)}. Every rank has to call new_group(), also for a group of others."
    claims = [Claim(f"rank {r} has made {count} process groups", f"ranks/{r}/rank.json") for r, count in made.items()]
    call = Call(does="has made a different number of groups than its peers")
    calls_made = dict.fromkeys(made, call)
    conflict = Conflict(calls_made, odd, decided, claims=tuple(claims[:8]), of="groups made")
    return blame_calls(case, conflict, text)


def _in_another_group(case: Case) -> list[int]:
    # A peer lists their group by the same name without them.
    lists = {each for rank in case.ranks for each in case.alignment.groups_of(rank).items() if each[1]}
    waiting = {rank: wait.group for rank, wait in case.waiting.items() if wait.group and wait.kind == "collective"}
    return [rank for rank, name in waiting.items() if any(name == group and rank not in m for group, m in lists)]
