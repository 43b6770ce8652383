"""Prints reminders about states that no limit covers: pauses, and launchers without ranks."""

from __future__ import annotations

from collections.abc import Callable

from safelaunch.job.process import identify
from safelaunch.model import rank_words
from safelaunch.supervise.watch.progress import Watch
from safelaunch.system.console import say

IDLE_S = 120.0  # for a launcher to start ranks, or to end after them
IDLE_EVERY_S = 5.0


class Reminder:
    """Decides when a line about a state is due: after some time, and then whenever that time has doubled."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._times = 1

    def is_due(self, since_s: float | None, first_s: float, now: float) -> bool:
        """Returns whether a line is due now.

        ``since_s`` is the start of the state, or None if the job isn't in that state.
        """
        if since_s is None or since_s != self._since_s:
            self._since_s, self._times = since_s, 1
        if since_s is None or now - since_s < first_s * self._times:
            return False
        self._times *= 2
        return True

    @property
    def is_first(self) -> bool:
        return self._times == 2


class Reminders:
    """Prints the reminders.

    Args:
        launcher: Pid of torchrun's agent.
        dump: Function that writes a bundle of the running job.
    """

    def __init__(self, watch: Watch, now: float, launcher: int | None, dump: Callable[[], object]) -> None:
        self._watch = watch
        self._dump = dump
        self._launcher = launcher
        self._pause, self._idle = Reminder(), Reminder()
        self._idle_since_s: float | None = now
        self._look_s = now

    def tick(self, now: float) -> None:
        self._on_pause(now)
        if self._launcher is not None and now >= self._look_s:
            self._look_s = now + IDLE_EVERY_S
            self._on_idle_launcher(self._launcher, now)

    def _on_pause(self, now: float) -> None:
        paused = self._watch.paused
        since_s = min(paused.values(), default=None)
        if not self._pause.is_due(since_s, self._watch.policy.max_stall_s, now) or since_s is None:
            return
        has = "has" if len(paused) == 1 else "have"
        text = f"{rank_words(paused)} {has} paused the watch for {now - since_s:.0f} s (safelaunch.pause()): until that"
        say(f"{text} ends, safelaunch detects no hang in this job")
        if self._pause.is_first:
            self._dump()

    def _on_idle_launcher(self, launcher: int, now: float) -> None:
        if self._has_ranks():
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now
        if not self._idle.is_due(self._idle_since_s, IDLE_S, now) or self._idle_since_s is None:
            return
        lasts = f"for {now - self._idle_since_s:.0f} s"
        began = bool(self._watch.roster.workers or self._watch.last_progress)
        what = "all ranks of this node have ended, but torchrun has neither ended nor started new ones"
        what = f"{what} {lasts}" if began else f"torchrun has not started a rank {lasts}"
        say(f"{what}: it waits for other nodes, or hangs itself ('py-spy dump --pid {launcher}' shows where)")

    def _has_ranks(self) -> bool:
        roster = self._watch.roster
        pids = {worker.pid for worker in roster.workers.values()} | {page.pid for page in roster.pages().values()}
        return any((process := identify(pid)) is not None and process.is_alive() for pid in pids)
