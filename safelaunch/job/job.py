"""A started job: its processes, its end, and the signals forwarded to it. Also defines safelaunch's exit codes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from safelaunch.job import process
from safelaunch.job.controlgroup import kill_of
from safelaunch.job.guardian import Guardian
from safelaunch.job.paths import RunPaths
from safelaunch.job.plan import Plan
from safelaunch.job.process import FORWARDED, SI_KERNEL, ProcessId

EXIT_HUNG = 124
EXIT_GAVE_UP = 125
GRACE_S = 5.0
RANK_GRACE_S = 1.0
NOW_GRACE_S = 2.0  # after a second Ctrl-C
TWICE_S = 0.3  # two SIGINTs within this time are one: `timeout` signals the process and its group
HOLD_S = 2.0  # longest delay of Ctrl-C for evidence


@dataclass(frozen=True, slots=True)
class Job:
    """A started job. Its first process is usually torchrun's agent; ``run`` is None if the job isn't watched."""

    plan: Plan
    agent: ProcessId
    run: RunPaths | None
    started_unix_s: float


class JobProcesses:
    def __init__(self, agent: ProcessId, guardian: Guardian | None) -> None:
        self.agent = agent
        self._guardian = guardian
        self._orphans: set[ProcessId] = set()

    def ended(self) -> int | None:
        """Returns the agent's wait status, or None while it runs. Also replaces a dead guardian."""
        return process.reap(self.agent.pid) if self._guardian is None else self._guardian.ended()

    def look_for_orphans(self) -> None:
        """If the job's first guardian is dead, adopts new orphans of the job and reports them to the next guardian."""
        if self._guardian is None or self._guardian.adopts_orphans:
            return
        for orphan in process.adopted([self.agent.pid, *self._not_the_jobs()]):
            if orphan not in self._orphans:
                self._orphans.add(orphan)
                self._guardian.adopt(orphan)

    def adopt_helper(self, pid: int) -> None:
        """Tells the guardian about one of safelaunch's own programs, which must also end if this process is killed."""
        helper = process.identify(pid)
        if helper is not None and self._guardian is not None:
            self._guardian.adopt(helper)

    def _not_the_jobs(self) -> list[int]:
        return [*self._guardians(), *process.helpers()]

    def _guardians(self) -> list[int]:
        return [self._guardian.pid] if self._guardian is not None and self._guardian.pid else []

    def all(self) -> tuple[ProcessId, ...]:
        """Returns all processes of the job, even those that this process adopted after a guardian's death."""
        return process.descendants([os.getpid(), *self._guardians()], exclude=self._not_the_jobs())

    def end_all(self, grace_s: float = GRACE_S) -> tuple[ProcessId, ...]:
        """Sends SIGTERM, then SIGKILL, to the whole job; returns processes that can't be killed. Takes seconds."""
        group = self._guardian.group if self._guardian is not None else None
        return process.end_all(self.agent, self.all, grace_s=grace_s, kill=kill_of(group))

    def ranks(self) -> tuple[ProcessId, ...]:
        return process.descendants([self.agent.pid])

    def end_ranks(self) -> tuple[ProcessId, ...]:
        """Ends the agent's current descendants, but not those that it starts later."""
        ranks = self.ranks()
        for rank in ranks:
            rank.send(signal.SIGTERM)
        deadline = time.monotonic() + RANK_GRACE_S
        while time.monotonic() < deadline and any(rank.is_alive() and not rank.is_stopped() for rank in ranks):
            time.sleep(0.05)
        for rank in ranks:
            rank.send(signal.SIGKILL)
        return tuple(rank for rank in ranks if rank.is_alive())


# unlike USR1 and USR2, these ask the job to end
STOPPING = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)


WAKES = frozenset(int(number) for number in (*FORWARDED, signal.SIGCHLD, signal.SIGALRM))


class Forwarder:
    r"""Waits for a signal or for a child to exit, and forwards each signal to the job once.

    Args:
        pid: The job's first process; None if the job receives signals directly.
        hold: Called at the first SIGINT. If it returns True, the signal is sent only by ``release``, after ``HOLD_S``,
            or when the next signal arrives.
        on_quit: Called for Ctrl-\ instead of ending the job.
    """

    def __init__(
        self, pid: int | None, *, hold: Callable[[], bool] | None = None, on_quit: Callable[[], None] | None = None
    ) -> None:
        self._pid = pid
        self._hold = hold
        self._on_quit = on_quit
        self._held: tuple[int, bool] | None = None
        self._held_until_s = 0.0
        self._interrupted_s = 0.0  # time of the first SIGINT
        self.stops = 0  # requests
        self.insists = False  # second Ctrl-C

    @property
    def stop_requested(self) -> bool:
        return self.stops > 0

    def note_stop(self) -> None:
        self.stops = max(self.stops, 1)

    @property
    def holding(self) -> bool:
        return self._held is not None

    def wait(self, timeout_s: float) -> None:
        """Waits until ``timeout_s`` seconds pass, a child exits, or a signal is forwarded."""
        # CPython 3.11 returns an uninitialised siginfo if sigtimedwait times out and is interrupted (Ctrl-Z, then fg):
        # the job would get a signal that no process sent.
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        info = signal.sigwaitinfo(WAKES)
        if info.si_signo in FORWARDED:
            self.take(info.si_signo, by_terminal=info.si_code == SI_KERNEL)
        if self._held is not None and time.monotonic() >= self._held_until_s:
            self.release()

    def take(self, signum: int, *, by_terminal: bool) -> None:
        """Handles a signal. ``by_terminal`` is True if a key such as Ctrl-C sent it."""
        if signum == signal.SIGQUIT and by_terminal and self._on_quit is not None and not self.stops:
            self._on_quit()
            return
        if signum in STOPPING:
            self.stops += 1
            self._note_interrupt(signum, time.monotonic())
            if self._held is not None:
                same = self._held[0] == signum
                self.release()
                if same:
                    return
            elif signum == signal.SIGINT and self.stops == 1 and self._hold is not None and self._hold():
                self._held, self._held_until_s = (signum, by_terminal), time.monotonic() + HOLD_S
                return
        self._send(signum, by_terminal)

    def _note_interrupt(self, signum: int, now: float) -> None:
        if signum == signal.SIGINT:
            self.insists = self.insists or (self._interrupted_s > 0 and now - self._interrupted_s > TWICE_S)
            self._interrupted_s = self._interrupted_s if self._interrupted_s > 0 else now

    def release(self) -> None:
        if self._held is not None:
            held_signal, self._held = self._held, None
            self._send(*held_signal)

    def _send(self, signum: int, by_terminal: bool) -> None:
        if self._pid is None:
            return
        # Under torchrun, the terminal signals the whole foreground group.
        send = os.killpg if by_terminal else os.kill
        try:
            send(self._pid, signum)
        except ProcessLookupError:
            return
