"""``--check-every``: reads what the beacons computed, compares it, and says what is wrong.

On several nodes the one that leads compares the checks of all, and tells the others what it has found.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

import msgspec

from safelaunch.addons.consistency.capture import Check, Series
from safelaunch.addons.consistency.compare import (
    MOST_FOUND,
    MOST_POSITIONS,
    Comparison,
    Found,
    decode,
    encode,
    share_of,
)
from safelaunch.beacon import layout
from safelaunch.job.paths import RunPaths
from safelaunch.model import Inconsistency, format_ranks
from safelaunch.supervise.cluster.messages import NOTHING, BadMessage, node_count, parsed
from safelaunch.supervise.council import Council
from safelaunch.supervise.watch.progress import Watch
from safelaunch.system.console import say
from safelaunch.system.errors import internal_error
from safelaunch.system.files import replace_file

POST_EVERY_S = 0.4
MEET_S = 60.0  # for the nodes to meet, from the first check on; then each compares its own
KEPT = 4096  # checks of this node that wait to be submitted
Part = Literal["alone", "waits", "leads", "follows"]
NOTHING_CHECKED = "the consistency checks had nothing to compare: no optimizer step was checked"


class Consistency:
    """The comparison of one run. Call ``advance`` on every tick; it never raises.

    ``stopped_for``: where the bundle is, once another node, which has compared the checks of all, ends the job.
    """

    def __init__(self, run: RunPaths, watch: Watch, council: Council) -> None:
        self._run = run
        self._watch = watch
        self._council = council
        self._channel = council.channel
        self._attempt = watch.attempt
        self._comparison = Comparison()
        self._series: dict[str, Series] = {}
        self._ignored: set[str] = set()
        self._full: set[int] = set()  # the ranks that train more than is checked
        self._failed = False
        self._part: Part = "alone"
        self._joint: Part = "waits"  # the same, where there are other nodes
        self._apart_since_s: float | None = None
        self._newest: list[Check] = []
        self._post_s, self._edition, self._posted = 0.0, 0, b""
        self._read: dict[int, str] = {}  # by slot, which of its checks were read last
        self._told = b""
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
            self._tell(stops=True, place=place)

    def _advance(self, *, last: bool) -> list[Inconsistency]:
        if self._watch.attempt != self._attempt:
            self._attempt, self._comparison = self._watch.attempt, Comparison()
            self._series.clear()
        self._find()
        checks = [check for series in self._series.values() for check in series.read()]
        self._comparison.add(checks)
        if self._series and not last:
            now = time.monotonic()
            self._part = self._part_now(now)
            if self._part != "alone":
                self._submit(checks, now)
        return self._compare(last=last)

    def _part_now(self, now: float) -> Part:
        """What this node does about the checks of all."""
        if not (self._channel.is_started and self._watch.unseen):
            return "alone"
        leads, page = self._channel.seen.leads, self._council.rounds.page
        if self._council.is_covered and (leads or (page is not None and page.compares)):
            self._apart_since_s = None
            self._joint = "leads" if leads else "follows"
        else:
            self._apart_since_s = self._apart_since_s or now
            self._joint = self._joint if now - self._apart_since_s < MEET_S else "alone"
        return self._joint

    def _submit(self, checks: Sequence[Check], now: float) -> None:
        self._newest = [*self._newest, *checks][-KEPT:]
        if now - self._post_s < POST_EVERY_S:
            return
        self._post_s = now
        data = encode(self._newest, share_of(node_count(self._council.rounds.page)))
        moments = sorted({one.moment for one in self._newest})[-MOST_POSITIONS:]
        self._newest = [one for one in self._newest if one.moment in moments]
        self._channel.gather("checks")
        if data not in (b"", self._posted):
            self._posted, self._edition = data, self._edition + 1
            self._channel.submit(f"checks.{self._edition}", [data])

    def _gathered(self) -> list[Check]:
        """What other nodes have submitted since the last call."""
        found: list[Check] = []
        gathered = self._channel.seen.gathered.get("checks", NOTHING)
        for slot, round_ in gathered.rounds.items():
            if self._read.get(slot) != round_:
                self._read[slot] = round_
                with suppress(BadMessage):  # a stranger's, or of another version
                    found += decode(b"".join(gathered.chunks[slot]))
        return found

    def _tell(self, *, stops: bool = False, place: str = "") -> None:
        """Tells all nodes what has been found in the checks of all."""
        found = Found(tuple(self._watch.inconsistent)[:MOST_FOUND], stops, place[:4096])
        self._channel.tell_wrong(msgspec.msgpack.encode(found))

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
            self._comparison.add(self._gathered())
            here = tuple(range(self._watch.world_size))
        found = self._comparison.found(here, round(time.time(), 3), last=last)
        self._note(found)
        if found and self._part == "leads":
            self._tell()
        if last and not self._watch.inconsistent:
            say(told + self._more if (told := self._comparison.told) else NOTHING_CHECKED)
        return found

    @property
    def _more(self) -> str:
        noun = "rank" if len(self._full) == 1 else "ranks"
        return f"; NOT checked: later modules of {noun} {format_ranks(self._full)}" if self._full else ""

    def _follow(self) -> None:
        """Takes what the node that leads has found, where that is new."""
        data = self._channel.seen.wrong
        if data in (b"", self._told):
            return
        self._told = data
        with suppress(BadMessage):
            told = parsed(data, Found)
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
