"""Ranks that meet and do not fit.

A send and its receive; two roots of one gather; what goes into an all_to_all and what comes out; how many groups ranks
have made; the calls of two threads of each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from safelaunch.model import Claim, Collective, Frame
from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.verdict.causes import GROUPS_MADE, RACE, ROOTS_DIFFER
from safelaunch.verdict.collectives import Alignment, number_of, op_name, sides_of, vote
from safelaunch.verdict.conditions import record_claim
from safelaunch.verdict.divergence import UNKNOWN, Identity, identity_of
from safelaunch.verdict.doubts import Doubt, those
from safelaunch.verdict.findings import (
    Finding,
    Ruling,
    capital,
    ranks_do,
    ranks_wait,
    ranks_word,
    wait_claims,
    waiting_culprit,
    waits_words,
)
from safelaunch.verdict.peers import PeerWait
from safelaunch.verdict.rank_state import CaseFacts, RankFacts, view_of
from safelaunch.verdict.transfers import RecordedTransfer, roots, unequal_exchange
from safelaunch.verdict.waits import Case


def unfit_transfers(case: Case) -> Ruling:
    """All ranks have arrived, but what one rank sends is not what another expects: size, type or root differ.

    Of a send and its receive, either may be the wrong one: both are named. Of an all_to_all only the sums are known.
    """
    for one in sorted(case.waits.classes.values(), key=lambda one: one.ranks):
        wait, members = one.wait, one.ranks
        numbered = wait.group is not None and wait.seq is not None
        if numbered and case.waits.circle:
            continue
        sources = _sources(case, wait) if wait.kind == "collective" else {}
        if len({*sources.values()}) > 1:
            return _of_sources(case, wait, sources)
        if wait.group is None or wait.seq is None:
            continue
        if wait.kind == "p2p":
            pair = case.transfers.unequal(members[0], wait.group)
            if pair is not None:
                return _pair(case, pair)
        elif wait.kind == "collective":
            sums = unequal_exchange(case.alignment, wait.group, wait.seq)
            if sums is not None:
                return _exchange(case, wait, members, sums)
    return ""


def _pair(facts: CaseFacts, pair: tuple[RecordedTransfer, RecordedTransfer]) -> Finding:
    sites = {one.rank: facts.alignment.stack(one.rank, one.entry).user_frame for one in pair}
    says = {one.rank: one.says() + fr.at(sites[one.rank]) for one in pair}
    text = " while rank ".join(f"{rank} {words}" for rank, words in says.items())
    return Finding(
        "collective-mismatch",
        (Doubt.EITHER_SIDE,),
        f"Rank {text}: they do not match.",
        tuple(waiting_culprit(facts.ranks[rank], f"Rank {rank} {says[rank]}.", sites[rank]) for rank in says),
        tuple(
            record_claim(
                one.rank,
                f"rank {one.rank} {one.says()}: {op_name(one.entry)} #{number_of(one.entry)} of group "
                f"{one.entry.group!r}",
            )
            for one in pair
        ),
    )


def _sources(facts: CaseFacts, wait: PeerWait) -> dict[int, int]:
    """rank → the root that it names in the call, of those that wait in the same one; by the record, itself."""
    there = {rank: one for rank in facts.waiting if _is_in(one := facts.ranks[rank], wait)}
    named = {rank: root for rank, one in there.items() if (root := _root_of(one)) is not None}
    return named or {rank: rank for rank in roots(facts.alignment, wait.group or "", wait.seq or 0)}


def _is_in(one: RankFacts, wait: PeerWait) -> bool:
    """It waits in the same call; lists of objects take two, first of their sizes, from one line and with one root."""
    mine = one.wait
    if mine is None or mine.key == wait.key:
        return mine is not None and (wait.seq is not None or mine.frame == wait.frame)
    same = (mine.group, mine.seq, mine.op, mine.frame) == (wait.group, (wait.seq or 0) + 1, wait.op, wait.frame)
    view = view_of(one.evidence) if same else None
    return view is not None and calls.passes_objects(view.stack)


def _root_of(one: RankFacts) -> int | None:
    """In the world; without a record nobody knows of which group it is: then in that."""
    wait, view = one.wait, view_of(one.evidence)
    if wait is not None and wait.seq is not None:
        return wait.target if wait.target is not None else wait.source
    call = view.thread.call if view is not None and view.thread is not None else None
    return (call.group_src if call.group_src is not None else call.group_dst) if call is not None else None


def _of_sources(facts: CaseFacts, wait: PeerWait, sources: Mapping[int, int]) -> Finding:
    """Ranks name different roots in one broadcast, reduce, gather or scatter."""
    by_root = sides_of(sources)
    odd, majority = vote(by_root)
    numbered = wait.seq is not None
    silent = len(facts.alignment.members(str(wait.group))[0]) - len(sources) if numbered else 0
    surely = majority and 2 * (len(sources) - len(odd)) > len(sources) + silent
    whose = "rank" if numbered else "group rank"
    parts = [f"{whose} {root} on {ranks_word(ranks)}" for root, ranks in by_root.items()]
    number = f", #{wait.seq} of group {wait.group!r}," if numbered else ""
    text = f"The root of {wait.words}{number} is {' and '.join(parts)}."
    return Finding(
        "collective-mismatch",
        (*(() if surely else (Doubt.NO_MAJORITY,)), *(() if numbered else (Doubt.LINES_ALONE,))),
        text,
        tuple(waiting_culprit(facts.ranks[r], f"Rank {r} names {whose} {sources[r]} as the root.") for r in odd),
        tuple(facts.ranks[r].line_claim(f"rank {r} names {whose} {root} as the root") for r, root in sources.items())[
            :8
        ]
        + wait_claims(facts, sorted(sources)),
        advice=frozenset({ROOTS_DIFFER}),
    )


def _exchange(facts: CaseFacts, wait: PeerWait, members: tuple[int, ...], sums: tuple[int, int]) -> Finding:
    where = f"#{wait.seq} of group {wait.group!r}"
    text = f"together the ranks send {sums[0]} elements and expect {sums[1]}"
    claim = record_claim(members[0], f"{where}: {text}")
    return Finding(
        "collective-mismatch",
        (Doubt.SUMS_ALONE,),
        f"{capital(ranks_wait(facts, members))} in {wait.words}, {where}: {text}.",
        claims=(claim, *wait_claims(facts, members)),
    )


def groups_made_apart(case: Case) -> Ruling:
    """Ranks wait in ``new_group``, or in a group that their peers created without them: not all ranks created the
    same groups.

    torch names groups by a count of its own on each rank, so ranks that are not in step wait for different ones.
    """
    told = {rank: one.evidence.gil.groups_made for rank, one in case.ranks.items()}
    made = {rank: count for rank, count in told.items() if count is not None}
    if len(made) < len(told) or len(set(made.values())) < 2:
        return ""
    apart = _in_another_group(case)
    within = [rank for rank, wait in case.waiting.items() if wait.op == "new_group"]
    inside = sorted({*within, *apart})
    if not inside:
        return ""
    least = min(made[rank] for rank in inside)  # the one under way counts
    # Who has made fewer, and waits elsewhere, has not come there yet.
    counts = sides_of({rank: count for rank, count in made.items() if rank in inside or count >= least})
    if len(counts) < 2:
        return ""
    odd, majority = vote(counts)
    odd = odd if majority else tuple(counts[min(counts)])  # they have left out a call that every rank has to make
    parts = [f"{ranks_do(ranks, 'has', 'have')} made {count}" for count, ranks in sorted(counts.items(), reverse=True)]
    waits = [f"{ranks_wait(case, within)} in new_group"] if within else []
    waits += [f"{waits_words(case, apart)}, in a group that peers have without it"] if apart else []
    text = f"{capital(' and '.join(waits))}, and not all ranks have made the same groups: "
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
        + wait_claims(case, case.waiting),
        advice=frozenset({GROUPS_MADE}),
    )


def _in_another_group(case: Case) -> list[int]:
    """The ranks that wait in a group which another rank lists by the same name, and without them."""
    waiting = {rank: wait.group for rank, wait in case.waiting.items() if wait.group and wait.kind == "collective"}
    lists: dict[str, set[tuple[int, ...]]] = {group: set() for group in waiting.values()}
    for rank in case.ranks:
        listed = case.alignment.listed(rank)
        for group in lists.keys() & listed.keys():
            lists[group].add(listed[group])
    return [
        rank
        for rank, group in waiting.items()
        if any(one and rank not in one for one in lists[group] - {case.alignment.listed(rank).get(group)})
    ]


# --- threads of one rank that call in one group -----------------------------------------------------------------------

_MOST = 256  # calls of one rank: a race shows at the newest ones

_STARTERS = ("/threading.py", "/concurrent/futures/thread.py", "/multiprocessing/pool.py")

ThreadKey = tuple[str, str] | int  # where its code begins, or its number


@dataclass(frozen=True)
class _ThreadCall:
    """A call of a thread: the same one, whatever else its entry says."""

    thread: ThreadKey
    call: Identity
    entry: Collective = field(compare=False)


def threads_that_race(case: Case) -> Ruling:
    """Two threads call in one group, and which one comes first differs from rank to rank: no rank is at fault.

    Each thread makes the same calls on all ranks; only their order among the threads differs. A backend pairs by
    number, so the calls of one thread meet those of the other.
    """
    groups = {w.group for one in case.waits.classes.values() if (w := one.wait).group is not None}
    found = next((race for group in sorted(groups) if (race := _race_in(case.alignment, group)) is not None), None)
    if found is None:
        return ""
    group, number, calls = found
    places = sides_of({rank: f"{op_name(one)}{_where(case, rank, one)}" for rank, one in calls.items()})
    which = f"collective #{number} of group {group!r}"
    parts = " and ".join(f"{what} on {ranks_word(ranks)}" for what, ranks in places.items())
    text = f"Two threads of each rank call collectives of group {group!r}, in no fixed order: {which} is {parts}."
    claims = [
        record_claim(ranks[0], f"{capital(ranks_word(ranks))}: {which} is {what}, and the other thread's call is next")
        for what, ranks in places.items()
    ]
    waiting = sorted(case.waiting)
    return Finding(
        "collective-mismatch",
        (),
        text,
        claims=(*claims, *wait_claims(case, waiting)),
        advice=frozenset({RACE}),
        victims=tuple(waiting),
    )


def _where(case: Case, rank: int, entry: Collective) -> str:
    site, begin = case.alignment.stack(rank, entry).user_frame, _begin(entry)
    return f" called from {fr.place(begin)}" if site is None and begin is not None else fr.at(site)


def _race_in(alignment: Alignment, group: str) -> tuple[str, int, dict[int, Collective]] | None:
    """``group``, its first number under which ranks recorded calls of different threads, and what each called there, if
    that is all that differs.

    None where some rank has not made a call that another has: then it is behind, whatever else.
    """
    if not alignment.has_threads:
        return None
    made = {rank: calls for rank in sorted(alignment.members(group)[0]) if (calls := _made(alignment, rank, group))}
    if len(made) < 2 or not any(len({call.entry.thread for call in calls.values()}) > 1 for calls in made.values()):
        return None
    first = max(min(calls) for calls in made.values())
    late = {rank: {number: one for number, one in calls.items() if number >= first} for rank, calls in made.items()}
    if len({_by_thread(calls) for calls in late.values()}) > 1:
        return None
    numbers = sorted(set().union(*late.values()))
    apart = next((n for n in numbers if len({calls[n] for calls in late.values() if n in calls}) > 1), None)
    if apart is None or not all(_are_of_several_threads(calls, late.values(), apart) for calls in late.values()):
        return None
    return group, apart, {rank: calls[apart].entry for rank, calls in late.items() if apart in calls}


def _are_of_several_threads(
    mine: Mapping[int, _ThreadCall], everybody: Iterable[Mapping[int, _ThreadCall]], number: int
) -> bool:
    """What ranks called as ``number``, a rank called from as many threads, whenever it did. One thread cannot race
    with itself, wherever its calls begin.
    """
    raced = {calls[number] for calls in everybody if number in calls}
    made = {mine[n]: mine[n].entry.thread for n in sorted(mine, reverse=True) if n >= number}
    threads = [thread for call, thread in made.items() if call in raced]
    return len(set(threads)) == len(threads)


def _begin(entry: Collective) -> Frame | None:
    """Where the code of a thread begins that runs nothing of the user's: behind what starts threads."""
    return next((frame for frame in reversed(entry.frames) if not fr.normal(frame.file).endswith(_STARTERS)), None)


def _by_thread(calls: Mapping[int, _ThreadCall]) -> frozenset[tuple[ThreadKey, tuple[Identity, ...]]]:
    """Each thread's own calls, in order."""
    by_thread = sides_of({number: calls[number].thread for number in sorted(calls)})
    return frozenset((thread, tuple(calls[n].call for n in numbers)) for thread, numbers in by_thread.items())


def _made(alignment: Alignment, rank: int, group: str) -> dict[int, _ThreadCall]:
    """The newest calls of a rank by number; empty where one of them is not known."""
    window = alignment.window(rank, group)
    found = {}
    for number in list(window.numbers if window is not None else ())[-_MOST:]:
        entry = alignment.entry(rank, group, number)
        call = identity_of(entry, alignment.stack(rank, entry)) if entry is not None else UNKNOWN
        if entry is None or call == UNKNOWN:
            return {}
        outer = next(reversed(alignment.stack(rank, entry).user_frames), None) or _begin(entry)
        thread: ThreadKey = (outer.file, fr.short(outer.function)) if outer is not None else entry.thread
        found[number] = _ThreadCall(thread, call, entry)
    return found
