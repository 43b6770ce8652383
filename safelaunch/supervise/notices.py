"""Prints one-time notices about how well safelaunch can watch a job."""

from __future__ import annotations

from collections.abc import Callable

from safelaunch.capture.without_beacon import why_without_beacon
from safelaunch.model import rank_words
from safelaunch.supervise.council import Council
from safelaunch.supervise.watch.progress import Watch
from safelaunch.supervise.watch.stall import Policy
from safelaunch.system.console import say

BEACON_PATIENCE_S = 20.0
BEACON_AGAIN_S = 5.0
STEP_PATIENCE_S = 600.0
RANK_PATIENCE_S = 60.0
MEETING_PATIENCE_S = 8.0


class Notices:
    def __init__(
        self,
        watch: Watch,
        policy: Policy,
        now: float,
        council: Council,
        *,
        by_torchrun: bool = True,
        why: Callable[[int], str] = why_without_beacon,
    ) -> None:
        """Sets the limits for the notices.

        Args:
            by_torchrun: False under ``exec``, because no agent announces ranks.
            why: Function that returns why a worker (pid) has no beacon; empty while it might still get one.
        """
        self._watch = watch
        self._why = why
        self._council = council
        self._startup_timeout_s = policy.startup_s
        self._beacons_due_s = now + BEACON_PATIENCE_S
        self._unreached: set[int] = set()
        self._is_said_blind = False
        self._ranks_due_s = None if by_torchrun else now + min(RANK_PATIENCE_S, policy.startup_s / 2)
        without_steps_s = now + min(STEP_PATIENCE_S, policy.startup_s / 2)
        self._steps_due_s = None if policy.has_one_limit else without_steps_s
        self._claimed_by_s = now + BEACON_PATIENCE_S  # without an agent
        self._reported: tuple[tuple[int, ...], bool] = ((), False)  # unseen ranks; do other nodes see them?
        self._unseen_s: float | None = None

    def tick(self, now: float) -> None:
        if now >= self._beacons_due_s and self._watch.roster.workers:
            self._beacons_due_s = now + BEACON_AGAIN_S
            self._say_without_beacon()
        self._retract()
        self._report_other_nodes(now)
        if self._ranks_due_s is not None and now >= self._ranks_due_s:
            self._ranks_due_s = None
            if not (self._watch.roster.workers or self._watch.last_progress):
                self._is_said_blind = True
                say(
                    "no rank detected (no rank variables, torch import or step marks): safelaunch CANNOT WATCH this "
                    "command until one appears. The command continues. To have it watched, call safelaunch.step() "
                    "in its training loop; if it starts its ranks in a container or on a different host, run "
                    "safelaunch there; if it runs Python with -I or -E, remove those options."
                )
        if self._steps_due_s is not None and now >= self._steps_due_s and self._watch.last_progress:
            self._steps_due_s = None
            self._say_without_steps()

    def _report_other_nodes(self, now: float) -> None:
        all_there = self._watch.roster.workers or now >= self._claimed_by_s
        unseen = self._watch.unseen if all_there and self._watch.last_progress else ()
        if not unseen:
            return
        self._unseen_s = self._unseen_s or now
        covered = self._council.is_covered
        reported, was_covered = self._reported
        if unseen == reported and (was_covered or not covered):
            return
        if not covered and now - self._unseen_s < MEETING_PATIENCE_S:
            return
        self._reported = (unseen, covered)
        world = self._watch.world_size
        here = f"watching {rank_words(set(range(world)) - set(unseen))} of {world}"
        if covered:
            say(f"{here}, together with {self._council.others}: one verdict for all")
            return
        why = f" ({self._council.why_alone})"
        say(
            f"{here}; the others are on other nodes, whose supervisors this one can't reach{why}. safelaunch ends the "
            "job from here only at a --max-stall that you set."
        )

    def _say_without_beacon(self) -> None:
        """Prints which ranks can't be watched, once their processes show the reason.

        A slow start isn't reported.
        """
        reasons = {worker: self._why(worker.pid) for worker in self._watch.without_beacon()}
        silent = {worker.rank: f"{worker.rank} (pid {worker.pid}, {why})" for worker, why in reasons.items() if why}
        if silent.keys() <= self._unreached:
            return
        self._unreached |= silent.keys()
        whose = "its steps are" if len(silent) == 1 else "their steps are"
        say(f"no beacon in rank {', '.join(silent.values())}: {whose} not counted")
        if len(silent) < len(self._watch.roster.workers):
            say(f"safelaunch still collects {'its' if len(silent) == 1 else 'their'} stacks when the job hangs")
        elif self._watch.unseen and self._council.is_covered:
            say("no rank of this node has a beacon: safelaunch looks at them when another node suspects the job")
        else:
            self._is_said_blind = True
            say("no rank has a beacon: safelaunch CANNOT WATCH this job; it continues as under plain torchrun")

    def _retract(self) -> None:
        """Corrects a notice about ranks that have a beacon after all, for example after a restart."""
        if not (self._unreached or self._is_said_blind) or not self._watch.last_progress:
            return
        appeared = self._unreached & self._watch.last_progress.keys()
        self._unreached -= appeared
        if self._is_said_blind:
            self._is_said_blind = False
            say(f"a beacon has appeared in {rank_words(self._watch.last_progress)}: safelaunch watches this job")
        elif appeared:
            say(f"a beacon has appeared in {rank_words(appeared)}: safelaunch watches it")

    def _say_without_steps(self) -> None:
        progress = self._watch.last_progress.values()
        if any(p.step is not None or p.paused or p.phase for p in progress):
            return
        pages = self._watch.roster.pages().values()
        signals = ["collectives"] if any(page.server_up for page in pages) else []
        signals += ["CPU", "I/O and stacks"]
        limit = self._watch.threshold_without_steps()
        where = "--startup-timeout" if limit.seconds == self._startup_timeout_s else limit.why
        say(
            f"no step seen so far: watching {', '.join(signals)} instead. safelaunch ends the job only if nothing "
            f"advances for {limit.seconds:.0f} s ({where}). Call safelaunch.step() in the training loop to track "
            "steps."
        )
