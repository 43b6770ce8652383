"""``--check-every``: reads what the beacons computed, compares it, and says what is wrong."""

from __future__ import annotations

import time
from contextlib import suppress

import msgspec

from safelaunch.beacon import layout
from safelaunch.capture.checks import Series
from safelaunch.job.paths import RunPaths
from safelaunch.model import Inconsistency, format_ranks
from safelaunch.supervise.joint_checks import Part
from safelaunch.supervise.together import Together
from safelaunch.supervise.watch.consistency import Comparison
from safelaunch.supervise.watch.job import Watch
from safelaunch.system.console import say
from safelaunch.system.errors import internal_error
from safelaunch.system.files import replace_file

NOTHING_CHECKED = "the consistency checks had nothing to compare: no optimizer step was checked"


class Consistency:
    """The comparison of one run. Call ``advance`` on every tick; it never raises.

    ``stopped_for``: where the bundle is, once another node, which has compared the checks of all, ends the job.
    """

    def __init__(self, run: RunPaths, watch: Watch, together: Together) -> None:
        self._run = run
        self._watch = watch
        self._together = together
        self._attempt = watch.attempt
        self._comparison = Comparison()
        self._series: dict[str, Series] = {}
        self._ignored: set[str] = set()
        self._full: set[int] = set()  # the ranks that train more than is checked
        self._failed = False
        self._part: Part = "alone"
        self.stopped_for: str | None = None

    def advance(self, *, last: bool = False) -> list[Inconsistency]:
        """Returns what is new and this node's to act on, and has said it. ``last``: the job has ended."""
        if self._failed:
            return []
        try:
            return self._advance(last=last)
        except Exception as error:  # noqa: BLE001 - the watch goes on without these checks
            self._failed = True
            say(internal_error(error, "the consistency checks", "Still watching."))
            return []

    def stop_all(self, place: str) -> None:
        """The job is ended for what was found, on all nodes; ``place``: of the bundle."""
        if self._part == "leads":
            self._together.checks.tell(self._watch.inconsistent, stops=True, place=place)

    def _advance(self, *, last: bool) -> list[Inconsistency]:
        if self._watch.attempt != self._attempt:
            self._attempt, self._comparison = self._watch.attempt, Comparison()
            self._series.clear()
        self._find()
        checks = [check for series in self._series.values() for check in series.read()]
        self._comparison.add(checks)
        if self._series and not last:
            now = time.monotonic()
            self._part = self._together.checks.part(self._watch.unseen, self._together.is_covered, now)
            if self._part != "alone":
                self._together.checks.offer(checks, now)
        return self._compare(last=last)

    def _compare(self, *, last: bool) -> list[Inconsistency]:
        """What is new here: by this node's own comparison, or by that of the node which leads."""
        if self._part == "follows":
            self._follow()
            if last and not self._watch.inconsistent:
                say("nothing inconsistent, according to the leader's comparison")
            return []
        if self._part == "waits" and not last:
            return []
        here = self._watch.seen
        if self._part == "leads":
            self._comparison.add(self._together.checks.gathered())
            here = tuple(range(self._watch.world_size))
        found = self._comparison.found(here, round(time.time(), 3), last=last)
        self._note(found)
        if found and self._part == "leads":
            self._together.checks.tell(self._watch.inconsistent)
        if last and not self._watch.inconsistent:
            say(told + self._more if (told := self._comparison.told) else NOTHING_CHECKED)
        return found

    @property
    def _more(self) -> str:
        noun = "rank" if len(self._full) == 1 else "ranks"
        return f"; NOT checked: later modules of {noun} {format_ranks(self._full)}" if self._full else ""

    def _follow(self) -> None:
        told = self._together.checks.told()
        if told is not None:
            self._note([one for one in told.found if one not in self._watch.inconsistent])
            self.stopped_for = told.place if told.stops else None

    def _note(self, found: list[Inconsistency]) -> None:
        for one in found:
            say(f"wrong result: {one.words}")
        self._watch.inconsistent += tuple(found)
        if found:
            self._keep()

    def _keep(self) -> None:
        """Leaves it in the run directory. A full disk costs only this."""
        with suppress(OSError):
            replace_file(self._run.wrong, msgspec.json.encode(self._watch.inconsistent))

    def _find(self) -> None:
        """Maps the files of the ranks of this attempt."""
        for rank, page in self._watch.roster.pages().items():
            for path in self._run.pages.glob(f"{page.name}{layout.CHECK_SUFFIX}*"):
                if path.name in self._series or path.name in self._ignored:
                    continue
                if path.name.endswith(layout.CHECK_FULL):
                    self._ignored.add(path.name)
                    self._full.add(rank)
                    continue
                if path.name.endswith(layout.CHECK_OFF):
                    self._ignored.add(path.name)
                    say(f"the consistency checks of rank {rank} have ended after an error in them; the job continues")
                    continue
                try:
                    self._series[path.name] = Series(path, rank)
                except BlockingIOError:
                    continue  # it is being made
                except (OSError, ValueError, msgspec.DecodeError):
                    self._ignored.add(path.name)
