"""Looking at all ranks of a job, again and again, while it lives."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from safelaunch.capture.flight_recorder import newest_entry
from safelaunch.capture.look import Look, RankLook, Target, take
from safelaunch.capture.node import environment_of
from safelaunch.capture.parallel import gather
from safelaunch.capture.result import Result

LOOK_DEADLINE_S = 6.0
NATIVE_DEADLINE_S = 8.0  # a build for CUDA has a few times the symbols
ENTRIES_DEADLINE_S = 1.5
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True)
class Looks:
    """The ranks that were looked at, and each look at them, oldest first.

    ``entries``: with each look, the newest entry of each rank's Flight Recorder. ``env``: the first rank's environment.
    """

    targets: tuple[Target, ...]
    taken: tuple[Look, ...] = ()
    entries: tuple[Mapping[int, int], ...] = ()
    env: Result[dict[str, str]] | None = None

    def plus(self, look: Look, entries: Mapping[int, int]) -> Looks:
        return replace(self, taken=(*self.taken, look)[-4:], entries=(*self.entries, entries)[-4:])

    @property
    def collectives_moved(self) -> bool:
        """Whether some rank has entered a collective between the last two looks.

        One that had none on record before, or could not say so in time, counts: it is looked at again soon.
        """
        if len(self.entries) < 2:
            return False
        before, after = self.entries[-2:]
        return any(number > before.get(rank, -1) for rank, number in after.items())


def look_at(targets: Sequence[Target], looks: Looks | None, *, collectives: bool = False) -> Looks:
    """One more look at the ranks; the first with ``looks`` None.

    ``collectives``: also how far each rank's Flight Recorder is. Not in a crash, where all ranks hold still for us.
    """
    earlier = looks.taken[-1] if looks is not None and looks.taken else None
    if looks is None:  # its environment now, while it lives
        looks = Looks(tuple(targets), env=environment_of(targets[0].pid) if targets else None)
    with _one_at_a_time:  # two py-spies on one process: the second is refused
        look = take(targets, deadline_s=LOOK_DEADLINE_S, earlier=earlier)
    return looks.plus(look, newest_entries(looks.targets) if collectives else {})


def newest_entries(targets: Sequence[Target]) -> dict[int, int]:
    """rank → the newest entry of its Flight Recorder; without those that do not say so in time."""
    asked = [target for target in targets if target.socket is not None]
    calls = [partial(newest_entry, str(target.socket)) for target in asked]
    answers = gather(calls, deadline_s=ENTRIES_DEADLINE_S)
    return {target.rank: number for target, number in zip(asked, answers, strict=True) if number is not None}


def native_where_it_tells(looks: Looks) -> Looks:
    """One native look at the ranks that rest in a futex called from a line that is not c10d's.

    ``with lock:`` and ``work.wait()`` look alike from Python, and the C frames tell them apart. They cost the job a
    pause and us a few hundred megabytes for each process, so they are taken only here, after a hang is confirmed.
    """
    last = looks.taken[-1] if looks.taken else None
    if last is None:
        return looks
    unclear = [target for target in looks.targets if _is_unclear(last.ranks.get(target.rank))]
    if not unclear:
        return looks
    native = take(unclear, deadline_s=NATIVE_DEADLINE_S, earlier=last, native=True)
    return replace(looks, taken=(*looks.taken, native))


def _is_unclear(look: RankLook | None) -> bool:
    from safelaunch.diagnose.calls import torch_wait

    main = look.main if look is not None else None
    if main is None or main.state is None or main.stack.value is None:
        return False
    kernel, thread = main.state.main_thread, main.stack.value.main_thread
    rests = kernel is not None and kernel.state == "S" and kernel.syscall_name in ("futex", "")
    return rests and thread is not None and torch_wait(thread.frames) is None
