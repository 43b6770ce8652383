"""What a person is told once about how well a job can be watched."""

from __future__ import annotations

from safelaunch.console import say
from safelaunch.watch.watch import Watch

BEACON_PATIENCE_S = 20.0
STEP_PATIENCE_S = 600.0
RANK_PATIENCE_S = 60.0


class Notices:
    """``tick`` is called with every tick of the watch; each notice comes once.

    ``by_torchrun`` False: nobody says what is a rank (``exec``), so it may be that none ever shows.
    """

    def __init__(self, watch: Watch, startup_timeout_s: float, now: float, *, by_torchrun: bool = True) -> None:
        self._watch = watch
        self._startup_timeout_s = startup_timeout_s
        self._beacons_due_s: float | None = now + BEACON_PATIENCE_S
        self._ranks_due_s = None if by_torchrun else now + min(RANK_PATIENCE_S, startup_timeout_s / 2)
        self._steps_due_s: float | None = now + min(STEP_PATIENCE_S, startup_timeout_s / 2)

    def tick(self, now: float) -> None:
        """Says what is due at ``now`` (CLOCK_MONOTONIC, seconds)."""
        if self._beacons_due_s is not None and now >= self._beacons_due_s and self._watch.roster.workers:
            self._beacons_due_s = None
            self._say_without_beacon()
        if self._ranks_due_s is not None and now >= self._ranks_due_s:
            self._ranks_due_s = None
            if not (self._watch.roster.workers or self._watch.last_progress):
                say(
                    "no rank seen so far: nothing here has the variables of one, imports torch or marks a step. Until "
                    "then safelaunch CANNOT WATCH this command; it runs on (safelaunch.step() in its loop is enough)"
                )
        if self._steps_due_s is not None and now >= self._steps_due_s and self._watch.last_progress:
            self._steps_due_s = None
            self._say_without_steps()

    def _say_without_beacon(self) -> None:
        silent = self._watch.without_beacon()
        if not silent:
            return
        ranks = ", ".join(f"{worker.rank} (pid {worker.pid})" for worker in silent)
        say(f"no beacon in rank {ranks}: its steps are not counted (python -I or -E, or PYTHONPATH was replaced)")
        if len(silent) == len(self._watch.roster.workers):
            say("no rank has one: safelaunch CANNOT WATCH this job; it runs on as under torchrun")
        else:
            say("its stacks are still collected when the job hangs")

    def _say_without_steps(self) -> None:
        """Not said where it need not be: a job that steps, pauses or names its phases is watched by that."""
        progress = self._watch.last_progress.values()
        if any(p.step is not None or p.paused or p.phase for p in progress):
            return
        pages = self._watch.roster.pages().values()
        signals = ["collectives"] if any(page.server_up for page in pages) else []
        signals += ["CPU", "I/O and stacks"]
        limit = self._watch.threshold_without_steps()
        where = "--startup-timeout" if limit.seconds == self._startup_timeout_s else limit.why
        say(
            f"no step seen so far: watched by {', '.join(signals)}; it is ended only if nothing at all moves for "
            f"{limit.seconds:.0f} s ({where}). safelaunch.step() in its loop tells more."
        )
