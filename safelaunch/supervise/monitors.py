"""Runs monitors: add-ons that watch for something other than a stall.

Monitors can print lines, request a bundle, end the job, and exchange values with monitors on other nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from safelaunch import addons
from safelaunch.job.job import Job
from safelaunch.job.paths import RunPaths
from safelaunch.settings.options import Settings
from safelaunch.supervise.cluster.exchange import NO_SUBMISSIONS
from safelaunch.supervise.cluster.messages import node_count
from safelaunch.supervise.council import Council
from safelaunch.supervise.publishing import Report
from safelaunch.supervise.respond import JobView
from safelaunch.system.console import say
from safelaunch.system.errors import internal_error

if TYPE_CHECKING:
    from safelaunch.addons.protocols import Monitor, Service
    from safelaunch.supervise.control.protocol import ServiceAnswer


@dataclass(frozen=True, slots=True)
class MonitorActions:
    write_bundle: Callable[[Callable[[Report], None], bool], None]
    """Writes a bundle and passes its report to the function. The flag says whether that ends the job."""
    write_last_bundle: Callable[[Callable[[Report], None]], None]
    show: Callable[[Report], None]
    end: Callable[[int, Report | None], None]
    """Ends the job with this exit code; without a report, another node decided it."""
    is_ending: Callable[[], bool]
    has_ended: Callable[[], bool]
    ask_nodes: Callable[[Service[Any, Any], Any, Callable[[ServiceAnswer[Any]], None]], None]
    """Asks a service for the answer of all nodes, and passes it to the function on a later tick."""


@dataclass(frozen=True, slots=True)
class MonitoredJob:
    settings: Settings
    run: RunPaths
    view: JobView
    actions: MonitorActions

    def topic(self, name: str) -> Topic:
        return Topic(name, self.view.council)


class Topic:
    """Exchanges values between nodes: every node submits one value, and the leader publishes one."""

    def __init__(self, name: str, council: Council) -> None:
        self._name = name
        self._council = council
        self._channel = council.channel
        self._edition = 0
        self._read: dict[int, str] = {}  # newest edition, by slot

    @property
    def has_others(self) -> bool:
        return self._channel.is_started

    @property
    def leads(self) -> bool:
        return self._channel.view.leads

    @property
    def is_led(self) -> bool:
        """True if all supervisors take part, and the leader gathers this topic."""
        page = self._council.rounds.page
        return self._council.is_covered and (self.leads or (page is not None and self._name in page.topics))

    @property
    def nodes(self) -> int:
        return node_count(self._council.rounds.page)

    def gather(self) -> None:
        self._channel.gather(self._name)

    def submit(self, data: bytes) -> None:
        self._edition += 1
        self._channel.submit(f"{self._name}.{self._edition}", [data])

    def gathered(self) -> list[bytes]:
        values = []
        gathered = self._channel.view.submissions.get(self._name, NO_SUBMISSIONS)
        for slot, round_ in gathered.rounds.items():
            if self._read.get(slot) != round_:
                self._read[slot] = round_
                values.append(b"".join(gathered.chunks[slot]))
        return values

    def publish(self, data: bytes) -> None:
        self._channel.publish(self._name, data)

    @property
    def published(self) -> bytes:
        return self._channel.view.published.get(self._name, b"")


class Monitors:
    """All monitors of a job. A monitor that fails is dropped."""

    def __init__(self, job: Job, view: JobView, actions: MonitorActions) -> None:
        assert job.run is not None
        self._monitors = addons.monitors(MonitoredJob(job.plan.settings, job.run, view, actions))

    def tick(self) -> None:
        for monitor in tuple(self._monitors):
            self._guarded(monitor, monitor.tick)

    def finish(self, *, succeeded: bool) -> None:
        """Finishes all monitors. ``succeeded`` means that the job ended with exit code 0 and without a stop request."""
        for monitor in tuple(self._monitors):
            self._guarded(monitor, partial(monitor.finish, succeeded=succeeded))

    def _guarded(self, monitor: Monitor, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the watch continues without this monitor
            self._monitors.remove(monitor)
            say(internal_error(error, monitor.name, "Still watching."))
