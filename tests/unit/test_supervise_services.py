"""Requests for what add-ons serve: begun, shared, refused, given up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from safelaunch import addons
from safelaunch.supervise.cluster.exchange import NO_SUBMISSIONS
from safelaunch.supervise.control.protocol import Client, ControlRequest, ServiceAnswer
from safelaunch.supervise.respond import JobView
from safelaunch.supervise.services import Services
from tests.support.waiting import until


class OpenFiles:
    """A service that counts the open files of each rank, once ``go`` is set."""

    name, noun, ask, part = "files", "count", int, dict[int, int]

    def __init__(self) -> None:
        self.go = threading.Event()

    def here(self, ask: int, job: JobView, stop: threading.Event) -> dict[int, int]:
        while not (self.go.wait(0.01) or stop.is_set()):
            pass
        if ask < 0:
            raise ValueError("a secret count")
        return {0: ask}

    def check(self, part: dict[int, int]) -> None: ...

    def merged(self, ask: int, parts: Sequence[dict[int, int]], notes: Sequence[str]) -> dict[int, int]:
        return parts[0]

    def bounded(self, part: dict[int, int], fits: Callable[[dict[int, int]], bool]) -> dict[int, int]:
        return part if fits(part) else {}


class Asking:
    """A client that keeps its answer."""

    value: ServiceAnswer[Any] | None = None

    def answer(self, value: ServiceAnswer[Any]) -> None:
        self.value = value


@contextmanager
def alone(question: object) -> Iterator[Callable[[threading.Event], object]]:
    yield lambda stop: NO_SUBMISSIONS


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> OpenFiles:
    service = OpenFiles()
    monkeypatch.setattr(addons, "service", lambda name: service if name == "files" else None)
    return service


@pytest.fixture
def services() -> Services:
    redactor = SimpleNamespace(text=lambda text: text.replace("secret", "[redacted]"))
    context = SimpleNamespace(bundle_dir=Path("/bundles"), redactor=redactor)
    rounds = SimpleNamespace(asking=alone, has_pending_dump=False)
    return Services(cast("JobView", SimpleNamespace(context=context, council=SimpleNamespace(rounds=rounds))))


def ask(services: Services, count: object, command: str = "files") -> Asking:
    client = Asking()
    services.ask(ControlRequest(command, ask=msgspec.Raw(msgspec.json.encode(count))), cast("Client", client))
    return client


def test_equal_requests_share_an_answer_others_are_refused(services: Services, files: OpenFiles) -> None:
    first, same, other = ask(services, 3), ask(services, 3), ask(services, 4)
    assert other.value == ServiceAnswer(problem="another count of this run is in progress")
    services.tick()
    assert first.value is None and not services.busy
    files.go.set()
    until(lambda: services.busy, "the count")
    services.tick()
    assert first.value == same.value == ServiceAnswer({0: 3}, "/bundles")


@pytest.mark.parametrize(
    ("command", "count", "problem"),
    [
        ("files", "many", "Expected `int`, got `str`"),
        ("frames", 3, "this run has no add-on for 'frames'"),
    ],
)
def test_unservable_request_is_answered_at_once(
    command: str, count: object, problem: str, services: Services, files: OpenFiles
) -> None:
    assert ask(services, count, command).value == ServiceAnswer(problem=problem)


def test_failure_answer_contains_no_secrets(services: Services, files: OpenFiles) -> None:
    files.go.set()
    client = ask(services, -1)
    until(lambda: services.busy, "the failure")
    services.tick()
    assert client.value == ServiceAnswer(problem="ValueError: a [redacted] count")


def test_service_yields_to_dump_and_ends_with_job(services: Services, files: OpenFiles) -> None:
    client = ask(services, 3)
    services.yield_to_dump()
    until(lambda: services.busy, "the end")
    services.tick()
    assert client.value is not None
    assert client.value.problem == "a bundle of this run was requested; files again once it is written"
    client = ask(services, 3)
    services.finish()
    assert client.value == ServiceAnswer(problem="the job is being stopped")


def test_monitors_request_gives_way_to_clients_and_waits_for_them(services: Services, files: OpenFiles) -> None:
    of_monitor = Asking()
    services.ask_for_monitor(files, 3, of_monitor.answer)
    client = ask(services, 4)
    assert of_monitor.value == ServiceAnswer(problem="another request came")
    services.ask_for_monitor(files, 5, of_monitor.answer)
    assert of_monitor.value == ServiceAnswer(problem="this run serves another request")
    files.go.set()
    until(lambda: services.busy, "the count")
    services.tick()
    assert client.value == ServiceAnswer({0: 4}, "/bundles")
    services.ask_for_monitor(files, 6, of_monitor.answer)
    until(lambda: services.busy, "the count for the monitor")
    services.tick()
    assert of_monitor.value == ServiceAnswer({0: 6}, "/bundles")
