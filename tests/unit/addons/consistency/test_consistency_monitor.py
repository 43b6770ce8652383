"""Requests of the monitor after a finding, for each value of --on-inconsistent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from safelaunch.addons.consistency.monitor import EXIT_INCONSISTENT, ConsistencyMonitor
from safelaunch.model import WrongResult

FINDING = WrongResult("loss", 1.0, step=3, ranks=(1,), words="loss: rank 1 diverged")
REPORT: Any = SimpleNamespace(published=SimpleNamespace(shown="/bundles/one"))


class Supervisor:
    """Records the requests of a monitor; a requested bundle is written at once."""

    def __init__(self, *, ending: bool = False) -> None:
        self.done: list[object] = []
        self._ending = ending
        self.is_ending = lambda: self._ending
        self.has_ended = lambda: False

    def write_bundle(self, then: Any, ends: bool) -> None:
        self.done.append(("bundle", ends))
        then(REPORT)

    def write_last_bundle(self, then: Any) -> None:
        self.done.append("last bundle")
        then(REPORT)

    def show(self, report: object) -> None:
        self.done.append("shown")

    def end(self, code: int, report: object) -> None:
        self.done.append((code, report is REPORT))
        self._ending = True


def monitor(
    monkeypatch: pytest.MonkeyPatch, supervisor: Supervisor, action: str, found: list[WrongResult]
) -> ConsistencyMonitor:
    view = SimpleNamespace(watch=SimpleNamespace(attempt=(0, 0)), context=SimpleNamespace(host="node1"))
    job = SimpleNamespace(
        settings=SimpleNamespace(on_inconsistent=action), view=view, actions=supervisor, topic=lambda name: None
    )
    monkeypatch.setattr(ConsistencyMonitor, "_advance", lambda self, *, last: found)
    return ConsistencyMonitor(cast("Any", job))


@pytest.mark.parametrize(
    ("action", "done"),
    [
        ("report", []),
        ("dump", [("bundle", False), "shown"]),
        ("stop", [("bundle", True), "shown", (EXIT_INCONSISTENT, True)]),
    ],
)
def test_finding_in_running_job_triggers_action(
    monkeypatch: pytest.MonkeyPatch, action: str, done: list[object]
) -> None:
    supervisor = Supervisor()
    monitor(monkeypatch, supervisor, action, [FINDING]).tick()
    assert supervisor.done == done


@pytest.mark.parametrize(
    ("action", "succeeded", "done"),
    [
        ("report", True, []),
        ("dump", True, ["last bundle", "shown"]),
        ("stop", True, ["last bundle", "shown", (EXIT_INCONSISTENT, True)]),
        ("stop", False, []),
    ],
)
def test_finding_in_last_checks_triggers_action(
    monkeypatch: pytest.MonkeyPatch, action: str, succeeded: bool, done: list[object]
) -> None:
    supervisor = Supervisor()
    monitor(monkeypatch, supervisor, action, [FINDING]).finish(succeeded=succeeded)
    assert supervisor.done == done


def test_ending_job_keeps_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor(ending=True)
    monitor(monkeypatch, supervisor, "stop", [FINDING]).tick()
    assert supervisor.done == [("bundle", True), "shown"]


def test_request_of_other_node_ends_job_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    supervisor = Supervisor()
    following = monitor(monkeypatch, supervisor, "stop", [])
    following._stopped_for = "node2: /bundles/two"
    following.tick()
    following.tick()
    assert supervisor.done == [(EXIT_INCONSISTENT, False)]
    assert "the bundle is on node2: /bundles/two" in " ".join(capfd.readouterr().err.replace("safelaunch:", "").split())


def test_no_finding_triggers_no_action(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor()
    monitor(monkeypatch, supervisor, "stop", []).tick()
    assert supervisor.done == []
