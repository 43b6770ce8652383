"""Monitors of a job: one that fails, and the values that nodes exchange on a topic."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from safelaunch import addons
from safelaunch.supervise.cluster.exchange import PeerView, Submissions
from safelaunch.supervise.cluster.messages import LeaderPage
from safelaunch.supervise.monitors import MonitorActions, Monitors, Topic


class Recording:
    """A monitor that fails at the tick ``fails_at``."""

    name = "a test monitor"

    def __init__(self, fails_at: int = 0) -> None:
        self.calls: list[object] = []
        self._fails_at = fails_at

    def tick(self) -> None:
        self.calls.append("tick")
        if len(self.calls) == self._fails_at:
            raise ValueError("a fault of the test")

    def finish(self, *, succeeded: bool) -> None:
        self.calls.append(succeeded)


def monitors(monkeypatch: pytest.MonkeyPatch, *made: Recording) -> Monitors:
    monkeypatch.setattr(addons, "monitors", lambda job: list(made))
    job = SimpleNamespace(plan=SimpleNamespace(settings=None), run=Path())
    return Monitors(cast("Any", job), cast("Any", None), cast("MonitorActions", None))


def test_monitors_are_ticked_and_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = Recording()
    every = monitors(monkeypatch, monitor)
    every.tick()
    every.finish(succeeded=True)
    assert monitor.calls == ["tick", True]


def test_failing_monitor_is_reported_once_and_others_continue(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failing, other = Recording(fails_at=2), Recording()
    every = monitors(monkeypatch, failing, other)
    for _ in range(3):
        every.tick()
    every.finish(succeeded=False)
    assert failing.calls == ["tick"] * 2 and other.calls == [*["tick"] * 3, False]
    assert " ".join(capfd.readouterr().err.replace("safelaunch:", "").split()) == (
        "an internal error ended a test monitor (ValueError: a fault of the test). Still watching."
    )


class Council:
    """The council of a node that ``leads`` or follows."""

    def __init__(self, *, leads: bool, topics: tuple[str, ...] = (), covered: bool = True) -> None:
        page = LeaderPage(leader=1, nodes=2, topics=topics)
        self.is_covered = covered
        self.rounds = SimpleNamespace(page=page)
        self.sent: list[tuple[str, object]] = []
        self.channel = SimpleNamespace(
            is_started=True,
            view=PeerView(page=page, leads=leads),
            gather=lambda name: self.sent.append(("gather", name)),
            submit=lambda round_, chunks: self.sent.append((round_, chunks)),
            publish=lambda name, data: self.sent.append((name, data)),
        )


@pytest.mark.parametrize(
    ("council", "is_led"),
    [
        (Council(leads=True), True),
        (Council(leads=False), False),
        (Council(leads=False, topics=("numbers",)), True),
        (Council(leads=False, topics=("others",)), False),
        (Council(leads=True, covered=False), False),
    ],
    ids=["the leader", "the leader has no such topic yet", "a follower", "another topic", "not every rank is seen"],
)
def test_topic_is_led_if_leader_gathers_every_rank(council: Council, is_led: bool) -> None:
    assert Topic("numbers", cast("Any", council)).is_led is is_led


def test_topic_value_is_read_once_per_edition() -> None:
    council = Council(leads=True)
    topic = Topic("numbers", cast("Any", council))
    topic.gather()
    topic.submit(b"one")
    topic.submit(b"two")
    topic.publish(b"all")
    assert council.sent == [
        ("gather", "numbers"),
        ("numbers.1", [b"one"]),
        ("numbers.2", [b"two"]),
        ("numbers", b"all"),
    ]
    council.channel.view = PeerView(
        submissions={"numbers": Submissions({2: [b"a", b"b"], 3: [b"c"]}, {2: "numbers.1", 3: "numbers.5"})},
        published={"numbers": b"result"},
    )
    assert (topic.gathered(), topic.gathered(), topic.published) == ([b"ab", b"c"], [], b"result")
