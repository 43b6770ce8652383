"""Which calls of a rank were made by threads beside the one that trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from safelaunch.diagnose.rank_state import RankFacts
from safelaunch.model import StackSample, Thread
from safelaunch.reading.frames import python_frames, stack_of

Made = tuple[int, str, bool]  # of a call: its thread, its group, whether it is over


@dataclass(frozen=True)
class SideThread:
    """``stands``: the rank's condition is this thread's."""

    ident: int
    name: str
    stands: bool = False


def threads_of(one: RankFacts, made: Sequence[Made]) -> list[SideThread]:
    """The threads beside the main one that have made some of these calls, or in which the rank stands.

    Where all calls are one thread's, it counts as the main one. A backward pass on a device calls from a thread of its
    own that runs nothing of the user's: that one belongs to the main one.
    """
    sample = _sample_of(one)
    callers = Counter(ident for ident, _, _ in made if ident)
    if sample is None or sample.main_thread is None or not sample.main_thread.ident:
        return _each_in_one_call(made, callers)
    main = sample.main_thread
    others = [thread for thread in sample.threads if thread is not main and thread.ident]
    standing = next((thread for thread in others if _stands_in(one, main, thread)), None)
    found = [thread for thread in others if thread.ident in callers or thread is standing]
    if main.ident not in callers and len(found) == 1 and standing is None:
        return []
    return [SideThread(thread.ident, thread.name, thread is standing) for thread in found]


def _each_in_one_call(made: Sequence[Made], callers: Counter[int]) -> list[SideThread]:
    """Of a record alone: several threads wait, each in one call. The one that has made most calls is the main one."""
    waiting = Counter(ident for ident, _, over in made if ident and not over)
    if len(waiting) < 2 or max(waiting.values()) > 1:
        return []
    main = callers.most_common(1)[0][0]
    return [SideThread(ident, "") for ident in waiting if ident != main]


def _sample_of(one: RankFacts) -> StackSample | None:
    stacks = one.evidence.main.stacks if one.evidence.main is not None else ()
    plain = [sample for sample in stacks if not sample.native]
    return plain[-1] if plain else None


def _stands_in(one: RankFacts, main: Thread, thread: Thread) -> bool:
    if one.condition is None or one.condition.frame is None or one.condition.cause == "uneven-batches":
        return False
    frames = [stack_of(one.evidence, python_frames(each)).user_frame for each in (main, thread)]
    return frames[1] == one.condition.frame != frames[0]
