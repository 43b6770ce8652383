"""torchrun agent's beacon: when the agent waits for the supervisor, and when it must not."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from safelaunch.beacon import agent, layout


class SignalException(Exception):
    """Stand-in for torchrun's exception, which the beacon recognizes by its name."""


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The longest times that the agent waits for an acknowledgement."""
    holds: list[float] = []
    monkeypatch.setattr(agent.page, "wait_for_ack", lambda words, pid, hold_s: holds.append(hold_s))
    return holds


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Events that the agent has reported to the supervisor."""
    reported: list[dict[str, Any]] = []
    monkeypatch.setattr(agent, "_words", memoryview(bytearray(layout.SIZE)).cast("Q"))
    monkeypatch.setattr(agent, "_append_event", lambda event, **values: reported.append({"event": event, **values}))
    return reported


def context(world: int, *, code: int | None = 0) -> Any:
    """torchrun's context of two workers on this node, with the beacon around it."""

    class PContext:
        envs = {n: {"RANK": str(n), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": "2"} for n in (0, 1)}  # noqa: RUF012
        subprocess_handlers = {n: SimpleNamespace(proc=SimpleNamespace(poll=lambda: code)) for n in (0, 1)}  # noqa: RUF012

        def start(self) -> None: ...

        def pids(self) -> dict[int, int]:
            return {n: os.getpid() for n in (0, 1)}

        def close(self, death_sig: Any = None, timeout: int = 30) -> None: ...

    agent._wrap_context(SimpleNamespace(PContext=PContext))
    return PContext()


@pytest.mark.parametrize("world", [2, 4])
def test_agent_does_not_wait_when_job_ends_normally(waits: list[float], world: int) -> None:
    """torchrun closes its workers with SIGTERM then, too."""
    context(world).close(15)
    assert waits == []


@pytest.mark.parametrize(("world", "expected"), [(2, []), (4, [layout.GOODBYE_S])])
def test_stopped_agent_waits_only_if_job_has_other_nodes(waits: list[float], world: int, expected: list[float]) -> None:
    try:
        raise SignalException
    except SignalException:
        context(world).close(15)
    assert waits == expected


def test_agent_waits_before_ending_peers_of_failed_rank(waits: list[float]) -> None:
    context(2, code=1).close()
    assert waits == [layout.AGENT_HOLD_S]


def test_started_event_has_world_size_and_workers(events: list[dict[str, Any]]) -> None:
    context(4).start()
    assert (events[0]["event"], events[0]["world_size"], set(events[0]["workers"])) == ("started", 4, {"0", "1"})


@pytest.mark.parametrize(
    ("error", "errors"),
    [(ConnectionError("the store is gone"), ["ConnectionError: the store is gone"]), (SignalException(), [])],
    ids=["fails itself", "is stopped"],
)
def test_failing_agent_reports_its_error_and_waits(
    waits: list[float], events: list[dict[str, Any]], error: Exception, errors: list[str]
) -> None:
    try:
        raise error
    except Exception:
        context(2, code=None).close(15)
    assert [event["error"] for event in events if event["event"] == "failing"] == errors
    assert waits == [layout.AGENT_HOLD_S] * len(errors)
