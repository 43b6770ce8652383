"""Determines, in a thread, what silent ranks are doing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from safelaunch.capture.look import Look, RankLook, Target
from safelaunch.supervise.looks import Looks, look_at, main_thread
from safelaunch.system.task import BackgroundTask

AGAIN_S = 30.0


@dataclass(frozen=True)
class _Observation:
    words: str
    at_s: float
    mark_s: float


class SilentRanks:
    def __init__(self, look: Callable[[Sequence[Target]], Looks] = lambda targets: look_at(targets, None)) -> None:
        self._look = look
        self._seen: dict[int, _Observation] = {}
        self._looking: tuple[BackgroundTask[Looks], Mapping[int, float]] | None = None

    @property
    def busy(self) -> bool:
        self._take()
        return self._looking is not None

    def ask(self, silent: Mapping[int, float], targets: Sequence[Target], now: float) -> None:
        """Looks at ranks that have become silent. ``silent`` has the time of each rank's newest progress."""
        if self.busy:
            return
        new = {
            rank: mark_s
            for rank, mark_s in silent.items()
            if not self.words(rank, mark_s) or now - self._seen[rank].at_s > AGAIN_S
        }
        wanted = [target for target in targets if target.rank in new]
        if wanted:
            self._looking = (BackgroundTask("silent ranks", lambda: self._look(wanted)), new)

    def words(self, rank: int, mark_s: float) -> str:
        """Returns the rank's activity; empty if unknown, or if the rank has made progress since."""
        self._take()
        sight = self._seen.get(rank)
        return sight.words if sight is not None and sight.mark_s == mark_s else ""

    def _take(self) -> None:
        if self._looking is None or not self._looking[0].done:
            return
        (task, marks), self._looking = self._looking, None
        try:
            look = task.result().taken[-1]
        except Exception:  # noqa: BLE001 - the watch continues without these words
            look = Look(0.0, 0.0)
        at_s = time.monotonic()
        self._seen.update(
            {rank: _Observation(activity_of(look.ranks.get(rank)), at_s, mark) for rank, mark in marks.items()}
        )


_BLOCKED = {"T": "is stopped", "t": "is stopped by a tracer", "D": "is blocked in the kernel (state D)"}


def activity_of(look: RankLook | None) -> str:
    """Describes what a rank is doing (``waits in all_reduce at train.py:18``), or what keeps it from running."""
    from safelaunch.stacks.calls import torch_wait
    from safelaunch.stacks.frames import Stack, at, place, python_frames

    main = look.main if look is not None else None
    if main is None or main.state is None:
        return "not seen"
    kernel = main.state.main_thread
    thread = main_thread(main)
    stack = Stack(python_frames(thread)) if thread is not None else Stack(())
    blocked = _BLOCKED.get(kernel.state, "") if kernel is not None else ""
    if blocked:
        return f"{blocked}{at(stack.user_frame)}"
    if thread is None:
        return f"no stack: {main.stack.missing}"
    wait = torch_wait(stack)
    return f"waits in {wait.op}{at(stack.user_frame)}" if wait is not None else place(stack.user_frame)
