"""Determines from looks alone whether a job moves, because without a beacon there are no steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from msgspec import structs

from safelaunch.capture.look import ProcessLook, RankLook
from safelaunch.stacks.frames import is_user, python_frames
from safelaunch.supervise.judge import wait_for_each_other, work_in
from safelaunch.supervise.looks import Looks, main_thread
from safelaunch.supervise.watch.work import Background, Peak

_OF_TORCH = "/torch/"
SPINS = 0.5  # share of the time on a core: a thread that polls never sleeps


def with_leads(looks: Looks, roots: tuple[str, ...]) -> Looks:
    """Marks the leading thread of ranks that run their script outside the first thread (Ray's workers).

    Args:
        roots: See ``frames.Stack``.
    """
    leads = {rank: tid for rank, rank_look in looks.taken[-1].ranks.items() if (tid := _leads(rank_look.main, roots))}

    def with_lead(rank: RankLook) -> RankLook:
        if rank.main is None or rank.rank not in leads:
            return rank
        tid, main = leads[rank.rank], rank.main
        state = structs.replace(main.state, leads=tid) if main.state is not None else None
        sample = structs.replace(main.stack.value, leads=tid) if main.stack.value is not None else None
        return replace(rank, main=replace(main, state=state, stack=replace(main.stack, value=sample)))

    taken = (
        replace(look, ranks={rank: with_lead(rank_look) for rank, rank_look in look.ranks.items()})
        for look in looks.taken
    )
    return replace(looks, taken=tuple(taken))


def _leads(look: ProcessLook | None, roots: tuple[str, ...]) -> int:
    """Returns the only thread with user code, if the first thread has neither user code nor torch code; else 0."""
    sample = look.stack.value if look is not None else None
    first = sample.main_thread if sample is not None else None
    if (
        sample is None
        or first is None
        or any(_OF_TORCH in frame.file or is_user(frame, roots) for frame in first.frames)
    ):
        return 0
    tids = [thread.os_tid for thread in sample.threads if any(is_user(frame, roots) for frame in python_frames(thread))]
    return (tids[0] or 0) if len(tids) == 1 else 0


def movement(looks: Looks) -> tuple[bool, float]:
    """Returns whether the job moves, and how many seconds a rank stood still; 0.0 if every rank moved.

    A rank stands still if its main thread was at the same place in every look and either got no core or kept one busy
    all the time. Spinning while waiting for peers or the GPU isn't work. Neither is the activity of other threads, if
    every main thread waits for its peers or sleeps.
    """
    mains = [
        [look.ranks[target.rank].main for look in looks.taken if target.rank in look.ranks] for target in looks.targets
    ]
    pairs = [[_stood(before, after) for before, after in pairwise(several)] for several in mains]
    stand = any(several and all(several) for several in pairs)
    left = any(_left(before, after) for several in mains for before, after in pairwise(several))
    all_stand = all(several and all(several) for several in pairs)
    all_seen = all(several and None not in several for several in pairs)
    spins = Peak(per_s=float("inf"))
    last = {target.rank: looks.taken[-1].ranks.get(target.rank) for target in looks.targets}
    states = {
        rank: rank_look.main.state
        for rank, rank_look in last.items()
        if rank_look and rank_look.main and rank_look.main.state
    }
    threads = {rank: state.leads or state.pid for rank, state in states.items()}
    waits = Background(
        {("cpu", target.pid, target.start_ticks, threads.get(target.rank, 0)): spins for target in looks.targets}
    )
    alone = all_stand and wait_for_each_other([rank_look for rank_look in last.values() if rank_look])
    works = looks.collectives_moved or (not alone and bool(work_in(looks, waits)))
    stood_s = looks.taken[-1].begin_s - looks.taken[0].end_s if stand else 0.0
    return left or works or (all_seen and not stand), stood_s


def _left(before: ProcessLook | None, after: ProcessLook | None) -> bool:
    threads = [main_thread(before), main_thread(after)]
    places = [python_frames(thread) for thread in threads if thread is not None and not thread.torn]
    return len(places) == len(threads) and places[0] != places[1]


def _stood(before: ProcessLook | None, after: ProcessLook | None) -> bool | None:
    if before is None or after is None or before.state is None or after.state is None:
        return None
    if after.state.state in "TtD" and before.state.state == after.state.state:
        return True
    first, last = before.state.main_thread, after.state.main_thread
    thread, later = main_thread(before), main_thread(after)
    if first is None or last is None or first.slices is None or thread is None or later is None:
        return None
    busy_ms = last.cpu_ms - first.cpu_ms + (last.queued_ms or 0) - (first.queued_ms or 0)
    spun = busy_ms > SPINS * 1000 * (after.state.at_s - before.state.at_s)
    return python_frames(thread) == python_frames(later) and (spun or first.slices == last.slices)
