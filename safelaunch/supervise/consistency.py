"""``--check-every``: reads what the beacons computed, compares it, and says what is wrong."""

from __future__ import annotations

import time
from contextlib import suppress

import msgspec

from safelaunch.beacon import layout
from safelaunch.launch.paths import RunPaths
from safelaunch.model import Inconsistency
from safelaunch.roster.checks import Series
from safelaunch.supervise.watch import Watch
from safelaunch.system.console import say
from safelaunch.watch.consistency import Comparison


class Consistency:
    """The comparison of one run. Call ``advance`` on every tick; it never raises."""

    def __init__(self, run: RunPaths, watch: Watch) -> None:
        self._run = run
        self._watch = watch
        self._attempt = watch.attempt
        self._comparison = Comparison()
        self._series: dict[str, Series] = {}
        self._ignored: set[str] = set()
        self._failed = False

    def advance(self, *, last: bool = False) -> list[Inconsistency]:
        """Returns what is new, and has said it. ``last``: the job has ended."""
        if self._failed:
            return []
        try:
            return self._advance(last=last)
        except Exception as error:  # noqa: BLE001 - the watch goes on without these checks
            self._failed = True
            say(f"an internal error ended the consistency checks ({type(error).__name__}: {error}); still watching")
            return []

    def _advance(self, *, last: bool) -> list[Inconsistency]:
        if self._watch.attempt != self._attempt:
            self._attempt, self._comparison = self._watch.attempt, Comparison()
            self._series.clear()
        self._find()
        for series in self._series.values():
            self._comparison.add(series.read())
        found = self._comparison.found(self._watch.seen, round(time.time(), 3), last=last)
        for one in found:
            say(f"wrong result: {one.words}")
        self._watch.inconsistent += tuple(found)
        if found:
            self._keep()
        if last and not self._watch.inconsistent:
            say(f"nothing inconsistent: {self._comparison.told}")
        return found

    def _keep(self) -> None:
        """Leaves it in the run directory. A full disk costs only this."""
        beside = self._run.wrong.with_name(f".{self._run.wrong.name}")
        with suppress(OSError):
            beside.write_bytes(msgspec.json.encode(self._watch.inconsistent))
            beside.replace(self._run.wrong)

    def _find(self) -> None:
        """Maps the files of the ranks of this attempt."""
        for rank, page in self._watch.roster.pages().items():
            for path in self._run.pages.glob(f"{page.name}{layout.CHECK_SUFFIX}*"):
                if path.name in self._series or path.name in self._ignored:
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
