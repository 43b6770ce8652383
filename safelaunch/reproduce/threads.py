"""Which calls of a rank were made by threads beside the one that trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from safelaunch.diagnose.rank_state import RankFacts
from safelaunch.model import Collective, StackSample, Thread
from safelaunch.reading.frames import python_frames, stack_of


@dataclass(frozen=True)
class SideThread:
    """``stands``: the rank's condition is this thread's."""

    ident: int
    name: str
    stands: bool = False


def threads_of(one: RankFacts, made: Sequence[Collective]) -> list[SideThread]:
    """The threads beside the main one that have made some of these calls, or in which the rank stands; some of them may
    have ended since.

    Where all calls are one thread's, it counts as the main one. A backward pass on a device calls from a thread of its
    own that runs nothing of the user's: that one belongs to the main one.
    """
    sample = _sample_of(one)
    if sample is None or sample.main_thread is None or not sample.main_thread.ident:
        return []
    main = sample.main_thread
    names = {thread.ident: thread.name for thread in sample.threads if thread is not main and thread.ident}
    standing = next((each.ident for each in sample.threads if each is not main and _stands_in(one, main, each)), None)
    callers = {entry.thread for entry in made if entry.thread}
    found = {entry.thread for entry in made if entry.thread and stack_of(one.evidence, entry.frames).user_frame}
    found -= {main.ident}
    if main.ident not in callers and len(found) == 1 and standing is None:
        return []
    found |= {standing} if standing is not None else set()
    return [SideThread(ident, names.get(ident, ""), ident == standing) for ident in sorted(found)]


def _sample_of(one: RankFacts) -> StackSample | None:
    stacks = one.evidence.main.stacks if one.evidence.main is not None else ()
    plain = [sample for sample in stacks if not sample.native]
    return plain[-1] if plain else None


def _stands_in(one: RankFacts, main: Thread, thread: Thread) -> bool:
    if one.condition is None or one.condition.frame is None or one.condition.cause == "uneven-batches":
        return False
    frames = [stack_of(one.evidence, python_frames(each)).user_frame for each in (main, thread)]
    return frames[1] == one.condition.frame != frames[0]
