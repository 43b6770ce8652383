"""Implements ``--check-every``: reads the ranks' numbers, compares them, and reports errors.

If there are several nodes, the leader compares the checks of all nodes and publishes its findings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

import msgspec

from safelaunch.addons.consistency import layout
from safelaunch.addons.consistency.capture import SeriesCheck, SeriesReader
from safelaunch.addons.consistency.compare import Comparison
from safelaunch.addons.consistency.wire import MOST_FOUND, MOST_POSITIONS, SharedFindings, decode, encode, share_of
from safelaunch.model import WrongResult, format_ranks
from safelaunch.supervise.cluster.codec import BadMessage, parse
from safelaunch.supervise.monitors import MonitoredJob
from safelaunch.supervise.publishing import Report
from safelaunch.system.console import say
from safelaunch.system.files import replace_file

EXIT_INCONSISTENT = 123
TOPIC = "checks"
POST_EVERY_S = 0.4
MEET_S = 60.0  # wait for other nodes after the first check; then each node compares its own
KEPT = 4096  # checks of this node that wait to be sent
Part = Literal["alone", "waits", "leads", "follows"]
NOTHING_CHECKED = "the consistency checks had nothing to compare: no optimizer step was checked"


class ConsistencyMonitor:
    name = "the consistency checks"

    def __init__(self, job: MonitoredJob) -> None:
        self._job = job
        self._action = job.settings.on_inconsistent
        self._watch = job.view.watch
        self._topic = job.topic(TOPIC)
        self._attempt = self._watch.attempt
        self._comparison = Comparison()
        self._series: dict[str, SeriesReader] = {}
        self._ignored: set[str] = set()
        self._full: set[int] = set()  # ranks that train more tensors than are checked
        self._part: Part = "alone"
        self._joint: Part = "waits"  # role of this node if there are other nodes
        self._apart_since_s: float | None = None
        self._newest: list[SeriesCheck] = []
        self._post_s, self._posted = 0.0, b""
        self._last_message = b""
        self._stopped_for: str | None = None  # path of the bundle for which another node ends the job

    def tick(self) -> None:
        findings = self._advance(last=False)
        if findings and self._action == "dump":
            self._job.actions.write_bundle(self._job.actions.show, False)
        elif findings and self._action == "stop":
            self._job.actions.write_bundle(self._stop, True)
        place = self._stopped_for
        if place is not None and not self._job.actions.is_ending():
            say(f"ending the job, as requested by another node (--on-inconsistent stop); the bundle is on {place}")
            self._job.actions.end(EXIT_INCONSISTENT, None)

    def finish(self, *, succeeded: bool) -> None:
        """Compares the last checks. Writes a bundle about new findings only if the job succeeded."""
        findings = self._advance(last=True)
        if findings and self._action != "report" and succeeded:
            self._job.actions.write_last_bundle(self._stop if self._action == "stop" else self._job.actions.show)

    def _stop(self, report: Report) -> None:
        actions = self._job.actions
        actions.show(report)
        if actions.is_ending():
            return
        code = f"exit code {EXIT_INCONSISTENT}, as --on-inconsistent stop asks for"
        say(f"the job had already ended; {code}" if actions.has_ended() else "ending the job (--on-inconsistent stop)")
        if self._part == "leads":
            self._publish(stops=True, place=f"{self._job.view.context.host}: {report.published.shown}")
        actions.end(EXIT_INCONSISTENT, report)

    def _advance(self, *, last: bool) -> list[WrongResult]:
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
        if not (self._topic.has_others and self._watch.unseen):
            return "alone"
        leads = self._topic.leads
        if self._topic.is_led:
            self._apart_since_s = None
            self._joint = "leads" if leads else "follows"
        else:
            self._apart_since_s = self._apart_since_s or now
            self._joint = self._joint if now - self._apart_since_s < MEET_S else "alone"
        return self._joint

    def _submit(self, checks: Sequence[SeriesCheck], now: float) -> None:
        self._newest = [*self._newest, *checks][-KEPT:]
        if now - self._post_s < POST_EVERY_S:
            return
        self._post_s = now
        data = encode(self._newest, share_of(self._topic.nodes))
        moments = sorted({check.moment for check in self._newest})[-MOST_POSITIONS:]
        self._newest = [check for check in self._newest if check.moment in moments]
        self._topic.gather()
        if data not in (b"", self._posted):
            self._posted = data
            self._topic.submit(data)

    def _gather(self) -> list[SeriesCheck]:
        checks: list[SeriesCheck] = []
        for data in self._topic.gathered():
            with suppress(BadMessage):  # from an unrelated process or another version
                checks += decode(data)
        return checks

    def _publish(self, *, stops: bool = False, place: str = "") -> None:
        shared = SharedFindings(tuple(self._watch.wrong_results)[:MOST_FOUND], stops, place[:4096])
        self._topic.publish(msgspec.msgpack.encode(shared))

    def _compare(self, *, last: bool) -> list[WrongResult]:
        if self._part == "follows":
            self._follow()
            if last and not self._watch.wrong_results:
                say("nothing inconsistent, according to the leader's comparison")
            return []
        if self._part == "waits" and not last:
            return []
        here = self._watch.own_ranks
        if self._part == "leads":
            self._comparison.add(self._gather())
            here = tuple(range(self._watch.world_size))
        findings = self._comparison.new_findings(here, round(time.time(), 3), last=last)
        self._note(findings)
        if findings and self._part == "leads":
            self._publish()
        if last and not self._watch.wrong_results:
            say(report + self._more if (report := self._comparison.report) else NOTHING_CHECKED)
        return findings

    @property
    def _more(self) -> str:
        noun = "rank" if len(self._full) == 1 else "ranks"
        return f"; NOT checked: later modules of {noun} {format_ranks(self._full)}" if self._full else ""

    def _follow(self) -> None:
        data = self._topic.published
        if data in (b"", self._last_message):
            return
        self._last_message = data
        with suppress(BadMessage):
            shared = parse(data, SharedFindings)
            self._note([finding for finding in shared.found if finding not in self._watch.wrong_results])
            self._stopped_for = shared.place if shared.stops else None

    def _note(self, findings: list[WrongResult]) -> None:
        for finding in findings:
            say(f"wrong result: {finding.words}")
        self._watch.wrong_results += tuple(findings)
        if findings:
            self._keep()

    def _keep(self) -> None:
        with suppress(OSError):
            replace_file(self._job.run.wrong, msgspec.json.encode(self._watch.wrong_results))

    def _find(self) -> None:
        for rank, page in self._watch.roster.pages().items():
            for path in self._job.run.pages.glob(f"{page.name}{layout.CHECK_SUFFIX}*"):
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
                    self._series[path.name] = SeriesReader(path, rank)
                except BlockingIOError:
                    continue
                except (OSError, ValueError, msgspec.DecodeError):
                    self._ignored.add(path.name)
