"""Threads of one rank that call in the same group in no fixed order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from safelaunch.model import Collective, Frame
from safelaunch.stacks import frames as fr
from safelaunch.verdict.alignment import Alignment
from safelaunch.verdict.blame import wait_claims
from safelaunch.verdict.c10d import op_name
from safelaunch.verdict.call_history import UNKNOWN, Identity, identity_of
from safelaunch.verdict.conditions import record_claim
from safelaunch.verdict.findings import Finding, Ruling
from safelaunch.verdict.majority import sides_of
from safelaunch.verdict.phrases import capital, ranks_word
from safelaunch.verdict.suggestions import RACE
from safelaunch.verdict.waits import Case

_MOST = 256  # newest calls of a rank that are compared

_STARTERS = ("/threading.py", "/concurrent/futures/thread.py", "/multiprocessing/pool.py")

ThreadKey = tuple[str, str] | int  # file and function where its code begins, or its number


@dataclass(frozen=True)
class _ThreadCall:
    """A call of a thread, equal to the same call on other ranks."""

    thread: ThreadKey
    call: Identity
    entry: Collective = field(compare=False)


def racing_threads(case: Case) -> Ruling:
    """Two threads call in one group, and which one comes first differs from rank to rank: no rank is at fault.

    Each thread makes the same calls on all ranks; only the order among the threads differs. A backend pairs calls by
    number, so the calls of one thread meet the other's.
    """
    groups = {w.group for waiters in case.waits.classes.values() if (w := waiters.wait).group is not None}
    first_race = next((race for group in sorted(groups) if (race := _race_in(case.alignment, group)) is not None), None)
    if first_race is None:
        return ""
    group, number, calls = first_race
    places = sides_of({rank: f"{op_name(entry)}{_where(case, rank, entry)}" for rank, entry in calls.items()})
    which = f"collective #{number} of {case.group(group)}"
    parts = " and ".join(f"{call} on {ranks_word(ranks)}" for call, ranks in places.items())
    text = f"Two threads of each rank call collectives of {case.group(group)}, in no fixed order: {which} is {parts}."
    claims = [
        record_claim(ranks[0], f"{capital(ranks_word(ranks))}: {which} is {call}, and the other thread's call is next")
        for call, ranks in places.items()
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
    """Returns ``group``, the first number at which ranks called from different threads, and each rank's call there.

    None if anything else differs, or if a rank lacks a call that another has: then it is behind.
    """
    if not alignment.has_threads:
        return None
    made = {
        rank: calls
        for rank in sorted(alignment.members(group)[0])
        if (calls := _calls_by_number(alignment, rank, group))
    }
    if len(made) < 2 or not any(len({call.entry.thread for call in calls.values()}) > 1 for calls in made.values()):
        return None
    first = max(min(calls) for calls in made.values())
    late = {rank: {number: call for number, call in calls.items() if number >= first} for rank, calls in made.items()}
    if len({_by_thread(calls) for calls in late.values()}) > 1:
        return None
    numbers = sorted(set().union(*late.values()))
    diverging = next((n for n in numbers if len({calls[n] for calls in late.values() if n in calls}) > 1), None)
    if diverging is None or not all(
        _are_of_several_threads(calls, late.values(), diverging) for calls in late.values()
    ):
        return None
    return group, diverging, {rank: calls[diverging].entry for rank, calls in late.items() if diverging in calls}


def _are_of_several_threads(
    own_calls: Mapping[int, _ThreadCall], all_calls: Iterable[Mapping[int, _ThreadCall]], number: int
) -> bool:
    """Returns whether the rank made the calls that ranks made as ``number`` from as many threads.

    A single thread can't race with itself, wherever its calls begin.
    """
    raced = {calls[number] for calls in all_calls if number in calls}
    threads_of_calls = {own_calls[n]: own_calls[n].entry.thread for n in sorted(own_calls, reverse=True) if n >= number}
    threads = [thread for call, thread in threads_of_calls.items() if call in raced]
    return len(set(threads)) == len(threads)


def _begin(entry: Collective) -> Frame | None:
    return next((frame for frame in reversed(entry.frames) if not fr.normal(frame.file).endswith(_STARTERS)), None)


def _by_thread(calls: Mapping[int, _ThreadCall]) -> frozenset[tuple[ThreadKey, tuple[Identity, ...]]]:
    by_thread = sides_of({number: calls[number].thread for number in sorted(calls)})
    return frozenset((thread, tuple(calls[n].call for n in numbers)) for thread, numbers in by_thread.items())


def _calls_by_number(alignment: Alignment, rank: int, group: str) -> dict[int, _ThreadCall]:
    window = alignment.window(rank, group)
    calls_made = {}
    for number in list(window.numbers if window is not None else ())[-_MOST:]:
        entry = alignment.entry(rank, group, number)
        call = identity_of(entry, alignment.stack(rank, entry)) if entry is not None else UNKNOWN
        if entry is None or call == UNKNOWN:
            return {}
        outer = next(reversed(alignment.stack(rank, entry).user_frames), None) or _begin(entry)
        thread: ThreadKey = (outer.file, fr.short(outer.function)) if outer is not None else entry.thread
        calls_made[number] = _ThreadCall(thread, call, entry)
    return calls_made
