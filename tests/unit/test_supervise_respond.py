"""An incident in its thread: what the supervisor's loop asks it, and how it is cancelled."""

from __future__ import annotations

from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from safelaunch.capture.look import Target
from safelaunch.supervise import respond
from safelaunch.supervise.kinds import CRASH, IncidentKind
from safelaunch.supervise.looks import Looks
from safelaunch.supervise.respond import Incident, JobView, look
from tests.support.waiting import until


def test_incident_needs_the_ranks_until_they_are_done() -> None:
    step, done = Event(), Event()

    def work(at: Incident[str]) -> str:
        assert step.wait(30)
        at.on_ranks_done()
        assert done.wait(30)
        return "report"

    at = Incident("test", work)
    assert (at.needs_ranks, at.done) == (True, False)
    step.set()
    until(lambda: not at.needs_ranks)
    assert not at.done
    done.set()
    assert at.wait(30) and at.result == "report"


def test_cancelled_incident_needs_no_ranks_and_has_no_result() -> None:
    never = Event()
    at: Incident[str] = Incident("test", lambda at: str(at.wait_until(never.is_set)))
    at.cancel()
    assert not at.needs_ranks
    assert at.wait(30) and at.result is None


def test_error_in_the_work_is_raised_by_the_result() -> None:
    at: Incident[None] = Incident("test", lambda at: at.pause(1 / 0))
    assert at.wait(30) and not at.needs_ranks
    with pytest.raises(ZeroDivisionError):
        _ = at.result


@pytest.mark.parametrize(
    ("kind", "cancelled", "expected"),
    [
        (IncidentKind("hang", between_s=0.0), False, [6.0, 6.0]),
        (IncidentKind("hang", between_s=0.0), True, [6.0]),
        (IncidentKind("hang", between_s=0.0, budget_s=0.0), False, [6.0]),
        (CRASH, False, [6.0]),
    ],
    ids=["two", "cancelled", "no time for another", "crash"],
)
def test_kind_decides_the_number_of_looks(
    kind: IncidentKind, cancelled: bool, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[float] = []

    def look_at(targets: tuple[Target, ...], looks: Looks | None, *, deadline_s: float, **_: Any) -> Looks:
        taken.append(deadline_s)
        return looks or Looks(targets)

    monkeypatch.setattr(respond, "look_at", look_at)
    watch: Any = SimpleNamespace(targets=lambda: (), quiet=None)
    unneeded: Any = None
    job = JobView(watch, unneeded, dict, unneeded)

    def work(at: Incident[Looks]) -> Looks:
        if cancelled:
            at.cancel()
        return look(kind, job, at)

    assert Incident("test", work).wait(30)
    assert taken == expected
